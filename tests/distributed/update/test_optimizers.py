"""Lion, Adafactor and SGD on shards, beside one process: values, states, collectives, steps that are skipped."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright.distributed._torch_compat import strided_shard
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.update.adafactor import Adafactor
from meshwright.distributed.update.flagged import local
from meshwright.distributed.update.lion import Lion
from meshwright.distributed.update.sgd import Sgd
from meshwright.layout import Layout
from tests.harness import run_ranks

SHAPES = {"even": (8, 6), "matrix": (5, 6), "wide": (3, 7), "experts": (4, 3, 5), "vector": (7,), "one": (1, 4)}
STEPS = 5


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1 for name, shape in SHAPES.items()}


def lion_of_the_paper(values: dict[str, torch.Tensor], steps: int, betas: tuple[float, float], lr: float, decay: float) -> None:
    """Algorithm 2, line by line."""
    moments = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(steps):
        for name, g in gradients(step).items():
            c = betas[0] * moments[name] + (1 - betas[0]) * g
            values[name] -= lr * (torch.sign(c) + decay * values[name])
            moments[name] = betas[1] * moments[name] + (1 - betas[1]) * g


def alone(kind: Any) -> dict[str, torch.Tensor]:
    values = {name: value.clone() for name, value in gradients(99).items()}
    if kind is Lion:
        lion_of_the_paper(values, STEPS, (0.8, 0.95), 0.01, 0.1)
        return values
    theirs = {Adafactor: torch.optim.Adafactor, Sgd: partial(torch.optim.SGD, momentum=0.9, nesterov=True)}[kind]
    optimizer = theirs([value.requires_grad_() for value in values.values()], lr=0.1, weight_decay=0.1)
    for step in range(STEPS):
        for value, gradient in zip(values.values(), gradients(step).values(), strict=True):
            value.grad = gradient
        optimizer.step()
    return {name: value.detach() for name, value in values.items()}


def made(kind: Any, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if kind is Lion:
        return Lion(parameters, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    if kind is Sgd:
        return Sgd(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    return Adafactor(parameters, lr=0.1, weight_decay=0.1)


def placements_of(layout: Layout, name: str) -> tuple[list[str], list[Any]]:
    """Axes and placements as the library gives them: FSDP over rows, tp over rows or columns."""
    if layout.size("tp") == 1:
        replicas = layout.size("dp_replicate") > 1
        return (["dp_replicate"] if replicas else []) + ["dp_shard_cp"], ([Replicate()] if replicas else []) + [Shard(0)]
    by_rows = {"even": [strided_shard(0, 2), Shard(0)], "wide": [Shard(0), Shard(1)]}
    return ["dp_shard_cp", "tp"], by_rows.get(name, [Shard(0), Replicate()])


def sharded(kind: Any, layout: Layout, rank: int) -> None:
    mesh, truth = build_mesh(layout, "cpu"), alone(kind)

    def spread(tensors: dict[str, torch.Tensor]) -> dict[str, DTensor]:
        found = {}
        for name, tensor in tensors.items():
            axes, placements = placements_of(layout, name)
            found[name] = distribute_tensor(tensor, mesh.submesh(axes), placements)
        return found

    parameters = {name: value.detach().requires_grad_() for name, value in spread(gradients(99)).items()}
    optimizer = made(kind, list(parameters.values()))
    for step in range(STEPS):
        for name, gradient in spread(gradients(step)).items():
            parameters[name].grad = gradient
        with CommCounter() as counter:
            optimizer.step()
        # Two rounds of sums, over each axis that something is sharded over.
        assert counter.counts == ({} if kind is not Adafactor else {"all_reduce": 4 if layout.size("tp") > 1 else 2})
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.full_tensor().detach(), truth[name], rtol=0, atol=1e-13)
    # A step that is skipped moves no number, whatever the gradient is.
    before = [tensor.clone() for tensor in held(optimizer)]
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert all(map(torch.equal, before, held(optimizer)))


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's numbers: parameters and states."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [local(tensor).detach() for tensor in (*optimizer.state, *states)]


LAYOUTS = [
    pytest.param(Layout(dp_shard=2), 2, id="shard"),
    pytest.param(Layout(dp_shard=4), 4, id="shard4", marks=pytest.mark.thorough),
    pytest.param(Layout(dp_replicate=2, dp_shard=2), 4, id="hsdp", marks=pytest.mark.thorough),
    pytest.param(Layout(dp_shard=2, tp=2), 4, id="tp"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Lion, Sgd, Adafactor])
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_shards_are_updated_as_in_one_process(kind: Any, layout: Layout, ranks: int) -> None:
    run_ranks(partial(sharded, kind, layout), ranks)
