"""`meshwright plan` and the help of every verb, in this process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.plan.sharding_plan import ShardingPlan

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = str(EXAMPLES / "quickstart.yaml")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_tables_for_people() -> None:
    text = run("plan", QUICKSTART, "--world-size", "4", "layout.dp_replicate=2")
    assert "4 ranks (dp_replicate=2 dp_shard=2)" in text
    assert "all-gathered per step" in text
    assert "model.layers.*.self_attn.q_proj.weight (3)" in text
    assert "dp_replicate: Replicate()" in text
    full = run("plan", QUICKSTART, "--full")
    assert "model.layers.1.self_attn.q_proj.weight" in full


def test_json_for_programs_and_the_difference_of_two(tmp_path) -> None:
    first = run("plan", QUICKSTART, "--json", "-n", "2")
    content = json.loads(first)
    assert content["world_size"] == 2
    assert content["totals"]["traffic"]["reduce_scatters"] == 4
    assert len(ShardingPlan.from_json(first).parameters) == len(content["parameters"])
    saved = tmp_path / "plan.json"
    saved.write_text(first)
    assert run("plan", QUICKSTART, "-n", "2", "--diff", str(saved)) == "no difference\n"
    lines = run("plan", QUICKSTART, "-n", "2", "--diff", str(saved), "parallel.sync=reduce_each").splitlines()
    assert "unit model.layers.0: sync <SyncPolicy.DEFER: 'defer'> -> <SyncPolicy.REDUCE_EACH: 'reduce_each'>" in lines


def test_axes_that_are_not_carried_out_yet_are_planned() -> None:
    overrides = ["layout.tp=2", "layout.cp=2", "layout.pp=3", "model.config.num_attention_heads=6"]
    content = json.loads(run("plan", QUICKSTART, "-n", "24", "--json", *overrides))
    assert content["layout"] == {"pp": 3, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 1}
    assert {row["stage"] for row in content["parameters"]} == {0, 1, 2}


def test_a_run_of_epochs_is_planned_without_its_data() -> None:
    epochs = ["training.steps=null", "training.epochs=3", "data.corpus=null", "data.files=[/nowhere.jsonl]"]
    assert run("plan", QUICKSTART, "-n", "2", "--json", *epochs) == run("plan", QUICKSTART, "-n", "2", "--json")
    content = yaml.safe_load(run("plan", QUICKSTART, "--print-config", *epochs))
    assert (content["training"]["steps"], content["training"]["epochs"]) == (None, 3)


def test_print_config_is_complete_and_loads_back() -> None:
    text = run("plan", QUICKSTART, "--print-config", "optimizer.lr=1e-4")
    content = yaml.safe_load(text)
    assert content["optimizer"]["lr"] == 1e-4
    assert content["optimizer"]["eps"] == 1e-8
    assert run("train", QUICKSTART, "--print-config", "optimizer.lr=1e-4") == text


@pytest.mark.parametrize("verb", ["plan", "train", "export", "generate", "doctor"])
def test_help_of_every_verb(verb: str) -> None:
    text = run(verb, "--help")
    assert "Usage" in text
    assert "--debug" in text
    assert verb in run("--help")


def test_doctor_finds_all_it_needs() -> None:
    facts = json.loads(run("doctor", "--json"))
    assert {"meshwright", "torch", "transformers", "python", "cpus", "gpus"} <= facts.keys()


@pytest.mark.command
def test_an_8b_model_at_1024_ranks_plans_within_a_gibibyte() -> None:
    script = (
        "import resource, sys; from meshwright.cli.main import app; app(sys.argv[1:], standalone_mode=False);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    arguments = [sys.executable, "-c", script, "plan", str(EXAMPLES / "llama_8b.yaml"), "-n", "1024", "--json"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    assert int(result.stderr.split()[-1]) < 2**20  # KiB
    totals = json.loads(result.stdout)["totals"]
    assert totals["parameters"] == 8_030_261_248
    # 128,256 rows of embedding and head are padded to 126 a rank; everything else divides by 1,024.
    padding = 2 * (126 * 1024 - 128256) * 4096
    assert totals["parameter_bytes"] == (8_030_261_248 + padding) * 4 // 1024
