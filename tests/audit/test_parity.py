"""Gradients, steps and collectives of every data-parallel layout against one process: a row for each composition.

A new axis, family or option adds a row here, or a line to the tables of :mod:`maintain.cells`.
"""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from maintain.cells import (
    LAYOUTS,
    VARIANTS,
    Cell,
    Outcome,
    Place,
    Variant,
    context_options,
    family_case,
    run_cell,
    slice_of_matrix,
)
from maintain.matrix import write_matrix
from maintain.tiny import TINY_MODELS
from meshwright.audit.conduct import Auditor
from meshwright.audit.report import AuditReport
from meshwright.distributed.context import attention_kernels as kernels
from meshwright.errors import WorkerError
from meshwright.layout import AXES
from meshwright.plan.given.closed_choices import ContextMethod, SyncPolicy
from meshwright.train.proofs.claim import Claim, versions
from meshwright.train.proofs.own_code import code_digest
from tests.tiny import SPARSE, UNPACKED

ONE = Place("one process", 1, {"dp_shard": 1})
DATA_PARALLEL = [ONE, *(place for place in LAYOUTS if not {"tp", "cp", "pp", "ep"} & place.sizes.keys())]
FOUR = [place for place in DATA_PARALLEL if place.world_size == 4]
SHARD_2 = LAYOUTS[0]


def audited(
    auditor: Auditor, folder: Path, place: Place, variant: Variant, family: str = "llama", **options: Any
) -> AuditReport:
    report = auditor.audit(family_case(family, place, variant, folder, **options), place.world_size)
    assert report.passed, report.verdict
    return report


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", DATA_PARALLEL, ids=lambda place: place.label.replace(" ", "-"))
def test_every_layout_and_policy(auditor: Auditor, folder: Path, place: Place) -> None:
    for sync, microbatches in product(SyncPolicy, (1, 3) if place.world_size < 8 else (3,)):
        report = audited(auditor, folder, place, Variant(sync, "float64", microbatches, False, False))
        assert report.worst_gradient < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ContextMethod)
@pytest.mark.parametrize(("family", "label"), [("gemma3_text", "cp 2"), ("mixtral", "cp 2 x shard 2"), ("gpt_oss", "cp 4")])
def test_ranks_that_share_sequences(auditor: Auditor, folder: Path, family: str, label: str, method: ContextMethod) -> None:
    place = next(place for place in LAYOUTS if place.label == label)
    moe = {"aux_loss": 1.0} if family == "mixtral" else None
    variant = Variant(SyncPolicy.REDUCE_EACH, "float64", 2, False, False)
    report = audited(auditor, folder, place, variant, family=family, moe=moe, context_parallel=method)
    assert report.worst_gradient < 1e-12


LONG = 2560  # above the limits of masks and scores that exist at once


def audited_at_length(auditor: Auditor, folder: Path, method: ContextMethod, **options: Any) -> AuditReport:
    place = next(place for place in LAYOUTS if place.label == "cp 2")
    variant = Variant(SyncPolicy.DEFER, "float64", 1, False, False)
    options = {"model": {"max_position_embeddings": LONG}, "sequence_length": LONG, "context_parallel": method, **options}
    return auditor.audit(family_case("gemma3_text", place, variant, folder, **options), 2)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ContextMethod)
def test_a_long_sequence_of_many_documents(auditor: Auditor, folder: Path, method: ContextMethod) -> None:
    """Masks are computed in blocks there, in backward once more."""
    report = audited_at_length(auditor, folder, method)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-11
    (fed,) = (check for check in report.checks if check.what == "each rank was fed its share")
    boundaries = int(re.search(r"(\d+) boundaries", fed.compared)[1])  # type: ignore[index]
    assert boundaries > 10


@pytest.mark.thorough
def test_a_bug_of_long_sequences_alone_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "checkpoint", lambda compute, *tensors, **_: 1.01 * compute(*tensors))
    with Auditor() as auditor:
        report = audited_at_length(auditor, folder, ContextMethod.GATHER)
    assert "forward diverges in model.layers.0.self_attn" in report.verdict


SLICE = list(slice_of_matrix())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "place", "variant"), SLICE, ids=[f"{f}-{p.label}-{v.dtype}".replace(" ", "-") for f, p, v in SLICE]
)
def test_a_slice_of_the_support_matrix(auditor: Auditor, folder: Path, family: str, place: Place, variant: Variant) -> None:
    cell = run_cell(auditor, family, place, [variant], folder)
    if "tp" in place.sizes and cell.outcome is Outcome.REFUSED:
        assert re.search("there are no styles|key/value heads? cannot be divided by|sequence_parallel=True: ", cell.note)
    elif "cp" in place.sizes and cell.outcome is Outcome.REFUSED:
        assert re.search("mixes tokens|runs twice", cell.note)
    elif "pp" in place.sizes and cell.outcome is Outcome.REFUSED:
        assert re.search("reads more than its hidden state|runs twice|does not say how stages call", cell.note)
    else:
        assert cell.outcome is Outcome.WORKS, cell.note


def test_the_slice_has_everything_once_and_the_variants_all_pairs() -> None:
    families, places, variants = (set(column) for column in zip(*((f, p.label, str(v)) for f, p, v in SLICE), strict=True))
    assert families == set(TINY_MODELS)
    assert places == {place.label for place in LAYOUTS}
    assert variants == {str(variant) for variant in VARIANTS}
    columns = {"sync": set(SyncPolicy), "dtype": {"float64", "float32", "bfloat16"}, "microbatches": {1, 3}}
    columns |= {name: {False, True} for name in ("checkpointing", "offload", "loss_parallel", "twin_units")}
    for one, other in product(columns, columns):
        if one != other:
            met = {(getattr(variant, one), getattr(variant, other)) for variant in VARIANTS}
            assert met == set(product(columns[one], columns[other])), (one, other)
    context = ("context_parallel", "context_balance", "context_recompute")
    chosen = [
        {**vars(variant), **context_options(family, variant)} for family, variant in product(TINY_MODELS, VARIANTS)
    ]  # fmt: skip
    for one, other in product(context, (*context, *columns)):
        values = [{options[name] for options in chosen} for name in (one, other)]
        assert one == other or {(options[one], options[other]) for options in chosen} == set(product(*values)), (one, other)
    assert set(AXES) >= {axis for place in LAYOUTS for axis in place.sizes} - {"ep"}


@pytest.mark.thorough
def test_collectives_of_five_units_and_four_microbatches(auditor: Auditor, folder: Path) -> None:
    """5 and 5 with ``defer``; every peer makes 44 to 52 all-gathers."""
    found = {}
    for sync, microbatches in product(SyncPolicy, (1, 4)):
        variant = Variant(sync, "float32", microbatches, False, False)
        counts = audited(auditor, folder, SHARD_2, variant, model={"num_hidden_layers": 4}).counts["dp"]
        found[f"{sync} {microbatches}"] = (counts["all_gather"], counts["reduce_scatter"])
    assert found == {
        "defer 1": (5, 5),
        "defer 4": (5, 5),
        "reshard_each 1": (8, 5),  # the last layer and the root keep their parameters between forward and backward
        "reshard_each 4": (32, 5),
        "reduce_each 1": (8, 5),
        "reduce_each 4": (32, 20),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", FOUR, ids=lambda place: place.label.replace(" ", "-"))
@pytest.mark.parametrize(
    "options",
    [
        {"sync_units": {"model.layers.0": "reduce_each", "model.layers.1": "reshard_each"}},
        {"sync": "reduce_each", "all_reduce_once": False},
        {"sync": "reduce_each", "reshard_after_forward": False},
        {"freeze": ["model.embed_tokens.*", "model.layers.0.**"]},
        {"freeze": ["model.embed_tokens.*", "model.layers.0.**"], "sync": "reduce_each"},
        {"freeze": ["lm_head.*", "model.layers.1.**"], "sync": "reduce_each"},
        {"freeze": ["model.layers.*.self_attn.**"], "activation_checkpointing": "full"},
        {"activation_checkpointing": "submodule", "sync": "reshard_each"},
        {"activation_checkpointing": "selective", "sync": "reduce_each"},
        {
            "activation_checkpointing_layers": {"model.layers.*": "selective", "model.layers.0": "submodule"},
            "activation_checkpointing_save": ["aten.mm.default", "aten._softmax.default"],
            "freeze": ["model.layers.0.mlp.**"],
        },
    ],
    ids=str,
)
def test_policies_by_unit_frozen_parameters_and_all_reduce_each(
    auditor: Auditor, folder: Path, place: Place, options: dict[str, Any]
) -> None:
    audited(auditor, folder, place, Variant(SyncPolicy.DEFER, "float64", 3, False, False), **options)


@pytest.mark.thorough
def test_shards_that_are_uneven_or_empty(auditor: Auditor, folder: Path) -> None:
    """Two rows of keys, five of a norm and a vocabulary of 29, over four and eight ranks."""
    narrow = {"hidden_size": 6, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 29}
    for label in ("shard 4", "shard 8", "2 x shard 2"):
        place = next(place for place in LAYOUTS if place.label == label)
        audited(auditor, folder, place, Variant(SyncPolicy.DEFER, "float64", 1, False, False), model=narrow)


@pytest.mark.thorough
def test_bf16_differs_from_one_process_in_bf16_by_much_less_than_from_fp32(auditor: Auditor, folder: Path) -> None:
    """A microbatch is computed with the same roundings in one process and on many; fp32 sums differ in their last bits."""
    for place in FOUR:
        reports = [
            audited(auditor, folder, place, Variant(SyncPolicy.REDUCE_EACH, dtype, 3, False, False))
            for dtype in ("bfloat16", "float32")
        ]
        assert reports[0].worst_gradient < 1e-6
        assert abs(reports[0].losses[0] - reports[1].losses[0]) > 1e-6  # it did compute in bf16


def test_experts_are_left_without_a_token(auditor: Auditor, folder: Path) -> None:
    report = audited(auditor, folder, SHARD_2, Variant(SyncPolicy.DEFER, "float64", 3, False, False), "mixtral")
    idle = next(check for check in report.checks if check.what.startswith("experts without a token"))
    assert int(idle.compared.split()[0]) > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "label", "options"),
    [
        ("mixtral", "one process", {"activation_checkpointing": "full"}),
        ("mixtral", "shard 2", {}),
        ("mixtral", "tp 2", {}),
        ("mixtral", "tp 2 seq", {"activation_checkpointing": "full"}),
        ("mixtral", "ep 2", {"activation_checkpointing": "full"}),
        ("qwen3_moe", "ep 2 x shard 2", {"activation_checkpointing": "submodule"}),
        ("qwen3_moe", "2 x ep 2", {"sync": "reduce_each"}),
        ("gpt_oss", "ep 2 = tp 2", {"activation_checkpointing": "selective"}),
        ("gemma4_moe", "tp 2", {}),
        ("deepseek_v3", "ep 2, tp 2 seq, shard 2", {"activation_checkpointing": "full"}),
        ("nemotron_h", "ep 2", {}),
    ],
    ids=str,
)
def test_balance_of_experts(auditor: Auditor, folder: Path, family: str, label: str, options: dict[str, Any]) -> None:
    """A balance loss as large as the training loss, and biases where there are some: those of one process."""
    place = next(place for place in (ONE, *LAYOUTS) if place.label == label)
    moe = {"aux_loss": 1.0, "bias_update_rate": 0.01 if family in ("deepseek_v3", "nemotron_h") else None}
    packing = "pad" if family in UNPACKED - {"gpt_oss"} else "pack"
    found = []
    for microbatches in (1, 3):
        variant = Variant(SyncPolicy.DEFER, "float64", microbatches, False, False)
        found.append(audited(auditor, folder, place, variant, family, moe=moe, packing=packing, **options))
        assert found[-1].worst_gradient < 1e-12
    without = audited(auditor, folder, place, variant, family, packing=packing, **options)
    assert without.losses[0] == found[-1].losses[0]
    assert without.losses[1] != found[-1].losses[1]  # it did something


def test_experts_that_reduce_each_time_while_the_rest_defers(auditor: Auditor, folder: Path) -> None:
    """One line of the configuration. Five units: two layers, the experts of each, and the root."""
    found = {}
    for sync in ({}, {"sync_units": {"model.layers.*.mlp.experts": "reduce_each"}}):
        report = audited(auditor, folder, SHARD_2, Variant(SyncPolicy.DEFER, "float64", 3, False, False), "mixtral", **sync)
        found[bool(sync)] = (report.counts["dp"]["all_gather"], report.counts["dp"]["reduce_scatter"])
    # The experts of the last layer are gathered again in backward too.
    assert found == {False: (5, 5), True: (3 + 2 * 2 * 3, 3 + 2 * 3)}


@pytest.mark.thorough
def test_the_page_of_the_matrix(tmp_path: Path) -> None:
    """A refusal is told in the user's words, and what fails is not hidden."""
    said: list[str] = []
    page = tmp_path / "docs" / "matrix.md"
    assert write_matrix(
        page,
        said.append,
        ["gpt2", "gpt_oss"],
        [place for place in LAYOUTS if place.label in ("shard 2", "pp 2 x tp 2 seq", "pp 2")],
        VARIANTS[:1],
        data=tmp_path / "data" / "proofs.json",
    )
    proofs = json.loads((tmp_path / "data" / "proofs.json").read_text())
    proven = [(cell["family"], cell["layout"], cell.get("axes"), cell["failed"]) for cell in proofs["cells"]]
    assert proven == [
        ("gpt2", "pp 2", ["pp"], ""),
        ("gpt2", "pp 2 x tp 2 seq", None, ""),
        ("gpt2", "shard 2", ["dp_shard"], ""),
        ("gpt_oss", "pp 2", ["pp"], ""),
        ("gpt_oss", "pp 2 x tp 2 seq", ["pp", "tp"], ""),
        ("gpt_oss", "shard 2", ["dp_shard"], ""),
    ]
    text = page.read_text()
    assert [line.partition(" (")[0] for line in said] == [
        "shard 2: 2 works",
        "pp 2: 2 works",
        "pp 2 x tp 2 seq: 1 works, 1 refused",
    ]
    row = next(line for line in text.splitlines() if line.startswith("| gpt2"))
    assert float(row.split("|")[2]) < 1e-9
    assert "refused [" in row
    assert "sequence_parallel=True: a slice cannot leave a stage" in text
    assert "data.packing" not in text  # packed documents of gpt-oss are kept apart, which its own masks do not


def test_a_matrix_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that are done are not audited again, and the pages are those of a matrix in one go. Those of other code are."""
    done: list[tuple[str, str]] = []
    most, code = 3, code_digest(["dp_shard"], "")

    def run_cell(auditor: Auditor, family: str, place: Place, *_: object) -> Cell:
        if len(done) == most:
            raise KeyboardInterrupt
        done.append((family, place.label))
        claim = Claim(family, "digest", ("dp_shard",), {"sync": place.label}, True, versions(), code, ("dp_shard",))
        return Cell(Outcome.WORKS, {"float32": len(done) * 1e-7}, f"note of {family}", (claim,))

    def write(name: str) -> list[str]:
        folder = tmp_path / name
        write_matrix(folder / "page.md", lambda _: None, ["gpt2", "llama"], LAYOUTS[:3], data=folder / "proofs.json")
        assert sorted(path.name for path in folder.iterdir()) == ["page.md", "proofs.json"]
        return [(folder / file).read_text() for file in ("page.md", "proofs.json")]

    monkeypatch.setattr("maintain.matrix.run_cell", run_cell)
    with pytest.raises(KeyboardInterrupt):
        write("in pieces")
    most = 6
    pieces = write("in pieces")
    assert done == [(family, place.label) for place in LAYOUTS[:3] for family in ("gpt2", "llama")]
    done.clear()
    assert write("whole") == pieces
    done.clear()
    file = tmp_path / "whole" / "proofs.json"
    older, case = json.loads(file.read_text()), {"digest": "of code before"}
    file.write_text(json.dumps({**older, "cells": [older["cells"][0] | case, *older["cells"][1:]]}))
    most = 1
    write("whole")
    assert done == [("gpt2", min(place.label for place in LAYOUTS[:3]))]


TP_PLACES = [place for place in LAYOUTS if "tp" in place.sizes and not place.sequence_parallel and not place.experts]
TP_CASES = [("mixtral", place) for place in TP_PLACES] + [
    (family, TP_PLACES[1]) for family in ("llama", "qwen2", "gemma3_text")
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "place"), [*TP_CASES, ("gpt_oss", TP_PLACES[2])], ids=lambda item: str(getattr(item, "label", item))
)
def test_sequence_and_loss_parallel(auditor: Auditor, folder: Path, place: Place, family: str) -> None:
    """Biases, tied embeddings, norms on both sides, experts, sinks; on four ranks two share a key/value head."""
    packing = "pack"
    for sequence_parallel, loss_parallel in product((False, True), repeat=2):
        if place.world_size == 8 and sequence_parallel != loss_parallel:
            continue
        variant = Variant(SyncPolicy.DEFER, "float64", 2, False, False)
        options = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
        report = audited(auditor, folder, place, variant, family, packing=packing, **options)
        assert report.worst_gradient < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("family", sorted(SPARSE))
def test_every_mixture_of_experts_over_ep(auditor: Auditor, folder: Path, family: str) -> None:
    """Each expert in one half of the ranks, sharded there; some microbatches leave experts without a token."""
    place = next(place for place in LAYOUTS if place.label == "ep 2 x shard 2")
    packing = "pad" if family in UNPACKED - {"gpt_oss"} else "pack"
    variant = Variant(SyncPolicy.REDUCE_EACH, "float64", 2, False, False)
    assert audited(auditor, folder, place, variant, family, packing=packing).worst_gradient < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["full", "submodule", "selective"])
def test_sequence_parallel_recomputed(auditor: Auditor, folder: Path, mode: str) -> None:
    place = next(place for place in LAYOUTS if place.label == "tp 2 x shard 2")
    variant = Variant(SyncPolicy.RESHARD_EACH, "float64", 2, False, False)
    audited(auditor, folder, place, variant, "qwen3_moe", sequence_parallel=True, activation_checkpointing=mode)


def test_a_cell_whose_workers_died_fails_and_says_so(auditor: Auditor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*args: Any) -> AuditReport:
        raise WorkerError("rank 1: died")

    monkeypatch.setattr(auditor, "audit", dies)
    cell = run_cell(auditor, "llama", SHARD_2, VARIANTS[:1], folder)
    assert cell.outcome is Outcome.FAILS
    assert cell.note.endswith("rank 1: died")


@pytest.mark.thorough
def test_one_step_is_compared_where_later_ones_are_rounding(auditor: Auditor, folder: Path) -> None:
    places = {place.label: place for place in LAYOUTS}
    for label, dtype, steps in (("tp 2", "bfloat16", 1), ("tp 2", "float32", 2), ("shard 2", "bfloat16", 2)):
        report = audited(auditor, folder, places[label], Variant(SyncPolicy.DEFER, dtype, 1, False, False))
        assert report.steps == len(report.losses) == steps
        assert [(change.before, change.after) for change in report.changes] == [(2, 1)] * (steps == 1)
