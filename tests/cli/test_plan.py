"""`meshwright plan` and the help of every verb, in this process."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.cli.plan import _plan_in
from meshwright.errors import ConfigError
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.result.sharding_plan import ShardingPlan

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = str(EXAMPLES / "quickstart.yaml")


def run(*arguments: str) -> str:
    # Workers of pytest-xdist have the width of their parent's terminal in COLUMNS.
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": None}, catch_exceptions=False)
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


def test_the_program_says_what_is_done_in_its_order() -> None:
    text = run("plan", QUICKSTART, "-n", "4", "--program", "layout.tp=2", "parallel.compile=true")
    kinds = [line.split()[0] for line in text.splitlines() if line.split()[:1] and line.split()[0].istitle()]
    assert list(dict.fromkeys(kinds[1:])) == ["Slice", "Compute", "Freeze", "Wrap", "Compile"]
    assert "model.layers.*.self_attn (3)" in text
    assert "axes dp_shard" in text
    full = run("plan", QUICKSTART, "-n", "4", "--program", "--full", "layout.tp=2")
    assert "model.layers.1.self_attn.o_proj.weight" in full


def test_the_timeline_of_a_pipeline(tmp_path) -> None:
    stages = ("layout.pp=2", "layout.dp_shard=1", "training.global_batch_size=16", "training.microbatch_size=4")
    lines = [line for line in run("plan", QUICKSTART, "-n", "2", "--timeline", *stages).splitlines() if line.strip()]
    assert [line.split()[:2] for line in lines if line.startswith("rank ")] == [["rank", "0"], ["rank", "1"]]
    picture = tmp_path / "schedule.svg"
    assert run("plan", QUICKSTART, "-n", "2", "--timeline-svg", str(picture), *stages) == ""
    assert picture.read_text().startswith("<svg")
    for arguments, words in (
        (("--timeline",), "the layout has no pipeline; it needs layout.pp > 1"),
        (("--timeline", "--json", *stages), "--json and --timeline: give one of them"),
        (("--timeline-svg", str(picture), "--program", *stages), "--program and --timeline: give one of them"),
        (("--timeline-svg", str(tmp_path), *stages), f"--timeline-svg={tmp_path}: is a directory"),
        (("--timeline-svg", str(tmp_path / "none" / "x.svg"), *stages), "or its directory does not exist"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            run("plan", QUICKSTART, "-n", "2", *arguments)


def test_data_that_train_would_refuse_is_said(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    content = yaml.safe_load(Path(QUICKSTART).read_text())
    content["data"] = {"files": ["gone.jsonl", str(tmp_path / "empty.txt")], "sequence_length": 256}
    (tmp_path / "empty.txt").touch()
    file.write_text(yaml.safe_dump(content))
    lines = run("plan", str(file), "-n", "2").splitlines()
    refused = [line for line in lines if line.endswith("; `train` would refuse it, a plan reads no data")]
    assert len(refused) == 2
    assert refused[0].startswith("data.files: 'gone.jsonl': no such file (working directory ")
    assert "empty.txt' is empty" in refused[1]
    assert json.loads(run("plan", str(file), "-n", "2", "--json"))["world_size"] == 2
    many = run("plan", str(file), "-n", "2", f"data.files=[{', '.join(f'{number}.txt' for number in range(9))}]")
    assert many.count("would refuse") == 5
    assert "... and 4 more such files" in many


def test_directories_that_train_would_refuse_are_said(tmp_path) -> None:
    absent = str(tmp_path / "nope")
    place = [f"output={tmp_path / 'run'}", "data.corpus=null", f"data.hub={absent}", f"adapter.path={absent}"]
    text = run("plan", QUICKSTART, "-n", "2", *place)
    assert f"data.hub='{absent}': no such directory" in text
    assert f"adapter.path='{absent}': no such directory" in text
    assert "would refuse it, a plan does not read it" in text
    text = run("plan", QUICKSTART, "-n", "2", f"checkpoint.resume={absent}")
    assert f"checkpoint.resume='{absent}': no such directory" in text


def test_json_for_programs_and_the_difference_of_two(tmp_path) -> None:
    first = run("plan", QUICKSTART, "--json", "-n", "2")
    content = json.loads(first)
    assert content["world_size"] == 2
    assert content["totals"]["traffic"]["reduce_scatters"] == 4
    assert len(ShardingPlan.from_json(first).parameters) == len(content["parameters"])
    saved = tmp_path / "plan.json"
    saved.write_text(first)
    assert run("plan", QUICKSTART, "-n", "2", "--diff", str(saved)) == "no difference\n"
    for content in ("", "[]", "{}", saved.read_text()[:-100]):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(ConfigError, match=r"--diff=.*broken.json: is no plan of `plan --json`"):
            _plan_in(tmp_path / "broken.json")
    lines = run("plan", QUICKSTART, "-n", "2", "--diff", str(saved), "parallel.sync=reduce_each").splitlines()
    assert "unit model.layers.0: sync <SyncPolicy.DEFER: 'defer'> -> <SyncPolicy.REDUCE_EACH: 'reduce_each'>" in lines


def test_every_axis_at_once_is_planned() -> None:
    overrides = [
        "layout.tp=2",
        "layout.cp=2",
        "layout.pp=3",
        "model.config.num_attention_heads=6",
        "training.global_batch_size=96",
    ]
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


def test_the_version() -> None:
    import meshwright

    assert run("--version") == f"meshwright {meshwright.__version__}\n"


def test_without_a_world_size_the_file_says_it() -> None:
    assert "2 ranks (dp_shard=2)" in run("plan", QUICKSTART)  # launch.nproc
    assert "4 ranks (dp_replicate=2 dp_shard=2)" in run("plan", QUICKSTART, "layout.dp_replicate=2", "layout.dp_shard=2")


def test_prefetching_further_than_there_are_layers_is_prefetching_all() -> None:
    def plan(ahead: int) -> dict[str, object]:
        choices = [f"parallel.prefetch_{way}={ahead}" for way in ("forward", "backward")]
        return json.loads(run("plan", QUICKSTART, "--json", "-n", "2", "parallel.sync=reduce_each", *choices))["totals"]

    assert plan(1) != plan(10**9) == plan(3)


def test_the_summary_has_the_bytes_of_every_axis() -> None:
    tp2 = run("plan", QUICKSTART, "-n", "4", "layout.tp=2")
    (line,) = [line for line in tp2.splitlines() if "all-reduced over tp per step" in line]
    found = re.search(r"per step\s+([\d.]+) (\w+)\s+([\d,]+) collectives", line)
    assert found is not None
    assert found.group(2) in ("KiB", "MiB", "GiB")
    assert f"{found.group(3)} all_reduce" in tp2.replace("per step: ", "")  # the table's own count
    assert "all-reduced over data ranks per step" in tp2
    assert "Tensor parallel, as transformers declares it for this model" in tp2
    assert "not given" not in tp2
    assert "all-reduced per step" in run("plan", QUICKSTART, "-n", "4")
    moe = "{model_type: mixtral, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    moe += "num_key_value_heads: 2, num_local_experts: 4, num_experts_per_tok: 2, max_position_embeddings: 256}"
    ep2 = run("plan", QUICKSTART, "-n", "2", f"model.config={moe}", "layout.ep=2", "--json")
    plan = ShardingPlan.from_json(ep2)
    (exchanged,) = activation_traffic(plan)
    # 4 sequences of 256 tokens, each to 2 experts, there and back, forward and backward; 2 layers, 2 microbatches, fp32
    assert exchanged.size == 4 * 256 * 2 * 32 * 4 * 4 * 2 * 2
    assert exchanged.calls == 2 * 2 * 5


def test_doctor_finds_all_it_needs() -> None:
    facts = json.loads(run("doctor", "--json"))
    assert {"meshwright", "torch", "transformers", "python", "cpus", "gpus"} <= facts.keys()


@pytest.mark.thorough
@pytest.mark.command
def test_an_8b_model_at_1024_ranks_plans_within_a_gibibyte() -> None:
    script = (
        "import sys; from meshwright.cli.main import app; app(sys.argv[1:], standalone_mode=False);"
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0], file=sys.stderr)"  # not that of the parent
    )
    arguments = [sys.executable, "-c", script, "plan", str(EXAMPLES / "llama_8b.yaml"), "-n", "1024", "--json"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=True)
    assert int(result.stderr.split()[-1]) < 2**20  # KiB
    totals = json.loads(result.stdout)["totals"]
    assert totals["parameters"] == 8_030_261_248
    # 128,256 rows of embedding and head are padded to 126 a rank; everything else divides by 1,024.
    padding = 2 * (126 * 1024 - 128256) * 4096
    assert totals["parameter_bytes"] == (8_030_261_248 + padding) * 4 // 1024


def test_a_file_has_one_line_for_each_row(tmp_path: Path) -> None:
    """A terminal breaks lines at its width; a file has none, unless COLUMNS says so."""
    command = ("plan", QUICKSTART, "-n", "2", "--full", "--gpu", "h100")
    pages = {}
    for columns in (None, "60"):
        result = CliRunner().invoke(app, list(command), env={"COLUMNS": columns}, catch_exceptions=False)
        pages[columns] = result.output.splitlines()
    name = "model.layers.1.post_attention_layernorm.weight"
    (line,) = (line for line in pages[None] if name in line and "Shard" in line)
    assert not any(name in line for line in pages["60"])
    assert len(line) > 80
    table = [row for row in pages[None] if row.startswith(" model.")]
    assert all(len(row.split()) > 3 for row in table)  # no rest of a cell of the row above
