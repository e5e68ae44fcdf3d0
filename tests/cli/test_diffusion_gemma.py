"""`plan`, `train` and `generate` with DiffusionGemma."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome
from tests.diffusion_gemma import RUN
from tests.train.runs import write_config

Meshwright = Callable[..., Outcome]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.thorough
def test_train_and_generate(meshwright: Meshwright, tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus)
    trained = meshwright("train", config, *RUN, "export=true", "sample={prompts: [abc], max_new_tokens: 8}")
    assert (trained.code, trained.error) == (0, "")
    assert "denoising loss" in trained.out
    assert trained.out.splitlines()[-1].startswith("abc")
    export = tmp_path / "out" / "export"

    found = meshwright("generate", export, "abc", "--max-new-tokens", 12, "--steps", 5)
    assert found.code == 0
    assert found.out.startswith("abc")
    drafts = found.error.splitlines()
    assert len(drafts) in (5, 10)  # two canvases of eight tokens, if the text does not end in the first
    assert re.match(r"canvas 1 step  5  uncertain   \d of 8  ", drafts[4])

    quiet = meshwright("generate", export, "abc", "--max-new-tokens", 12, "--steps", 5, "--quiet")
    assert (quiet.out, quiet.error) == (found.out, "")
    refused = meshwright("generate", export, "abc", "--temperature", 0)
    assert (refused.code, refused.error.count("temperature=0")) == (2, 1)


def test_steps_of_denoising_are_for_what_denoises(meshwright: Meshwright, tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus)
    assert meshwright("train", config, "training.steps=1", "export=true").code == 0
    refused = meshwright("generate", tmp_path / "out" / "export", "abc", "--steps", 5)
    assert refused.code == 2
    assert "steps=5: LlamaForCausalLM generates one token at a time" in refused.error


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [8, 64])
def test_the_released_shapes_are_planned_without_weights(meshwright: Meshwright, ranks: int) -> None:
    found = meshwright("plan", EXAMPLES / f"diffusion_gemma_26b_{ranks}gpu.yaml", "--json")
    assert found.code == 0, found.error
    plan = json.loads(found.out)
    assert plan["world_size"] == ranks
    sizes = {row["name"]: row["shape"] for row in plan["parameters"]}
    assert len(sizes) == 985
    assert sizes["model.encoder.language_model.layers.5.experts.gate_up_proj"] == [128, 1408, 2816]


@pytest.mark.thorough
@pytest.mark.command
def test_the_quickstart_learns_to_denoise(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright.cli.main", "train", str(EXAMPLES / "diffusion_gemma_quickstart.yaml")]
    command += [f"output={tmp_path}/run", "launch.device=cpu", "training.steps=100"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["eval/denoising_loss"] for row in rows if "eval/denoising_loss" in row]
    assert held_out[-1] < held_out[0] - 1.2
    assert "\nimport os" in result.stdout
