"""The README's first command, to its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.mark.command
@pytest.mark.parametrize(
    ("steps", "every", "drop"), [(12, 6, 1.0), pytest.param(150, 50, 2.0, marks=pytest.mark.thorough)], ids=["12", "all"]
)
def test_quickstart_learns_saves_exports_and_samples(tmp_path: Path, steps: int, every: int, drop: float) -> None:
    command = [
        sys.executable,
        "-m",
        "meshwright.cli.main",
        "train",
        str(EXAMPLE),
        f"output={tmp_path}/run",
        "launch.device=cpu",
        *([] if steps == 150 else [f"training.steps={steps}", f"checkpoint.every={every}", "schedule.warmup_steps=2"]),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    for said in ("2 ranks (dp_shard=2)", "all-gathered per step", f"held-out loss after {steps} steps", "def main("):
        assert said in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert held_out[-1] < held_out[0] - drop
    saved = [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert saved == [f"step-{step:08}" for step in (steps - every, steps)]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    with torch.no_grad():
        ids = tokenizer("import os\nimport sys\n", return_tensors="pt")["input_ids"]
        assert float(model(ids, labels=ids).loss) < 7.6  # below what it started from, ln(2048)


@pytest.mark.command
@pytest.mark.thorough
def test_four_processes_of_a_pipeline_learn(tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}/run", "launch.device=cpu", "training.steps=40", "training.eval_every=0"]
    command = [sys.executable, "-m", "meshwright.cli.main", "train", str(EXAMPLE.with_name("pipeline_quickstart.yaml"))]
    result = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    for said in ("4 ranks (pp=2 dp_shard=2)", "Pipeline: zbv, 4 microbatches in a run", "receive buffers", "def main("):
        assert said in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (row["eval/loss"] for row in rows if "eval/loss" in row)
    assert last < first - 1.0


@pytest.mark.command
@pytest.mark.thorough
def test_two_processes_that_share_long_sequences_learn(tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}/run", "launch.device=cpu", "training.steps=30", "training.eval_every=0"]
    command = [sys.executable, "-m", "meshwright.cli.main", "train", str(EXAMPLE.with_name("long_context.yaml")), *overrides]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    for said in (
        "2 ranks (cp=2)",
        "Context parallel: gather, zigzag",
        "all-gathered over cp per step",
        "the most attention has",
    ):
        assert said in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (row["eval/loss"] for row in rows if "eval/loss" in row)
    assert last < first - 1.0


@pytest.mark.command
@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", "dp_replicate=2", "pp=2", "cp=2"])
def test_muon_learns_on_every_layout(tmp_path: Path, layout: str) -> None:
    processes = 2 if layout == "dp_shard=2" else 4
    overrides = [f"output={tmp_path}/run", "launch.device=cpu", "training.steps=12", "training.eval_every=0"]
    overrides += [
        "training.eval_sequences=16",
        "schedule.warmup_steps=2",
        f"launch.nproc={processes}",
        f"layout.{layout}",
    ]
    command = [sys.executable, "-m", "meshwright.cli.main", "train", str(EXAMPLE.with_name("muon.yaml"))]
    wide = {**os.environ, "COLUMNS": "160"}
    result = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=900, cwd=tmp_path, env=wide)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "AdamW, two moments; Muon, one moment" in result.stdout
    assert "exchanged (all-to-all) over" in result.stdout
    assert "held by Muon in an update" in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (row["eval/loss"] for row in rows if "eval/loss" in row)
    assert last < first - 1.0
