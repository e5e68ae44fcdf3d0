"""The support matrix: every family on every layout that fits few processes, each audited under options that cover all pairs."""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import cycle
from pathlib import Path
from typing import Any

from meshwright.audit.case import Case
from meshwright.audit.conduct import Auditor, make_ready
from meshwright.audit.data import draw_documents
from meshwright.audit.report import AuditReport
from meshwright.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.models.families import TINY_MODELS
from meshwright.plan.options import SyncPolicy
from meshwright.train.claim import Claim, versions
from meshwright.train.config import RunConfig
from meshwright.train.proof import CellProof, matrix_data

__all__ = ["LAYOUTS", "VARIANTS", "Cell", "Outcome", "Variant", "family_case", "run_cell", "slice_of_matrix", "write_matrix"]

STEPS = 2
SEQUENCE_LENGTH = 32


@dataclass(frozen=True)
class Place:
    """A layout of the matrix."""

    label: str
    world_size: int
    sizes: Mapping[str, int]
    experts: bool = False
    """Only for families that have experts."""
    sequence_parallel: bool = False
    """Whether the ranks of ``tp`` share the residual stream too."""


LAYOUTS = (
    Place("shard 2", 2, {"dp_shard": 2}),
    Place("replicate 2", 2, {"dp_replicate": 2, "dp_shard": 1}),
    Place("tp 2", 2, {"dp_shard": 1, "tp": 2}),
    Place("tp 2 seq", 2, {"dp_shard": 1, "tp": 2}, sequence_parallel=True),
    Place("cp 2", 2, {"dp_shard": 1, "cp": 2}),
    Place("pp 2", 2, {"dp_shard": 1, "pp": 2}),
    Place("ep 2", 2, {"dp_shard": 2, "ep": 2}, experts=True),
    Place("ep 4", 4, {"dp_shard": 4, "ep": 4}, experts=True),
    Place("ep 2 x shard 2", 4, {"dp_shard": 4, "ep": 2}, experts=True),
    Place("2 x ep 2", 4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, experts=True),
    Place("ep 2 = tp 2", 2, {"dp_shard": 1, "tp": 2, "ep": 2}, experts=True),
    Place("2 x ep 2 = tp 2", 4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "ep": 2}, experts=True),
    Place("ep 4 = tp 2 x 2", 4, {"dp_shard": 2, "tp": 2, "ep": 4}, experts=True),
    Place("ep 2, tp 2 seq, shard 2", 4, {"dp_shard": 2, "tp": 2, "ep": 2}, experts=True, sequence_parallel=True),
    Place("2 x ep 2 x shard 2, tp 2", 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2}, experts=True),
    Place("tp 4", 4, {"dp_shard": 1, "tp": 4}),
    Place("tp 4 seq", 4, {"dp_shard": 1, "tp": 4}, sequence_parallel=True),
    Place("tp 2 x shard 2", 4, {"dp_shard": 2, "tp": 2}),
    Place("tp 2 seq x shard 2", 4, {"dp_shard": 2, "tp": 2}, sequence_parallel=True),
    Place("2 x tp 2", 4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
    Place("2 x shard 2", 4, {"dp_replicate": 2, "dp_shard": 2}),
    Place("shard 4", 4, {"dp_shard": 4}),
    Place("replicate 4", 4, {"dp_replicate": 4, "dp_shard": 1}),
    Place("2 x tp 2 x shard 2", 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    Place("2 x tp 2 seq x shard 2", 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, sequence_parallel=True),
    Place("2 x shard 4", 8, {"dp_replicate": 2, "dp_shard": 4}),
    Place("4 x shard 2", 8, {"dp_replicate": 4, "dp_shard": 2}),
    Place("shard 8", 8, {"dp_shard": 8}),
)
"""The columns. ``2 x shard 4``: two replicas of four shards each (HSDP). ``seq``: with sequence parallel."""


@dataclass(frozen=True)
class Variant:
    """Options that a cell is audited under."""

    sync: SyncPolicy
    dtype: str
    microbatches: int
    checkpointing: bool
    offload: bool
    loss_parallel: bool = False
    """Where there is tensor parallel."""
    twin_units: bool = False
    """Where a stack runs twice."""

    def __str__(self) -> str:
        """In words."""
        plural = "microbatch" if self.microbatches == 1 else "microbatches"
        options = (
            ("checkpointing", self.checkpointing),
            ("offload", self.offload),
            ("loss parallel", self.loss_parallel),
            ("twin units", self.twin_units),
        )
        extra = [name for name, on in options if on]
        return ", ".join([self.sync, self.dtype, f"{self.microbatches} {plural}", *extra])


VARIANTS = (
    Variant(SyncPolicy.DEFER, "float64", 1, False, False, True),
    Variant(SyncPolicy.DEFER, "float32", 3, True, False, False, True),
    Variant(SyncPolicy.DEFER, "bfloat16", 3, False, True, False),
    Variant(SyncPolicy.RESHARD_EACH, "float64", 3, True, True, True),
    Variant(SyncPolicy.RESHARD_EACH, "float32", 1, False, True, False, True),
    Variant(SyncPolicy.RESHARD_EACH, "bfloat16", 3, False, False, True, True),
    Variant(SyncPolicy.REDUCE_EACH, "float64", 3, False, True, False, True),
    Variant(SyncPolicy.REDUCE_EACH, "float32", 3, False, False, True),
    Variant(SyncPolicy.REDUCE_EACH, "bfloat16", 1, True, False, True),
)
"""Every value of every option meets every value of every other one (a test sees to it)."""


ON_EIGHT = (VARIANTS[1], VARIANTS[2], VARIANTS[3], VARIANTS[8])
"""Those of layouts of eight processes, which take long where there are few cores: every value of every option."""


class Outcome(StrEnum):
    """Of a family on a layout."""

    WORKS = "works"
    REFUSED = "refused"
    NOT_YET = "not yet"
    FAILS = "FAILS"


@dataclass(frozen=True)
class Cell:
    """A family on a layout.

    Attributes:
        outcome: of all its variants together.
        worst: largest error of a gradient, by dtype.
        note: what a user would be told, or the verdict of the variant that failed.
        claims: that were audited, one for each variant that came to a verdict.
    """

    outcome: Outcome
    worst: Mapping[str, float]
    note: str = ""
    claims: tuple[Claim, ...] = ()


def family_case(
    family: str,
    place: Place,
    variant: Variant,
    folder: Path,
    *,
    packing: str = "pack",
    model: Mapping[str, Any] | None = None,
    moe: Mapping[str, Any] | None = None,
    **parallel: Any,
) -> Case:
    """The case of a family, by its name in :data:`~meshwright.models.families.TINY_MODELS`, on drawn documents.

    Args:
        family: ``model_type``.
        place: the layout.
        variant: the options.
        folder: for the documents.
        packing: of documents.
        model: what its config has otherwise.
        moe: the section of that name.
        parallel: further options of the section ``parallel``.
    """
    tiny = TINY_MODELS[family]
    config = {**tiny.config, **(model or {})}
    vocabulary = int(config.get("text_config", config)["vocab_size"])
    readers = place.sizes.get("dp_replicate", 1) * place.sizes["dp_shard"]
    run = RunConfig.model_validate(
        {
            "output": str(folder),
            "model": {"config": {"model_type": family, **config}},
            "layout": dict(place.sizes),
            "parallel": {
                "sync": variant.sync,
                "activation_checkpointing": "full" if variant.checkpointing else "none",
                "cpu_offload": variant.offload,
                "sequence_parallel": place.sequence_parallel,
                **({"twin_units": variant.twin_units} if tiny.twins else {}),
                "loss_parallel": variant.loss_parallel and place.sizes.get("tp", 1) > 1 and not tiny.twins,
                **parallel,
            },
            "data": {"files": ["drawn"], "sequence_length": SEQUENCE_LENGTH, "eval_fraction": 0.0, "packing": packing},
            "moe": dict(moe or {}),
            "training": {"steps": STEPS, "global_batch_size": variant.microbatches * readers},
        }
    )
    ready, _ = make_ready(run, variant.dtype, STEPS, folder)
    store = folder / f"documents-{vocabulary}"
    if not (store / "index.json").is_file():
        draw_documents(vocabulary, SEQUENCE_LENGTH, 400, 0, store)
    return Case(ready, store, STEPS)


def run_cell(auditor: Auditor, family: str, place: Place, variants: Iterable[Variant], folder: Path) -> Cell:
    """Audit a family on a layout under some options."""
    worst: dict[str, float] = {}
    notes: list[str] = []
    claims: list[Claim] = []
    packing = "pack"

    def audit(variant: Variant) -> AuditReport:
        return auditor.audit(family_case(family, place, variant, folder, packing=packing), place.world_size)

    for variant in variants:
        try:
            report = None
            if packing == "pack":
                try:
                    report = audit(variant)
                except ConfigError as error:
                    if "data.packing" not in str(error):
                        raise
                    notes.append(f"with data.packing=pad only: {error.problems[0]}")
                    packing = "pad"
            if report is None:
                report = audit(variant)
        except UnsupportedError as error:
            return Cell(Outcome.NOT_YET, {}, error.problems[0])
        except MeshwrightError as error:
            if error.exit_code != 2:  # a worker that failed, or a hang: no refusal
                return Cell(Outcome.FAILS, {}, f"{variant}: {error}")
            return Cell(Outcome.REFUSED, {}, error.problems[0])
        claims.append(report.claim)
        if not report.passed:
            return Cell(Outcome.FAILS, {}, f"{variant}: {report.verdict}", tuple(claims))
        worst[variant.dtype] = max(worst.get(variant.dtype, 0.0), report.worst_gradient)
    return Cell(Outcome.WORKS, worst, "; ".join(notes), tuple(claims))


def slice_of_matrix() -> Iterator[tuple[str, Place, Variant]]:
    """A part of the matrix that has every family, every layout and every variant at least once."""
    families, left = list(TINY_MODELS), []
    sparse = cycle(family for family in families if TINY_MODELS[family].sparse)
    for index in range(max(len(families), len(LAYOUTS), len(VARIANTS))):
        place = LAYOUTS[index % len(LAYOUTS)]
        family = families[index % len(families)]
        if place.experts and not TINY_MODELS[family].sparse:
            left.append(family)
            family = next(sparse)
        yield family, place, VARIANTS[index % len(VARIANTS)]
    for index, family in enumerate(left):
        yield family, LAYOUTS[index], VARIANTS[index]


def write_matrix(
    output: Path,
    say: Callable[[str], None],
    families: Sequence[str] = tuple(TINY_MODELS),
    places: Sequence[Place] = LAYOUTS,
    variants: Sequence[Variant] = VARIANTS,
    *,
    data: Path,
) -> bool:
    """Run the matrix, and write its page and its data, from which `plan` and `train` know what is proven.

    It takes an hour or more. The cells that are done lie in ``DATA.partial`` until all are; a matrix that was ended goes on
    from them, under the same versions and variants. A cell that failed is audited again.

    Args:
        output: the page.
        data: JSON, see :func:`~meshwright.train.proof.matrix_data`.
        say: takes a line for each layout.
        families: rows.
        places: columns.
        variants: options of each cell.

    Returns:
        Whether nothing failed. A refusal is no failure.
    """
    begun = time.perf_counter()
    partial = data.with_name(f"{data.name}.partial")
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
            output.write_text(_page(cells, families, places, variants))  # what is known so far is there if this is ended
            data.write_text(_data(cells))
    partial.unlink()
    return all(cell.outcome is not Outcome.FAILS for cell in cells.values())


def _audited_under(variants: Sequence[Variant]) -> dict[str, Any]:
    """What the cells of two matrices must have in common."""
    return {"versions": versions(), "variants": [str(variant) for variant in variants]}


def _cells_as_json(cells: Mapping[tuple[str, str], Cell], variants: Sequence[Variant]) -> str:
    done = [[*at, asdict(cell)] for at, cell in cells.items() if cell.outcome is not Outcome.FAILS]
    return json.dumps({**_audited_under(variants), "cells": done})


def _read_cells(partial: Path, variants: Sequence[Variant]) -> dict[tuple[str, str], Cell]:
    """Cells that an earlier matrix has audited under the same versions and variants."""
    content = json.loads(partial.read_text()) if partial.is_file() else {"cells": []}
    found: dict[tuple[str, str], Cell] = {}
    if any(content.get(key) != value for key, value in _audited_under(variants).items()):
        return found
    for family, label, cell in content["cells"]:
        claims = tuple(Claim(**{**claim, "axes": tuple(claim["axes"])}) for claim in cell["claims"])
        found[family, label] = Cell(Outcome(cell["outcome"]), cell["worst"], cell["note"], claims)
    return found


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
        f"Written by `meshwright audit --matrix` with torch {torch.__version__}, transformers {transformers.__version__}. "
        "Do not edit.",
        "",
        "Each cell is a tiny model of the family, trained on that many CPU processes and in one, and compared parameter by",
        f"parameter ([how](audit.md)), under {len(variants)} combinations of options. A number is the largest error of a",
        "gradient, relative to its largest entry, in float32; *not yet* and *refused* are what `meshwright train` says too.",
        "`2 x shard 4`: two replicas of four shards (HSDP). `seq`: with sequence parallel.",
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
    lines += ["", "## Options", "", "Every value of every option meets every value of every other one:", ""]
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
