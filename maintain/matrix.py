"""Writes the support matrix: audits every cell, and writes the page for people and the data for `plan` and `train`.

From the root of the repository, an hour on two cores:

    python -m maintain.matrix
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from maintain import objectives
from maintain.cells import LAYOUTS, ON_EIGHT, PROOFS, VARIANTS, Cell, Outcome, Place, Variant, run_cell
from maintain.kept import case_digest, cell_of, is_current, read_rows, row_of, write_rows
from maintain.tiny import TINY_MODELS
from meshwright.audit.conduct import Auditor
from meshwright.train.proofs.shipped_cells import MATRIX

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

    This takes an hour or more. A cell is audited if it was not, if the code that it runs through or its options have changed
    since, or if it failed. Each one is written at once, so that a matrix that was interrupted goes on.

    Args:
        output: path of the page.
        say: called with a line for each layout.
        families: the rows.
        places: the columns.
        variants: the options that each cell is audited with.
        data: path of the data, JSON.

    Returns:
        Whether no cell failed. A refusal is no failure.
    """
    begun = time.perf_counter()
    rows = read_rows(data)
    cells = {at: cell_of(row) for at, row in rows.items() if at[0] in families}
    output.parent.mkdir(parents=True, exist_ok=True)
    with Auditor() as auditor, tempfile.TemporaryDirectory(prefix="meshwright-matrix-") as folder:
        for place in places:
            for family in families:
                if place.experts and not TINY_MODELS[family].sparse:
                    continue
                at = (family, place.label)
                some = [variant for variant in variants if place.world_size < 8 or variant in ON_EIGHT] or variants
                case = case_digest(TINY_MODELS[family], place, *some)
                if at not in rows or not is_current(rows[at], case):
                    rows[at] = row_of(*at, run_cell(auditor, family, place, some, Path(folder)), case)
                    write_rows(data, rows)
                cells[at] = cell_of(rows[at])
            outcomes = [cell.outcome for (_, label), cell in cells.items() if label == place.label]
            counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in Outcome if outcome in outcomes)
            say(f"{place.label}: {counts} ({time.perf_counter() - begun:.0f} s)")
            output.write_text(_page(cells, families, places, variants))  # if this is interrupted, the page has what is known
    return all(cell.outcome is not Outcome.FAILS for cell in cells.values())


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
