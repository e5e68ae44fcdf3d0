"""Columns of the data for batches that are made up: those of a trial, and those of which only shapes matter."""

import math
from collections.abc import Mapping

import torch

from meshwright.data.rows.columns import MEMBER
from meshwright.models.objective import Batch, Column
from meshwright.models.token_loss import IGNORE

__all__ = ["REFERENCE", "invented", "spread_of"]

REFERENCE = "reference_log_probs"
"""The column that stands for the log-probabilities of a reference."""


def spread_of(columns: Mapping[str, Column]) -> list[str]:
    """Return the names of the columns that have a value for each document."""
    return [name for name, column in columns.items() if column.per == "document"]


def invented(columns: Mapping[str, Column], batch: Batch) -> Batch:
    """Return values for the columns of whole sequences, as a loader gives them: [B, S, ...].

    Numbers of float32 are between 0 and 1; those of a column whose name ends with ``log_probs`` are negative, and probabilities
    of its words that add up to less than 1. Numbers of int64 are 0 and 1, which are legal as classes and as tokens; those of a
    name that ends with ``ids`` are different words. Documents are members of pairs, one after the other.

    Args:
        columns: the columns.
        batch: ``input_ids``, ``labels`` and ``position_ids``.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    first = torch.ones_like(labels)
    first[:, 1:] = batch["position_ids"].diff(dim=1) != 1
    found = {}
    for name, column in columns.items():
        numbers = first.cumsum(1) + 7 * torch.arange(len(ids))[:, None] if column.per == "document" else ids
        if column.width is not None:
            numbers = numbers[..., None] + torch.arange(column.width)
        if name == MEMBER:
            found[name] = (first.cumsum(1) - 1) % 2 + 1
            continue
        if column.dtype == "int64":
            different = column.width is not None and name.endswith("ids")
            values = numbers[..., :1] % 2 + torch.arange(column.width or 1) if different else numbers % 2
        else:
            values = 0.5 + 0.4 * torch.sin(numbers.float())
            values = -values - math.log(column.width or 1) if name.endswith("log_probs") else values
        absent = (labels == IGNORE) & (column.per == "token")
        found[name] = values.masked_fill(absent if column.width is None else absent[..., None], 0)
    return found
