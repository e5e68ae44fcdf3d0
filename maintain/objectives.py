"""Audits the objectives that Meshwright brings, each on every axis, and writes their table in docs/support-matrix.md.

From the root of the repository, nine minutes on two cores:

    python -m maintain.objectives

The result is kept as data, from which ``python -m maintain.matrix`` writes the same section.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from maintain.cells import LAYOUTS, Place, Variant, family_case
from meshwright.audit.case import Case
from meshwright.audit.conduct import Auditor
from meshwright.audit.data import draw_documents
from meshwright.errors import MeshwrightError
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.train.config import RunConfig
from meshwright.train.proofs.claim import versions

__all__ = ["OBJECTIVES", "ObjectiveRow", "audit_objectives", "objective_case", "section", "write_section"]

DATA, PAGE = Path(__file__).with_name("objectives.json"), Path("docs/support-matrix.md")
BEGIN, END = "<!-- python -m maintain.objectives writes from here -->", "<!-- to here -->"
PLACES = ("shard 2", "2 x shard 2", "tp 2", "tp 2 seq", "cp 2", "pp 2", "ep 2", "cp 2 x tp 2")
CLOSE = 1e-11
"""Largest relative error of a gradient, in fp64."""


@dataclass(frozen=True)
class ObjectiveRow:
    """A row of the table.

    Attributes:
        use: name of the objective.
        arguments: its arguments.
        tensors: columns that its data have besides.
        head: ``model.head``.
        reference: whether it needs log-probabilities of a reference: a column, and the model without its adapter.
    """

    use: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    head: Mapping[str, Any] | None = None
    reference: bool = False

    @property
    def label(self) -> str:
        """How the table names it."""
        shown = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        if self.head is not None and self.use == "classification":
            shown = str(self.head.get("problem_type", ""))
        return f"`{self.use}`{f' {shown}' if shown else ''}"

    @property
    def part(self) -> dict[str, Any]:
        """The value of ``training.objective``."""
        return {"use": self.use, "with": dict(self.arguments)}


_TEACHER = {
    "teacher_ids": {"per": "token", "width": 4, "dtype": "int64"},
    "teacher_log_probs": {"per": "token", "width": 4},
}
_REFERENCE = {"reference_log_probs": {"per": "token"}}
OBJECTIVES = (
    *(ObjectiveRow("preference", {"loss_type": kind}, reference=True) for kind in ("dpo", "ipo", "hinge", "kto")),
    *(ObjectiveRow("preference", {"loss_type": kind}) for kind in ("simpo", "orpo", "cpo")),
    *(
        ObjectiveRow("policy", {"loss_type": kind, "beta": 0.1}, reference=True)
        for kind in ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
    ),
    *(
        ObjectiveRow("classification", head={"kind": "sequence_classification", "num_labels": 3, "problem_type": kind})
        for kind in ("single_label_classification", "multi_label_classification", "regression")
    ),
    ObjectiveRow("token_classification", head={"kind": "token_classification", "num_labels": 3}),
    *(
        ObjectiveRow("reward", {"loss_type": kind}, head={"kind": "sequence_classification", "num_labels": 1})
        for kind in ("bradley_terry", "mse")
    ),
    *(ObjectiveRow("distillation", {"divergence": kind}, _TEACHER) for kind in ("forward_kl", "reverse_kl", "js")),
)


def objective_case(
    folder: Path,
    place: Place,
    objective: Mapping[str, Any],
    family: str = "llama",
    *,
    packing: str = "pack",
    tensors: Mapping[str, Any] | None = None,
    microbatches: int = 2,
    head: Mapping[str, Any] | None = None,
    **options: Any,
) -> Case:
    """Return the case of an objective on a layout, in fp64, on random documents.

    Args:
        folder: where the documents are written.
        place: the layout.
        objective: the value of ``training.objective``.
        family: the model, one of :data:`~maintain.tiny.TINY_MODELS`.
        packing: ``data.packing``.
        tensors: ``data.tensors``.
        microbatches: of a step.
        head: ``model.head``.
        options: those of :func:`~maintain.cells.family_case`.
    """
    variant = Variant(SyncPolicy.REDUCE_EACH, "float64", microbatches, False, False)
    case = family_case(family, place, variant, folder, packing=packing, **{"loss_chunks": 0, **options})
    values = case.config.model_dump(mode="json")
    values["training"]["objective"] = dict(objective)
    values["data"]["tensors"] = dict(tensors or {})
    values["model"]["head"] = head
    run = RunConfig.model_validate(values)
    vocabulary, length = int((run.model.config or {})["vocab_size"]), run.data.sequence_length
    count = 4 * run.training.global_batch_size * case.steps
    columns = "-".join(f"{name}{one.width or ''}" for name, one in run.data.values.items())
    store = folder / f"{objective['use']}-{count}-{packing}-{run.data.pairs}-{columns}"
    if not (store / "index.json").is_file():
        longest = length if packing == "pack" or run.data.pairs else 2 * length
        draw_documents(vocabulary, length, count, 0, store, longest, tensors=run.data.values, pairs=run.data.pairs)
    return replace(case, config=run, store=store)


def audit_objectives(rows: Sequence[ObjectiveRow] = OBJECTIVES, data: Path = DATA) -> bool:
    """Audit every cell, write what was found, and return whether no cell failed.

    Args:
        rows: the rows.
        data: where it is written: ``versions``, and for each row its label and, for each column, the worst relative error of a
            gradient, or what is wrong.
    """
    places = {place.label: place for place in LAYOUTS}
    columns = [*((label, {}) for label in PLACES), ("shard 2, LoRA", {"adapter": {"rank": 2, "targets": "all-linear"}})]
    begun, table = time.perf_counter(), dict[str, dict[str, float | str]]()
    with Auditor() as auditor, tempfile.TemporaryDirectory(prefix="meshwright-objectives-") as folder:
        for row in rows:
            cells = table.setdefault(row.label, {})
            for label, options in columns:
                place = places[label.partition(",")[0]]
                found = [_audited(auditor, Path(folder), row, place, packing, options) for packing in ("pack", "pad")]
                wrong = [one for one in found if isinstance(one, str)]
                cells[label] = wrong[0] if wrong else max(float(one) for one in found)
            print(f"{row.label}: {', '.join(map(_words, cells.values()))} ({time.perf_counter() - begun:.0f} s)", flush=True)
    data.write_text(json.dumps({"versions": versions(), "rows": table}, indent=1) + "\n")
    return not any(isinstance(cell, str) for cells in table.values() for cell in cells.values())


def section(data: Path = DATA) -> list[str]:
    """Return the lines of the section of the support matrix, from what was found."""
    content = json.loads(data.read_text())
    columns = list(next(iter(content["rows"].values())))
    with_versions = ", ".join(f"{name} {content['versions'][name]}" for name in ("torch", "transformers"))
    return [
        BEGIN,
        "",
        "## Objectives",
        "",
        f"Written by `python -m maintain.objectives` with {with_versions}. Do not edit.",
        "",
        "Each cell is two audits in float64, packed and padded, with three microbatches of unequal lengths: the worst relative",
        "error of a gradient beside one process, of a tiny Llama, or of a tiny Mixtral with `ep`. [More](objectives.md).",
        "",
        f"| objective | {' | '.join(columns)} |",
        f"|{'---|' * (len(columns) + 1)}",
        *(f"| {label} | {' | '.join(map(_words, cells.values()))} |" for label, cells in content["rows"].items()),
        "",
        END,
    ]


def write_section(page: Path = PAGE, data: Path = DATA) -> None:
    """Write the section into the support matrix, in place of the one that is there."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text("\n".join([before + section(data)[0], *section(data)[1:]]) + rest.partition(END)[2])


def _words(cell: float | str) -> str:
    return f"**{cell}**" if isinstance(cell, str) else f"{cell:.0e}"


def _audited(
    auditor: Auditor, folder: Path, row: ObjectiveRow, place: Place, packing: str, options: Mapping[str, Any]
) -> float | str:
    """Return the worst error of a gradient, or what failed."""
    family = "mixtral" if place.experts else "llama"
    tensors = {**row.tensors, **(_REFERENCE if row.reference and not options else {})}
    try:
        case = objective_case(
            folder, place, row.part, family, packing=packing, tensors=tensors, microbatches=3, head=row.head, **options
        )
        report = auditor.audit(case, place.world_size)
    except MeshwrightError as error:
        return f"refused: {error}"
    return report.worst_gradient if report.passed and report.worst_gradient < CLOSE else report.verdict


if __name__ == "__main__":
    good = audit_objectives()
    write_section()
    sys.exit(0 if good else 1)
