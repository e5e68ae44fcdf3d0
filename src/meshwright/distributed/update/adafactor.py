"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): of the second moment, only means of rows and of columns are kept.

The means are those of whole matrices, wherever these are sharded. Two rounds of sums over ranks do for all parameters: one for
the means and the sizes of parameters, one for the sizes of updates. A round has one all-reduce for each group of ranks that
shards are spread over.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from meshwright.distributed._torch_compat import sharded_dim
from meshwright.distributed.update.flagged import FlaggedOptimizer, local

__all__ = ["Adafactor"]


class Adafactor(FlaggedOptimizer):
    """Algorithm 4 of the paper with relative step sizes; arguments, defaults and order of operations are those of torch.

    The state is in fp32, or in the dtype of a parameter in float64.

    Args:
        params: parameters, or groups of them.
        lr: upper bound of the relative step size.
        beta2_decay: power of the step in the decay of the second moment.
        eps: least root of the second moment (``None``: the precision of the dtype), and least size of a parameter.
        d: largest root mean square of an update.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change the parameters that have a gradient. Collective over the ranks that hold shards of them."""
        updates = [_Update(self, *one) for one in self.trained()]
        _sum_over_ranks([one for update in updates for one in update.means()])
        _sum_over_ranks([update.length() for update in updates])
        for update in updates:
            update.finish()


class _Update:
    """The update of one parameter [..., m, n], of which this rank stores a part."""

    def __init__(self, optimizer: Adafactor, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.group, self.shape, self.numel = group, parameter.shape, parameter.numel()
        self.values, self.state, self.axes = local(parameter), optimizer.state[parameter], _axes(parameter)
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.gradient = gradient
        if not self.state:
            self.state["step"] = torch.zeros((), device=self.values.device)
            kept = {"row_var": -1, "col_var": -2} if parameter.ndim > 1 else {"variance": None}
            self.state.update({name: _means(parameter, self.dtype, dim) for name, dim in kept.items()})
        step = self.state["step"].to(self.dtype) + 1
        self.put = optimizer.put
        self.put(self.state["step"], step.to(self.state["step"].dtype))
        self.weight, self.rate = step ** group["beta2_decay"], step.rsqrt().clamp(max=group["lr"])
        self.decay = 1 - group["lr"] * group["weight_decay"]
        first, self.least = group["eps"]
        self.eps = torch.finfo(parameter.dtype).eps if first is None else first

    def means(self) -> Iterator["_Sum"]:
        """Yield the sums for the size of the parameter, and for the means of its squared gradient."""
        square = self.gradient.to(self.dtype).square()
        self.size = _Sum(self.values.to(self.dtype).square().sum(), self._over(*range(len(self.shape))))
        yield self.size
        if len(self.shape) < 2:
            self.second = local(self.state["variance"]).lerp(square, self.weight)
            self.put(local(self.state["variance"]), self.second)
            return
        self.rows, self.columns = (_Sum(square.sum(dim, keepdim=True), self._over(dim)) for dim in (-1, -2))
        # The mean of the new means of rows is that of the old ones and of the gradient's, so it needs no round of its own.
        self.old = _Sum(local(self.state["row_var"]).sum(-2, keepdim=True), self._over(-2))
        self.new = _Sum(square.sum((-2, -1), keepdim=True), self._over(-2, -1))
        yield from (self.rows, self.columns, self.old, self.new)

    def length(self) -> "_Sum":
        """Bring the means up to date, and return the sum for the size of the update."""
        if len(self.shape) >= 2:
            *_, m, n = self.shape
            for name, mean in (("row_var", self.rows.value / n), ("col_var", self.columns.value / m)):
                kept = local(self.state[name])
                self.put(kept, kept.lerp(mean, self.weight))
            self.mean = (self.old.value / m).lerp(self.new.value / (m * n), self.weight)
        self.norm = _Sum(self._direction().square().sum(), self._over(*range(len(self.shape))))
        return self.norm

    def _direction(self) -> torch.Tensor:
        """Return the update before it is clipped. It is computed twice, so that not all are held at once."""
        if len(self.shape) < 2:
            second = self.second.clone()
        else:
            second = local(self.state["row_var"]) * local(self.state["col_var"]) / self.mean.clamp(min=self.eps)
        return second.clamp_(min=self.eps**2).rsqrt_().mul_(self.gradient)

    def finish(self) -> None:
        """Change the parameter."""
        root = self.numel**0.5
        size = (self.size.value.sqrt() / root).clamp(min=self.least)
        clipped = (self.norm.value.sqrt() / (root * self.group["d"])).clamp(min=1)
        changed = self.values.to(self.dtype) * self.decay - self._direction() * (self.rate * size / clipped)
        self.put(self.values, changed.to(self.values.dtype))

    def _over(self, *dims: int) -> list[dist.ProcessGroup]:
        wanted = {dim % len(self.shape) for dim in dims}
        return [group for dim, group in self.axes if dim in wanted]


class _Sum:
    """A tensor that is to be summed over ranks.

    Attributes:
        value: this rank's part; the sum after :func:`_sum_over_ranks`.
        groups: the groups to sum over, one after another.
    """

    def __init__(self, value: torch.Tensor, groups: list[dist.ProcessGroup]) -> None:
        self.value, self.groups = value, groups


def _axes(parameter: torch.Tensor) -> list[tuple[int, dist.ProcessGroup]]:
    """Return the dimensions that a parameter is sharded in, each with the group of the ranks that hold its shards."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
    sharded = [(axis, dim) for axis, one in placements if (dim := sharded_dim(one)) is not None and mesh.size(axis) > 1]
    return [(dim % parameter.ndim, mesh.get_group(axis)) for axis, dim in sharded]


def _means(parameter: torch.Tensor, dtype: torch.dtype, over: int | None) -> torch.Tensor:
    """Return zeros for the means of a parameter over a dimension, sharded as the parameter is in the others."""
    values = local(parameter)
    zeros = torch.zeros_like(values, dtype=dtype)
    if over is not None:
        zeros = zeros.narrow(over, 0, 1).contiguous() if values.size(over) else zeros.sum(over, keepdim=True)
    if not isinstance(parameter, DTensor):
        return zeros
    dim = None if over is None else over % parameter.ndim
    shape = torch.Size(1 if place == dim else size for place, size in enumerate(parameter.shape))
    placements = [Replicate() if dim is not None and sharded_dim(one) == dim else one for one in parameter.placements]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _sum_over_ranks(sums: list[_Sum]) -> None:
    """Sum tensors over their groups: one all-reduce a group and dtype. All ranks of a group call this with tensors alike."""
    for group in dict.fromkeys(group for one in sums for group in one.groups):
        of_group = [one for one in sums if group in one.groups]
        for dtype in dict.fromkeys(one.value.dtype for one in of_group):
            alike = [one for one in of_group if one.value.dtype is dtype]
            together = torch.cat([one.value.flatten() for one in alike])
            dist.all_reduce(together, group=group)
            parts = together.split([one.value.numel() for one in alike])
            for one, part in zip(alike, parts, strict=True):
                one.value = part.view(one.value.shape)
