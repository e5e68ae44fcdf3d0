"""What became of the parameters and of the files of weights that were loaded."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

__all__ = ["LoadReport"]


@dataclass(frozen=True)
class LoadReport:
    """What did not match when a checkpoint was read into a model.

    Attributes:
        missing: parameters of the model that are not in the files.
        unexpected: tensors of the files that are not in the model.
        mismatched: (name, shape in the files, shape in the model).
        errors: conversions that failed.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    errors: tuple[str, ...]
