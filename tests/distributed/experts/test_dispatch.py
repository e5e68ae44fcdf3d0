"""Dispatch of tokens to the ranks of their experts, against one module with all experts."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.experts.dispatch import dispatch, static_splits
from meshwright.errors import ModelError
from tests.harness import TIMEOUT, run_ranks

WIDTH, EXPERTS, K = 5, 4, 2


class Experts(nn.Module):
    """A matrix and a bias for each expert, called as those of transformers are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = torch.einsum("th,tkoh->tko", hidden, self.weight[index]) + self.bias[index]
        return (torch.tanh(found) * weights.unsqueeze(-1)).sum(1)


def whole() -> Experts:
    generator = torch.Generator().manual_seed(0)
    shapes = ((EXPERTS, WIDTH, WIDTH), (EXPERTS, WIDTH))
    return Experts(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))


def tokens(rank: int, count: int, chosen: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank + 1)
    hidden = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(count, K, generator=generator, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:K] for _ in range(count)] or [torch.zeros(K)]).long()
    if chosen is not None:
        index = torch.tensor(chosen).repeat(count, 1)
    return hidden, index[:count], weights


CASES = {
    "even": [(6, None)] * 2,
    "uneven": [(7, None), (2, None)],
    "a rank without tokens": [(5, None), (0, None)],
    "experts without tokens": [(5, [0, 1]), (4, [1, 0])],  # all of rank 1
    "everything elsewhere": [(3, [2, 3]), (4, [0, 1])],
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_one_module(case: str) -> None:
    def on_rank(rank: int) -> None:
        alone = whole()
        mine = slice(rank * 2, rank * 2 + 2)
        own = Experts(alone.weight.detach()[mine].clone(), alone.bias.detach()[mine].clone())
        given = [tokens(other, *CASES[case][other]) for other in range(2)]
        results = [alone(*given[other]) for other in range(2)]
        sum((result * result).sum() for result in results).backward()
        expected = [result.detach() for result in results]
        wanted = [[tensor.grad for tensor in (given[other][0], given[other][2])] for other in range(2)]

        hidden, index, weights = tokens(rank, *CASES[case][rank])
        with CommCounter() as counter:
            output = dispatch(own, EXPERTS, dist.group.WORLD, hidden, index, weights)
            (output * output).sum().backward()
        assert counter.counts == {"all_to_all": 5}
        assert torch.allclose(output, expected[rank], rtol=0, atol=1e-14)
        for tensor, gradient in zip((hidden, weights), wanted[rank], strict=True):
            assert torch.allclose(tensor.grad, torch.zeros_like(tensor) if gradient is None else gradient, atol=1e-14)
        for name in ("weight", "bias"):  # zeros where no token came, and never None
            assert torch.allclose(getattr(own, name).grad, getattr(alone, name).grad[mine], rtol=0, atol=1e-13)

    run_ranks(on_rank, 2)


def test_ranks_with_the_same_tokens_send_each_once() -> None:
    def on_rank(rank: int) -> None:
        alone = whole()
        mine = slice(rank * 2, rank * 2 + 2)
        own = Experts(alone.weight.detach()[mine].clone(), alone.bias.detach()[mine].clone())
        for count in (6, 5, 1):  # one rank has a smaller share, or none
            one, many = tokens(0, count), tokens(0, count)
            alone.zero_grad()
            own.zero_grad()
            expected = alone(*one)
            expected.square().sum().backward()
            output = dispatch(own, EXPERTS, dist.group.WORLD, *many, token_group=dist.group.WORLD)
            output.square().sum().backward()
            assert torch.allclose(output, expected, rtol=0, atol=1e-14)
            for ours, theirs in zip(many, one, strict=True):
                assert theirs.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-14)
            assert torch.allclose(own.weight.grad, alone.weight.grad[mine], rtol=0, atol=1e-13)

    run_ranks(on_rank, 2)


def test_what_cannot_be_dispatched_is_refused() -> None:
    def on_rank(rank: int) -> None:
        hidden, index, weights = tokens(rank, 3)
        for wrong in ((hidden, index[:2], weights), (hidden[None], index, weights), (hidden, index[:, :1], weights)):
            with pytest.raises(ModelError, match=r"experts take hidden \[tokens, features\]"):
                dispatch(whole(), EXPERTS, dist.group.WORLD, *wrong)
        for expert in (EXPERTS, -1, 99):
            with pytest.raises(ModelError, match="6 times on rank 0; legal are 0 to 3"):
                dispatch(whole(), EXPERTS, dist.group.WORLD, hidden, index.clone().fill_(expert), weights)

    run_ranks(on_rank, 1)


def test_an_expert_that_there_is_not_stops_all_ranks() -> None:
    """Whoever has it; nobody waits for the others."""

    def on_rank(rank: int) -> list[tuple[str, float]]:
        found = []
        for guilty in ([1], [0, 1]):
            hidden, index, weights = tokens(rank, 3)
            if rank in guilty:
                index[1, 0], index[2, 1] = EXPERTS, -7
            began = time.monotonic()
            with pytest.raises(ModelError) as error, CommCounter() as counter:
                dispatch(whole(), EXPERTS, dist.group.WORLD, hidden, index, weights)
            assert counter.counts == {"all_to_all": 1}
            found.append((str(error.value), time.monotonic() - began))
        # They are still in step.
        alone, (hidden, index, weights) = whole(), tokens(rank, 3)
        mine = slice(rank * 2, rank * 2 + 2)
        output = dispatch(Experts(alone.weight[mine], alone.bias[mine]), EXPERTS, dist.group.WORLD, hidden, index, weights)
        assert torch.allclose(output, alone(hidden, index, weights), rtol=0, atol=1e-14)
        return found

    message = "the router chose an expert that does not exist, {}; legal are 0 to 3"
    wanted = [message.format("2 times on rank 1"), message.format("2 times on rank 0, 2 times on rank 1")]
    for found in run_ranks(on_rank, 2):
        assert [text for text, _ in found] == wanted
        assert all(seconds < TIMEOUT.total_seconds() / 4 for _, seconds in found)


def test_static_splits_need_no_data() -> None:
    def on_rank(rank: int) -> list[int]:
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
        seen = []
        with FakeTensorMode(), static_splits():
            hidden, weights = torch.randn(10, WIDTH, requires_grad=True), torch.rand(10, K)
            index = torch.randint(EXPERTS, (10, K))

            def compute(rows: torch.Tensor, expert: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
                seen.append(len(rows))
                return rows * 2

            output = dispatch(compute, EXPERTS, dist.group.WORLD, hidden, index, weights)
            output.sum().backward()
            assert (output.shape, hidden.grad.shape) == ((10, WIDTH), (10, WIDTH))
        return seen

    assert run_ranks(on_rank, 1, group=False) == [[20]]  # 20 pairs from each of 4 ranks, a quarter of them for this one
