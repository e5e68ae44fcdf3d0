"""The house: floors, façades, no circles, no long files; and the documentation of the configuration is that of the schema."""

import ast
import importlib
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from maintain.tiny import TINY_MODELS
from meshwright.models.families.listed import FAMILIES
from meshwright.models.specs.registry import registered_strategies
from meshwright.train.config import RunConfig, TrainingConfig, load_config
from meshwright.train.schema.config_page import reference

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"

FLOORS = (
    {"errors", "error_areas"},
    {"error_codes", "files", "once", "paths", "terminal", "quiet", "user_code"},
    {"layout", "device"},
    {"plan"},
    {"distributed", "ranks"},
    {"data", "models", "checkpoint"},
    {"objectives"},
    {"train"},
    {"shrink", "nemo"},
    {"moe"},
    {"audit", "trace"},
    {"report"},
    {"search"},
    {"cli", "from_python"},
    {"__main__"},
)
"""A room imports itself and what lies on lower floors."""

BESIDE = {
    ("ranks", "distributed"),
    ("checkpoint", "data"),
    ("checkpoint", "models"),
}
"""And these import a room of their own floor."""

ALONE = {"data": {"errors", "files", "paths", "user_code"}}
"""All that a room imports: what a loader yields is a function of seed, data and step, and of no layout."""

FACADES = {
    "meshwright.distributed.parallelizer",
    "meshwright.distributed.fsdp2",
    "meshwright.moe.fsdp_mixin",
    "meshwright.models.diffusion_gemma.fsdp",
}
"""Modules whose names NeMo AutoModel fixes. They offer what is in `nemo` and below, which only they may ask for."""

LONG = 350

MOST_ENTRIES = {"plan": 15, "distributed": 16, "models": 15, "train": 20}
"""Files and folders that a room, and each folder inside it, shows at most."""

SAME_NAME = {"context", "experts", "pipeline"}
"""Names of axes, which several rooms may have. The façades have the names that are promised."""


def name_of(file: Path) -> str:
    parts = ("meshwright", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


FILES = {name_of(file): file for file in SOURCE.rglob("*.py")}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(file.read_text()) for name, file in FILES.items()}


@cache
def imports() -> dict[str, set[str]]:
    return {name: imports_of(name) for name in FILES}


def imports_of(name: str) -> set[str]:
    """The modules of Meshwright that one imports, also inside functions and for types alone."""
    found = set()
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & FILES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & FILES.keys()) - {name}


def room_of(name: str) -> str:
    return f"{name}.".split(".")[1]


def test_imports_between_rooms_run_one_way() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

    def legal(room: str, other: str) -> bool:
        if room in ALONE:
            return other in ALONE[room]
        return other != "nemo" and (floor[other] < floor[room] or (room, other) in BESIDE)

    wrong = [
        f"{name} imports {other}"
        for name in imports().keys() - FACADES
        for other in imports()[name] - {"meshwright"}
        if room_of(name) != room_of(other) and not legal(room_of(name), room_of(other))
    ]
    assert not wrong


def test_a_room_starts_no_process_of_a_higher_one() -> None:
    """A module that is named in a command is an import too; `train` is given the command of its forecast."""
    for name, tree in trees().items():
        named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not {text for text in named & FILES.keys() if room_of(text) not in (room_of(name), "")} - {"meshwright"}, name
        assert "-m" not in named or room_of(name) in ("cli", "trace"), name


DEVICE_WORDS = {"cuda", "nccl"}
MAY_NAME_A_DEVICE = {"meshwright.device", "meshwright.distributed.memory.nf4"}
"""The door to devices, and files of kernels. `nemo` may too, for its interface, and `_torch_compat`, for names of torch."""


def test_no_kind_of_device_is_named_but_at_its_door() -> None:
    for name, tree in trees().items():
        if name in MAY_NAME_A_DEVICE or room_of(name) == "nemo" or "._torch_compat" in name:
            continue
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings may explain
        for node in ast.walk(tree):
            text = {ast.Attribute: "attr", ast.Name: "id", ast.Constant: "value"}.get(type(node))
            if text is not None and id(node) not in documented:
                words = set(re.findall("[a-z]+", str(getattr(node, text)).lower()))
                assert not words & DEVICE_WORDS, f"{name}:{node.lineno}"


def test_what_is_installed_needs_nothing_of_the_repository() -> None:
    for name, tree in trees().items():
        named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {module for module in named if module.partition(".")[0] in ("maintain", "tests", "benchmarks")}, name


@pytest.mark.parametrize("package", ["meshwright", "meshwright.audit", "meshwright.data"])
def test_what_a_package_offers_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def test_facades_hold_no_code_and_nobody_here_imports_them() -> None:
    assert [f"{name} imports {other}" for name, others in imports().items() for other in others & FACADES] == []
    for name in FACADES:
        text, *asked, offered = trees()[name].body
        assert isinstance(text, ast.Expr), name
        assert all(isinstance(node, ast.ImportFrom) for node in asked), name
        assert isinstance(offered, ast.Assign), name
        assert {alias.name for node in asked for alias in node.names} == set(ast.literal_eval(offered.value)), name  # type: ignore[attr-defined]


def test_imports_run_in_no_circle() -> None:
    TopologicalSorter(imports()).prepare()  # a CycleError names the modules


def test_a_family_knows_no_torch_distributed() -> None:
    homes = [FILES.get(type(strategy).__module__) for strategy in registered_strategies().values()]
    for home in filter(None, homes):  # tests register others
        for file in [home] if home.parent.name in ("families", "specs") else home.parent.glob("*.py"):
            assert "torch.distributed" not in file.read_text(), file


def test_files_are_short() -> None:
    long = {str(file.relative_to(SOURCE)) for file in FILES.values() if len(file.read_text().splitlines()) > LONG}
    assert long == set()


def test_a_folder_shows_few_files() -> None:
    for room, most in MOST_ENTRIES.items():
        for folder in (SOURCE / room, *(item for item in (SOURCE / room).rglob("*") if item.is_dir())):
            shown = [item.name for item in folder.iterdir() if item.name not in ("__init__.py", "__pycache__")]
            assert len(shown) <= most, (folder, sorted(shown))


def test_no_file_has_the_name_of_another() -> None:
    files: dict[str, list[str]] = {}
    for name in FILES.keys() - FACADES:
        if FILES[name].stem != "__init__":
            files.setdefault(FILES[name].stem, []).append(name)
    assert {stem for stem, names in files.items() if len(names) > 1} <= SAME_NAME


def test_private_names_of_torch_and_transformers_live_in_one_file_each() -> None:
    allowed = ("distributed/_torch_compat/", "models/_transformers_compat/")
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


NAME_OF_A_FAMILY = re.compile(
    r"(?i:llama|mi[sx]tral|qwen|gemma|olmo|deepseek|nemotron)|\b(?i:phi|gpt|opt|wan)(?:\b|_|\d|[A-Z])"
)
MAY_NAME_A_FAMILY = {
    # an old format of chats calls the role so
    '"gpt": "assistant",',
    # another trainer
    '"""What users of the Hugging Face Trainer, TRL, axolotl and LLaMA-Factory type, and the key that it is here."""',
}


def test_only_models_knows_families_by_name() -> None:
    """In code, comments and descriptions. A paper is cited by its name, with its number beside it."""
    for name in (*TINY_MODELS, *(family.name for family in FAMILIES), *(name for of in FAMILIES for name in of.classes)):
        assert NAME_OF_A_FAMILY.search(name), name
    rest = (file for file in SOURCE.rglob("*.py") if file.relative_to(SOURCE).parts[0] not in ("models", "nemo"))
    rest = (file for file in rest if name_of(file) not in FACADES)  # whose names the reference fixes
    lines = (line.strip() for file in rest for line in file.read_text().splitlines())
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
        "mw.GradSync, mw.clip_grad_norm_, mw.spec_of; assert 'transformers' not in sys.modules;"
        "[getattr(mw, name) for name in mw.__all__]; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_distributed_performs_and_asks_a_module_nothing() -> None:
    """What a module has is a fact of the plan: nothing is looked for with a default, and no attribute of a model is named."""
    of_models = {
        "base_layer", "config", "embed_tokens", "hidden_states", "layers", "lm_head", "lora_A", "mlp", "num_attention_heads",
        "num_experts", "num_heads", "num_key_value_heads", "self_attn", "use_cache",
    }  # fmt: skip
    found = []
    for file in (SOURCE / "distributed").rglob("*.py"):
        if name_of(file) in FACADES or "_torch_compat" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                asks = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) > 2)
                found += [f"{file.name}:{node.lineno} {node.func.id}"] if asks else []
            named = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
            found += [f"{file.name}:{node.lineno} {named}"] if isinstance(named, str) and named in of_models else []
    assert found == []
