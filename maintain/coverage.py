"""Coverage: every causal language model of transformers on one layout for each axis, audited in float64 on a small model.

A model type is audited as a run of its default config would be: :func:`~meshwright.shrink.run.shrink` makes it small, and keeps
its classes, its kinds of layers, and the ratios of its heads and experts. From the root of the repository:

    python -m maintain.coverage [--part K/N] [--variants]
"""

import argparse
import logging
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maintain.cells import LAYOUTS, PROOFS, SEQUENCE_LENGTH, STEPS, Cell, Outcome, Place, audited
from maintain.default_configs import MISSING_DEFAULTS, model_types
from maintain.kept import Rows, case_digest, is_current, read_rows, row_of, write_rows
from maintain.reasons import EXPLAINED, reason_of
from maintain.variants import flipped, parsed, variants_of, written
from meshwright.audit.case import Case
from meshwright.audit.conduct import Auditor
from meshwright.audit.data import draw_documents
from meshwright.audit.ready import make_ready
from meshwright.errors import ConfigError, MeshwrightError, ModelError
from meshwright.shrink.run import shrink
from meshwright.train.config import RunConfig
from meshwright.train.proofs.shipped_cells import COVERAGE

__all__ = ["COLUMNS", "case_of", "part_of", "run_of", "write_coverage"]

COLUMNS = tuple(
    next(place for place in LAYOUTS if place.label == label)
    for label in ("shard 2", "replicate 2", "tp 2", "tp 2 seq", "ep 2", "cp 2", "pp 2")
)
"""One layout for each axis."""

VARIANT_COLUMNS = tuple(place for place in COLUMNS if place.label not in ("replicate 2", "tp 2 seq"))
"""Of variants. Replicas differ from shards in no switch, and sequence parallel is the stream of `tp 2`."""

MIXED = ("fsdp.dtypes", "model.values", "pp.halves", "sp.stream", "worker.dtypes", "worker.overflow")
"""Codes of what may not be so in float32: a model that stores or computes something in it, whatever the rest is in, has one
dtype in float32 alone."""


def part_of(types: Sequence[str], part: str) -> list[str]:
    """Return the part ``K/N`` of some model types: every N-th, from the K-th on.

    Raises:
        ConfigError: it is no such part; the message says what is legal.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError("cli.part", f"--part={part}: legal is K/N with K from 1 to N, such as 3/10")
    return list(types[int(match[1]) - 1 :: int(match[2])])


def run_of(name: str, place: Place, folder: Path, packing: str = "pack", **parallel: Any) -> RunConfig:
    """Return the run of a model type's default config, or of a variant of it, on a layout.

    Raises:
        ModelError: transformers has no default config for it.
    """
    from transformers import AutoConfig

    model_type, switch = parsed(name)
    odd = dict(MISSING_DEFAULTS.get(model_type, {}))
    try:
        config = AutoConfig.for_model(model_type, **odd)
        text = config.get_text_config()
        sizes: dict[str, Any] = {"vocab_size": text.vocab_size}
    except Exception as error:  # whatever a config checks or computes
        raise ModelError(
            "model.build", f"model: its default config cannot be made ({type(error).__name__}: {_first_line(error)})"
        ) from error
    if text is not config:
        key = next(key for key, value in vars(config).items() if value is text)
        sizes = {key: {"model_type": text.model_type, **odd.get(key, {}), **sizes}}
    return RunConfig.model_validate(
        {
            "output": str(folder),
            "model": {"config": flipped({"model_type": model_type, **odd, **sizes}, switch)},
            "layout": dict(place.sizes),
            "parallel": {"sequence_parallel": place.sequence_parallel, **parallel},
            "data": {"files": ["drawn"], "sequence_length": SEQUENCE_LENGTH, "eval_fraction": 0.0, "packing": packing},
            "training": {"steps": STEPS, "microbatch_size": 2, "global_batch_size": 8},
        }
    )


def case_of(model_type: str, place: Place, folder: Path, packing: str, dtype: str, **parallel: Any) -> Case:
    """Return the case of a model type or variant on a layout, on random documents.

    Args:
        model_type: the type, or the name of a variant.
        place: the layout.
        folder: where the documents are written.
        packing: value of ``data.packing``.
        dtype: what both sides compute in.
        parallel: further values of the section ``parallel``.
    """
    run, _, _ = shrink(run_of(model_type, place, folder, packing, **parallel), place.world_size)
    ready, _ = make_ready(run, dtype, STEPS, folder)
    values = ready.model.config or {}
    nested = next((value for value in values.values() if isinstance(value, dict) and "vocab_size" in value), values)
    vocabulary = int(nested["vocab_size"])
    store = folder / f"documents-{vocabulary}"
    if not (store / "index.json").is_file():
        draw_documents(vocabulary, SEQUENCE_LENGTH, 400, 0, store)
    return Case(ready, store, STEPS)


def _unable(case: Case) -> str:
    """Return why the model of a case does not run without Meshwright; empty: it does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(case.config.model.config or {})
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
        model(input_ids=torch.ones((2, SEQUENCE_LENGTH), dtype=torch.long), use_cache=False)
    except Exception as error:  # whatever a model raises
        return f"{type(error).__name__}: {_first_line(error)}"
    return ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _cell(auditor: Auditor, model_type: str, place: Place, folder: Path) -> Cell:
    def audit(dtype: str) -> Cell:
        return audited(auditor, place, [dtype], lambda _, packing: case_of(model_type, place, folder, packing, dtype))

    try:
        cell = audit("float64")
        cell = audit("float32") if cell.code in MIXED and not cell.claims else cell
        if cell.outcome is Outcome.FAILS and cell.code in ("audit.random", "worker.overflow"):
            return Cell(Outcome.REFUSED, {}, cell.note, code=cell.code)  # one process cannot be compared with itself
        crashed = cell.outcome is Outcome.FAILS and not cell.claims
        if crashed and (why := _unable(case_of(model_type, place, folder, "pad", "float32"))):
            note = f"{model_type} cannot be shrunk: the small model does not run by itself ({why})"
            return Cell(Outcome.REFUSED, {}, note, code="shrink.model")
        return cell
    except MeshwrightError:
        raise
    except Exception as error:  # no refusal: what is wrong is to be mended, and the other cells are audited all the same
        return Cell(Outcome.FAILS, {}, f"{type(error).__name__}: {_first_line(error)}")


def names_of_variants(model_types: Iterable[str]) -> Iterator[str]:
    """Yield the names of the variants of some model types. Types that cannot be built or shrunk have none."""
    with tempfile.TemporaryDirectory(prefix="meshwright-coverage-") as folder, _quiet():
        for model_type in model_types:
            try:
                small, _, _ = shrink(run_of(model_type, COLUMNS[0], Path(folder)), COLUMNS[0].world_size)
            except Exception:  # the row of the type itself says why
                continue
            for key, value in variants_of(small.model).items():
                yield written(model_type, key, value)


def write_coverage(
    page: Path,
    data: Path,
    say: Callable[[str], None],
    types: Sequence[str] | None = None,
    places: Sequence[Place] = COLUMNS,
) -> bool:
    """Audit model types or variants on the columns, and write the page and its data, which `plan` and `train` read too.

    A cell is audited if it was not, if the code that it runs through has changed since, or if it failed. Each one is written at
    once, so that a job that was interrupted goes on. Cells of other model types stay as they are in the data.

    Args:
        page: path of the page.
        data: path of the data, JSON.
        say: called with a line for each model type.
        types: the model types, or names of variants, to audit; ``None``: all types.
        places: the columns to audit.

    Returns:
        Whether no cell failed. A refusal is no failure.
    """
    begun, chosen = time.perf_counter(), list(model_types() if types is None else types)
    rows = read_rows(data)
    with Auditor() as auditor, tempfile.TemporaryDirectory(prefix="meshwright-coverage-") as folder, _quiet():
        for model_type in chosen:
            for place in places:
                at, case = (model_type, place.label), case_digest(place)
                if at not in rows or not is_current(rows[at], case):
                    rows[at] = row_of(*at, _cell(auditor, model_type, place, Path(folder)), case)
                    write_rows(data, rows)
            outcomes = ", ".join(f"{place.label} {rows[model_type, place.label]['outcome']}" for place in places)
            say(f"{model_type}: {outcomes} ({time.perf_counter() - begun:.0f} s)")
    page.write_text(_page(rows))
    return all(rows[model_type, place.label]["outcome"] != Outcome.FAILS for model_type in chosen for place in places)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of transformers about 190 default configs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


# -- the page -----------------------------------------------------------------------------------------------------------------


def _page(rows: Rows) -> str:
    import torch
    import transformers

    labels = [place.label for place in COLUMNS]
    types = sorted({name for name, _ in rows if not parsed(name)[1]})
    built = [of for of in types if _reason(rows[of, labels[0]]) != "unbuilt"]
    lines = [
        "# Coverage",
        "",
        f"Written by `python -m maintain.coverage` with torch {torch.__version__},",
        f"transformers {transformers.__version__}. Do not edit.",
        "",
        f"Transformers has {len(types)} model types of causal language models, of which {len(built)} build from their default",
        "config (encoders with `is_decoder: true`). Each cell is a small model of the type, made from the default config as",
        "`meshwright audit` does, trained on two CPU processes and in one, in float64 (in float32 if its code computes",
        "something in float32), and compared parameter by parameter ([how](audit.md)). A number is the largest error of a",
        "gradient, relative to its largest entry. A word is the reason of a refusal, explained below. Under `ep`, models",
        "without experts are left out.",
        "",
        "| axis | work | refused | fail |",
        "|---|---|---|---|",
    ]
    lines += [_counted(rows, built, label) for label in labels]
    lines += ["", f"| model type | {' | '.join(labels)} |", f"|{'---|' * (len(labels) + 1)}"]
    for of in built:
        lines.append(f"| {of} | {' | '.join(_words(rows.get((of, label))) for label in labels)} |")
    lines += _variants_of_page(rows)
    used = Counter(_reason(row) for (of, _), row in rows.items() if parsed(of)[0] in built)
    lines += ["", "## Reasons", ""]
    lines += [
        f"- *{key}* ({used[key]} cells): {sentence}" for key, sentence in EXPLAINED.items() if used[key] and key != "dense"
    ]
    if failed := [row for _, row in sorted(rows.items()) if row["failed"]]:
        lines += ["", "## Failures", "", *(f"- {row['family']} on {row['layout']}: {row['failed']}" for row in failed)]
    unbuilt = [rows[of, labels[0]] for of in types if of not in built]
    lines += ["", "## Not built", "", "transformers itself does not build these from their default config:", ""]
    lines += [f"- {row['family']}: {row['note'].removeprefix('model: ')}" for row in unbuilt]
    return "\n".join(lines) + "\n"


def _variants_of_page(rows: Rows) -> list[str]:
    """Return the lines about variants: how many there are, and which are proven."""
    names = sorted({name for name, _ in rows if parsed(name)[1]})
    if not names:
        return []
    labels = [place.label for place in VARIANT_COLUMNS]
    lines = [
        "",
        "## Variants",
        "",
        "A released model seldom has the default config of its type. A variant has one switch of the config flipped: a",
        "boolean, or a number that may be absent (window, shared experts, convolution). It counts if it has other names,",
        f"shapes, operators or attentions. {len(names)} variants of {len({parsed(name)[0] for name in names})} types were",
        "audited like the types, by `python -m maintain.coverage --variants`. `plan` and `train` take each that works for",
        "proven. Two switches flipped together are not in the table, and what is not in it was not audited.",
        "",
        "| axis | work | refused | fail |",
        "|---|---|---|---|",
        *(_counted(rows, names, label) for label in labels),
        "",
        f"| variant | {' | '.join(labels)} |",
        f"|{'---|' * (len(labels) + 1)}",
    ]
    return lines + [f"| {name} | {' | '.join(_words(rows.get((name, label))) for label in labels)} |" for name in names]


def _counted(rows: Rows, names: Sequence[str], label: str) -> str:
    """Return the line of an axis: how many of some types or variants work, are refused, and fail."""
    counts = Counter(rows[name, label]["outcome"] for name in names if (name, label) in rows and _words(rows[name, label]))
    refused = counts[Outcome.REFUSED] + counts[Outcome.NOT_YET]
    return f"| {label} | {counts[Outcome.WORKS]} | {refused} | {counts[Outcome.FAILS]} |"


def _reason(row: Mapping[str, Any]) -> str:
    """Return the key of the reason of a refusal; empty if the cell is no refusal."""
    return reason_of(row["code"]) if row["outcome"] in (Outcome.REFUSED, Outcome.NOT_YET) else ""


def _words(row: Mapping[str, Any] | None) -> str:
    if row is None or (reason := _reason(row)) == "dense":
        return ""
    return reason or (f"{max(row['worst'].values()):.0e}" if row["outcome"] == Outcome.WORKS else "FAILS")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the coverage page or a part of it; 1: a cell failed, 2: the arguments are wrong."""
    parser = argparse.ArgumentParser(prog="python -m maintain.coverage", description=__doc__)
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th part of N; the others stay as they are")
    parser.add_argument("--variants", action="store_true", help="the variants of each model, instead of its default config")
    parser.add_argument("--page", type=Path, default=Path("docs/coverage.md"), help="the page to write")
    parser.add_argument("--data", type=Path, default=PROOFS / COVERAGE, help="the same as data, to write")
    options = parser.parse_args(arguments)
    try:
        types = part_of(model_types(), options.part)
    except ConfigError as error:
        parser.error(str(error))
    names, places = (list(names_of_variants(types)), VARIANT_COLUMNS) if options.variants else (types, COLUMNS)
    return 0 if write_coverage(options.page, options.data, print, names, places) else 1


if __name__ == "__main__":
    sys.exit(main())
