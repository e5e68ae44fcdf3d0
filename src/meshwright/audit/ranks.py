"""The many: the same steps under the layout, and on every rank what there is to compare."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.audit.case import AuditTrainer, Case, local_part
from meshwright.audit.compare import Row, compare, weights_of_parts
from meshwright.audit.precision import FLOORS, TOLERANCES
from meshwright.audit.reference import Reference
from meshwright.checkpoint import state
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.grad_clip import total_grad_norm
from meshwright.plan.sharding_plan import ParameterRow
from meshwright.train.trainer import Batch

__all__ = ["RankResult", "RankTrainer", "audit_on_rank"]

NOISE_FACTOR = 2.0
"""A gradient may be this many times as far from its reference as rounding alone takes the reference from the truth."""


@dataclass
class RankResult:
    """What one rank saw.

    Attributes:
        rows: comparisons with the reference; on rank 0 only.
        losses: of each step, over all ranks, as this rank reports it, and ``norms`` before clipping.
        clipped_norm: of the whole gradient after clipping, in the first step.
        sequences: for each step, the digests of the sequences that this rank was fed.
        digests: ``gradient``, ``parameter``, an optimizer state or ``buffer`` to name to digest of what this rank holds.
        without_gradient: trained parameters that got none in the first step.
        frozen_moved: parameters that are not trained, and yet have a gradient or another value.
        come_apart: groups of names that are one parameter in the plan, and several in the model after the steps.
        drew: whether forward or backward drew random numbers.
        counts: collectives of the microbatches of the first step, by kind, and their ``bytes``.
        seconds: that the steps took, comparisons included.
    """

    rank: int
    rows: list[Row] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped_norm: float = 0.0
    sequences: list[list[str]] = field(default_factory=list)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    without_gradient: list[str] = field(default_factory=list)
    frozen_moved: list[str] = field(default_factory=list)
    come_apart: list[tuple[str, ...]] = field(default_factory=list)
    drew: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class RankTrainer(AuditTrainer):
    """Trains under the layout, and compares with the reference on the way.

    Args:
        case: to run.
        device: of this rank.
        reference: of the case.
        noise: of each gradient, from :func:`~meshwright.audit.reference.measure_noise`.
    """

    def __init__(self, case: Case, device: torch.device, reference: Reference, noise: dict[str, float]) -> None:
        super().__init__(case, device)
        self.reference, self.noise = reference, noise
        self.result = RankResult(self.rank)
        self.planned = {row.name: row for row in self.setup.plan.parameters}
        self.named = {name: parameter for name, parameter in self.model.named_parameters() if name in self.planned}
        self.scales: dict[str, float] = {}
        training = case.config.training.model_copy(update={"clip_norm": reference.clip_norm})
        self.config = self.config.model_copy(update={"training": training})

    def run(self) -> None:
        """All steps, and everything that is compared after them."""
        begun = time.perf_counter()
        for name, parameter in self.named.items():
            self._row("initial value", name, parameter, self.reference.get(f"initial.{name}"), tolerance=0.0)
        frozen = {name: digest(p) for name, p in self.named.items() if not self.planned[name].trainable}
        while self.step < self.case.steps:
            metrics = self.train_step()
            self.result.losses.append(metrics["loss"])
            self.result.norms.append(metrics["gradient_norm"])
            self.step += 1
        self._compare_after_steps()
        self.result.sequences = self.sequences
        moved = [name for name, before in frozen.items() if digest(self.named[name]) != before]
        self.result.frozen_moved = sorted({*self.result.frozen_moved, *moved})
        self.result.come_apart = [
            (row.name, *row.aliases)
            for row in self.planned.values()
            if any(self.model.get_parameter(alias) is not self.model.get_parameter(row.name) for alias in row.aliases)
        ]
        self.result.seconds = time.perf_counter() - begun

    def backward(self, batches: list[Batch], divisor: torch.Tensor) -> torch.Tensor:
        """As a run does; in the first step collectives are counted and gradients compared."""
        if self.step > 0:
            return super().backward(batches, divisor)
        generators = self._generators()
        with CommCounter() as counter:
            loss = super().backward(batches, divisor)
        self.result.drew = self._generators() != generators
        self.result.counts, self.result.bytes = counter.counts, counter.bytes
        self._compare_gradients()
        return loss

    def clip(self) -> torch.Tensor:
        """As a run does, and measured again afterwards."""
        norm = super().clip()
        if self.step == 0:
            self.result.clipped_norm = float(total_grad_norm(self.model.parameters()))
        return norm

    # -- comparisons; all ranks take part in the gathering, rank 0 compares ---------------------------------------------------

    @torch.no_grad()
    def _compare_gradients(self) -> None:
        trained = {name: p for name, p in self.named.items() if self.planned[name].trainable}
        self.result.frozen_moved = [
            name for name, p in self.named.items() if not self.planned[name].trainable and p.grad is not None
        ]
        self.result.without_gradient = [name for name, parameter in trained.items() if parameter.grad is None]
        lacking: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(lacking, self.result.without_gradient)
        nowhere = {name for names in lacking for name in names}
        gradients = {name: p.grad for name, p in trained.items() if name not in nowhere and p.grad is not None}
        self.result.digests["gradient"] = {name: digest(gradient) for name, gradient in gradients.items()}
        floor = FLOORS[self.case.dtype] * self.reference.largest_gradient
        for name in trained:
            truth = self.reference.get(f"gradient.{name}")
            if truth is None:  # it takes no part in the loss
                truth = torch.zeros(self.planned[name].shape)
            self.scales[name] = max(float(truth.abs().max()) if truth.numel() else 0.0, floor)
            self._row("gradient", name, gradients.get(name), truth, self._tolerance(name), floor)

    @torch.no_grad()
    def _compare_after_steps(self) -> None:
        """Adam divides a gradient by its own size: where that is not far above rounding, the update is any number up to the
        learning rate, in the reference too. So every entry may be off by what the tolerance of its gradient can move it.
        """
        states = self._optimizer_states()
        for name, parameter in self.named.items():
            tolerance = max(self._tolerance(name), self._storage_tolerance(name))
            slack = self._slack(name, tolerance) if self.planned[name].trainable else None
            self._row("parameter", name, parameter, self.reference.get(f"final.{name}"), tolerance, slack=slack)
        for kind, named in states.items():
            for name, value in named.items():
                truth = self.reference.get(f"optimizer.{name}.{kind}")
                share = {"exp_avg": 1 - self.config.optimizer.betas[0], "exp_avg_sq": 1 - self.config.optimizer.betas[1]}
                size = self.scales[name] ** (2 if kind == "exp_avg_sq" else 1)
                tolerance = max(self._tolerance(name), self._storage_tolerance(name))
                self._row(kind, name, value, truth, tolerance, floor=share.get(kind, 0.0) * size)
        for name, buffer in self.model.named_buffers():
            tolerance = TOLERANCES[self.case.dtype]
            self._row("buffer", name, buffer, self.reference.get(f"buffer.{name}"), tolerance)
        self.result.digests["parameter"] = {name: digest(parameter) for name, parameter in self.named.items()}
        self.result.digests["buffer"] = {name: digest(buffer) for name, buffer in self.model.named_buffers()}
        for kind, named in states.items():
            self.result.digests[kind] = {name: digest(value) for name, value in named.items()}

    def _optimizer_states(self) -> dict[str, dict[str, torch.Tensor]]:
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.optimizer_tensors(self.model, self.optimizer).items():
            name, _, kind = key.removeprefix("optimizer.").rpartition(".")
            found.setdefault(kind, {})[name] = value
        return found

    def _tolerance(self, name: str) -> float:
        return max(TOLERANCES[self.case.dtype], NOISE_FACTOR * self.noise.get(name, 0.0))

    def _storage_tolerance(self, name: str) -> float:
        """Two units in the last place of what is stored."""
        return 2 * torch.finfo(getattr(torch, self.planned[name].dtype)).eps

    def _slack(self, name: str, tolerance: float) -> torch.Tensor | None:
        """How far each entry may be moved by a gradient that is off by the tolerance, in units of the tolerance."""
        variance = self.reference.get(f"optimizer.{name}.exp_avg_sq")
        if variance is None:
            return None
        settings, steps = self.config.optimizer, self.case.steps
        size = (variance.double() / (1 - settings.betas[1] ** steps)).sqrt() + settings.eps
        return settings.lr * steps * (tolerance * self.scales[name] / size).clamp(max=2.0) / tolerance

    def _row(
        self,
        what: str,
        name: str,
        value: torch.Tensor | None,
        truth: torch.Tensor | None,
        tolerance: float,
        floor: float = 0.0,
        slack: torch.Tensor | None = None,
    ) -> None:
        if value is not None:
            value = value.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if self.rank != 0:
            return
        planned = self.planned.get(name)
        if truth is None:
            numbers = (float("inf"), float("nan"), float("inf"), 0.0)
        else:
            numbers = compare(value, truth, floor, slack)
        weights: tuple[float, ...] = ()
        if what == "gradient" and value is not None and numbers[0] > tolerance:
            parts = self.reference.parts(name)
            weights = weights_of_parts(value, parts) if parts else ()
        unit = self.setup.plan.unit(planned.unit).label if planned else ""
        placed = _placements(planned) if planned else "every rank"
        missing = value is None or truth is None
        self.result.rows.append(Row(what, name, unit, placed, *numbers[:3], tolerance, numbers[3], missing, weights))

    def _generators(self) -> list[bytes]:
        return [value.cpu().numpy().tobytes() for value in state.rng_tensors(self.rank, self.device).values()]


def _placements(row: ParameterRow) -> str:
    return " ".join(f"{axis}:{placement}" for axis, placement in row.placements) or "whole"


def digest(tensor: torch.Tensor) -> str:
    """Of the bytes that this rank holds."""
    local = local_part(tensor.detach()).cpu().contiguous()
    return hashlib.sha256(local.reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b"").hexdigest()[:16]


def audit_on_rank(
    device: torch.device,
    case: Case,
    folder: Path,
    noise: dict[str, float],
    plants: Iterable[Callable[[RankTrainer], None]] = (),
) -> RankResult:
    """Job of each rank: run a case and compare it with the reference in a folder.

    Args:
        device: of this rank.
        case: to run.
        folder: that the reference was written to.
        noise: of each gradient.
        plants: change the trainer before its first step; this is how the tests of the audit plant bugs.
    """
    trainer = RankTrainer(case, device, Reference(folder), noise)
    for plant in plants:
        plant(trainer)
    trainer.run()
    return trainer.result
