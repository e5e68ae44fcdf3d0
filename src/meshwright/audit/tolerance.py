"""Tolerances: how much the results of one process and of many may differ.

Two cases decide the tolerance of a gradient. Data parallelism computes each microbatch exactly as one process does, in any
dtype. Only sums have another order, in the dtype of reduction. Tensor, context and expert parallel, and a loss in chunks,
compute other products and other partial sums. There the rounding of the compute dtype counts, and the audit measures it: the
distance between the gradient of one process in this dtype and in the next more precise one (the noise).

After the first step each side continues with its own weights, and differences grow. So optimizer states, parameters and the
losses of later steps have their own tolerances, relative to how far a parameter moved. In bfloat16 under model parallelism even
these say nothing: the difference between the two sides is as large as the error of one process, and a router may send a token
to another expert. So there one step is compared, which has all the casts. More steps are compared in float64, in float32, and
in bfloat16 if each microbatch is computed exactly as in one process.
"""

from collections.abc import Mapping

import torch

from meshwright.audit.one_process.reference import LOSS, Reference
from meshwright.plan.given.names import within
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.config import OptimizerConfig
from meshwright.train.schema.optimizer_kinds import ADAMW

__all__ = ["SQUARES", "TOLERANCES", "Tolerances", "comparable_steps"]

TOLERANCES = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-5}
"""For gradients, loss and norm of the first step, relative to the largest entry. Another order of sums gives far less."""

STATE_TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 1e-2}
"""Per step: for an optimizer state relative to its largest entry, for a parameter relative to how far it moved."""

BORDER_TOLERANCE = 1e-3
"""For activations and their gradients in float32 under model parallelism. They explain a failure, and never cause one."""

ROUNDED_SCALARS = {"loss": 1e-3, "norm": 1e-2}
"""For loss and norm in bfloat16 under model parallelism: averages, over tokens or entries, of numbers with eight bits. If
the noise of the loss is larger, so is its tolerance: self-conditioning feeds rounded numbers to the model again."""

NOISE_FACTOR = 4.0
"""A gradient may differ from its reference by this many times the noise. Both distances come from about the same distribution,
and the one that was measured may be small by chance."""

SQUARES = ("exp_avg_sq", "row_var", "col_var", "variance")
"""States of optimizers that are means of squared gradients: their relative error is twice that of a gradient."""

HALF_EPS = 2.0**-8
"""Relative rounding of bfloat16."""


def comparable_steps(plan: ShardingPlan, dtype: str, steps: int) -> int:
    """The number of steps in which an error can be told from rounding, at most ``steps``."""
    return steps if dtype != "bfloat16" or _same_arithmetic(plan) else 1


def _same_arithmetic(plan: ShardingPlan) -> bool:
    """Whether a layout computes each microbatch exactly as one process does.

    Twin units do not: they add the gradients of their two passes in the dtype of reduction, one process in that of compute. A
    loss in chunks does not: its products have fewer rows, and one process computes it at once.
    """
    alone = plan.loss is None and all(plan.layout.size(axis) == 1 for axis in ("pp", "cp", "tp", "ep"))
    return alone and not any(unit.twin_of for unit in plan.units)


class Tolerances:
    """The tolerances of a case.

    Args:
        plan: the plan of the layout.
        dtype: the dtype of compute.
        reference: the reference of the case.
        noise: parameter name to the noise of its gradient in one process.
        steps: number of steps that are compared.
    """

    def __init__(self, plan: ShardingPlan, dtype: str, reference: Reference, noise: dict[str, float], steps: int) -> None:
        self.plan, self.dtype, self.reference, self.steps = plan, dtype, reference, steps
        self.same_arithmetic = _same_arithmetic(plan)
        self.noise = {} if self.same_arithmetic else _noise_of_mixtures(plan, noise)
        self.rows = {row.name: row for row in plan.parameters}
        self.half = {name for name in self.rows if self._sums_in_half(name)}

    def gradient(self, name: str, scale: float) -> float:
        """For the gradient of a parameter, whose largest entry is ``scale``."""
        tolerance = max(TOLERANCES[self.dtype], NOISE_FACTOR * self.noise.get(name, 0.0))
        if name in self.half and scale > 0:
            parts = self.reference.parts(name)
            largest = float(sum(part.double().abs() for part in parts).max()) if parts else 4 * scale  # type: ignore[union-attr]
            tolerance = max(tolerance, 2 * HALF_EPS * largest / scale)
        return tolerance

    def state(self, name: str, gradient: float) -> float:
        """For optimizer state and movement after the steps, of a parameter whose gradient has the tolerance ``gradient``."""
        return max(self.steps * STATE_TOLERANCES[self.dtype], gradient, 4 * self.steps * self.storage_eps(name))

    def movement(
        self, name: str, states: Mapping[str, torch.Tensor], after: torch.Tensor, off: float, settings: OptimizerConfig
    ) -> torch.Tensor:
        """For each entry of the movement of a parameter in all steps, absolute, beside that of :meth:`state`.

        Adam divides a gradient by its own size, and Lion takes its sign. If that size is not far above rounding, the update may
        be any number up to the learning rate, in one process too. So an entry may also differ by the movement that a difference
        of ``off`` in its gradient can cause, and by the rounding of its stored value.

        Args:
            name: its name.
            states: the states of the optimizer in one process, by kind.
            after: its values in one process.
            off: how much an entry of its gradient may be off.
            settings: of the optimizer.
        """
        row = self.rows[name]
        kind, caused = settings.updaters[row.update].kind, torch.zeros(())
        size: torch.Tensor | None = None
        if kind == ADAMW and "exp_avg_sq" in states:
            second, eps = (row.betas or settings.betas)[1], row.eps or settings.eps
            size = (states["exp_avg_sq"].double() / (1 - second**self.steps)).sqrt() + eps
        elif kind == "lion" and "exp_avg" in states:
            size = states["exp_avg"].double().abs()
        if size is not None:
            caused = row.rate * settings.lr * self.steps * (off / size).nan_to_num(posinf=2.0).clamp(max=2.0)
        return caused + 4 * self.steps * self.storage_eps(name) * float(after.abs().max())

    def moment_floor(self, name: str, kind: str, scale: float, settings: OptimizerConfig) -> float:
        """For a moment of an optimizer of ours: what one step with a gradient of this scale adds to it; 0 for another state."""
        row = self.rows[name]
        updater, (first, second) = settings.updaters[row.update], row.betas or settings.betas
        options = {} if updater.options is None else updater.options.model_dump()
        of_kind = {
            ADAMW: {"exp_avg": (1 - first) * scale, "exp_avg_sq": (1 - second) * scale**2},
            "lion": {"exp_avg": (1 - options.get("betas", (0.0, 0.0))[1]) * scale},
            "sgd": {"momentum_buffer": scale},
            "muon": {"momentum_buffer": (1 - options.get("momentum", 0.0)) * scale},
            "adafactor": dict.fromkeys(("row_var", "col_var", "variance"), scale**2),
        }
        return of_kind.get(updater.kind, {}).get(kind, 0.0)

    def storage_eps(self, name: str) -> float:
        """Relative rounding of the dtype that a parameter is stored in."""
        return torch.finfo(getattr(torch, self.rows[name].dtype)).eps

    def scalar(self, name: str, step: int) -> float:
        """For ``loss`` or ``norm`` of a step, counted from 0."""
        half = self.rounded() or (self.dtype == "bfloat16" and name == "norm" and bool(self.half))
        first = ROUNDED_SCALARS[name] if half else TOLERANCES[self.dtype]
        if name == "loss" and half:
            first = max(first, NOISE_FACTOR * self.noise.get(LOSS, 0.0))
        return first if step == 0 else max(first, step * STATE_TOLERANCES[self.dtype])

    def border(self) -> float:
        """For an activation and its gradient. In float32, other products differ by more than another order of sums."""
        return TOLERANCES[self.dtype] if self.same_arithmetic or self.dtype == "float64" else BORDER_TOLERANCE

    def rounded(self) -> bool:
        """Whether both sides round activations to eight bits, and round different numbers."""
        return self.dtype == "bfloat16" and not self.same_arithmetic

    def _sums_in_half(self, name: str) -> bool:
        row = self.rows[name]
        unit = self.plan.unit(row.unit)
        return "bfloat16" in (row.dtype, unit.reduce_dtype or unit.param_dtype or row.dtype)


def _noise_of_mixtures(plan: ShardingPlan, noise: dict[str, float]) -> dict[str, float]:
    """Return the noise, and for the parameters of every mixture the largest that those of any mixture have.

    Rounding sends a token to another expert now and then. It is chance in which mixture it does.
    """
    experts = {name for name in noise if within(name, [row.module for row in plan.experts])}
    largest = max((noise[name] for name in experts), default=0.0)
    return {name: largest if name in experts else own for name, own in noise.items()}
