"""Adapters of peft: small matrices beside frozen ones (LoRA, Hu et al. 2021, arXiv 2106.09685; DoRA, Liu et al. 2024, arXiv
2402.09353).

The model is wrapped on the meta device, before its spec is taken, so a plan sees the small matrices, and what is frozen. Its
class stays; a matrix becomes a module that holds it (``base_layer``) and its adapter. Frozen parameters are stored in the dtype
of compute, because nothing is added to them.
"""

import difflib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.names import class_name
from meshwright.errors import ConfigError, ModelError, described
from meshwright.models.config import AdapterConfig
from meshwright.models.init import derive_seed, whole_parameters
from meshwright.plan.names import match_names, within

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["adapt", "bare", "check_adapter", "initialize_adapters", "merge", "with_adapter", "write_adapter"]

NAME = "default"
"""Name of the adapter in peft's modules."""

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"

CONV1D = "Conv1D"
"""Linear layer of transformers whose weight is [in, out]."""


def adapt(model: "PreTrainedModel", config: AdapterConfig, param_dtype: str | None) -> None:
    """Wrap the matrices that a configuration names, and freeze all else, in place. The model is on the meta device.

    Args:
        model: the model.
        config: which adapter, and where.
        param_dtype: dtype of compute, in which frozen parameters are stored; ``None``: they keep theirs.

    Raises:
        ConfigError: peft is not installed, a name matches nothing, or a tied parameter would be trained under one of its names.
        ModelError: peft refuses the model.
    """
    _check_installed()
    import peft

    from meshwright.models.registry import spec_of

    spec = spec_of(model, param_dtype)
    targets = _targets(model, config, spec.layers, spec.idle)
    _refuse_shared(model, targets)
    saved = _saved(model, config)
    if both := [name for name in targets if within(name, saved)]:
        raise ConfigError(
            f"adapter.save_modules: {both[0]!r} is trained whole, and is among adapter.targets; name it in one of them"
        )
    fp32 = {name for pattern in spec.fp32 for name, _ in model.named_modules() if match_names(pattern, [name])}
    master = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    for name, parameter in model.named_parameters():
        trained = within(name, saved)
        parameter.requires_grad_(trained)
        if param_dtype is not None and not trained and not within(name, fp32) and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(getattr(torch, param_dtype))
    try:
        with torch.device("meta"):
            settings = _peft_config(config.model_copy(update={"save_modules": []}), targets)  # those are no wrappers here
            peft.inject_adapter_in_model(settings, model, adapter_name=NAME, low_cpu_mem_usage=True)
    except Exception as error:  # peft raises errors of many kinds, all about what the adapter is for
        raise ModelError(f"adapter: peft refuses {class_name(model)}: {described(error)}") from error
    for name, parameter in model.named_parameters():  # peft freezes all but its own
        parameter.requires_grad_("lora_" in name or within(name, saved))
        if parameter.requires_grad:  # the values that an optimizer adds to
            parameter.data = parameter.data.to(master)


def _check_installed() -> None:
    if find_spec("peft") is None:
        raise ConfigError("adapter: needs `pip install 'meshwright[adapters]'`")


def _peft_config(config: AdapterConfig, targets: list[str]) -> Any:
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


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) or class_name(module) == CONV1D
    }


def _targets(model: nn.Module, config: AdapterConfig, layers: tuple[str, ...], idle: tuple[str, ...]) -> list[str]:
    """Return the names of the matrices that get an adapter."""
    linear = _linear(model)
    taken = {end for end in {name.rpartition(".")[2] for name in linear} if _of_experts(model, end)}
    if config.targets == "all-linear":
        inside = [name for pattern in layers for name in match_names(pattern, [name for name, _ in model.named_modules()])]
        asleep = [name for pattern in idle for name in match_names(pattern, [name for name, _ in model.named_modules()])]
        return [
            name
            for name, module in linear.items()
            if within(name, inside)
            and not within(name, asleep)
            and not _routes(name, module)
            and name.rpartition(".")[2] not in taken
        ]
    found: list[str] = []
    problems = []
    for target in config.targets:
        matched = [name for name in linear if name == target or name.endswith(f".{target}") or match_names(target, [name])]
        if not matched:
            ends = sorted({name.rpartition(".")[2] for name in linear})
            near = difflib.get_close_matches(target, ends, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            problems.append(f"adapter.targets: {target!r} matches no matrix; {hint}legal are all-linear, {', '.join(ends)}")
        refused = [name for name in matched if name.rpartition(".")[2] in taken]
        if refused:
            problems.append(
                f"adapter.targets: peft takes {refused[0]!r} for the name of experts, which cannot have adapters here"
            )
        found += [name for name in matched if name not in found]
    if problems:
        raise ConfigError(problems)
    return found


def _of_experts(model: nn.Module, end: str) -> bool:
    """Return whether peft takes the last component of a name for that of experts, which transformers 5 has fused."""
    import peft
    from peft.utils import transformers_weight_conversion as conversion

    probe = peft.LoraConfig(target_modules=[end])
    try:
        conversion.convert_peft_config_for_transformers(probe, model, conversion.get_model_conversion_mapping(model))
    except ValueError:  # one of several that are fused
        return True
    return end not in (probe.target_modules or ())


def _refuse_shared(model: nn.Module, targets: list[str]) -> None:
    """Refuse a matrix that is in several modules: each of them would get an adapter of its own."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        if len(tied) > 1 and any(within(name, targets) for name in tied):
            raise ConfigError(
                f"adapter.targets: {tied[0]!r} is also {tied[1]!r}, and each would get an adapter of its own; legal are "
                "matrices that are in one module"
            )


def _routes(name: str, module: nn.Module) -> bool:
    """Return whether a matrix chooses experts, or weighs one."""
    last = name.rpartition(".")[2]
    return last in ("router", "gate", "shared_expert_gate") or getattr(module, "out_features", 2) == 1


def _saved(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Return the names of the modules that are trained whole."""
    modules = [name for name, _ in model.named_modules() if name]
    problems, found = [], []
    for wanted in config.save_modules:
        matched = [name for name in modules if name == wanted or name.endswith(f".{wanted}")]
        if not matched:
            problems.append(f"adapter.save_modules: {wanted!r} is no module of {class_name(model)}")
        found += matched
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        inside = [name for name in tied if within(name, found)]
        if inside and len(inside) < len(tied):
            other = next(name for name in tied if name not in inside)
            problems.append(
                f"adapter.save_modules: {inside[0]!r} is tied to {other!r}; name both, so that they stay tied, or neither"
            )
    if problems:
        raise ConfigError(problems)
    return found


def _wrappers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the modules that hold an adapter: parent, name in it, module."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "base_layer") and hasattr(child, "lora_A"):
                yield parent, name, child


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one without adapters: same parameters, under the names of its files. It is not called."""
    wrappers = list(_wrappers(model))
    for parent, name, wrapper in wrappers:
        parent._modules[name] = wrapper.base_layer
    try:
        yield
    finally:
        for parent, name, wrapper in wrappers:
            parent._modules[name] = wrapper


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by their names in the model; a tied one by each of them, because peft unties them."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def initialize_adapters(model: nn.Module, device: torch.device, seed: int, path: str | None = None) -> None:
    """Give the adapters of a model their first values, the same on every layout. The frozen matrices have theirs already.

    A is drawn as peft draws it, B is zero, and the magnitudes of DoRA are the norms of the frozen rows; or all of them are read
    from a directory of peft, and so are modules that are trained whole.

    Args:
        model: the model, which may be parallelized.
        device: device of the shards.
        seed: seed of the run.
        path: such a directory.

    Raises:
        ModelError: the directory is of another adapter.
    """
    names = {module: name for name, module in model.named_modules()}
    wrappers = [wrapper for _, _, wrapper in _wrappers(model)]
    for wrapper in wrappers:
        for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
            getattr(wrapper, part).to_empty(device=device)
    given = None if path is None else _read(model, path)
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for wrapper in wrappers:
            norms = _norms(wrapper) if given is None and NAME in wrapper.lora_magnitude_vector else None
            with whole_parameters(wrapper, skip={wrapper.base_layer}):
                if given is None:
                    torch.manual_seed(derive_seed(seed, names[wrapper], "adapter"))
                    nn.init.kaiming_uniform_(wrapper.lora_A[NAME].weight, a=math.sqrt(5))
                    nn.init.zeros_(wrapper.lora_B[NAME].weight)
                    if norms is not None:
                        wrapper.lora_magnitude_vector[NAME].weight.copy_(norms)
                else:
                    for name, parameter in wrapper.named_parameters():
                        if "lora_" in name:
                            parameter.copy_(given.pop(_saved_name(f"{names[wrapper]}.{name}")))
        for name, parameter in () if given is None else list(model.named_parameters()):
            if parameter.requires_grad and "lora_" not in name:
                module = model.get_submodule(name.rpartition(".")[0])
                with whole_parameters(module, skip=set(module.children())):
                    module._parameters[name.rpartition(".")[2]].copy_(given.pop(_saved_name(name)))  # type: ignore[union-attr]


def _norms(wrapper: Any) -> torch.Tensor:
    """Return the norm of each row of a frozen matrix."""
    weight = wrapper.base_layer.weight.data
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    weight = weight.T if class_name(wrapper.base_layer) == CONV1D else weight
    return torch.linalg.norm(weight, dim=1)


def _saved_name(name: str) -> str:
    """Return the name of a trained parameter in peft's files."""
    return "base_model.model." + name.replace(f".{NAME}.weight", ".weight").replace(
        "lora_magnitude_vector.weight", "lora_magnitude_vector"
    )


def check_adapter(model: nn.Module, path: str) -> None:
    """Refuse a directory that holds no adapter of a model, or another one.

    Raises:
        ModelError: names what differs.
    """
    _read(model, path)


def _read(model: nn.Module, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory of peft.

    Raises:
        ModelError: it is none, or of another adapter.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path).expanduser()
    try:
        tensors, settings = load_file(folder / WEIGHTS), json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"adapter.path={path!r}: is no adapter of peft: {described(error)}") from error
    expected = {_saved_name(name): tuple(parameter.shape) for name, parameter in _trained(model).items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differ = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differ:
        name = differ[0]
        raise ModelError(
            f"adapter.path={path!r}: is of another adapter: {name} is {found.get(name, 'not there')} in the files, and "
            f"{expected.get(name, 'not there')} in this run ({len(differ)} differ); set rank, targets and save_modules "
            f"as in its {SETTINGS}: r={settings.get('r')}, target_modules={settings.get('target_modules')}"
        )
    return tensors


def merge(model: nn.Module) -> None:
    """Add the adapters to the matrices, in fp32 and rounded once, and take the wrappers away. All tensors are whole."""
    for parent, name, wrapper in list(_wrappers(model)):
        base, scale = wrapper.base_layer, wrapper.scaling[NAME]
        wide = torch.promote_types(base.weight.dtype, torch.float32)
        delta = scale * (wrapper.lora_B[NAME].weight.data.to(wide) @ wrapper.lora_A[NAME].weight.data.to(wide))
        turned = class_name(base) == CONV1D
        whole = (base.weight.data.T if turned else base.weight.data).to(wide) + delta
        if NAME in wrapper.lora_magnitude_vector:
            magnitude = wrapper.lora_magnitude_vector[NAME].weight.data.to(wide)
            whole = whole * (magnitude / torch.linalg.norm(whole, dim=1))[:, None]
        base.weight.data = (whole.T.contiguous() if turned else whole).to(base.weight.dtype)
        parent._modules[name] = base


def with_adapter(model: nn.Module, folder: Path) -> Any:
    """Return a model with the adapter of a directory of peft, merged.

    Raises:
        ConfigError: peft is not installed.
        ModelError: the directory has no adapter, or one of another model.
    """
    _check_installed()
    import peft

    try:
        return peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"--adapter={folder}: {str(error).splitlines()[0]}") from error


def write_adapter(model: nn.Module, config: AdapterConfig, base: str | None, folder: Path) -> None:
    """Write the trained parameters as a directory that plain peft loads.

    Args:
        model: the model, with whole tensors.
        config: its adapter.
        base: path or name of the model without adapters; ``None``: unknown.
        folder: an existing directory.
    """
    from safetensors.torch import save_file

    tensors = {_saved_name(name): tensor.data.clone() for name, tensor in _trained(model).items()}  # no file shares memory
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    names = {id(module): name for name, module in model.named_modules()}
    settings = _peft_config(config, sorted(names[id(wrapper)] for _, _, wrapper in _wrappers(model)))
    settings.base_model_name_or_path, settings.inference_mode = base, True
    settings.save_pretrained(folder)
