"""Directories of peft: the tensors of an adapter under the names, and in the shapes, that plain peft reads."""

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError, ModelError, described
from meshwright.files import save_tensors
from meshwright.models.adapters import expert_adapters
from meshwright.models.adapters.adapter_targets import saved_modules
from meshwright.models.heads import PEFT_TASKS, task_of
from meshwright.models.model_config import AdapterConfig
from meshwright.paths import mistaken, no_directory
from meshwright.plan.given.names import within
from meshwright.plan.given.parameter_storage import names_of_parameters

__all__ = [
    "NAME",
    "NOT_FOR_PEFT",
    "Entry",
    "check_adapter",
    "check_installed",
    "file_entries",
    "is_adapter_name",
    "named_as_experts",
    "peft_config",
    "read_adapter",
    "refuse_no_adapter",
    "with_adapter",
    "wrappers",
    "write_adapter",
]

NAME = "default"
"""Name of the adapter in peft's modules."""

PREFIX = "base_model.model."
"""What peft puts before the names of a model's modules."""

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


NOT_FOR_PEFT = (
    "plain peft cannot load this adapter: it takes {name} for the name of fused experts, and has no dora for those; "
    "`meshwright export` without --adapter merges it into the model"
)
"""What a user is told of DoRA under such names. Meshwright itself reads the adapter."""

_OF_ADAPTER = re.compile(r"[._]lora_(embedding_[AB]\.default|(A|B|magnitude_vector)(\.default\.weight)?)$")


def is_adapter_name(name: str) -> bool:
    """Return whether a parameter, by its name, is of an adapter."""
    return _OF_ADAPTER.search(name) is not None


def check_installed() -> None:
    """Raise a ConfigError if peft is not installed."""
    if find_spec("peft") is None:
        raise ConfigError("adapter.peft_missing", "adapter: needs `pip install 'meshwright[adapters]'`")
    if find_spec("peft.utils.transformers_weight_conversion") is None:
        raise ConfigError("adapter.peft_missing", "adapter: this peft is too old; `pip install -U peft`")


def peft_config(config: AdapterConfig, targets: list[str]) -> Any:
    """Return peft's configuration of an adapter.

    Args:
        config: which adapter.
        targets: names of the matrices.
    """
    import peft

    return peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=targets, bias="none",
        use_dora=config.kind == "dora", use_rslora=config.scaling == "rs", task_type="CAUSAL_LM",
        modules_to_save=list(config.save_modules) or None,
    )  # fmt: skip


def wrappers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the modules that peft put around matrices: parent, name in it, module."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "base_layer") and hasattr(child, "lora_A"):
                yield parent, name, child


def named_as_experts(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return those of some matrices whose names plain peft takes for those of experts, which transformers 5 has fused.

    peft then looks for parameters of the experts, wherever the matrix is: in a dense MLP or in shared experts. It finds such a
    matrix as a parameter (``target_parameters``), and then knows neither DoRA nor dropout.
    """
    import peft
    from peft.utils import transformers_weight_conversion as conversion

    def taken(end: str) -> bool:
        probe = peft.LoraConfig(target_modules=[end])
        try:
            conversion.convert_peft_config_for_transformers(probe, model, conversion.get_model_conversion_mapping(model))
        except ValueError:  # one of several that are fused
            return True
        return end not in (probe.target_modules or ())

    found = list(names)
    ends = {end for end in {name.rpartition(".")[2] for name in found} if taken(end)}
    return {name for name in found if name.rpartition(".")[2] in ends}


class Entry(NamedTuple):
    """A trained parameter, by one of its names."""

    name: str
    """First name of the parameter."""
    parameter: nn.Parameter
    key: str
    """Name in the files."""
    to_files: Callable[[torch.Tensor], torch.Tensor]
    """Its shape in the files."""
    from_files: Callable[[torch.Tensor], torch.Tensor]


def file_entries(model: nn.Module) -> list[Entry]:
    """Return the trained parameters by their names in files; a tied one by each of its names, because peft unties them."""
    names = names_of_parameters(model)
    adapted = dict(expert_adapters.adapted_experts(model))
    entries = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        holder, _, own = name.rpartition(".")
        to_files, from_files, key = _same, _same, name
        if holder in adapted and "lora_" in own:
            experts = len(parameter)
            key = f"{holder}.{expert_adapters.name_in_files(adapted[holder], own)}"
            to_files = partial(expert_adapters.to_files, own)
            from_files = partial(expert_adapters.from_files, own, experts)
        key = key.removesuffix(f".{NAME}") if "lora_embedding_" in key else key
        key = key.replace(f".{NAME}.weight", ".weight").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
        entries.append(Entry(names[parameter][0], parameter, f"{PREFIX}{key}", to_files, from_files))
    return entries


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def check_adapter(model: nn.Module, path: str) -> None:
    """Refuse a directory that holds no adapter of a model, or another one.

    Raises:
        ModelError: names what differs.
    """
    read_adapter(model, path)


def read_adapter(model: nn.Module, path: str, elsewhere: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return the values of the trained parameters of a model from a directory of peft, whole.

    Args:
        model: the model, which may be a stage of a pipeline.
        path: the directory.
        elsewhere: names of modules that the files may have, and the model has not, because other stages have them.

    Raises:
        ModelError: the directory holds no adapter, or one of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if absent := no_directory("adapter.path", path, hub=False):
        raise ModelError(absent)
    folder = Path(path).expanduser()
    try:
        tensors, settings = load_file(folder / WEIGHTS), json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        why = f"{described(error)}{mistaken(path, 'adapter')}"
        raise ModelError("adapter.path", f"adapter.path={path!r}: is no adapter of peft: {why}") from error
    entries = {entry.key: entry for entry in file_entries(model)}
    expected = {
        key: tuple(entry.to_files(torch.empty(entry.parameter.shape, device="meta")).shape) for key, entry in entries.items()
    }
    others = tuple(f"{PREFIX}{name}" for name in elsewhere)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if not within(name, others) or name in expected}
    differ = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differ:
        name = differ[0]
        raise ModelError(
            "adapter.path",
            f"adapter.path={path!r}: is of another adapter: {name} is {found.get(name, 'not there')} in the files, and "
            f"{expected.get(name, 'not there')} in this run ({len(differ)} differ); set rank, targets, experts and "
            f"save_modules as in its {SETTINGS}: r={settings.get('r')}, target_modules={settings.get('target_modules')}",
        )
    values: dict[str, torch.Tensor] = {}
    for key, entry in entries.items():
        value = entry.from_files(tensors[key])
        if not torch.equal(values.setdefault(entry.name, value), value):
            raise ModelError(
                "adapter.path", f"adapter.path={path!r}: {key} has two values; {class_name(model)} shares it with {entry.name}"
            )
    return values


def refuse_no_adapter(folder: Path) -> None:
    """Refuse a directory that is no adapter, before a model is read for it.

    Raises:
        ModelError: says what it is instead.
    """
    if absent := no_directory("--adapter", str(folder), hub=False):
        raise ModelError(absent)
    if not (folder / SETTINGS).is_file():
        raise ModelError(
            "adapter.path", f"--adapter={folder}: holds no adapter (no {SETTINGS}){mistaken(folder, 'adapter', 'DIRECTORY')}"
        )


def with_adapter(model: nn.Module, folder: Path) -> Any:
    """Return a model with the adapter of a directory of peft beside it: peft would merge it twice into a shared matrix.

    Raises:
        ConfigError: peft is not installed.
        ModelError: the directory has no adapter, or one of another model.
    """
    check_installed()
    refuse_no_adapter(folder)
    import peft

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys.*")  # peft would leave zeros there
            return peft.PeftModel.from_pretrained(model, str(folder)).get_base_model()
    except (OSError, ValueError, RuntimeError, UserWarning) as error:
        raise ModelError("adapter.path", f"--adapter={folder}: {str(error).splitlines()[0]}") from error


def write_adapter(model: nn.Module, config: AdapterConfig, base: str | None, folder: Path) -> None:
    """Write the trained parameters as a directory that plain peft loads.

    Args:
        model: the model, with whole tensors.
        config: its adapter.
        base: path or name of the model without adapters; ``None``: unknown.
        folder: an existing directory.
    """
    tensors = {entry.key: entry.to_files(entry.parameter.data).clone().contiguous() for entry in file_entries(model)}
    save_tensors(tensors, folder / WEIGHTS)
    names = {id(module): name for name, module in model.named_modules()}
    adapted = [names[id(wrapper)] for _, _, wrapper in wrappers(model)]
    as_experts = named_as_experts(model, adapted)
    settings = peft_config(config, sorted(name for name in adapted if name not in as_experts))
    settings.modules_to_save, settings.task_type = saved_modules(model, config) or None, PEFT_TASKS[task_of(model)]
    parameters = [*expert_adapters.targets_in_files(model), *sorted(f"{name}.weight" for name in as_experts)]
    settings.target_parameters = parameters or None
    if as_experts:
        settings.lora_dropout = 0.0  # peft knows none there, and needs none to compute
        if config.kind == "dora":
            warnings.warn(f"{folder.name}: {NOT_FOR_PEFT.format(name=min(as_experts))}", stacklevel=2)
    settings.base_model_name_or_path, settings.inference_mode = base, True
    settings.save_pretrained(folder)
