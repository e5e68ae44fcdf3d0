"""Adapters of peft: small matrices beside frozen ones (LoRA, Hu et al. 2021, arXiv 2106.09685; DoRA, Liu et al. 2024, arXiv
2402.09353).

The model is wrapped on the meta device, before its spec is taken, so a plan sees the small matrices, and what is frozen. Its
class stays; a matrix becomes a module that holds it (``base_layer``) and its adapter. Frozen parameters are stored in the dtype
of compute, because nothing is added to them.
"""

import difflib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.names import class_name
from meshwright.distributed.nf4 import dequantize, is_packed, quantize
from meshwright.errors import ConfigError, ModelError, described
from meshwright.models.adapter_files import NAME, check_installed, of_adapter, peft_config, read_adapter, wrappers
from meshwright.models.config import AdapterConfig
from meshwright.models.expert_adapters import adapt_experts, bare_experts, merge_experts
from meshwright.models.init import derive_seed, keep_slice
from meshwright.models.packed import Packs, pack_linear
from meshwright.plan.inspection import inspect_model
from meshwright.plan.names import match_names, within
from meshwright.plan.sliced_code import reads_matrix
from meshwright.plan.tp_styles import canonical

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["adapt", "bare", "initialize_adapters", "merge"]

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
    check_installed()
    import peft

    from meshwright.models.registry import spec_of

    spec = spec_of(model, param_dtype)
    modules = [name for name, _ in model.named_modules()]
    inside, idle = (
        [name for pattern in patterns for name in match_names(pattern, modules)] for patterns in (spec.layers, spec.idle)
    )
    targets = _targets(model, config, inside, idle)
    _refuse_shared(model, targets)
    saved = _saved(model, config)
    if both := [name for name in targets if within(name, saved)]:
        raise ConfigError(
            f"adapter.save_modules: {both[0]!r} is trained whole, and is among adapter.targets; name it in one of them"
        )
    facts = inspect_model(spec, model)
    read = [name for name in _linear(model) if reads_matrix(facts, name)] if config.base is not None else []
    fp32 = {name for pattern in spec.fp32 for name, _ in model.named_modules() if match_names(pattern, [name])}
    master = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    for name, parameter in model.named_parameters():
        trained = within(name, saved)
        parameter.requires_grad_(trained)
        if param_dtype is not None and not trained and not within(name, fp32) and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(getattr(torch, param_dtype))
    try:
        with torch.device("meta"):
            settings = peft_config(config.model_copy(update={"save_modules": []}), targets)  # those are no wrappers here
            peft.inject_adapter_in_model(settings, model, adapter_name=NAME, low_cpu_mem_usage=True)
    except Exception as error:  # peft raises errors of many kinds, all about what the adapter is for
        raise ModelError(f"adapter: peft refuses {class_name(model)}: {described(error)}") from error
    if _share(model) and config.reduce == "once":
        raise ConfigError(
            f"adapter.reduce=once: modules of {class_name(model)} share matrices, and run apart; the legal value is unit"
        )
    if config.experts or config.base is not None:
        adapt_experts(model, config, inside, idle)
    if config.base is not None:
        _pack(model, [name for name in inside if not within(name, idle)], [*saved, *read])
    for name, parameter in model.named_parameters():  # peft freezes all but its own
        parameter.requires_grad_(of_adapter(name) or within(name, saved))
        if parameter.requires_grad:  # the values that an optimizer adds to
            parameter.data = parameter.data.to(master)


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) or class_name(module) == CONV1D
    }


def _targets(model: nn.Module, config: AdapterConfig, inside: list[str], idle: list[str]) -> list[str]:
    """Return the names of the matrices that get an adapter.

    Args:
        model: the model.
        config: which adapter.
        inside: names of the layers.
        idle: names of modules that text does not run.
    """
    linear = _linear(model)
    ends = {name.rpartition(".")[2] for name in linear}
    taken = {end for end in ends if _of_experts(model, end)}
    if config.targets == "all-linear":
        return [
            name
            for name, module in linear.items()
            if within(name, inside)
            and not within(name, idle)
            and not _routes(name, module)
            and name.rpartition(".")[2] not in taken | _read_by_kernels(model, ends)
        ]
    found: list[str] = []
    problems = []
    for target in config.targets:
        matched = [name for name in linear if name == target or name.endswith(f".{target}") or match_names(target, [name])]
        if not matched:
            near = difflib.get_close_matches(target, sorted(ends), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            legal = ", ".join(["all-linear", *sorted(ends)])
            problems.append(f"adapter.targets: {target!r} matches no matrix; {hint}legal are {legal}")
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


def _read_by_kernels(model: nn.Module, ends: set[str]) -> set[str]:
    """Return the last components of the names of matrices that kernels of Mamba read themselves, so that peft refuses them."""
    import peft
    from peft.tuners import tuners_utils

    check: Any = getattr(tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
    refused = set()
    for end in ends:
        try:
            check(peft.LoraConfig(), model, end)
        except ValueError:
            refused.add(end)
    return refused


def _pack(model: nn.Module, inside: list[str], whole: list[str]) -> None:
    """Let the frozen linear layers inside a model's layers take their weights in 4 bits, but routers.

    Args:
        model: the model, with its adapters.
        inside: names of the layers.
        whole: names of modules that are trained, or whose matrix other code reads.
    """
    for name, module in _linear(model).items():
        before = canonical(name)  # without the adapter around it
        stays = of_adapter(f"{name}.weight") or within(before, whole) or not within(before, inside) or _routes(before, module)
        if not stays and (type(module) is nn.Linear or class_name(module) == CONV1D):
            pack_linear(module)


def _refuse_shared(model: nn.Module, targets: list[str]) -> None:
    """Refuse a matrix that several modules share, if one of them would have no adapter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        without = [name for name in tied if not within(name, targets)]
        if 0 < len(without) < len(tied):
            adapted = next(name for name in tied if name not in without)
            raise ConfigError(
                f"adapter.targets: {adapted!r} is also {without[0]!r}, which would compute without the adapter; legal are "
                "linear layers that are named together with all that share their matrix"
            )


def _share(model: nn.Module) -> bool:
    """Give linear layers that share a matrix one adapter, and return whether there are any."""
    first: dict[int, Any] = {}
    found = list(wrappers(model))
    for _, _, wrapper in found:
        leader = first.setdefault(id(wrapper.base_layer.weight), wrapper)
        for part in ("lora_A", "lora_B", "lora_magnitude_vector") if leader is not wrapper else ():
            for name, holder in getattr(wrapper, part).items():
                holder.weight = getattr(leader, part)[name].weight
    return len(first) < len(found)


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


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one without adapters: same parameters, under the names of its files. It is not called."""
    wrapped = list(wrappers(model))
    for parent, name, wrapper in wrapped:
        parent._modules[name] = wrapper.base_layer
    try:
        with bare_experts(model):
            yield
    finally:
        for parent, name, wrapper in wrapped:
            parent._modules[name] = wrapper


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
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in made:  # a tied one stays one
                    made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device))
                module._parameters[own] = made[id(parameter)]
    given = None if path is None else read_adapter(model, path)
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for name, parameter in model.named_parameters():
            if given is not None and parameter.requires_grad:
                keep_slice(parameter, given[name])
            elif given is None and of_adapter(name):
                keep_slice(parameter, _first(model, name, parameter, device, seed))


def _first(model: nn.Module, name: str, parameter: torch.Tensor, device: torch.device, seed: int) -> torch.Tensor:
    """Return the first value of a parameter of an adapter, whole."""
    holder, _, own = name.rpartition("lora_")
    if own.startswith("magnitude"):
        return _norms(model.get_submodule(holder.removesuffix(".")))
    value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    if own.startswith("A"):
        torch.manual_seed(derive_seed(seed, holder[:-1], "adapter"))
        nn.init.kaiming_uniform_(value.view(-1, value.shape[-1]), a=math.sqrt(5))
    return value


def _norms(wrapper: Any) -> torch.Tensor:
    """Return the norm of each row of a frozen matrix."""
    weight = wrapper.base_layer.weight.data
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    if isinstance(wrapper.base_layer, Packs) and wrapper.base_layer.packed_weights:  # stored in 4 bits, if not yet, then later
        dtype = wrapper.base_layer.unpacked_dtype
        weight = dequantize(weight if is_packed(weight) else quantize(weight), dtype)
    weight = weight.T if class_name(wrapper.base_layer) == CONV1D else weight
    return torch.linalg.norm(weight, dim=1)


def merge(model: nn.Module) -> None:
    """Add the adapters to the matrices, in fp32 and rounded once, and take the wrappers away. All tensors are whole."""
    merged = set()
    for parent, name, wrapper in list(wrappers(model)):
        base, scale = wrapper.base_layer, wrapper.scaling[NAME]
        parent._modules[name] = base
        if id(base.weight) in merged:  # shared
            continue
        merged.add(id(base.weight))
        wide = torch.promote_types(base.weight.dtype, torch.float32)
        delta = scale * (wrapper.lora_B[NAME].weight.data.to(wide) @ wrapper.lora_A[NAME].weight.data.to(wide))
        turned = class_name(base) == CONV1D
        whole = (base.weight.data.T if turned else base.weight.data).to(wide) + delta
        if NAME in wrapper.lora_magnitude_vector:
            magnitude = wrapper.lora_magnitude_vector[NAME].weight.data.to(wide)
            whole = whole * (magnitude / torch.linalg.norm(whole, dim=1))[:, None]
        base.weight.data = (whole.T.contiguous() if turned else whole).to(base.weight.dtype)
    merge_experts(model)
