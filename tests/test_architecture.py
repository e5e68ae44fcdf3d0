"""Imports between rooms run one way, and the documentation of the configuration is that of the schema."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshwright.train.config import load_config
from meshwright.train.reference import reference

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"

MAY_IMPORT = {
    "errors": set(),
    "paths": set(),
    "layout": {"errors"},
    "plan": {"layout", "errors"},
    "distributed": {"moe", "plan", "layout", "errors"},  # of one floor, as DESIGN section 2 has it
    "moe": {"distributed", "plan", "layout", "errors"},
    "ranks": {"distributed", "plan", "layout", "errors"},
    "models": {"distributed", "moe", "plan", "layout", "paths", "errors"},
    "data": {"paths", "errors"},
    "checkpoint": {"data", "models", "distributed", "moe", "plan", "layout", "paths", "errors"},
    "train": {"checkpoint", "data", "models", "distributed", "moe", "ranks", "plan", "layout", "paths", "errors"},
    "audit": {"train", "checkpoint", "data", "models", "distributed", "moe", "ranks", "plan", "layout", "paths", "errors"},
    "__main__": {"cli"},
    "cli": {"audit", "train", "checkpoint", "models", "distributed", "moe", "ranks", "plan", "layout", "errors"},
}
EXCEPTIONS = {("distributed/strategy.py", "models")}
"""Who asks for the strategy of a model gets those of Meshwright's own families too, and only models know themselves."""


def imports_of(file: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names if node.module == "meshwright"]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("meshwright.")}
    return rooms


def test_imports_between_rooms_run_one_way() -> None:
    wrong = []
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE)
        room = place.parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for other in imports_of(file) - MAY_IMPORT[room] - {room}:
            if (str(place), other) not in EXCEPTIONS:
                wrong.append(f"{place} imports {other}")
    assert not wrong


def test_private_names_of_torch_and_transformers_live_in_one_file_each() -> None:
    allowed = ("distributed/_torch_compat/", "models/_transformers_compat.py")
    found = []
    for file in SOURCE.rglob("*.py"):
        if str(file.relative_to(SOURCE)).startswith(allowed):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "transformers"):
                path = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                found += [f"{file.name}: {'.'.join(path)}" for part in path if part.startswith("_")]
    # public in all but name, and the only home of these two
    found = [item for item in found if "torch.utils._python_dispatch" not in item and "torch.utils._pytree" not in item]
    assert not found


def test_the_configuration_page_is_that_of_the_schema() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_legal_configurations(example: Path) -> None:
    config = load_config(example)
    assert load_config(example).model_validate(yaml.safe_load(config.to_yaml())) == config


def test_importing_the_package_is_light() -> None:
    """Neither transformers nor torch._dynamo at import; the parts come on first use."""
    script = (
        "import sys, meshwright; modules = ('torch', 'transformers', 'torch._dynamo', 'datasets');"
        "heavy = [m for m in modules if m in sys.modules];"
        "assert not heavy, heavy; import torch, meshwright as mw; mw.Layout, mw.ShardingPlan, mw.resolve, mw.parallelize;"
        "mw.GradSync, mw.clip_grad_norm_, mw.spec_of; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
