"""Cells that were audited already. One is audited again if the code that it ran through has changed since; so a page is brought
up to date in pieces, over sessions and commits, and a change of one axis leaves the cells of the others as they are.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maintain.cells import Cell, Outcome
from meshwright.train.proofs.claim import versions
from meshwright.train.proofs.own_code import code_digest, package_digest
from meshwright.train.proofs.shipped_cells import CellProof, cell_data, cells_as_text, cells_from_text

__all__ = ["Rows", "case_digest", "cell_of", "is_current", "read_rows", "row_of", "write_rows"]

Rows = dict[tuple[str, str], dict[str, Any]]
"""(family, model type or name of a variant; layout) to the values of a cell, as JSON has them."""


def case_digest(*parts: object) -> str:
    """Return a digest of what a cell audits, beside the code: its config, sizes and options."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:12]


def row_of(family: str, label: str, cell: Cell, case: str) -> dict[str, Any]:
    """Return the values of a cell that was audited now.

    Args:
        family: name of its row.
        label: name of its layout.
        cell: the cell.
        case: digest of what was audited.
    """
    proof = CellProof(family, label, cell.note if cell.outcome is Outcome.FAILS else "", cell.claims)
    row = {**cell_data(proof), "outcome": str(cell.outcome), "worst": dict(cell.worst), "note": cell.note, "case": case}
    if cell.claims:
        row |= {"concerns": list(cell.claims[0].concerns), "strategy": cell.claims[0].strategy}
    else:
        row["package"] = package_digest()
    return {**row, "code": cell.code} if cell.code else row


def cell_of(row: Mapping[str, Any]) -> Cell:
    """Return the cell of some values, without its claims."""
    return Cell(Outcome(row["outcome"]), row["worst"], row["note"], code=row.get("code", ""))


def is_current(row: Mapping[str, Any], case: str) -> bool:
    """Return whether an audit now would be of the same case and the same code. A cell that failed is never current.

    A cell that works is of the files that its plan runs through, a refusal of all files that carry some plan out.
    """
    if row["outcome"] == Outcome.FAILS or row.get("case") != case:
        return False
    if "strategy" in row:
        return bool(row["digest"] == code_digest(row["concerns"], row["strategy"]))
    return row.get("package") == package_digest()


def read_rows(path: Path) -> Rows:
    """Return the rows of a file that was written with the same versions; none if it is not there."""
    content = cells_from_text(path.read_text()) if path.is_file() else {}
    same = content.get("versions") == versions()
    return {(row["family"], row["layout"]): row for row in content["cells"]} if same else {}


def write_rows(path: Path, rows: Rows) -> None:
    """Write rows in order, in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(cells_as_text([row for _, row in sorted(rows.items())]))
    path.with_suffix(".tmp").rename(path)
