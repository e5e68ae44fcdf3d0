"""What callbacks do to a run, as an audit sees it: each hook is called between two looks at what it must leave alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.audit.causes.findings import Finding, Kind
from meshwright.audit.timeline import Moment, Sketch, divergences, sketch
from meshwright.checkpoint import state
from meshwright.distributed.pipeline.parameter_copies import local_shard
from meshwright.distributed.slices import whole_tensor
from meshwright.train.callbacks.hooks import Callbacks
from meshwright.train.trainer import Trainer

__all__ = ["CallbackNotes", "NotingCallbacks", "callback_findings", "notes_of"]


@dataclass
class CallbackNotes:
    """What callbacks did on a rank.

    Attributes:
        names: the callbacks that have hooks.
        deeds: what one must not do: ``Noise draws random numbers in on_step``, each once.
        gradients: step, name of a callback that changed gradients, and name of each of these to its sketch afterwards.
    """

    names: list[str] = field(default_factory=list)
    deeds: list[str] = field(default_factory=list)
    gradients: list[tuple[int, str, dict[str, Sketch]]] = field(default_factory=list)


class NotingCallbacks(Callbacks):
    """Calls the callbacks of a run, and notes what each does to parameters, gradients and random numbers."""

    def __init__(self, trainer: Any, resume: Path | None = None) -> None:
        self.notes = CallbackNotes()
        super().__init__(trainer, resume)
        self.notes.names = [name for name, _ in self.named]

    @contextmanager
    def around(self, name: str, hook: str) -> Iterator[None]:
        """Look before and after a hook."""
        model, run = self.run.model, self.run
        trained = dict(model.named_parameters())
        numbers, parameters = self._numbers(), {of: local_shard(p.data).clone() for of, p in trained.items()}
        gradients = {of: None if p.grad is None else local_shard(p.grad).clone() for of, p in trained.items()}
        with super().around(name, hook):
            yield
        if self._numbers() != numbers:
            self._add(f"{name} draws random numbers in {hook}")
        moved = [of for of, p in model.named_parameters() if not _same(local_shard(p.data), parameters[of])]
        if moved:
            self._add(f"{name} moves parameters in {hook}: {', '.join(moved[:4])}")
        if hook == "on_gradients":
            own = {of: p.grad for of, p in model.named_parameters()}
            changed = [of for of, gradient in own.items() if not _same(local_shard(gradient), gradients[of])]
            self._note_gradients(run.step, name, own, changed)

    def _numbers(self) -> list[bytes]:
        found = state.rng_tensors(self.run.rank, self.run.device)
        return [value.cpu().numpy().tobytes() for value in found.values()]

    def _add(self, deed: str) -> None:
        if deed not in self.notes.deeds:
            self.notes.deeds.append(deed)

    def _note_gradients(self, step: int, name: str, own: dict[str, torch.Tensor | None], changed: list[str]) -> None:
        """Note the gradients that any rank changed. All ranks call it."""
        lacking = [of for of, gradient in own.items() if gradient is None]
        everywhere: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
        dist.all_gather_object(everywhere, (changed, lacking))
        somewhere = {of for names, _ in everywhere for of in names}
        nowhere = {of for _, names in everywhere for of in names}
        if not somewhere:
            return
        found = {}
        for of, gradient in own.items():
            if of in somewhere:
                found[of] = (0.0, 0.0) if gradient is None or of in nowhere else sketch(_whole(gradient))
        self.notes.gradients.append((step, name, found))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two local tensors are the same to the last bit, NaN included."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    return whole_tensor(value) if isinstance(value, DTensor) else value


def notes_of(trainer: Trainer) -> CallbackNotes:
    """Return what the callbacks of a trainer of an audit did."""
    assert isinstance(trainer.callbacks, NotingCallbacks)
    return trainer.callbacks.notes


def callback_findings(
    truth: Sequence[tuple[int, str, dict[str, Sketch]]], ranks: Sequence[CallbackNotes], tolerance: float | None
) -> Iterator[Finding]:
    """Yield what callbacks do that they must not do.

    Args:
        truth: the gradients that they changed in one process.
        ranks: the notes of all ranks.
        tolerance: largest relative error of a changed gradient; ``None``: gradients are not compared, because something else
            is wrong with them, or because both sides round differently.
    """
    for deed in dict.fromkeys(deed for notes in ranks for deed in notes.deeds):
        why = (
            "no two runs of it agree, and dropout gets other numbers"
            if "random numbers" in deed
            else "the plan and the optimizer know nothing of it"
        )
        yield Finding(Kind.CALLBACK, f"callback {deed}; {why}")
    if tolerance is None:
        return
    due = {(step, name): sketches for step, name, sketches in truth}
    found: dict[tuple[int, str], dict[str, Sketch]] = {}
    for notes in ranks:
        for step, name, sketches in notes.gradients:
            found.setdefault((step, name), {}).update(sketches)
    for step, name in sorted({*due, *found}, key=lambda place: place[0]):  # stable: in the order of their calls
        own, theirs = found.get((step, name)), due.get((step, name))
        words = f"callback {name} changes gradients differently on layouts: in step {step}"
        if own is None or theirs is None:
            yield Finding(Kind.CALLBACK, f"{words} {'only one process' if own is None else 'only the ranks'} change any")
            return
        if wrong := [*divergences(step, Moment.GRADIENT, {**dict.fromkeys(theirs, (0.0, 0.0)), **own}, theirs, tolerance)]:
            worst = max(wrong, key=lambda item: item.error)
            many = f"{len(wrong)} gradients, that of {worst.name} the most" if len(wrong) > 1 else f"that of {worst.name}"
            yield Finding(
                Kind.CALLBACK, f"{words} {many}: {worst.ratio:.4g} times its norm in one process (error {worst.error:.2g})"
            )
            return
