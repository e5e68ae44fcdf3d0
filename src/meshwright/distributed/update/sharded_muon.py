"""Muon over sharded matrices: each is orthogonalised once, whole, by its owner.

A step, for each bucket of matrices (:mod:`meshwright.plan.update.muon` says which, and who owns what):

1. The momentum of the shards is updated where it lies, and the parts of what is orthogonalised go to the owners.
2. The owners compute their whole matrices, all of one shape at once, and send the results back.
3. Each rank decays its shards, and subtracts the results.

The first exchange of the next bucket begins before 2, and the results of a bucket are awaited after 2 of the next one, so both
all-to-alls are hidden by what is computed, where the device runs them beside it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.distributed import _torch_compat
from meshwright.distributed.update.exchange import BucketExchange, Part
from meshwright.distributed.update.flagged import FlaggedOptimizer, local
from meshwright.distributed.update.newton_schulz import COEFFICIENTS, EPS, STEPS, newton_schulz
from meshwright.plan.update.matrices import Cut, Form, Held
from meshwright.plan.update.muon import BUCKET, Bucket, decide

__all__ = ["Muon", "shape_factor"]


def shape_factor(rows: int, columns: int, adjust: str | None) -> float:
    """Return the factor of the learning rate of a matrix, by the name that ``torch.optim.Muon`` has for it.

    Args:
        rows: number of output features.
        columns: number of input features.
        adjust: ``original``, or ``None``: the root of rows / columns, where that is above 1 (Jordan et al. 2024).
            ``match_rms_adamw``: 0.2 times the root of the larger number, so that updates are as large as those of AdamW (Liu et
            al. 2025, arXiv 2502.16982, section 2.2).
    """
    if adjust == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns))


class Muon(FlaggedOptimizer):
    """Momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), with decoupled decay.

    Arguments of ``torch.optim.Muon`` mean the same here, and the result is the same up to rounding. In addition, parameters may
    be sharded in any way (DTensors), may be stacks of matrices [experts, rows, columns], and may hold several matrices.

    All ranks that share parameters have the same ones, in the same order, with the same options, and gradients of the same ones
    in each step. A parameter without a gradient is left as it is.

    Args:
        params: parameters of two or three dimensions, or groups of them.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: decay of the momentum.
        nesterov: whether Nesterov's momentum is orthogonalised.
        ns_coefficients: those of Newton-Schulz.
        eps: the least number that a matrix is divided by.
        ns_steps: steps of Newton-Schulz.
        adjust_lr_fn: see :func:`shape_factor`.
        forms: for parameters that are not one matrix [out, in] for each weight, how they are taken apart.
        dtype: in which matrices are exchanged and orthogonalised.
        bucket: elements of the matrices of a bucket for each rank.

    Attributes:
        parameters: each parameter with its group; read in the first step, as are the others.
        held: how each is held.
        at: index of this rank on each axis.

    Raises:
        ValueError: an argument has an illegal value, or a parameter another number of dimensions.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = STEPS,
        adjust_lr_fn: str | None = None,
        *,
        forms: Mapping[torch.Tensor, Form] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        bucket: int = BUCKET,
    ) -> None:
        for name, value, most in (("lr", lr, None), ("momentum", momentum, 1.0), ("weight_decay", weight_decay, None)):
            if not value >= 0.0 or (most is not None and value >= most):
                raise ValueError(f"{name}={value}: must be at least 0{'' if most is None else f' and below {most:g}'}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}: legal are original and match_rms_adamw")
        if len(ns_coefficients) != 3 or not 1 <= ns_steps < 100:
            raise ValueError(f"ns_coefficients={ns_coefficients}, ns_steps={ns_steps}: legal are 3 numbers, and 1 to 99 steps")
        self._forms = dict(forms or {})
        self._dtype, self._bucket = dtype, bucket
        self._orthogonalise = partial(newton_schulz, steps=ns_steps, coefficients=ns_coefficients, eps=eps)
        self.parameters: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self.held: list[Held] = []
        self.at: dict[str, int] = {}
        self._exchanges: dict[tuple[int, ...], list[BucketExchange]] = {}  # by the parameters that have a gradient
        own = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {"lr": lr, **own})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            ValueError: one has not two or three dimensions.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim not in (2, 3):
                raise ValueError(f"Muon: a parameter has the shape {tuple(parameter.shape)}; legal are two or three dimensions")
        self._exchanges = {}  # they are of other parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._exchanges:
            self._read()
        active = tuple(index for index, (parameter, _) in enumerate(self.parameters) if parameter.grad is not None)
        if active not in self._exchanges:
            self._exchanges[active] = self._make_exchanges(active)
        exchanges, skip = self._exchanges[active], self.found_inf
        if not any(group["lr"] for group in self.param_groups):  # nothing but the momentum changes
            for exchange in exchanges:
                self._updates(exchange, skip)
            return loss
        entering = iter(exchanges)

        def start_next() -> None:
            if (following := next(entering, None)) is not None and following.bucket.split:
                following.start(self._updates(following, skip))

        start_next()
        before: BucketExchange | None = None
        for exchange in exchanges:
            start_next()
            exchange.compute(self._orthogonalise, partial(self._updates, exchange, skip))
            if before is not None:
                self._apply(before, skip)
            before = exchange
        if before is not None:
            self._apply(before, skip)
        return loss

    def _read(self) -> None:
        """Read how the parameters are held."""
        self.parameters = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        names = _AxisNames()
        self.held = [names.held(parameter, self._forms.get(parameter, Form())) for parameter, _ in self.parameters]
        self.at = names.at

    def _make_exchanges(self, active: Sequence[int]) -> list[BucketExchange]:
        """Return the exchanges of a step in which some parameters have a gradient. Owners and buckets do not depend on it."""
        made, having = [], set(active)
        for index in active:
            self._momentum(self.parameters[index][0])  # also of what this rank has nothing of
        for bucket in decide(self.held, self.at, self._bucket):
            if items := tuple(item for item in bucket.items if item.parameter in having):
                made.append(self._make_exchange(replace(bucket, items=items)))
        return made

    def _make_exchange(self, bucket: Bucket) -> BucketExchange:
        parameter = self.parameters[bucket.parameters[0]][0]
        home = local(parameter).device
        device, group, order = home, None, [0]
        if isinstance(parameter, DTensor):
            mesh, inside = parameter.device_mesh, {name for name, _ in bucket.axes}
            if home.type != mesh.device_type:  # shards are kept on the host
                device = torch.device(mesh.device_type)
            names = [name for name, _ in self.held[bucket.parameters[0]].axes]
            axes = [axis for axis, name in zip(_larger_axes(mesh), names, strict=True) if name in inside]
            if axes:
                group, ranks = _torch_compat.group_over(mesh, axes), _ranks(mesh, axes)
                order = [ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
        return BucketExchange(self.held, bucket, self.at, group, order, home, device, self._dtype)

    def _updates(self, exchange: BucketExchange, skip: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """Update the momentum of a bucket, and return what is orthogonalised of each parameter: [stack, rows, columns]."""
        found: dict[int, torch.Tensor] = {}
        alike: dict[tuple[float, bool], list[int]] = {}
        for index in exchange.parameters:
            group = self.parameters[index][1]
            alike.setdefault((group["momentum"], group["nesterov"]), []).append(index)
        for (momentum, nesterov), indices in alike.items():
            gradients = [local(own) for index in indices if (own := self.parameters[index][0].grad) is not None]
            buffers = [self._momentum(self.parameters[index][0]) for index in indices]
            if skip is not None:  # in place of a gradient that is not finite the momentum, which then stays what it is
                gradients = [torch.where(skip > 0, own, new) for own, new in zip(buffers, gradients, strict=True)]
            torch._foreach_lerp_(buffers, gradients, 1 - momentum)
            updates = buffers
            if nesterov and skip is not None:
                torch._foreach_lerp_(gradients, buffers, momentum)
                updates = gradients
            elif nesterov:
                updates = list(torch._foreach_lerp(gradients, buffers, momentum))
            found.update((index, _stack(own)) for index, own in zip(indices, updates, strict=True))
        return found

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return local(state["momentum_buffer"])

    def _apply(self, exchange: BucketExchange, skip: torch.Tensor | None) -> None:
        """Decay the shards of a bucket, and subtract the results."""
        back, results = exchange.finish()
        keep = None if skip is None else 1.0 - skip.double()
        if keep is not None:
            back.mul_(keep)
        decays: dict[float, list[torch.Tensor]] = {}
        for index in exchange.parameters:
            parameter, group = self.parameters[index]
            decays.setdefault(group["lr"] * group["weight_decay"], []).append(local(parameter))
        for decay, shards in decays.items():
            if decay:
                torch._foreach_mul_(shards, 1 - decay if keep is None else 1 - decay * keep)
        rates: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for part, result in zip(exchange.back, results, strict=True):
            parameter, group = self.parameters[part.parameter]
            rate = -group["lr"] * self._factor(part, group["adjust_lr_fn"])
            shard = _stack(local(parameter))
            if any(isinstance(own, torch.Tensor) for own in part.where):
                shard[part.where] = shard[part.where].add_(result, alpha=rate)
            else:
                targets, sources = rates.setdefault(rate, ([], []))
                targets.append(shard[part.where])
                sources.append(result)
        for rate, (targets, sources) in rates.items():
            torch._foreach_add_(targets, sources, alpha=rate)

    def _factor(self, part: Part, adjust: str | None) -> float:
        rows, columns = part.matrix
        if self.held[part.parameter].form.transposed:
            rows, columns = columns, rows
        return shape_factor(rows, columns, adjust)


class _AxisNames:
    """Reads how parameters are held. An axis of another mesh that has the name of a known one, and other ranks, gets another.

    Attributes:
        at: index of this rank on each axis.
    """

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}

    def held(self, parameter: torch.Tensor, form: Form) -> Held:
        """Return how a parameter is held."""
        if not isinstance(parameter, DTensor):
            return Held(tuple(parameter.shape), form=form)
        mesh = parameter.device_mesh
        named = {axis: self._name(mesh, axis) for axis in _larger_axes(mesh)}
        cuts = [Cut(named[axis], dim, pieces) for axis, dim, pieces in _torch_compat.cuts_of(parameter) if axis in named]
        axes = tuple((name, mesh.size(axis)) for axis, name in named.items())
        return Held(tuple(parameter.shape), axes, tuple(cuts), form)

    def _name(self, mesh: DeviceMesh, axis: int) -> str:
        own = mesh.get_coordinate()
        assert own is not None
        plain = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else f"axis {axis}"
        key = plain, tuple(_ranks(mesh, [axis]))
        if key not in self._names:
            same = sum(known == plain for known, _ in self._names)
            self._names[key] = f"{plain} {same + 1}" if same else plain
            self.at[self._names[key]] = own[axis]
        return self._names[key]


def _ranks(mesh: DeviceMesh, axes: Sequence[int]) -> list[int]:
    """Return the ranks that differ from this one on some axes alone, in the order of the mesh."""
    own = mesh.get_coordinate()
    assert own is not None
    found: list[int] = (
        mesh.mesh[tuple(slice(None) if axis in axes else place for axis, place in enumerate(own))].flatten().tolist()
    )
    return found


def _larger_axes(mesh: DeviceMesh) -> list[int]:
    return [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]


def _stack(shard: torch.Tensor) -> torch.Tensor:
    """Return a shard as [stack, rows, columns], a view."""
    return shard if shard.ndim == 3 else shard[None]
