"""Writes the support matrix: audits every cell, and writes the page for people and the data for `plan` and `train`.

From the root of the repository, an hour on two cores:

    python -m maintain.matrix
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from maintain import objectives
from maintain.cells import LAYOUTS, ON_EIGHT, PROOFS, VARIANTS, Cell, Outcome, Place, Variant, run_cell
from maintain.tiny import TINY_MODELS
from meshwright.audit.conduct import Auditor
from meshwright.train.proofs.claim import Claim, versions
from meshwright.train.proofs.own_code import package_digest
from meshwright.train.proofs.shipped_cells import MATRIX, CellProof, matrix_data

__all__ = ["write_matrix"]


def write_matrix(
    output: Path,
    say: Callable[[str], None],
    families: Sequence[str] = tuple(TINY_MODELS),
    places: Sequence[Place] = LAYOUTS,
    variants: Sequence[Variant] = VARIANTS,
    *,
    data: Path,
) -> bool:
    """Audit the matrix, and write its page and its data, from which `plan` and `train` read what is proven.

    This takes an hour or more. The finished cells are kept in the file ``DATA.*.partial`` until all are finished. A matrix
    that was interrupted continues from them, if versions, code and variants are the same. A cell that failed is audited again.

    Args:
        output: path of the page.
        say: called with a line for each layout.
        families: the rows.
        places: the columns.
        variants: the options that each cell is audited with.
        data: path of the data, JSON, see :func:`~meshwright.train.proofs.shipped_cells.matrix_data`.

    Returns:
        Whether no cell failed. A refusal is no failure.
    """
    begun = time.perf_counter()
    partial = data.with_name(f"{data.name}.{package_digest()}.partial")
    known, cells = _read_cells(partial, variants), {}
    for file in (output, data):
        file.parent.mkdir(parents=True, exist_ok=True)
    with Auditor() as auditor, tempfile.TemporaryDirectory(prefix="meshwright-matrix-") as folder:
        for place in places:
            for family in families:
                if place.experts and not TINY_MODELS[family].sparse:
                    continue
                at = (family, place.label)
                some = [variant for variant in variants if place.world_size < 8 or variant in ON_EIGHT]
                cells[at] = known.get(at) or run_cell(auditor, family, place, some or variants, Path(folder))
                partial.with_suffix(".tmp").write_text(_cells_as_json({**known, **cells}, variants))
                partial.with_suffix(".tmp").rename(partial)
            outcomes = [cell.outcome for (_, label), cell in cells.items() if label == place.label]
            counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in Outcome if outcome in outcomes)
            say(f"{place.label}: {counts} ({time.perf_counter() - begun:.0f} s)")
            output.write_text(_page(cells, families, places, variants))  # if this is interrupted, the page has what is known
            data.write_text(_data(cells))
    partial.unlink()
    return all(cell.outcome is not Outcome.FAILS for cell in cells.values())


def _audited_under(variants: Sequence[Variant]) -> dict[str, Any]:
    """Return what must be equal for two matrices to share cells: versions and variants."""
    return {"versions": versions(), "variants": [str(variant) for variant in variants]}


def _cells_as_json(cells: Mapping[tuple[str, str], Cell], variants: Sequence[Variant]) -> str:
    done = [[*at, asdict(cell)] for at, cell in cells.items() if cell.outcome is not Outcome.FAILS]
    return json.dumps({**_audited_under(variants), "cells": done})


def _read_cells(partial: Path, variants: Sequence[Variant]) -> dict[tuple[str, str], Cell]:
    """Return the cells that an earlier, interrupted matrix audited with the same versions and variants."""
    content = json.loads(partial.read_text()) if partial.is_file() else {"cells": []}
    cells: dict[tuple[str, str], Cell] = {}
    if any(content.get(key) != value for key, value in _audited_under(variants).items()):
        return cells
    for family, label, cell in content["cells"]:
        claims = tuple(Claim(**{**claim, "axes": tuple(claim["axes"])}) for claim in cell["claims"])
        cells[family, label] = Cell(Outcome(cell["outcome"]), cell["worst"], cell["note"], claims, cell["code"])
    return cells


def _data(cells: Mapping[tuple[str, str], Cell]) -> str:
    proofs = [
        CellProof(family, label, cell.note if cell.outcome is Outcome.FAILS else "", cell.claims)
        for (family, label), cell in cells.items()
        if cell.claims
    ]
    return matrix_data(proofs)


# -- the page ----------------------------------------------------------------------------------------------------------------


def _page(
    cells: Mapping[tuple[str, str], Cell], families: Sequence[str], places: Sequence[Place], variants: Sequence[Variant]
) -> str:
    import torch
    import transformers

    notes: dict[str, int] = {}
    header = ["family", *(place.label for place in places)]
    lines = [
        "# Support matrix",
        "",
        f"Written by `python -m maintain.matrix` with torch {torch.__version__}, transformers {transformers.__version__}. "
        "Do not edit.",
        "",
        "Each cell is a tiny model of the family, trained on that many CPU processes and in one, and compared parameter by",
        f"parameter ([how](audit.md)), under {len(variants)} combinations of options. A number is the largest error of a",
        "gradient, relative to its largest entry, in float32; *not yet* and *refused* are what `meshwright train` says too.",
        "`2 x shard 4`: two replicas of four shards (HSDP). `seq`: with sequence parallel. There is a table of",
        "[each objective](#objectives) too.",
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
    ]
    for family in families:
        row = [family]
        for place in places:
            cell = cells.get((family, place.label))
            row.append("" if cell is None else _words(cell, notes))
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", *objectives.section()]
    pairs = "Every value of every option meets every value of every other one, on up to four processes:"
    lines += ["", "## Options", "", pairs, ""]
    lines += [f"- {variant}{', also on eight processes' if variant in ON_EIGHT else ''}" for variant in variants]
    if notes:
        lines += ["", "## Notes", ""]
        lines += [f"{number}. {note}" for note, number in notes.items()]
    worst: dict[str, float] = {}
    for cell in cells.values():
        for dtype, error in cell.worst.items():
            worst[dtype] = max(worst.get(dtype, 0.0), error)
    lines += ["", "## Largest errors", "", "Of a gradient, over all cells, against one process in the same arithmetic:", ""]
    lines += [f"- {dtype}: {error:.1e}" for dtype, error in sorted(worst.items())]
    return "\n".join(lines) + "\n"


def _words(cell: Cell, notes: dict[str, int]) -> str:
    mark = f" [{notes.setdefault(cell.note, len(notes) + 1)}]" if cell.note else ""
    if cell.outcome is Outcome.WORKS:
        error = cell.worst.get("float32", max(cell.worst.values(), default=math.nan))
        return f"{error:.0e}{mark}"
    return f"{cell.outcome}{mark}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the support matrix; 1: a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m maintain.matrix", description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("docs/support-matrix.md"), help="the page to write")
    parser.add_argument("--data", type=Path, default=PROOFS / MATRIX, help="the same as data, to write")
    options = parser.parse_args(arguments)
    return 0 if write_matrix(options.page, print, data=options.data) else 1


if __name__ == "__main__":
    sys.exit(main())
