"""The other side of an audit: the same steps under the layout, on many ranks, and what each rank compares and records."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.audit.again import difference, evaluate, go_on, save_here
from meshwright.audit.borders import MOST_BYTES_OF_BORDERS, compare_borders, first_recorders, tokens_of
from meshwright.audit.case import AuditTrainer, Case, NotingRunner, digest, modules_in_evaluation, states_by_kind
from meshwright.audit.causes.callback_notes import notes_of
from meshwright.audit.compare import Row, compare, weights_of_parts
from meshwright.audit.counted_collectives import by_axis
from meshwright.audit.data import whole_sequences
from meshwright.audit.one_process.decay import decayed_by_optimizer
from meshwright.audit.one_process.reference import Reference
from meshwright.audit.precision import FLOORS
from meshwright.audit.result import RankResult, digest_of, placements_in_words
from meshwright.audit.timeline import Moment, divergences, sketch
from meshwright.audit.tolerance import SQUARES, TOLERANCES, Tolerances
from meshwright.checkpoint import state
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.memory.nf4 import dequantize, is_packed
from meshwright.distributed.pipeline.stage_parts import models_of
from meshwright.distributed.slices import whole_tensor
from meshwright.plan.axes.pipeline.stage_plan import elsewhere, stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import on_stages
from meshwright.plan.given.names import within
from meshwright.plan.result.border_places import first_microbatch, portion_of_rank
from meshwright.train.engine.runner import Batch, Sums

__all__ = ["RankTrainer", "audit_on_rank"]


class ComparingRunner(NotingRunner):
    """Runs microbatches as a run does. It counts collectives, and compares gradients in the first step."""

    trainer: "RankTrainer"

    def forward_backward(self, batches: list[Batch], counts: torch.Tensor) -> Sums:
        """Run the microbatches of a step, as a run does."""
        trainer, generators = self.trainer, self.trainer.generators()
        trainer.note_sequences([whole_sequences(batch, trainer.setup.plan, trainer.mesh) for batch in batches])
        if trainer.step == 0:
            trainer.result.evaluating = modules_in_evaluation(trainer.model)
        if trainer.compiled:
            sums = super().forward_backward(batches, counts)  # inside the counter nothing would be compiled
        else:
            with CommCounter() as counter:
                sums = super().forward_backward(batches, counts)
            trainer.count(counter)
        trainer.result.drew |= trainer.generators() != generators
        if trainer.step == 0:
            trainer.compare_first_step(batches[0])
        else:
            trainer.compare_sketches(trainer.step + 1, Moment.GRADIENT)
        return sums


class RankTrainer(AuditTrainer):
    """Trains under the layout, and compares with the reference.

    Args:
        case: the case.
        device: the device of this rank.
        reference: the reference of the case.
        noise: the noise of each gradient, from :func:`~meshwright.audit.one_process.reference.measure_noise`.
        checkpoints: folder for a checkpoint to go on from; ``None``: this is not tried, and nothing is evaluated.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        reference: Reference,
        noise: dict[str, float],
        checkpoints: Path | None = None,
    ) -> None:
        super().__init__(case, device, ComparingRunner)
        self.folder = checkpoints
        self.reference, self.noise = reference, noise
        self.compiled = any(unit.compile for unit in self.setup.plan.units)
        self.result = RankResult(self.rank, callbacks=notes_of(self), plan=digest_of(self.setup.plan))
        stages = stages_of_rank(self.setup.plan, self.mesh.rank("pp"))
        self.plan, self.elsewhere = on_stages(self.setup.plan, stages), elsewhere(self.setup.plan, stages)
        self.copies = {row.name for row in self.plan.parameters if row.copies and row.stage not in stages}
        self.planned = {row.name: row for row in self.plan.parameters}
        place = self.setup.layout.coordinates(self.rank)
        self.compares = not any(index for axis, index in place.items() if axis != "pp")
        self.named = {name: parameter for name, parameter in self.model.named_parameters() if name in self.planned}
        self.tolerances = Tolerances(self.setup.plan, case.dtype, reference, noise, case.steps)
        self.scales: dict[str, float] = {}
        training = case.config.training.model_copy(update={"clip_norm": reference.clip_norm})
        self.config = self.config.model_copy(update={"training": training})

    def run(self) -> None:
        """Run all steps, and compare after them."""
        begun = time.perf_counter()
        for name, parameter in self.named.items():
            self._row("initial value", name, parameter, self.reference.get(f"initial.{name}"), tolerance=0.0)
        tensors = {**self.named, **dict(self.model.named_buffers())}
        self.result.digests["initial value"] = {name: digest(tensor) for name, tensor in tensors.items()}
        nowhere = self.compiled or self.tolerances.rounded()  # hooks would break a compiled graph
        limit = MOST_BYTES_OF_BORDERS // self.setup.layout.size("dp")
        self.at_borders = [] if nowhere else first_recorders(self.setup.plan, models_of(self.model), limit)
        frozen = {name: digest(p) for name, p in self.named.items() if not self.planned[name].trainable}
        while self.step < self.case.steps:
            self.train_step()
            self.step += 1
            metrics = self.metrics()
            self.result.losses.append(metrics["loss"])
            self.result.norms.append(metrics["gradient_norm"])
            self._compare_buffers()
            self.compare_sketches(self.step, Moment.PARAMETER)
            if self.folder is not None and self.step == 1 < self.case.steps and not self.compiled:
                saved = save_here(self, self.folder)
        if self.folder is not None and not self.compiled:
            self.result.evaluation = evaluate(self)
            if self.case.steps > 1:
                tensors, losses = go_on(self, saved)
                self.result.resumed = difference(self._tensors(), tensors)
                pairs = zip(self.result.losses[1:], losses, strict=True)
                self.result.resumed["loss"] = max(abs(one - other) / abs(one) for one, other in pairs)
        names = {name for name, _ in self.model.named_parameters()} ^ self.planned.keys()
        held = {name for name, _ in self.model.named_buffers()} ^ set(self.reference.names("buffer"))
        buffers = {name for name in held if not within(name, self.elsewhere)}
        self.result.lost = sorted({*names, *buffers})
        self._compare_after_steps()
        self.result.sequences = self.sequences
        self.result.decayed = decayed_by_optimizer(self.model, self.optimizer)
        moved = [name for name, before in frozen.items() if digest(self.named[name]) != before]
        self.result.frozen_moved = sorted({*self.result.frozen_moved, *moved})
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        own = {*stages_of_rank(self.setup.plan, self.mesh.rank("pp"))}
        held_twice = [name for row in self.plan.parameters if row.copies and own >= {*row.stages} for name in row.aliases]
        self.result.come_apart = [
            (row.name, *row.aliases)
            for row in self.planned.values()
            if len({id(parameters[name]) for name in (row.name, *row.aliases) if name in parameters}) > 1
            or any(name not in parameters and not within(name, [*self.elsewhere, *held_twice]) for name in row.aliases)
        ]
        self.result.seconds = time.perf_counter() - begun

    def count(self, counter: CommCounter) -> None:
        """Record the collectives of a step."""
        self.result.counts.append(by_axis(self.setup.layout, self.rank, counter.counts_of))
        self.result.bytes.append(by_axis(self.setup.layout, self.rank, counter.bytes_of))

    def compare_first_step(self, batch: Batch) -> None:
        """Compare the borders of the first step's first microbatch, and the gradients."""
        for recorder in self.at_borders:
            recorder.close()
        self._compare_borders(batch)
        self._compare_gradients()

    def _compare_borders(self, batch: Batch) -> None:
        plan, place = self.setup.plan, self.setup.layout.coordinates(self.rank)
        rows, first = len(batch["input_ids"]), first_microbatch(plan, place)
        self.result.borders = compare_borders(
            {point: tensor for recorder in self.at_borders for point, tensor in recorder.tensors[0].items()},
            lambda point: self.reference.get(f"border.{first}.{point}"),
            lambda at, shape: portion_of_rank(
                plan, at.module, at.side, place, rows, tokens_of(shape, batch, plan), shape[-1] if shape else 0
            ),
            self.tolerances.border(),
            FLOORS[self.case.dtype],
            self.rank,
        )
        self.result.borders_left_out = sum(recorder.left_out for recorder in self.at_borders)

    def clip(self) -> torch.Tensor:
        """Clip the gradient as a run does, and measure its norm again afterwards."""
        norm = super().clip()
        if self.step == 0:
            self.result.clipped_norm = float(self.runner.clip(None))
        return norm

    # -- comparisons; all ranks take part in gathering, and rank 0 compares ---------------------------------------------------

    @torch.no_grad()
    def _compare_gradients(self) -> None:
        trained = {name: p for name, p in self.named.items() if self.planned[name].trainable}
        self.result.frozen_moved = [
            name for name, p in self.named.items() if not self.planned[name].trainable and p.grad is not None
        ]
        self.result.without_gradient = [name for name, parameter in trained.items() if parameter.grad is None]
        gradients = self._gradients()
        self.result.digests["gradient"] = {name: digest(gradient) for name, gradient in gradients.items()}
        floor = FLOORS[self.case.dtype] * self.reference.largest_gradient
        for name in trained:
            truth = self.reference.get(f"gradient.{name}")
            if truth is None:  # the loss does not depend on it
                truth = torch.zeros(self.planned[name].shape)
            self.scales[name] = max(float(truth.abs().max()) if truth.numel() else 0.0, floor)
            tolerance = self.tolerances.gradient(name, self.scales[name])
            self._row("gradient", name, gradients.get(name), truth, tolerance, floor)

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that all ranks with the parameter have, so that each can be gathered."""
        gradients = {name: p.grad for name, p in self.named.items() if self.planned[name].trainable and p.grad is not None}
        lacking: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        trained = [name for name in self.named if self.planned[name].trainable]
        dist.all_gather_object(lacking, [name for name in trained if name not in gradients])
        nowhere = {name for names in lacking for name in names}
        return {name: gradient for name, gradient in gradients.items() if name not in nowhere}

    @torch.no_grad()
    def compare_sketches(self, step: int, moment: Moment) -> None:
        """Note which trained parameters, or their gradients, are not those of one process. All ranks call this."""
        if self.case.dtype != "float64":
            return
        trained = {name: parameter for name, parameter in self.named.items() if self.planned[name].trainable}
        tensors = self._gradients() if moment is Moment.GRADIENT else trained
        sketches = {name: sketch(_whole(tensor)) for name, tensor in tensors.items()}
        if self.compares:
            lacking = dict.fromkeys(trained.keys() - sketches.keys(), (0.0, 0.0))
            truths, allowed = self.reference.sketches[step - 1][moment], step * TOLERANCES[self.case.dtype]
            self.result.divergences += divergences(step, moment, {**sketches, **lacking}, truths, allowed)

    @torch.no_grad()
    def _compare_after_steps(self) -> None:
        states, settings = states_by_kind(self.model, self.optimizer), self.config.optimizer
        # The optimizer got the clipped gradient.
        clipped = min(1.0, self.reference.clipped_norm / self.reference.norms[0]) if self.reference.norms[0] else 1.0
        for name, parameter in self.named.items():
            if not self.planned[name].trainable:
                self._row("parameter", name, parameter, self.reference.get(f"final.{name}"), tolerance=0.0)
                continue
            gradient = self.tolerances.gradient(name, self.scales[name])
            tolerance, scale = self.tolerances.state(name, gradient), clipped * self.scales[name]
            self._compare_movement(name, parameter, tolerance, gradient * scale)
            own = {kind for kind, named in states.items() if name in named}
            for kind in sorted(own.union(self.reference.names(f"optimizer.{name}"))):
                truth = self.reference.get(f"optimizer.{name}.{kind}")
                floor = self.tolerances.moment_floor(name, kind, scale, settings)
                allowed = {"step": 0.0, **dict.fromkeys(SQUARES, 2 * tolerance)}.get(kind, tolerance)
                self._row(kind, name, states.get(kind, {}).get(name), truth, allowed, floor)
        self.result.digests["parameter"] = {name: digest(parameter) for name, parameter in self.named.items()}
        for kind, named in states.items():
            self.result.digests[kind] = {name: digest(value) for name, value in named.items()}

    @torch.no_grad()
    def _compare_buffers(self) -> None:
        """After each step, add a row for each buffer that is wrong for the first time; after the last step, for all others too.

        The digest of a buffer is that of its values after every step so far.
        """
        digests = self.result.digests.setdefault("buffer", {})
        reported = {row.name for row in self.result.rows if row.what == "buffer"}
        last = self.step == self.case.steps
        for name, buffer in self.model.named_buffers():
            digests[name] = hashlib.sha256(f"{digests.get(name, '')}{digest(buffer)}".encode()).hexdigest()[:16]
            if not self.compares or name in reported:
                continue
            self._row(
                "buffer", name, buffer, self.reference.get(f"buffer_after.{self.step}.{name}"), TOLERANCES[self.case.dtype]
            )
            row = self.result.rows.pop()
            if last or not row.passed:
                self.result.rows.append(row if row.passed else replace(row, step=self.step))

    def _compare_movement(self, name: str, parameter: torch.Tensor, tolerance: float, off: float) -> None:
        """Compare how far a parameter moved in all steps with how far it moved in one process.

        Args:
            name: its name.
            parameter: the parameter after the last step.
            tolerance: of its movement, relative to the largest movement of an entry.
            off: how much an entry of its gradient may be off.
        """
        before, after = self.reference.get(f"initial.{name}"), self.reference.get(f"final.{name}")
        kept = self.reference.names(f"optimizer.{name}")
        states = {kind: own for kind in kept if (own := self.reference.get(f"optimizer.{name}.{kind}")) is not None}
        slack = moved = None
        if before is not None and after is not None:
            moved = after.double() - before.double()
            slack = self.tolerances.movement(name, states, after, off, self.config.optimizer) / tolerance
        gathered = _whole(parameter)
        value = None if before is None else gathered.double().cpu() - before.double()
        self._row("parameter", name, value, moved, tolerance, slack=slack)

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
        value = None if value is None else _whole(value)
        if value is not None and truth is not None and is_packed(value):
            value = dequantize(value, truth.dtype)
        if not self.compares:
            return
        planned = self.planned.get(name)
        unknown = (float("inf"), float("nan"), float("inf"), 0.0)
        numbers = unknown if truth is None else compare(value, truth, floor, slack)
        weights: tuple[float, ...] = ()
        if what == "gradient" and value is not None and name not in self.copies:
            self.result.gathered_norm = math.hypot(self.result.gathered_norm, float(value.double().norm()))
        if what == "gradient" and value is not None and numbers[0] > tolerance:
            parts = self.reference.parts(name)
            weights = weights_of_parts(value, parts) if parts else ()
        unit = self.setup.plan.unit(planned.unit).label if planned else ""
        placed = placements_in_words(planned) if planned else "every rank"
        missing = value is None or truth is None
        self.result.rows.append(Row(what, name, unit, placed, *numbers[:3], tolerance, numbers[3], missing, weights))

    def generators(self) -> list[bytes]:
        """Return the states of the random number generators of this rank."""
        return [value.cpu().numpy().tobytes() for value in state.rng_tensors(self.rank, self.device).values()]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the global values of a tensor; all ranks take part."""
    value = tensor.detach()
    return whole_tensor(value) if isinstance(value, DTensor) else value


def audit_on_rank(
    device: torch.device,
    case: Case,
    folder: Path,
    noise: dict[str, float],
    plants: Iterable[Callable[[RankTrainer], None]] = (),
    whole: bool = False,
) -> RankResult:
    """Run a case and compare it with the reference in a folder. This is the job of each rank.

    Args:
        device: the device of this rank.
        case: the case.
        folder: the folder that the reference was written to.
        noise: the noise of each gradient.
        plants: functions that change the trainer before its first step. The tests of the audit plant bugs with them.
        whole: also evaluate, and go on from a checkpoint.
    """
    trainer = RankTrainer(case, device, Reference(folder), noise, folder if whole else None)
    for plant in plants:
        plant(trainer)
    trainer.run()
    return trainer.result
