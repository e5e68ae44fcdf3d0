"""The coverage page: cells of default configs, resuming, parts, and the reasons of refusals."""

import json
from importlib import resources
from pathlib import Path

import pytest

from maintain import coverage
from maintain.cells import Cell, Outcome, Place
from maintain.default_configs import model_types
from maintain.reasons import CODES, EXPLAINED, OTHER, reason_of
from maintain.variants import parsed, variants_of
from meshwright.audit.case import Case
from meshwright.audit.causes.findings import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.data import draw_documents
from meshwright.audit.ready import make_ready
from meshwright.error_codes import CODES as ERROR_CODES
from meshwright.errors import ConfigError
from meshwright.models.model_config import ModelConfig
from meshwright.shrink.run import shrink
from meshwright.train.proofs.shipped_cells import COVERAGE
from meshwright.train.start.setup import make_setup
from tests.harness import OF_PINNED

SHARD, TP = (next(place for place in coverage.COLUMNS if place.label == label) for label in ("shard 2", "tp 2"))


def test_cells_are_audited_once_and_others_stay(tmp_path: Path) -> None:
    page, data, said = tmp_path / "coverage.md", tmp_path / "coverage.json", []
    assert coverage.write_coverage(page, data, said.append, ["jetmoe", "gptj"], [SHARD, TP])
    rows = {(row["family"], row["layout"]): row for row in json.loads(data.read_text())["cells"]}
    assert [rows[of, "shard 2"]["outcome"] for of in ("jetmoe", "gptj")] == ["works", "works"]
    assert (rows["jetmoe", "tp 2"]["outcome"], rows["gptj", "tp 2"]["outcome"]) == ("refused", "works")
    assert reason_of(rows["jetmoe", "tp 2"]["code"]) == "styles"
    assert len(rows["gptj", "tp 2"]["model"]) == 20
    text = page.read_text()
    assert "| shard 2 | 2 | 0 | 0 |" in text
    assert "| tp 2 | 1 | 1 | 0 |" in text
    assert "- *styles* (1 cells): " in text
    assert not list(tmp_path.glob("*.partial"))
    assert coverage.write_coverage(page, data, said.append, ["dbrx"], [SHARD])  # the others stay
    assert len(json.loads(data.read_text())["cells"]) == 5


@OF_PINNED
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model_type", "label"),
    [
        ("deepseek_v2", "tp 2"),  # mla_kv_a_proj
        ("granite_swa", "tp 2"),  # local_params
        ("aria_text", "tp 2"),  # packed_rowwise
        ("lfm2", "tp 2"),  # an embedding that is tied to a sliced head
        ("stablelm", "tp 2 seq"),  # derived styles on a traced stream
        ("gpt2", "tp 2"),  # matrices that are stored transposed
        ("mvp", "tp 2"),  # an attention that counts heads and their width
        ("olmo", "pp 2"),  # a norm without parameters after the layers
        ("hrm_text", "shard 2"),  # layers that run in cycles, some of them without gradient
        ("gemma3", "shard 2"),  # a tower that does not run
        ("zamba2", "shard 2"),  # modules whose parameters are tied
        ("inkling2_text", "shard 2"),  # in float32
        ("glm4_moe use_qk_norm=true", "tp 2"),  # a switch that released models flip
    ],
)
def test_what_no_family_describes_is_exact(tmp_path: Path, model_type: str, label: str) -> None:
    place = next(place for place in coverage.COLUMNS if place.label == label)
    with Auditor() as auditor:
        cell = coverage._cell(auditor, model_type, place, tmp_path)
    assert (cell.outcome, cell.note.partition(" only")[0]) in (
        (Outcome.WORKS, ""),
        (Outcome.WORKS, "with data.packing=pad"),
    )


def test_switches_that_make_another_model_are_its_variants() -> None:
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = variants_of(ModelConfig(config={"model_type": "mixtral", **sizes, "num_key_value_heads": 2}))
    assert found == {"tie_word_embeddings": True, "sliding_window": 8}
    glm = {**sizes, "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1}
    found = variants_of(ModelConfig(config={"model_type": "glm4_moe", **glm}))
    assert found.items() >= {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True}.items()
    assert not found.keys() & {"use_cache", "is_decoder", "hidden_size"}


def test_variants_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_cell", lambda *_: Cell(Outcome.WORKS, {"float64": 1e-16}))
    paths = (tmp_path / "coverage.md", tmp_path / "coverage.json")
    names = list(coverage.names_of_variants(["llama"]))
    assert "llama attention_bias=true" in names
    assert coverage.write_coverage(*paths, print, ["llama"], [SHARD])
    assert coverage.write_coverage(*paths, print, names, [SHARD, TP])
    page = paths[0].read_text()
    assert "has 1 model types" in page
    assert "| shard 2 | 1 | 0 | 0 |" in page
    assert f"| shard 2 | {len(names)} | 0 | 0 |" in page
    assert "| llama attention_bias=true | 1e-16 | 1e-16 |" in page
    run = coverage.run_of("llama attention_bias=true", SHARD, tmp_path)
    assert (run.model.config or {})["attention_bias"] is True


def test_what_is_wrong_with_meshwright_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(coverage, "case_of", broken)
    with Auditor() as auditor:
        cell = coverage._cell(auditor, "llama", SHARD, tmp_path)
    assert (cell.outcome, cell.note) == (Outcome.FAILS, "KeyError: 'a defect'")


def test_a_page_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def cell(auditor: object, model_type: str, place: coverage.Place, folder: Path) -> Cell:
        seen.append((model_type, place.label))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return Cell(Outcome.WORKS, {"float64": 1e-16})

    monkeypatch.setattr(coverage, "_cell", cell)
    paths = (tmp_path / "coverage.md", tmp_path / "coverage.json")
    with pytest.raises(KeyboardInterrupt):
        coverage.write_coverage(*paths, print, ["gpt2", "gptj"], [SHARD, TP])
    assert coverage.write_coverage(*paths, print, ["gpt2", "gptj"], [SHARD, TP])
    assert seen == [("gpt2", "shard 2"), ("gpt2", "tp 2"), ("gptj", "shard 2"), ("gptj", "shard 2"), ("gptj", "tp 2")]


def test_parts() -> None:
    types = model_types()
    parts = [coverage.part_of(types, f"{number}/10") for number in range(1, 11)]
    assert sorted(name for part in parts for name in part) == types
    for wrong in ("0/10", "11/10", "1", "a/b", "-1/3"):
        with pytest.raises(ConfigError, match="legal is K/N with K from 1 to N"):
            coverage.part_of(types, wrong)


@OF_PINNED
def test_the_page_that_is_here() -> None:
    """Every model type is on it, no cell failed, and each refusal has a reason that the page explains."""
    rows = json.loads(resources.files("meshwright.train.proofs").joinpath(COVERAGE).read_text())["cells"]
    assert {row["family"] for row in rows if not parsed(row["family"])[1]} == set(model_types())
    assert len({row["family"] for row in rows if parsed(row["family"])[1]}) > 250
    assert [row["family"] for row in rows if row["outcome"] == "fails"] == []
    refused = [row for row in rows if row["outcome"] in ("refused", "not yet")]
    assert [row["note"] for row in refused if reason_of(row["code"]) == OTHER] == []
    page = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text()
    used = {reason_of(row["code"]) for row in refused} - {"dense", "unbuilt"}
    assert all(f"- *{key}* (" in page and EXPLAINED[key] in page for key in used)


def test_each_reason_has_codes_that_exist() -> None:
    assert set(CODES.values()) == EXPLAINED.keys() - {OTHER}
    assert CODES.keys() - ERROR_CODES.keys() == {f"audit.{Kind.RANDOM}"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_share_key_value_heads_in_models_that_no_family_describes(tmp_path: Path, sequence_parallel: bool) -> None:
    place = Place("tp 4", 4, {"dp_shard": 1, "tp": 4}, sequence_parallel=sequence_parallel)
    run = coverage.run_of("granite", place, tmp_path, "pad")
    model = run.model.model_copy(update={"config": {**(run.model.config or {}), "num_key_value_heads": 2}})
    run, _, _ = shrink(run.model_copy(update={"model": model}), 4)
    ready, _ = make_ready(run, "float64", 1, tmp_path)
    vocabulary = (ready.model.config or {})["vocab_size"]
    draw_documents(vocabulary, 32, 100, 0, tmp_path / "store")
    styles = {row.style for row in make_setup(ready, 4).plan.tensor_parallel}
    assert {"grouped_colwise", "region"} <= styles
    with Auditor() as auditor:
        assert auditor.audit(Case(ready, tmp_path / "store", 1), 4).passed
