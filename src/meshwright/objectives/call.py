"""Calls an objective: what it returns is checked, and what it raises is named."""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from meshwright.errors import MeshwrightError, PartError, described
from meshwright.models.objective import Batch, Objective
from meshwright.objectives.running import Running, running

__all__ = ["evaluate_batch", "in_part", "is_ours", "named"]

_OURS = str(Path(__file__).parents[1])


def named(objective: Objective) -> str:
    """Return how messages name an objective: one of the user's by its module, as in the configuration."""
    kind = getattr(objective, "kind", type(objective))
    return objective.name if is_ours(objective) else f"{kind.__module__}:{kind.__qualname__}"


def is_ours(objective: Objective) -> bool:
    """Return whether an objective is one of Meshwright's."""
    kind = getattr(objective, "kind", type(objective))
    return f"{kind.__module__}.".startswith("meshwright.")


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
        frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
        own = [one for one in frames if "site-packages" not in one.filename and "<frozen" not in one.filename]
        lines = "".join(f"\n  {one.filename}:{one.lineno} in {one.name}: {one.line}" for one in own or frames[-1:])
        raise PartError("part.raised", f"{part}, {hook}: {described(error)}{lines}") from error


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
        with nullcontext() if is_ours(objective) else in_part(part, "sums"):
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
        with in_part(part, "metrics"), torch.no_grad():
            measured = dict(objective.metrics(model, batch))
            device = terms[0].device
            metrics = {name: (_number(total, device), _number(count, device)) for name, (total, count) in measured.items()}
        return terms, metrics


def _number(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    return (
        value.detach().double()
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=torch.float64, device=device)
    )
