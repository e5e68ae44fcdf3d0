"""The code of docs/adding-a-family.md does what the page says; so do the sections of docs/data.md."""

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.fsdp import FSDPModule

from meshwright.data.rows.columns import FORMATS
from meshwright.data.rows.formats import SPEAKERS
from meshwright.train.config import OptimizerConfig, RunConfig, load_config
from meshwright.train.schema.optimizer_kinds import SCHEMAS
from meshwright.user_code import import_modules
from tests.cli.conftest import meshwright, start, warm
from tests.harness import run_ranks
from tests.train.conftest import corpus

__all__ = ["corpus", "meshwright", "start", "warm"]

PAGE = Path(__file__).parents[1] / "docs" / "adding-a-family.md"


def test_the_sections_of_the_page_on_data_are_legal() -> None:
    needed = {
        "data": {"files": ["a.jsonl"], "sequence_length": 8},
        "training": {"steps": 1, "global_batch_size": 1},
    }
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.with_name("data.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        found = {"output": "runs/x", "model": {"path": "x"}, **needed, **yaml.safe_load(block)}
        assert RunConfig.model_validate(found)


def test_the_guide_has_legal_keys_and_links(tmp_path: Path) -> None:
    guide = PAGE.with_name("guide.md")
    text = guide.read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(block)
    overrides = re.findall(r"`((?:layout|parallel|training)\.\w+(?:=|: )\w+)`", text)
    assert len(overrides) >= 9
    for override in overrides:
        load_config(tmp_path / "run.yaml", [override.replace(": ", "=")])
    for link in re.findall(r"\]\(([\w./-]+\.md)", text):
        assert (guide.parent / link).is_file(), link


def test_the_pictures_are_those_of_their_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(PAGE.parent / "pictures" / "make.py"))
    monkeypatch.setitem(script["picture"].__globals__, "HERE", tmp_path)
    script["main"]()
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert made == {file.name: file.read_text() for file in (PAGE.parent / "pictures").glob("*.svg")}
    pages = "".join(file.read_text() for file in PAGE.parent.glob("*.md"))
    assert all(f"(pictures/{name})" in pages for name in made)


def test_the_page_on_data_has_every_format_and_its_columns() -> None:
    page = PAGE.with_name("data.md").read_text()
    for name, layout in FORMATS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert all(f"`{column}`" in row for column in layout.names if column not in layout.extra)
        assert all(f"| `{column}` |" in page for column in layout.extra)
    for speaker in SPEAKERS:
        assert speaker in page


def test_the_page_on_optimizers_has_every_kind_and_option() -> None:
    page = PAGE.with_name("optimizers.md")
    text = page.read_text()
    kinds, names = text.split("## Bytes")[0], PAGE.with_name("from-automodel.md").read_text()
    for kind, schema in SCHEMAS.items():
        (row,) = [line for line in kinds.splitlines() if line.startswith(f"| `{kind}` |")]
        shared = kind in ("adamw4bit", "adamwfp8")  # as the row above
        assert all(f"`{option}`" in row for option in schema.model_fields if not shared)
        assert f"| `kind: {kind}` |" in names
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert OptimizerConfig.model_validate(yaml.safe_load(block)["optimizer"])
    for link in re.findall(r"\]\(([\w./-]+\.\w+)", text):
        assert (page.parent / link).is_file(), link
    for test in re.findall(r"tests/[\w/]+\.py", text):
        assert (page.parents[1] / test).is_file(), test


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the blocks of the page that begin with the name of a file; it is the working directory."""
    found = re.findall(r"^```\w+\n# (\S+\.\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in found] == ["my_family.py", "plan_it.py", "prove_it.py", "stablelm_family.py", "run.yaml"]
    for name, text in found:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(file: str) -> dict[str, Any]:
    """In a rank, which is a process of its own."""
    sys.path.insert(0, ".")
    return runpy.run_path(file)


def test_no_block_of_python_or_yaml_is_left_out() -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [kind for kind, text in blocks if not text.startswith("# ")] == ["bash"]


def test_a_plain_family_is_planned(files: Path) -> None:
    def on_rank(rank: int) -> dict[str, Any]:
        found = run("plan_it.py")
        return {"family": found["plan"].family, "layout": str(found["plan"].layout), "up": found["up"]}

    (found,) = run_ranks(on_rank, 1, group=False)
    assert found["family"] == "MyModel"
    assert found["layout"] == "dp_shard=8 tp=8"
    assert dict(found["up"].placements) == {"dp_shard": "Shard(0)", "tp": "Shard(0)"}
    assert found["up"].local_shape == (4 * 4096 // 64, 4096)


def test_a_plain_family_is_parallelized_and_has_the_gradients_of_one_process(files: Path) -> None:
    def on_rank(rank: int) -> dict[str, Any]:
        found = run("prove_it.py")
        model = found["model"]
        units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        local = tuple(model.blocks[0].up.weight.to_local().shape)
        return {"worst": found["worst"], "units": units, "local": local, "layout": str(found["manager"].mesh.layout)}

    for found in run_ranks(on_rank, 2):
        assert 0 < found["worst"] < 1e-5
        assert found["units"] == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert found["local"] == (64, 32)
        assert found["layout"] == "tp=2"


@pytest.mark.thorough
@pytest.mark.command
def test_a_family_of_transformers_is_planned_and_audited(files: Path, meshwright: Callable[..., Any]) -> None:
    planned = meshwright("plan", "run.yaml", "--world-size", 8, "--json")
    assert planned.code == 0, planned.error
    styles = {row["module"]: row["style"] for row in json.loads(planned.out)["tensor_parallel"]}
    assert styles["model.layers.3.mlp.down_proj"] == "rowwise"

    audited = meshwright("audit", "run.yaml", "--drawn", "--nproc", 2, "--steps", 1)
    assert audited.code == 0, audited.out + audited.error
    assert audited.out.splitlines()[-1].startswith("PASS")


UP = '"model.layers.*.mlp.up_proj": "colwise"'


@pytest.mark.sampled(1)
@pytest.mark.command
@pytest.mark.parametrize(
    ("instead", "code", "told"),
    [
        ('"model.layers.*.mlp.up_proj": "rowwise"', 1, "shapes cannot be multiplied"),
        (UP + ', "model.layers.*.input_layernorm": "replicated_with_grad_allreduce"', 2, "input_layernorm"),
    ],
    ids=["shapes", "refused"],
)
def test_a_wrong_style_is_found(files: Path, meshwright: Callable[..., Any], instead: str, code: int, told: str) -> None:
    file = files / "stablelm_family.py"
    file.write_text(file.read_text().replace(UP, instead))
    audited = meshwright("audit", "run.yaml", "--drawn", "--nproc", 2, "--steps", 1)
    assert audited.code == code
    assert told in [*audited.out.splitlines(), *audited.error.splitlines()][-1]


@pytest.mark.thorough
@pytest.mark.command
def test_a_run_trains_exports_and_exports_again_with_its_imports(files: Path, meshwright: Callable[..., Any]) -> None:
    small = ["training.steps=2", "data.sequence_length=32", "data.corpus=null", "data.files=[text.txt]", "data.eval_fraction=0"]
    (files / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
    trained = meshwright("train", "run.yaml", *small, "tokenizer.vocab_size=280")
    assert trained.code == 0, trained.error
    assert meshwright("export", "runs/stablelm", "out").code == 0
    (files / "stablelm_family.py").rename(files / "elsewhere.py")
    lost = meshwright("export", "runs/stablelm", "again")
    assert lost.code == 2
    assert "imports: 'stablelm_family' cannot be imported" in lost.error


@pytest.mark.command
def test_what_cannot_be_imported_is_named_in_one_report(files: Path, meshwright: Callable[..., Any]) -> None:
    (files / "broken.py").write_text("1 / 0")
    (files / "second.py").write_text(
        "from stablelm_family import StableLmStrategy\nimport meshwright as mw\n"
        "@mw.register_parallel_strategy('StableLmForCausalLM')\nclass Other(StableLmStrategy): pass\n"
    )
    for verb in ("plan", "train", "audit"):
        ended = meshwright(verb, "run.yaml", "imports=[absent.module, broken, second, ./my_family.py, stablelm_family]")
        assert ended.code == 2
        lines = ended.error.splitlines()
        assert len(lines) == 4, ended.error
        assert lines[0].startswith("error: imports: 'absent.module' cannot be imported: ModuleNotFoundError")
        assert lines[1] == "error: imports: 'broken' cannot be imported: ZeroDivisionError: division by zero [config.imports]"
        assert "'second': 'StableLmForCausalLM' has the strategy stablelm_family.StableLmStrategy already" in lines[2]
        assert "second.Other" in lines[2]
        assert "'./my_family.py' is no name of a module" in lines[3]


def test_the_working_directory_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("meshwright_test_json.py").write_text("value = 1")
    import_modules(["json", "meshwright_test_json"])
    assert sys.path[-1] == str(tmp_path)
    assert sys.modules.pop("meshwright_test_json").value == 1
