"""How many bytes an objective gathers: found by trying it on batches of different sizes, and in different dtypes."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

from meshwright.models.objective import Gathered
from meshwright.objectives.running import Seen

__all__ = ["BASE", "Sizes", "gathered_by"]


class Sizes(NamedTuple):
    """Sizes of a batch that is tried.

    Attributes:
        rows: B.
        length: S.
        documents: D.
    """

    rows: int
    length: int
    documents: int


BASE = Sizes(4, 12, 2)
_WIDTHS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_POWERS = {1: 0, 2: 1, 4: 2}
"""What doubling a size multiplies a product by that has a power of it."""


def gathered_by(tried: Callable[[Sizes, torch.dtype], list[Seen]]) -> tuple[Gathered, ...] | None:
    """Return what an objective gathers for a batch; ``None``: it is no product of powers of the batch's sizes.

    Args:
        tried: returns what was gathered for a batch of these sizes, with a model that computes in this dtype; gradients are
            computed.
    """
    widths = {width: tried(BASE, dtype) for width, dtype in _WIDTHS.items()}
    base = widths[8]
    doubled = [tried(BASE._replace(**{name: 2 * getattr(BASE, name)}), torch.float64) for name in Sizes._fields]
    if any(len(other) != len(base) for other in (*widths.values(), *doubled)):
        return None
    found = []
    for index, one in enumerate(base):
        powers = tuple(_POWERS.get(_ratio(other[index].numbers, one.numbers), -1) for other in doubled)
        rows, length, documents = powers
        if min(powers) < 0 or any(other[index].numbers != one.numbers for other in widths.values()):
            return None
        share = one.numbers / prod(size**power for size, power in zip(BASE, powers, strict=True))
        of_width = {width: other[index].width for width, other in widths.items()}
        found.append(Gathered(share, (rows, length, documents), of_width, one.reduced))
    return tuple(found)


def _ratio(number: int, of: int) -> int:
    """Return a quotient of whole numbers; 0: it is none."""
    return number // of if of and number % of == 0 else 0
