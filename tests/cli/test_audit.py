"""`meshwright audit` as a command: what it says, what it leaves behind, and how it ends."""

import json
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import pytest

from tests.audit import plants

ROOT = Path(__file__).parents[2]


def plant(bug: Callable[..., None]) -> Callable[[], None]:
    """Before the command: have every case of it carry a bug."""

    def before() -> None:
        from meshwright.audit.conduct import Auditor

        Auditor.audit = partialmethod(Auditor.audit, plants=[bug])  # type: ignore[method-assign, assignment]

    return before


@pytest.mark.sampled(1)
@pytest.mark.command
@pytest.mark.parametrize("processes", [2, 4])
def test_the_quickstart_passes_within_a_minute(meshwright, tmp_path: Path, processes: int, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    outcome = meshwright("audit", "examples/quickstart.yaml", "--nproc", processes, "--json", tmp_path / "report.json")
    assert (outcome.code, outcome.error) == (0, "")
    assert outcome.seconds < 60
    last = outcome.out.splitlines()[-1]
    assert last.startswith(f"PASS: LlamaForCausalLM, {processes} ranks (dp_shard={processes}), float64: 21 gradients as in one")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is True
    assert report["verdict"] == last
    assert 0 < report["worst_gradient"] < 1e-12
    assert {"model.config.hidden_size", "data.sequence_length"} <= {change["key"] for change in report["changes"]}
    for key in ("model.config.hidden_size", "192", "64"):
        assert key in outcome.out


@pytest.mark.thorough
def test_any_layout_of_any_dtype_and_nothing_is_left_behind(meshwright, config: str, tmp_path: Path) -> None:
    for arguments in (
        ["--nproc", 4, "--dtype", "bfloat16", "--steps", 1, "layout.dp_replicate=2", "parallel.sync=reduce_each"],
        ["--nproc", 2, "--dtype", "float32", "--full", "parallel.cpu_offload=true", "training.clip_norm=null"],
        ["--drawn", "data.files=[nowhere/*.txt]", "data.packing=pad", "parallel.activation_checkpointing=full"],
    ):
        outcome = meshwright("audit", config, *arguments)
        assert outcome.code == 0, outcome.error + outcome.out
        assert outcome.out.splitlines()[-1].startswith("PASS: ")
    assert not (tmp_path / "out").exists()


def test_a_bug_ends_with_1_and_its_name_in_the_last_line(meshwright, config: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    outcome = meshwright("audit", config, "--nproc", 2, "--json", file, before=plant(plants.divided_twice))
    assert outcome.code == 1
    last = outcome.out.splitlines()[-1]
    assert last.startswith("FAIL: the gradient of all 9 parameters of unit model.layers.1 is 0.5 times that of one process")
    assert "FAIL" in outcome.out.partition("Worst comparisons")[2]
    report = json.loads(file.read_text())
    assert report["passed"] is False
    assert report["findings"][0]["kind"] == "gradient"
    failed = [row for row in report["rows"] if row["what"] == "gradient" and not row["passed"]]
    assert {row["unit"] for row in failed} == {"model.layers.1"}
    assert all(abs(row["ratio"] - 0.5) < 1e-9 for row in failed)


def test_a_hang_ends_with_1_and_says_who_waits_where(meshwright, config: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    before = plant(plants.another_collective_on_rank_1)
    outcome = meshwright("audit", config, "--nproc", 2, "--timeout", 3, "--json", file, before=before)
    assert outcome.code == 1
    assert outcome.seconds < 40
    assert "error: ranks disagree about collective" in outcome.error
    assert "Traceback" not in outcome.error
    assert json.loads(file.read_text())["verdict"].startswith("HANG: ranks disagree about collective")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "float16"], "dtype='float16': legal are float64, float32, bfloat16"),
        (["layout.pp=40"], "pp=40: 2 layers make at most 2 stages"),
        (["layout.dp_replicate=3", "--nproc", "2", "--full"], "dp_replicate=3"),
        (["data.files=[nowhere/*.txt]"], "glob matches no file"),
        (["data.files=[nowhere/*.txt]"], "--drawn audits with random tokens"),
        (["model.config.num_attention_heads=5"], "model"),
    ],
    ids=str,
)
def test_what_cannot_be_audited_is_refused_with_2(meshwright, config: str, arguments: list[str], words: str) -> None:
    outcome = meshwright("audit", config, *arguments)
    assert outcome.code == 2, outcome.out
    assert words in outcome.error
    assert "Traceback" not in outcome.error


def test_without_a_configuration_it_says_what_is_missing(meshwright) -> None:
    outcome = meshwright("audit")
    assert outcome.code == 2
    assert "Missing argument 'CONFIG'" in outcome.error
