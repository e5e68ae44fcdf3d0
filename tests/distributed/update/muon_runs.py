"""Muon of ours on ranks, and of torch in one process, in float64, on the same matrices and gradients."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import _muon

from meshwright.distributed import _torch_compat
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.mesh import ParallelMesh, build_mesh
from meshwright.distributed.slices import whole_tensor
from meshwright.distributed.update.sharded_muon import Muon
from meshwright.layout import Layout
from meshwright.plan.update.matrices import Apart, Form
from meshwright.plan.update.muon_cost import traffic_of

STEPS, BUCKET = 5, 40


class Matrix(NamedTuple):
    """A parameter: its shape, its form, the matrices of each weight as slices of it, and what slices it under tp."""

    shape: tuple[int, ...]
    form: Form = Form()
    parts: tuple[slice, ...] = (slice(None),)
    tp: tuple[int, int] | None = None
    """The dimension that is sliced, and the number of pieces."""


FUSED = tuple(slice(*rows) for rows in ((0, 8), (8, 12), (12, 16)))
MATRICES = {
    "uneven": Matrix((7, 5)),
    "less": Matrix((3, 9)),
    "tall": Matrix((12, 10), tp=(0, 1)),
    "tall too": Matrix((12, 10), tp=(0, 1)),
    "wide": Matrix((6, 16), tp=(1, 1)),
    "square": Matrix((8, 8)),
    "q k v": Matrix((16, 6), Form(apart=Apart((8, 4, 4))), FUSED, tp=(0, 1)),
    "heads": Matrix((16, 6), Form(apart=Apart((8, 8), heads=(2, 2))), tuple(slice(at, at + 4) for at in (0, 4, 8, 12))),
    "gate up": Matrix((12, 8), Form(apart=Apart((6, 6))), (slice(0, 6), slice(6, 12)), tp=(0, 2)),
    "transposed": Matrix((6, 9), Form(transposed=True)),
}
EXPERTS = {
    "experts": Matrix((4, 5, 6)),
    "experts too": Matrix((4, 7, 3)),
    "experts' gate up": Matrix((4, 6, 8), Form(True, Apart((1, 1), runs=4)), (slice(0, None, 2), slice(1, None, 2))),
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": 0.02, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": 0.01, "nesterov": False, "weight_decay": 0.3},
)
"""Of parameters in even and in odd places."""


class Held(nn.Module):
    """All parameters, sharded as a unit of FSDP is, and the experts as one of its own."""

    def __init__(self, values: Sequence[torch.Tensor], mesh: ParallelMesh) -> None:
        super().__init__()
        self.dense, self.experts = nn.Module(), nn.Module()
        for place, ((name, matrix), value) in enumerate(zip((MATRICES | EXPERTS).items(), values, strict=True)):
            holder = self.experts if name in EXPERTS else self.dense
            made = value
            if name in EXPERTS and mesh.layout.ep > 1:
                made = distribute_tensor(value, mesh["ep"], [Shard(0)], src_data_rank=None)
            elif matrix.tp is not None and mesh.layout.size("tp") > 1:
                dim, pieces = matrix.tp
                placement = Shard(dim) if pieces == 1 else _torch_compat.strided_shard(dim, pieces)
                made = distribute_tensor(value, mesh["tp"], [placement], src_data_rank=None)
            holder.register_parameter(f"p{place}", nn.Parameter(made.clone()))
        pieces = [(own.tp or (0, 1))[1] for own in MATRICES.values()]
        packed = {id(self.dense.get_parameter(f"p{place}")) for place, count in enumerate(pieces) if count > 1}
        axes = [axis for axis in ("dp_replicate", "ep_shard") if axis == "ep_shard" or mesh.layout.size(axis) > 1]
        over = mesh.submesh(axes, experts=True) if mesh.layout.ep > 1 else mesh.fsdp()
        fully_shard(self.experts, mesh=over)
        fully_shard(self.dense, mesh=mesh.fsdp(), shard_placement_fn=lambda own: Shard(1) if id(own) in packed else None)

    def in_order(self) -> list[nn.Parameter]:
        by_name = {name.rpartition(".")[2]: own for name, own in self.named_parameters()}
        return [by_name[f"p{place}"] for place in range(len(by_name))]


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(own.shape, generator=generator, dtype=torch.float64) for own in (MATRICES | EXPERTS).values()]


def has_gradient(place: int, step: int) -> bool:
    return (place + step) % 6 != 5 or step == 1


def newton_schulz_by_torch_names(
    grad: torch.Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> torch.Tensor:
    """Newton-Schulz of one matrix in float64, in the place of torch's, which rounds to bfloat16."""
    a, b, c = ns_coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / max(float(torch.linalg.norm(x)), eps)
    for _ in range(ns_steps):
        square = x @ x.T
        x = a * x + b * (square @ x) + c * (square @ (square @ x))
    return x.T if grad.shape[0] > grad.shape[1] else x


def in_one_process(steps: int = STEPS) -> list[torch.Tensor]:
    """What torch's Muon makes of the matrices, each a parameter of its own [out, in]."""
    start = values(0)
    alone: list[list[nn.Parameter]] = []

    def apart(value: torch.Tensor, matrix: Matrix) -> list[torch.Tensor]:
        weights = list(value) if value.ndim == 3 else [value]
        if matrix.form.transposed:
            weights = [weight.T for weight in weights]
        return [weight[part] for weight in weights for part in matrix.parts]

    every = list((MATRICES | EXPERTS).values())
    for value, matrix in zip(start, every, strict=True):
        alone.append([nn.Parameter(own.clone()) for own in apart(value, matrix)])
    optimizers = [torch.optim.Muon([own for of in alone[kind::2] for own in of], **SETTINGS[kind]) for kind in range(2)]
    original = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = newton_schulz_by_torch_names
    try:
        for step in range(steps):
            for place, (gradient, matrix) in enumerate(zip(values(step + 1), every, strict=True)):
                for own, part in zip(alone[place], apart(gradient, matrix), strict=True):
                    own.grad = part.clone() if has_gradient(place, step) else None
            for optimizer in optimizers:
                optimizer.step()
    finally:
        _muon._zeropower_via_newtonschulz = original
    found = []
    for value, matrix, parts in zip(start, every, alone, strict=True):
        whole = value.clone()
        weights = list(whole) if whole.ndim == 3 else [whole]
        places = [(weight.T if matrix.form.transposed else weight)[part] for weight in weights for part in matrix.parts]
        for place, own in zip(places, parts, strict=True):
            place.copy_(own.detach())
        found.append(whole)
    return found


def on_rank(
    rank: int,
    layout: Layout,
    planted: Callable[[int], AbstractContextManager[Any]] = lambda rank: nullcontext(),
    skipped: int | None = None,
) -> tuple[list[torch.Tensor], list[dict[str, int]]]:
    """Run Muon of ours on a rank: the parameters at the end, whole, and what each step counted and was planned to.

    Args:
        rank: the rank.
        layout: the layout.
        planted: a context of each step.
        skipped: before this step, there is one more whose gradients are not finite, which is skipped.
    """
    mesh = build_mesh(layout, "cpu")
    model = Held(values(0), mesh)
    parameters = model.in_order()
    groups = [{"params": parameters[kind::2], **SETTINGS[kind]} for kind in range(2)]
    forms = {own: matrix.form for own, matrix in zip(parameters, (MATRICES | EXPERTS).values(), strict=True)}
    optimizer = Muon(groups, forms=forms, dtype=torch.float64, bucket=BUCKET)
    counted = []
    with planted(rank):
        for step in range(STEPS):
            if step == skipped:
                for own in parameters:
                    own.grad = torch.full_like(own, torch.nan)
                optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
                optimizer.step()
            if skipped is not None:
                optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
            gradients = Held(values(step + 1), mesh).in_order()
            for place, (own, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                own.grad = gradient.data if has_gradient(place, step) else None
            with CommCounter() as counter:
                optimizer.step()
            planned = traffic_of(optimizer.held, optimizer.at, 8, [8] * len(parameters), bucket=BUCKET)
            counted.append(
                {
                    "all_to_all": counter.counts["all_to_all"],
                    "others": sum(counter.counts.values()) - counter.counts["all_to_all"],
                    "bytes": counter.bytes["all_to_all"],
                    "planned": planned.all_to_alls,
                    "planned_bytes": planned.bytes,
                    "whole": all(own.grad is not None for own in parameters),
                }
            )
    found = [whole_tensor(own.data) if isinstance(own.data, DTensor) else own.data for own in parameters]
    return found, counted


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
