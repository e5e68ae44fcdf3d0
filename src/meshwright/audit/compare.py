"""One tensor against its reference: its error, its factor, and the parts of the batch that it contains.

Three numbers distinguish most bugs. With g the tensor, r the reference, and all sums over entries:

- *error*: ``max |g - r| / max |r|``. If it is within the tolerance, the tensor is right.
- *ratio*: ``sum(g r) / sum(r r)``, the factor c for which ``c r`` is nearest to g (least squares). 2.000: counted twice.
- *residual*: ``|g - ratio r| / |r|``. Near 0: nothing is wrong but the factor. Not near 0: something is missing or foreign.

If the reference has the gradient r_i of every microbatch, ``g = sum_i w_i r_i`` is solved for the *weights* w. They are all 1
if g is right. A weight is 0 if the gradient of a microbatch was lost, and 0.5 if it was divided by two ranks once too often.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Row", "compare", "weights_of_parts"]


ROUNDING = 1e-9
"""A part whose norm is at most this share of the largest norm counts as zero."""

MOST_CONDITION = 1e4
"""Largest condition number of some parts for which weights are solved. An error of the gradient may appear in the weights this
many times as large."""


@dataclass(frozen=True)
class Row:
    """The comparison of a tensor with its reference.

    Attributes:
        what: ``initial value``, ``gradient``, ``parameter``, ``buffer``, or the name of an optimizer state.
        name: name of the parameter or buffer.
        unit: label of the unit that gathers and reduces it, for people.
        placements: its planned placements, for people.
        error: see the module; infinite if the tensor is missing or not finite.
        ratio: see the module; NaN if the reference is zero.
        residual: see the module.
        tolerance: largest error that passes.
        scale: what the error is relative to: the largest entry of the reference, or the floor of :func:`compare` if that is
            more.
        missing: whether one of the two tensors was missing.
        weights: weights of the microbatches, in the order of the reference, for a gradient that failed; otherwise empty. NaN:
            unknown.
        step: for a buffer that failed, the first step after which it did, counted from 1; otherwise 0.
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
        """Return whether the error is within the tolerance."""
        return self.error <= self.tolerance

    @property
    def severity(self) -> float:
        """Return the error in units of the tolerance."""
        return self.error / self.tolerance if self.tolerance else math.inf


def compare(
    actual: torch.Tensor | None, reference: torch.Tensor, floor: float = 0.0, slack: torch.Tensor | None = None
) -> tuple[float, float, float, float]:
    """Return the error, ratio, residual and scale of a tensor; the module says what they are.

    Args:
        actual: the tensor; ``None``: it is missing.
        reference: the reference, of the same shape.
        floor: smallest scale, so that noise in a tensor that should be zero is not compared with itself.
        slack: added to the scale, entry by entry, for entries that are known to be ill-conditioned.
    """
    truth = reference.detach().double().flatten().cpu()
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    scale = max(largest, floor)
    if actual is None:
        return (math.inf, 0.0, 1.0, scale) if largest else (0.0, math.nan, 0.0, scale)
    value = actual.detach().double().flatten().cpu()
    if not bool(value.isfinite().all()):
        return math.inf, math.nan, math.inf, scale
    distance = (value - truth).abs()
    if not truth.numel() or float(distance.max()) == 0.0:
        error = 0.0
    else:
        allowed = torch.full_like(distance, scale) if slack is None else scale + slack.double().flatten().cpu()
        # Equal entries are right, also where nothing is allowed; a reference that is NaN leaves the error NaN.
        error = float(torch.where(distance == 0, distance, distance / allowed).max())
    power = float(truth.dot(truth))
    if power == 0.0:
        return error, math.nan, 0.0 if error == 0.0 else math.inf, scale
    ratio = float(value.dot(truth)) / power
    return error, ratio, float((value - ratio * truth).norm()) / math.sqrt(power), scale


def weights_of_parts(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """Return the weights w for which ``sum_i w_i parts_i`` is nearest to a tensor; empty if the tensor is no such sum.

    The weight of a part that is zero, or only rounding, is unknown: its microbatch does not touch the parameter. Such a part
    gets NaN. All parts get NaN if they are so similar that a small error of the tensor is a large error of the weights.
    """
    matrix = torch.stack([part.detach().double().flatten().cpu() for part in parts], dim=1)
    value = tensor.detach().double().flatten().cpu()
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
