"""Calls an objective: what it returns is checked, and what it raises is named."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError, PartError
from meshwright.models.objective import Batch, Objective
from meshwright.objectives.given import log_probs
from meshwright.objectives.running import Running, running
from meshwright.user_code import raised_by

__all__ = ["Pass", "at_step", "calling", "evaluate_batch", "in_part", "named", "passes_before"]


def named(objective: Objective) -> str:
    """Return how messages name an objective: one of the user's by its module, as in the configuration."""
    kind = _kind(objective)
    return objective.name if _is_ours(objective) else f"{kind.__module__}:{kind.__qualname__}"


def _kind(objective: Objective) -> Any:
    """Return the class of an objective, or the function that it is made of."""
    return getattr(objective, "kind", type(objective))


def _is_ours(objective: Objective) -> bool:
    return f"{_kind(objective).__module__}.".startswith("meshwright.")


def calling(objective: Objective, hook: str) -> AbstractContextManager[None]:
    """Inside, a method of an objective is called; what one of the user's raises is named, see :func:`in_part`."""
    return nullcontext() if _is_ours(objective) else in_part(f"objective {named(objective)}", hook)


@contextmanager
def in_part(part: str, hook: str) -> Iterator[None]:
    """Inside, code of the user is called. What it raises is an error that names it, the hook, and the user's own lines.

    Args:
        part: what it is, such as ``objective my_parts:Focal``.
        hook: the method.

    Raises:
        PartError: in place of an exception that is not Meshwright's own, nor torch's about communication or memory.
    """
    try:
        yield
    except (MeshwrightError, torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("torch._subclasses"):
            raise  # a trace without values says itself what it cannot follow
        raise PartError("part.raised", f"{part}, {hook}: {raised_by(error)}") from error


@contextmanager
def at_step(words: str) -> Iterator[None]:
    """Inside, a part of the user may raise; its error then says when.

    Args:
        words: such as ``step 12``.

    Raises:
        PartError: as it was, with the words before it.
    """
    try:
        yield
    except PartError as error:
        raise PartError([line.within(f"{words}: ") for line in error.problems]) from error


def evaluate_batch(
    objective: Objective, model: nn.Module, batch: Batch, call: Running
) -> tuple[tuple[torch.Tensor, ...], Mapping[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return the terms of the loss of a batch, each a sum over its targets, and the objective's metrics.

    Args:
        objective: the objective.
        model: its model.
        batch: a prepared batch, on the device.
        call: what the given functions know.

    Raises:
        PartError: the objective raises something, or does not return what it should.
    """
    part = f"objective {named(objective)}"
    with running(call):
        with calling(objective, "sums"):
            terms = objective.sums(model, batch)
        terms = (terms,) if isinstance(terms, torch.Tensor) else tuple(terms)
        wrong = [one for one in terms if not isinstance(one, torch.Tensor) or one.ndim or not one.is_floating_point()]
        if wrong or len(terms) != len(objective.terms):
            found = ", ".join(
                f"{one.dtype} {list(one.shape)}" if isinstance(one, torch.Tensor) else type(one).__name__ for one in terms
            )
            raise PartError(
                "part.returned",
                f"{part}: sums returned {found or 'nothing'}; legal is one scalar for each of its terms: "
                f"{', '.join(objective.terms)}",
            )
        if type(objective).metrics is Objective.metrics:
            return terms, {}
        with calling(objective, "metrics"), torch.no_grad():
            measured = dict(objective.metrics(model, batch))
            if objective.metric_names and measured.keys() != set(objective.metric_names):
                names = ", ".join(objective.metric_names)
                raise PartError(
                    "part.returned", f"{part}: metrics returned {', '.join(measured)}, and {names} when it was tried"
                )
            device = terms[0].device
            metrics = {name: (_number(total, device), _number(count, device)) for name, (total, count) in measured.items()}
        return terms, metrics


_REFERENCE = "the log-probabilities of the reference, with adapters off"


@dataclass(frozen=True)
class Pass:
    """Values of the model that an objective needs before a step.

    Attributes:
        values: computes them for a batch.
        what: what they are, in words.
        adapted: whether adapters are on.
        means: whether they are sums and counts [2], of which the batches get the means over the whole step.
    """

    values: Callable[[nn.Module, Batch], Mapping[str, torch.Tensor]]
    what: str
    adapted: bool = True
    means: bool = False

    def add(
        self, batches: Sequence[Batch], found: Sequence[Mapping[str, torch.Tensor]], over_ranks: Callable[[torch.Tensor], Any]
    ) -> None:
        """Add values to the batches of a step.

        Args:
            batches: the microbatches of this rank.
            found: the values of each; none where another rank computes the loss.
            over_ranks: returns a sum over the data ranks.
        """
        if self.means and found:
            sums = over_ranks(torch.stack([torch.stack(list(values.values())) for values in found]).sum(0))
            means = dict(zip(found[0], sums[:, 0] / sums[:, 1].clamp(min=1), strict=True))
            found = [means] * len(batches)
        for batch, more in zip(batches, found, strict=False):
            batch.update(more)


def passes_before(objective: Objective) -> list[Pass]:
    """Return what an objective needs of the model as it is before a step: a forward of all batches for each."""
    found = []
    if objective.reference is True:
        found.append(Pass(lambda model, batch: {"reference_log_probs": log_probs(model, batch)}, _REFERENCE, adapted=False))
    if type(objective).before is not Objective.before:

        def before(model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
            with calling(objective, "before"):
                return objective.before(model, batch)

        found.append(Pass(before, "what its before() returns"))
    if type(objective).baselines is not Objective.baselines:

        def baselines(model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
            with calling(objective, "baselines"):
                measured = objective.baselines(model, batch)
            device = batch["input_ids"].device
            return {name: torch.stack([_number(one, device) for one in pair]) for name, pair in measured.items()}

        found.append(Pass(baselines, "means over the whole step", means=True))
    return found


def _number(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    return (
        value.detach().double()
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=torch.float64, device=device)
    )
