"""Which step goes wrong first: a few numbers of each gradient and parameter, in every step.

The tensors of the first step are compared entry by entry. For later steps each side keeps a *sketch* of every trained
parameter's gradient, before clipping, and of its value after the update. So a bug that only a second step shows, such as a
gradient that is not set to zero, is named with its step. Sketches are compared in float64 only: in other dtypes both sides go
on from weights with different rounding. They explain what the comparisons after the last step found, and fail no audit by
themselves.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

__all__ = ["Divergence", "Moment", "Sketch", "divergences", "earliest", "sketch"]

Sketch = tuple[float, float]
"""The norm of a tensor, and its product with a fixed vector: two numbers that no exchange of entries or signs leaves alone."""


class Moment(StrEnum):
    """When in a step."""

    GRADIENT = "gradient"
    """After backward, before clipping."""

    PARAMETER = "parameter"
    """After the update."""


@dataclass(frozen=True)
class Divergence:
    """A tensor that is not that of one process.

    Attributes:
        step: the step, counted from 1.
        moment: when in the step.
        name: the parameter.
        error: difference of the sketches, relative to the norm of the reference.
        ratio: norm of the tensor, in norms of the reference.
    """

    step: int
    moment: Moment
    name: str
    error: float
    ratio: float


def sketch(tensor: torch.Tensor) -> Sketch:
    """Return the sketch of a whole tensor."""
    flat = tensor.detach().double().flatten().cpu()
    return float(flat.norm()), float(flat.dot(torch.arange(1, len(flat) + 1, dtype=torch.float64).sqrt().cos()))


def divergences(
    step: int, moment: Moment, own: Mapping[str, Sketch], truths: Mapping[str, Sequence[float]], tolerance: float
) -> Iterator[Divergence]:
    """Yield what differs at a moment of a step.

    Args:
        step: the step, counted from 1.
        moment: when in the step.
        own: name of each parameter of this rank to the sketch.
        truths: the same of one process; what it lacks has no gradient there.
        tolerance: largest error that passes, relative to the norm of the tensor or to a thousandth of the largest norm.
    """
    floor = 1e-3 * max((truth[0] for truth in truths.values()), default=0.0)
    for name, (norm, product) in own.items():
        truth = truths.get(name, (0.0, 0.0))
        error = max(abs(norm - truth[0]), abs(product - truth[1])) / (max(truth[0], floor) or 1.0)
        if not error <= tolerance:
            yield Divergence(step, moment, name, error, norm / truth[0] if truth[0] else math.nan)


def earliest(found: Iterable[Divergence]) -> list[Divergence]:
    """Return the divergences of the first moment that has any, the largest first."""
    order = list(Moment)
    ordered = sorted(found, key=lambda item: (item.step, order.index(item.moment), -item.error))
    return [item for item in ordered if (item.step, item.moment) == (ordered[0].step, ordered[0].moment)]
