"""What a proof is a proof of, and the line that says whether a layout is proven."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maintain.tiny import TINY_MODELS
from meshwright.models.specs.derived import DefaultParallelizationStrategy
from meshwright.train.config import RunConfig
from meshwright.train.proofs import claim as claims
from meshwright.train.proofs import own_code
from meshwright.train.proofs import records as proof
from meshwright.train.proofs.claim import claim_of
from meshwright.train.proofs.records import Record, Source, Standing, State, audit_arguments, record, standing_of
from meshwright.train.proofs.shipped_cells import MATRIX, CellProof, cell_data, cells_as_text, cells_from_text, today
from meshwright.train.start.setup import make_setup

LARGE: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 7, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
"""Sizes for ``llama``, all others than those of the matrix."""


def setup_of(model: dict[str, Any] | None = None, world_size: int = 2, family: str = "llama", **sections: Any) -> Any:
    training = {"steps": 2, "global_batch_size": world_size, **sections.pop("training", {})}
    config = RunConfig.model_validate(
        {
            "output": "nowhere",
            "model": {"config": {"model_type": family, **TINY_MODELS[family].config, **(model or {})}},
            "data": {"files": ["nowhere"], "sequence_length": 16},
            "training": training,
            **sections,
        }
    )
    return make_setup(config, world_size)


def key(*arguments: Any, **sections: Any) -> str:
    return claim_of(setup_of(*arguments, **sections)).key


# -- the key ------------------------------------------------------------------------------------------------------------------


def test_sizes_names_and_dtypes_do_not_count() -> None:
    plain = key()
    assert key(LARGE, 4) == plain
    for sections in (
        {"parallel": {"param_dtype": "float32"}},
        {"parallel": {"param_dtype": "float64", "reduce_dtype": "float64"}},
        {"optimizer": {"lr": 1.0}},
        {"model": {"attention_dropout": 0.1}},
        {"model": {"initializer_range": 0.5, "pad_token_id": 3, "use_cache": False}},
    ):
        assert key(**sections) == plain, sections


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
    ids=str,
)
def test_the_structure_of_a_model_counts(change: dict[str, Any]) -> None:
    assert key(change) != key()


@pytest.mark.parametrize(
    "sections",
    [
        {"layout": {"dp_replicate": 2}},
        {"layout": {"tp": 2}},
        {"parallel": {"sync": "reduce_each"}},
        {"parallel": {"sync_budget_gib": 0.0}},
        {"parallel": {"sync_units": {"model.layers.*": "reduce_each"}}},
        {"parallel": {"cpu_offload": True}},
        {"parallel": {"activation_checkpointing": "full"}},
        {"parallel": {"activation_checkpointing_layers": {"model.layers.0": "full"}}},
        {"parallel": {"compile": True}},
        {"parallel": {"freeze": ["model.layers.*.mlp.**"]}},
        {"parallel": {"prefetch_forward": 2}},
        {"parallel": {"reshard_after_forward": True}},
        {"training": {"global_batch_size": 8}},
        {"optimizer": {"no_decay": ["**.mlp.*.weight"]}},
    ],
    ids=str,
)
def test_axes_and_choices_count(sections: dict[str, Any]) -> None:
    assert key(**sections) != key()


def test_what_tensor_parallel_moves_and_shares_counts() -> None:
    tp = {"layout": {"tp": 2}}
    styles = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    mlp = {f"model.layers.*.mlp.{own}_proj": style for own, style in styles.items()}
    found = [
        key(**tp),
        key(**tp, parallel={"sequence_parallel": True}),
        key(**tp, parallel={"loss_parallel": False}),
        key(**tp, parallel={"tp_plan": mlp}),
        key(LARGE, 8, layout={"tp": 8, "dp_shard": 1}),  # two ranks share a head
    ]
    assert len(set(found)) == len(found)
    assert key(LARGE, 4, layout={"tp": 4, "dp_shard": 1}) == found[0]


def test_policies_count_as_they_were_resolved() -> None:
    """What nobody chose depends on the size of the model."""
    assert key() == key(parallel={"sync": "defer"})
    assert key(parallel={"sync_budget_gib": 0.0}) == key(parallel={"sync": "reduce_each"})


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "diffusion_gemma"])
def test_families_with_experts(family: str) -> None:
    data = {"files": ["nowhere"], "sequence_length": 16, "packing": "pad"}
    ep = {"layout": {"ep": 2}, "data": data}
    assert key(family=family, **ep) != key(family=family, data=data)
    assert key(family=family, world_size=4, **ep) != key(family=family, **ep)  # experts are sharded too


def test_versions_and_foreign_code_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = key()
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.partition('+')[0]}+cu130")
    assert key() == plain
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert key() != plain
    file = tmp_path / "mine.py"
    digests = []
    for text in ("a = 1", "a = 2"):
        file.write_text(text)
        monkeypatch.setattr(claims.inspect, "getfile", lambda module: str(file))
        digests.append(claims._foreign_code({"meshwright.errors", "torch.nn.modules", "tests.tiny", __name__}))
    assert digests[0] != digests[1]
    assert all(len(found) == 2 - ("tests.tiny" not in claims.sys.modules) for found in digests)


def test_a_strategy_of_one_s_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key()

    class Mine(DefaultParallelizationStrategy):
        pass

    monkeypatch.setattr(claims, "get_parallelization_strategy", lambda model: Mine())
    assert key() != plain


def test_the_place_of_a_layer_in_a_list_is_a_size() -> None:
    assert claims._structure({"mlp_only_layers": [0, 2, 5]}) == claims._structure({"mlp_only_layers": [0]})
    assert claims._structure({"mlp_only_layers": []}) != claims._structure({"mlp_only_layers": [0]})
    assert claims._structure({"ratios": [0.5, 0.0]}) != claims._structure({"ratios": [0.5]})


# -- records ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(proof, "shipped_matrix", lambda: {"versions": {}, "date": "2026-01-02", "cells": []})
    return tmp_path / "cache" / "meshwright" / "audits"


def keep(setup: Any, say: Callable[[str], None] = pytest.fail, **values: Any) -> None:
    outcome = {"passed": True, "verdict": "PASS: all", "dtype": "float64", "layout": "dp_shard=2", "world_size": 2}
    claim = claim_of(setup)
    entry = Record(**{**outcome, "steps": 3, "worst": 2e-15, "date": today(), "seconds": 12.0, "code": claim.code, **values})
    record(claim, entry, say)


def standing(setup: Any, said: list[str] | None = None) -> Standing:
    return standing_of(
        setup, Source("my run.yaml", ("optimizer.lr=1", "data.files=[a b]")), pytest.fail if said is None else said.append
    )


def test_one_process_has_nothing_to_prove() -> None:
    assert standing(setup_of(world_size=1)) == Standing(State.ALONE, "nothing to prove")


def test_an_unproven_layout_gets_the_command() -> None:
    found = standing(setup_of())
    assert found.state is State.UNPROVEN
    command = found.line.partition("prove it: ")[2]
    expected = ["meshwright", "audit", "my run.yaml", "optimizer.lr=1", "data.files=[a b]", "--nproc", "2"]
    assert shlex.split(command) == expected
    assert standing(setup_of(parallel={"compile": True})).line.endswith(" --nproc 2 --dtype float32")


def test_a_passed_audit_proves_the_same_at_any_size() -> None:
    keep(setup_of(training={"global_batch_size": 8}))
    for setup in (setup_of(training={"global_batch_size": 8}), setup_of(LARGE, 32), setup_of()):  # several steps prove one too
        found = standing(setup)
        assert found.state is State.PROVEN
        assert ", by your audit of 20" in found.words
        assert "(float64, 3 steps, dp_shard=2, the worst gradient off by 2.0e-15)" in found.words
    assert standing(setup_of(layout={"tp": 2})).state is State.UNPROVEN


def test_one_microbatch_does_not_prove_several() -> None:
    keep(setup_of())
    assert standing(setup_of(training={"global_batch_size": 8})).state is State.UNPROVEN


def test_a_failed_audit_is_told_until_the_same_passes() -> None:
    keep(setup_of(), passed=False, verdict="FAIL: the gradient of x is lost", dtype="bfloat16")
    keep(setup_of())
    found = standing(setup_of())
    assert found.state is State.FAILED
    assert "(bfloat16, 3 steps, dp_shard=2) found LlamaForCausalLM on dp_shard wrong: the gradient of x is lost; " in found.line
    keep(setup_of(), dtype="bfloat16")
    assert standing(setup_of()).state is State.PROVEN


def of_other_code(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    known = own_code._digests()
    assert path in known
    monkeypatch.setattr(own_code, "_digests", lambda: {**known, path: "another"})


def test_an_audit_of_an_earlier_version_of_the_code_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"layout": {"tp": 2}}
    for setup in (setup_of(), setup_of(**two)):
        keep(setup)
    of_other_code(monkeypatch, "distributed/tensor/moves.py")
    assert standing(setup_of()).state is State.PROVEN
    found = standing(setup_of(**two))
    assert found.state is State.UNPROVEN
    assert (
        ", dp_shard=2) is of an earlier version of Meshwright's code; an audit took 12 s; prove it: meshwright audit"
        in found.words
    )
    keep(setup_of(**two))
    assert standing(setup_of(**two)).state is State.PROVEN


WRONG = {
    "passed": True, "verdict": "", "date": "", "dtype": "", "layout": "", "world_size": 2, "steps": "x", "worst": None,
    "seconds": 1, "code": "",
}  # fmt: skip


@pytest.mark.parametrize("content", ["", "{", "[]", '{"passed": true}', "\x00\xff", json.dumps(WRONG), None], ids=repr)
def test_a_damaged_record_is_said_and_passed_over(records: Path, content: str | None) -> None:
    keep(setup_of())
    (path,) = records.iterdir()
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_text(content)
    said: list[str] = []
    assert standing(setup_of(), said).state is State.UNPROVEN
    assert said[0].startswith(f"a recorded audit is ignored: {path}: ")


def test_a_cache_that_cannot_be_written_is_said_and_passed_over(records: Path) -> None:
    records.parent.mkdir(parents=True)
    records.write_text("a file")
    said: list[str] = []
    keep(setup_of(), said.append)
    assert len(said) == 1
    assert said[0].startswith("the verdict of the audit could not be recorded: ")
    assert standing(setup_of(), said).state is State.UNPROVEN


def test_a_record_is_whole_or_absent(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(setup_of())

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    said: list[str] = []
    keep(setup_of(), said.append, passed=False)
    assert said
    (path,) = records.iterdir()  # no temporary file is left
    assert json.loads(path.read_text())["passed"] is True


# -- the matrix ---------------------------------------------------------------------------------------------------------------


def in_matrix(monkeypatch: pytest.MonkeyPatch, *setups: Any, failed: str = "") -> None:
    content = cells_from_text(cells_as_text([cell_data(CellProof("llama", "shard 2", failed, tuple(map(claim_of, setups))))]))
    monkeypatch.setattr(proof, "shipped_matrix", lambda: content)


def test_a_cell_proves_its_family_on_its_axes_under_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    in_matrix(monkeypatch, setup_of(), setup_of(parallel={"sync": "reduce_each", "cpu_offload": True}))
    for parallel in ({}, {"sync": "reduce_each"}, {"cpu_offload": True}):
        found = standing(setup_of(LARGE, 64, parallel=parallel))
        assert found.state is State.PROVEN
        assert ", by the support matrix of 20" in found.words
        assert found.words.endswith("(llama, shard 2)")
    for other in ({"parallel": {"sync": "reshard_each"}}, {"layout": {"dp_replicate": 2}}, {"moe": {"aux_loss": 0.1}}):
        setup = setup_of(**other) if "moe" not in other else setup_of(family="mixtral", **other)
        assert standing(setup).state is State.UNPROVEN, other
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert standing(setup_of()).state is State.UNPROVEN


def test_a_cell_of_an_earlier_version_of_the_code_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    in_matrix(monkeypatch, setup_of())
    of_other_code(monkeypatch, "distributed/context/attend.py")
    assert standing(setup_of()).state is State.PROVEN
    of_other_code(monkeypatch, "distributed/data/grad_sync.py")
    found = standing(setup_of())
    assert found.state is State.UNPROVEN
    assert (
        "(llama, shard 2) is of an earlier version of Meshwright's code; an audit takes 10 s to a minute; prove it: "
        in found.words
    )


def test_a_cell_that_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    in_matrix(monkeypatch, setup_of(), failed="defer: FAIL: x")
    found = f"FAIL: the support matrix of {today()} found LlamaForCausalLM on dp_shard wrong: defer: FAIL: x"
    assert standing(setup_of()).line.startswith(found)


def test_a_damaged_matrix_is_said_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "shipped_matrix", lambda: {"versions": claims.versions()})
    said: list[str] = []
    assert standing(setup_of(), said).state is State.UNPROVEN
    assert said == ["the support matrix is ignored: KeyError: 'cells'"]


def test_the_matrix_that_comes_with_the_package_knows_the_families_of_this_version() -> None:
    from importlib import resources

    content = json.loads(resources.files("meshwright.train.proofs").joinpath(MATRIX).read_text())
    assert content["cells"]
    for cell in content["cells"]:
        assert cell["family"] in TINY_MODELS
        assert cell["failed"] == ""
    if content["versions"] == claims.versions():
        (llama,) = {cell["model"] for cell in content["cells"] if cell["family"] == "llama" and cell["outcome"] == "works"}
        assert claim_of(setup_of(LARGE)).model == llama


def test_a_proof_holds_for_every_version_of_python() -> None:
    """Files of the standard library are not part of a model: `abc` was, and with it the version of Python."""
    assert claims._foreign_code({"abc", "collections.abc", "torch.nn", "meshwright.layout"}) == []
    assert len(claims._foreign_code({__name__, "yaml"})) == 2


# -- the command --------------------------------------------------------------------------------------------------------------


def test_an_audit_of_many_ranks_keeps_inferred_axes() -> None:
    """With other numbers of processes an inferred axis would become another."""
    model = {**LARGE, "num_key_value_heads": 16}
    setup = setup_of(model, 16, layout={"tp": 16}, launch={"nproc": 8}, training={"global_batch_size": 2})
    config, nproc = audit_arguments(setup)
    assert (config.layout.dp_shard, config.launch.nproc, nproc) == (1, None, None)
    assert standing(setup).line.endswith("layout.dp_shard=1 launch.nproc=null")
    wide = setup_of(model, 32, layout={"tp": 16}, training={"global_batch_size": 2})
    assert standing(wide).line.endswith("'data.files=[a b]'")
