"""Imports between rooms run one way, and the documentation of the configuration is that of the schema."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshwright.models.families import FAMILIES, TINY_MODELS
from meshwright.train.config import RunConfig, TrainingConfig, load_config
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
    allowed = {"distributed/_torch_compat.py", "models/_transformers_compat.py"}
    found = []
    for file in SOURCE.rglob("*.py"):
        if str(file.relative_to(SOURCE)) in allowed:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "transformers"):
                path = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                found += [f"{file.name}: {'.'.join(path)}" for part in path if part.startswith("_")]
    # public in all but name, and the only home of these two
    found = [item for item in found if "torch.utils._python_dispatch" not in item and "torch.utils._pytree" not in item]
    assert not found


NAME_OF_A_FAMILY = re.compile(
    r"(?i:llama|mi[sx]tral|qwen|gemma|olmo|deepseek|nemotron)|\b(?i:phi|gpt|opt|wan)(?:\b|_|\d|[A-Z])"
)
MAY_NAME_A_FAMILY = {
    # an old format of chats calls the role so
    '"gpt": "assistant",',
    # names of NeMo AutoModel, which are promised at this place
    '"NemotronHParallelizationStrategy": "nemotron_h",',
    '"WanParallelizationStrategy": "wan",',
    # an example of a class name, in a message for who writes something else
    "raise TypeError(f\"register_parallel_strategy{names!r}: takes names of model classes, such as 'LlamaForCausalLM'\")",
    # the field's name for a kind of layer, which many families have; what tells it are the names of its parts, not the family
    "the user, written for the family, declared by the model, or, for a model whose layers are those of a Llama, generic.",
    'return f"{generalize(layer)} has no {part}, so it is not the layer of a Llama"',
    'return f"{generalize(layer)}.{part} holds {held}; a Llama\'s holds {wanted}"',
    "# A Llama's attention reads heads from shapes. One that knows their number would not see that it has fewer.",
    # another trainer
    '"""What users of the Hugging Face Trainer, TRL, axolotl and LLaMA-Factory type, and the key that it is here."""',
}


def test_only_models_knows_families_by_name() -> None:
    """In code, comments and descriptions. A paper is cited by its name, with its number beside it."""
    for name in (*TINY_MODELS, *(family.name for family in FAMILIES), *(name for of in FAMILIES for name in of.classes)):
        assert NAME_OF_A_FAMILY.search(name), name
    rooms = (file for file in SOURCE.rglob("*.py") if file.relative_to(SOURCE).parts[0] != "models")
    lines = (line.strip() for file in rooms for line in file.read_text().splitlines())
    assert {line for line in lines if NAME_OF_A_FAMILY.search(line) and "arXiv" not in line} == MAY_NAME_A_FAMILY


def test_the_configuration_has_the_section_and_the_name_of_every_objective() -> None:
    for objective in (family.objective() for family in FAMILIES):
        TrainingConfig(steps=1, global_batch_size=1, objective=objective.name)  # type: ignore[arg-type]
        assert not objective.section or objective.section in RunConfig.model_fields


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
