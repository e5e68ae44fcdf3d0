"""One tensor against its reference: how far off, by which factor, and which parts of the batch are in it.

Three numbers tell most bugs apart. With g the tensor, r the reference, and all sums over entries:

- *error*: ``max |g - r| / max |r|``. Small against the tolerance: right.
- *ratio*: ``sum(g r) / sum(r r)``, the factor c for which ``c r`` is nearest to g (least squares). 2.000: counted twice.
- *residual*: ``|g - ratio r| / |r|``. Near 0: nothing is wrong but the factor. Not near 0: something is missing or foreign.

And where the reference keeps the gradient of every microbatch apart, ``g = sum_i w_i r_i`` is solved for the *weights* w: all 1
where it is right, 0 for a microbatch whose gradient got lost, 0.5 for one that was divided by two ranks once too often.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Row", "compare", "weights_of_parts"]


ROUNDING = 1e-9
"""A part that is no larger than this share of the largest one is taken for zero."""

MOST_CONDITION = 1e4
"""Largest condition number of some parts for which weights are solved: what is foreign in a gradient comes out of it that many
times as large."""


@dataclass(frozen=True)
class Row:
    """A tensor against its reference.

    Attributes:
        what: ``gradient``, ``parameter``, ``buffer``, or the name of an optimizer state.
        name: of the parameter or buffer.
        unit: that gathers and reduces it; for people.
        placements: as planned; for people.
        error: see the module; infinite where the tensor is missing or not finite.
        ratio: see the module; NaN where the reference is zero.
        residual: see the module.
        tolerance: largest error that passes.
        scale: largest entry of the reference.
        missing: whether there was nothing to compare.
        weights: of the microbatches, in the order of the reference, for a gradient that failed; empty otherwise. NaN: cannot be
            told.
        step: of a buffer that failed: after which it did first, counted from 1; otherwise 0.
    """

    what: str
    name: str
    unit: str
    placements: str
    error: float
    ratio: float
    residual: float
    tolerance: float
    scale: float
    missing: bool = False
    weights: tuple[float, ...] = ()
    step: int = 0

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance

    @property
    def severity(self) -> float:
        """The error in units of the tolerance."""
        return self.error / self.tolerance if self.tolerance else math.inf


def compare(
    found: torch.Tensor | None, reference: torch.Tensor, floor: float = 0.0, slack: torch.Tensor | None = None
) -> tuple[float, float, float, float]:
    """Error, ratio, residual and scale of a tensor.

    Args:
        found: the tensor; ``None``: it is missing.
        reference: of the same shape.
        floor: the scale is at least this, so that the noise of an entry that ought to be zero is not measured by itself.
        slack: added to the scale, entry by entry, where an entry is known to be ill-conditioned.
    """
    truth = reference.detach().double().flatten().cpu()
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    scale = max(largest, floor)
    if found is None:
        return (math.inf, 0.0, 1.0, scale) if largest else (0.0, math.nan, 0.0, scale)
    value = found.detach().double().flatten().cpu()
    if not bool(value.isfinite().all()):
        return math.inf, math.nan, math.inf, scale
    distance = (value - truth).abs()
    if not truth.numel() or float(distance.max()) == 0.0:
        error = 0.0
    elif scale == 0.0:
        error = math.inf
    else:
        error = float((distance / (scale if slack is None else scale + slack.double().flatten().cpu())).max())
    power = float(truth.dot(truth))
    if power == 0.0:
        return error, math.nan, 0.0 if error == 0.0 else math.inf, scale
    ratio = float(value.dot(truth)) / power
    return error, ratio, float((value - ratio * truth).norm()) / math.sqrt(power), scale


def weights_of_parts(found: torch.Tensor, parts: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """The weights w for which ``sum_i w_i parts_i`` is nearest to a tensor; empty where it is not made of them.

    Parts that are zero, or nothing but rounding (a microbatch that does not touch the parameter), cannot be told; they get NaN.
    So does every part where parts are so much alike that a small error of the tensor is a large one of the weights.
    """
    matrix = torch.stack([part.detach().double().flatten().cpu() for part in parts], dim=1)
    value = found.detach().double().flatten().cpu()
    sizes = matrix.norm(dim=0)
    known = sizes > ROUNDING * sizes.max()
    if not bool(value.isfinite().all()) or not bool(known.any()) or matrix.shape[0] < int(known.sum()):
        return ()
    scaled = matrix[:, known] / sizes[known]
    solved = torch.linalg.lstsq(scaled, value, driver="gelsd")
    left = float((scaled @ solved.solution - value).norm())
    if left > 0.02 * max(float(value.norm()), 1e-300):
        return ()
    weights = torch.full((len(parts),), math.nan, dtype=torch.float64)
    if float(solved.singular_values.min()) * MOST_CONDITION >= float(solved.singular_values.max()):
        weights[known] = solved.solution / sizes[known]
    return tuple(weights.tolist())
