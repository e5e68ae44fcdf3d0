"""What may differ between one process and many.

Two things decide what may differ. Data parallelism computes each microbatch exactly as one process does, in any dtype; only
sums are made in another order, in the dtype of reduction. Tensor, context and expert parallel compute other products and other
partial sums, so there the rounding of the dtype itself counts, and it is measured: the distance between the gradient of one
process in this dtype and in the next better one.

After the first step each side goes on from weights of its own, and differences grow. Optimizer states, parameters, and what
later steps report have tolerances of their own for that, relative to how far a parameter moved. In bfloat16 under model
parallelism there is nothing to be had from them: the two sides part by what one process itself is off, and a router sends a
token elsewhere. So there one step is compared, which all the casts are in; later steps are float64's and float32's.
"""

import torch

from meshwright.audit.reference import LOSS, Reference
from meshwright.plan.sharding_plan import ShardingPlan

__all__ = ["TOLERANCES", "Tolerances", "comparable_steps"]

TOLERANCES = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-5}
"""Of a gradient, a loss and a norm of the first step, relative to the largest entry. Sums in another order stay far below."""

STATE_TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 1e-2}
"""For each step, of an optimizer state relative to its largest entry, and of a parameter relative to how far it moved."""

BORDER_TOLERANCE = 1e-3
"""Of activations and their gradients in float32 under model parallelism, where they explain and do not judge."""

ROUNDED_SCALARS = {"loss": 1e-3, "norm": 1e-2}
"""In bfloat16 under model parallelism: averages over tokens, and over entries, of what has eight bits. Of a loss, more where
one process itself is further off: self-conditioning feeds what was rounded to the model again."""

NOISE_FACTOR = 4.0
"""A gradient may be this many times as far from its reference as rounding takes the reference from the truth: both distances
are draws from much the same distribution, and the one that was measured may have been lucky."""

HALF_EPS = 2.0**-8
"""Relative rounding of bfloat16."""


def comparable_steps(plan: ShardingPlan, dtype: str, steps: int) -> int:
    """How many of some steps of a layout can be told from rounding."""
    return steps if dtype != "bfloat16" or _same_arithmetic(plan) else 1


def _same_arithmetic(plan: ShardingPlan) -> bool:
    """Whether a layout computes each microbatch as one process does. Twin units do not: they add the gradients of their two
    passes in the dtype of reduction, and one process in that of compute.
    """
    alone = all(plan.layout.size(axis) == 1 for axis in ("pp", "cp", "tp", "ep"))
    return alone and not any(unit.twin_of for unit in plan.units)


class Tolerances:
    """What may differ in a case.

    Args:
        plan: of the layout.
        dtype: of compute.
        reference: of the case.
        noise: of each gradient in one process, by name.
        steps: that are compared.
    """

    def __init__(self, plan: ShardingPlan, dtype: str, reference: Reference, noise: dict[str, float], steps: int) -> None:
        self.plan, self.dtype, self.reference, self.steps = plan, dtype, reference, steps
        self.same_arithmetic = _same_arithmetic(plan)
        self.noise = {} if self.same_arithmetic else noise
        self.rows = {row.name: row for row in plan.parameters}
        self.half = {name for name in self.rows if self._sums_in_half(name)}

    def gradient(self, name: str, scale: float) -> float:
        """Of the gradient of a parameter whose largest entry is ``scale``."""
        found = max(TOLERANCES[self.dtype], NOISE_FACTOR * self.noise.get(name, 0.0))
        if name in self.half and scale > 0:
            parts = self.reference.parts(name)
            largest = float(sum(part.double().abs() for part in parts).max()) if parts else 4 * scale  # type: ignore[union-attr]
            found = max(found, 2 * HALF_EPS * largest / scale)
        return found

    def state(self, name: str, gradient: float) -> float:
        """Of optimizer state and movement after the steps, for a parameter whose gradient may be off by ``gradient``."""
        return max(self.steps * STATE_TOLERANCES[self.dtype], gradient, 4 * self.steps * self.storage_eps(name))

    def storage_eps(self, name: str) -> float:
        """Relative rounding of what is stored."""
        return torch.finfo(getattr(torch, self.rows[name].dtype)).eps

    def scalar(self, what: str, step: int) -> float:
        """Of ``loss`` or ``norm`` in a step, counted from 0."""
        half = self.rounded() or (self.dtype == "bfloat16" and what == "norm" and bool(self.half))
        first = ROUNDED_SCALARS[what] if half else TOLERANCES[self.dtype]
        if what == "loss" and half:
            first = max(first, NOISE_FACTOR * self.noise.get(LOSS, 0.0))
        return first if step == 0 else max(first, step * STATE_TOLERANCES[self.dtype])

    def border(self) -> float:
        """Of an activation and its gradient. In float32 products in another order part by more than sums do."""
        return TOLERANCES[self.dtype] if self.same_arithmetic or self.dtype == "float64" else BORDER_TOLERANCE

    def rounded(self) -> bool:
        """Whether both sides round their activations to eight bits, and not alike."""
        return self.dtype == "bfloat16" and not self.same_arithmetic

    def _sums_in_half(self, name: str) -> bool:
        row = self.rows[name]
        unit = self.plan.unit(row.unit)
        return "bfloat16" in (row.dtype, unit.reduce_dtype or unit.param_dtype or row.dtype)
