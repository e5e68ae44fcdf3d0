"""The support matrix and the coverage page as data, which come with the package."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any

from meshwright.train.proofs.claim import Claim, versions

__all__ = [
    "COVERAGE",
    "MATRIX",
    "CellProof",
    "cell_data",
    "cells_as_text",
    "cells_from_text",
    "covering_cell",
    "shipped_matrix",
    "today",
]

MATRIX, COVERAGE = "matrix.json", "coverage.json"
"""Names of the files, in this file's directory, with the support matrix and the coverage page as data, written
together with docs/support-matrix.md and docs/coverage.md by the scripts of `maintain/`, in the repository."""


def today() -> str:
    """Return today's date in the format of records."""
    return f"{datetime.now():%Y-%m-%d}"


@dataclass(frozen=True)
class CellProof:
    """A cell of the support matrix.

    Attributes:
        family: name of the family in the matrix.
        layout: name of the layout in the matrix.
        failed: the verdict if the audit failed, otherwise empty.
        claims: the claims that were audited, at least one; they differ in their choices.
    """

    family: str
    layout: str
    failed: str
    claims: tuple[Claim, ...]


def cells_as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return cells as JSON, with date and versions. The choices that most cells share stand once, before the cells."""
    chosen = [row["choices"] for row in rows if "choices" in row]
    names = set.intersection(*map(set, chosen)) if chosen else set()
    usual = {name: max((values := [choices[name] for choices in chosen]), key=values.count) for name in sorted(names)}
    lines = []
    for row in rows:
        if "choices" in row:
            row = {**row, "choices": {name: own for name, own in row["choices"].items() if usual.get(name) != own}}
        lines.append(json.dumps(row))
    head = json.dumps({"date": today(), "versions": versions(), "choices": usual})
    return head[:-1] + ', "cells": [\n' + ",\n".join(lines) + "\n]}\n"


def cells_from_text(text: str) -> dict[str, Any]:
    """Read what :func:`cells_as_text` wrote; each cell has all its choices again."""
    content: dict[str, Any] = json.loads(text)
    for row in content["cells"]:
        if "choices" in row:
            row["choices"] = {**content.get("choices", {}), **row["choices"]}
    return content


def cell_data(cell: CellProof) -> dict[str, Any]:
    """Return a cell as values of JSON: the model, axes, and values of each choice of its claims, if it has claims."""
    named: dict[str, Any] = {"family": cell.family, "layout": cell.layout, "failed": cell.failed}
    if cell.claims:
        first = cell.claims[0]
        choices = {name: sorted({claim.choices[name] for claim in cell.claims}) for name in first.choices}
        named |= {"model": first.model, "axes": list(first.axes), "digest": first.code, "choices": choices}
    return named


@cache
def shipped_matrix() -> Mapping[str, Any]:
    """Return the support matrix, with the cells of the coverage page behind its own."""
    matrix, coverage = (
        cells_from_text(resources.files("meshwright.train.proofs").joinpath(name).read_text()) for name in (MATRIX, COVERAGE)
    )
    same = matrix["versions"] == coverage["versions"]
    page = {"page": f"coverage page of {coverage['date']}"}
    more = [{**cell, **page} for cell in coverage["cells"]] if same else []
    return {**matrix, "cells": [cell for cell in (*matrix["cells"], *more) if cell.get("model")]}  # a refusal has none


def covering_cell(claim: Claim, matrix: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the cell of the matrix that covers a claim, in this code or in an earlier version.

    If there are several, it is one of this code, and one that failed.

    The cell has the same model and axes, and each of the claim's choices was audited in it. Below eight processes, the audits
    of a cell have every pair of values of two options, but not every combination of all options. On eight processes they only
    have every value of every option, so a pair of choices may never have been audited together.
    """
    if dict(claim.versions) != matrix["versions"]:
        return None
    for cell in sorted(matrix["cells"], key=lambda cell: (cell.get("digest") != claim.code, not cell["failed"])):
        same = cell["model"] == claim.model and cell["axes"] == list(claim.axes)
        if same and all(value in cell["choices"].get(name, ()) for name, value in claim.choices.items()):
            return dict(cell)
    return None
