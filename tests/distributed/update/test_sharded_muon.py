"""Muon over sharded matrices is that of one process: to 1e-12 in float64, on every layout. Planted bugs are seen."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.update import exchange, sharded_muon
from meshwright.distributed.update.newton_schulz import newton_schulz
from meshwright.distributed.update.sharded_muon import Muon, shape_factor
from meshwright.layout import Layout
from meshwright.plan.update.muon_cost import traffic_of
from meshwright.trace.live import LiveBytes
from tests.distributed.update.muon_runs import difference, in_one_process, newton_schulz_by_torch_names, on_rank
from tests.harness import run_ranks

EXACT = 1e-12

LAYOUTS = {
    "shard 2": Layout(dp_shard=2),
    "shard 4": Layout(dp_shard=4),
    "2 x shard 2": Layout(dp_replicate=2, dp_shard=2),
    "replicate 2": Layout(dp_replicate=2, dp_shard=1),
    "tp 2": Layout(dp_shard=1, tp=2),
    "tp 2 x shard 2": Layout(dp_shard=2, tp=2),
    "cp 2": Layout(dp_shard=1, cp=2),
    "cp 2 x shard 2": Layout(dp_shard=2, cp=2),
    "ep 2": Layout(dp_shard=2, ep=2),
    "ep 2 x shard 2": Layout(dp_shard=4, ep=2),
    "2 x ep 2": Layout(dp_replicate=2, dp_shard=2, ep=2),
    "tp 2 x ep 2 x shard 2": Layout(dp_shard=2, tp=2, ep=2),
}
USUAL = ("tp 2 x shard 2",)


@cache
def expected() -> list[torch.Tensor]:
    return in_one_process()


def cells() -> list[object]:
    return [pytest.param(name, id=name, marks=[] if name in USUAL else [pytest.mark.thorough]) for name in LAYOUTS]


@pytest.mark.parametrize("name", cells())
def test_equals_one_process_with_the_collectives_of_the_plan(name: str) -> None:
    layout = LAYOUTS[name]
    for skipped in (2, None) if name in USUAL else (None,):
        outcomes = run_ranks(on_rank, layout.world_size, layout, nothing, skipped)
        assert max(difference(found, expected()) for found, _ in outcomes) < EXACT
    for step in range(5):
        counts = [counted[step] for _, counted in outcomes]
        assert all(one["others"] == 0 for one in counts)
        if counts[0]["whole"]:
            assert {one["all_to_all"] for one in counts} == {one["planned"] for one in counts} != {0}
            # The plan has the rank of each group that sends most. They need not be one.
            assert max(one["bytes"] for one in counts) <= max(one["planned_bytes"] for one in counts)
            assert max(one["bytes"] for one in counts) >= 0.8 * max(one["planned_bytes"] for one in counts)
        else:
            assert all(one["all_to_all"] <= one["planned"] for one in counts)


def held_on_rank(rank: int, layout: Layout, bucket: int, stack: tuple[int, ...], nesterov: bool) -> tuple[int, int]:
    """The most bytes that a step holds, and the most that was planned."""
    model = torch.nn.Module()
    for place, shape in enumerate([(64, 64), (32, 64), (64, 32), (192, 64), (64, 192)] * 2):
        model.register_parameter(f"p{place}", torch.nn.Parameter(torch.ones(*stack, *shape)))
    fully_shard(model, mesh=build_mesh(layout, "cpu").fsdp())
    optimizer = Muon(model.parameters(), bucket=bucket, nesterov=nesterov)
    for own in model.parameters():
        own.grad = torch.ones_like(own)
    optimizer.step()  # its state is there
    own = [*(state["momentum_buffer"] for state in optimizer.state.values()), *(own.grad for own in model.parameters())]
    found = []
    for _ in range(5):  # a thread of gloo may let go of a small buffer late, and not each time
        with LiveBytes(model, own, settle=True) as live:
            before = live.held
            optimizer.step()
        found.append(live.peak - before)
    return min(found), traffic_of(optimizer.held, optimizer.at, 2, [4] * 10, nesterov=nesterov, bucket=bucket).held


@pytest.mark.parametrize(
    ("layout", "bucket", "stack", "nesterov"),
    [
        (Layout(dp_shard=2), 1000, (), True),
        pytest.param(Layout(dp_shard=2), 10**6, (), False, marks=pytest.mark.thorough),
        pytest.param(Layout(dp_shard=2), 1000, (4,), True, marks=pytest.mark.thorough),
        pytest.param(Layout(dp_replicate=2, dp_shard=2), 1000, (), False, marks=pytest.mark.thorough),
        pytest.param(Layout(dp_replicate=2, dp_shard=2), 10**6, (4,), True, marks=pytest.mark.thorough),
    ],
)
def test_a_step_holds_what_is_planned(layout: Layout, bucket: int, stack: tuple[int, ...], nesterov: bool) -> None:
    outcomes = run_ranks(held_on_rank, layout.world_size, layout, bucket, stack, nesterov)
    most, planned = max(held for held, _ in outcomes), outcomes[0][1]
    # The plan adds up what the ranks that hold most in each bucket hold. Among replicas they need not be one.
    assert most == planned if layout.dp_replicate == 1 else most <= planned <= 1.15 * most


# -- planted bugs ---


@contextmanager
def nothing(rank: int) -> Iterator[None]:
    yield


@contextmanager
def momentum_of_another_owner(rank: int) -> Iterator[None]:
    """One rank sends the momentum of a matrix to the owner of the next one of the same shape."""
    start = exchange.BucketExchange.start

    def swapped(self: exchange.BucketExchange, updates: dict[int, torch.Tensor]) -> None:
        by_shape = {tuple(own.shape): index for index, own in updates.items()}
        if rank == 0:
            updates = {index: updates[by_shape[tuple(own.shape)]] for index, own in updates.items()}
        start(self, updates)

    with mock.patch.object(exchange.BucketExchange, "start", swapped):
        yield


@contextmanager
def order_of_a_bucket_swapped(rank: int) -> Iterator[None]:
    """One rank takes the results of a bucket for those of its matrices from the last to the first."""
    finish = exchange.BucketExchange.finish

    def reversed_results(self: exchange.BucketExchange) -> tuple[torch.Tensor, list[torch.Tensor]]:
        back, results = finish(self)
        flat = back.flip(0) if rank == 1 else back
        sizes = [result.numel() for result in results]
        return flat, [part.view_as(result) for part, result in zip(flat.split(sizes), results, strict=True)]

    with mock.patch.object(exchange.BucketExchange, "finish", reversed_results):
        yield


@contextmanager
def newton_schulz_on_slices(rank: int) -> Iterator[None]:
    """Each half of a matrix is orthogonalised alone, as where ranks do not exchange what they have."""

    def in_halves(self: Muon, batch: torch.Tensor) -> torch.Tensor:
        return torch.cat([newton_schulz(half.clone()) for half in batch.chunk(2, dim=-1)], dim=-1)

    with mock.patch.object(exchange.BucketExchange, "compute", halved(exchange.BucketExchange.compute, in_halves)):
        yield


def halved(compute: Callable[..., None], in_halves: Callable[..., torch.Tensor]) -> Callable[..., None]:
    return lambda self, orthogonalise, updates: compute(self, lambda batch: in_halves(self, batch), updates)


@contextmanager
def factor_of_the_shape_of_a_slice(rank: int) -> Iterator[None]:
    def of_slice(rows: int, columns: int, adjust: str | None) -> float:
        return shape_factor(rows // 2, columns, adjust)

    with mock.patch.object(sharded_muon, "shape_factor", of_slice):
        yield


@contextmanager
def state_of_a_skipped_step_moved(rank: int) -> Iterator[None]:
    """The gradient of a skipped step still enters the momentum."""
    updates = Muon._updates

    def moved(self: Muon, own: exchange.BucketExchange, skip: torch.Tensor | None) -> dict[int, torch.Tensor]:
        for parameter, _ in self.parameters:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(nan=1.0)
        return updates(self, own, None)

    with mock.patch.object(Muon, "_updates", moved):
        yield


PLANTS = {
    "momentum of another owner": momentum_of_another_owner,
    "order of a bucket swapped": order_of_a_bucket_swapped,
    "Newton-Schulz on slices": newton_schulz_on_slices,
    "factor of the shape of a slice": factor_of_the_shape_of_a_slice,
    "state of a skipped step moved": state_of_a_skipped_step_moved,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_a_planted_bug_is_seen(plant: Callable[[int], AbstractContextManager[None]]) -> None:
    layout = Layout(dp_shard=2)
    skipped = 2 if plant is state_of_a_skipped_step_moved else None
    outcomes = run_ranks(on_rank, 2, layout, plant, skipped)
    assert max(difference(found, expected()) for found, _ in outcomes) > 1e-4


# -- in one process ---


def test_newton_schulz_is_that_of_torch_for_many_matrices_at_once() -> None:
    for shape in ((3, 5, 8), (2, 8, 5), (1, 4, 4), (0, 3, 2)):
        matrices = torch.randn(shape, dtype=torch.float64)
        found = newton_schulz(matrices.clone(), 4, (2.0, -1.5, 0.5), 1e-7)
        for one, alone in zip(found, matrices, strict=True):
            torch.testing.assert_close(one, newton_schulz_by_torch_names(alone, (2.0, -1.5, 0.5), 4, 1e-7))
    assert newton_schulz(torch.zeros(1, 2, 3)).eq(0).all()


def test_in_bfloat16_it_is_the_optimizer_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((12, 8), (8, 20))]
    ours, theirs = ([torch.nn.Parameter(own.clone()) for own in start] for _ in range(2))
    first, second = Muon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        first.step()
        second.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)
        assert not torch.equal(one, start[0])


def test_a_rate_of_zero_moves_the_momentum_alone() -> None:
    own = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = Muon([own], lr=0.0)
    own.grad = torch.ones(2, 3)
    optimizer.step()
    assert own.eq(1).all()
    assert optimizer.state[own]["momentum_buffer"].ne(0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"momentum": 1.0},
        {"weight_decay": -0.1},
        {"adjust_lr_fn": "other"},
        {"ns_steps": 0},
        {"ns_coefficients": (1.0,)},
    ],
)
def test_illegal_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], **wrong)  # type: ignore[arg-type]


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        Muon([torch.nn.Parameter(torch.ones(2))])
