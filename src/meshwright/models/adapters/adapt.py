"""Adapters of peft: small matrices beside frozen ones (LoRA, Hu et al. 2021, arXiv 2106.09685; DoRA, Liu et al. 2024, arXiv
2402.09353).

The model is wrapped on the meta device, before its spec is taken, so a plan sees the small matrices, and what is frozen. Its
class stays; a matrix becomes a module that holds it (``base_layer``) and its adapter. Frozen parameters are stored in the dtype
of compute, because nothing is added to them.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.device import fork_rng, seed_generators
from meshwright.distributed import _torch_compat
from meshwright.distributed.class_names import class_name
from meshwright.distributed.memory.nf4 import dequantize, is_packed, quantize
from meshwright.distributed.slices import whole_tensor
from meshwright.errors import ConfigError, ModelError, described
from meshwright.models.adapters.adapter_files import (
    NAME,
    NOT_FOR_PEFT,
    check_installed,
    is_adapter_name,
    named_as_experts,
    peft_config,
    read_adapter,
    wrappers,
)
from meshwright.models.adapters.adapter_targets import Chosen, choose
from meshwright.models.adapters.expert_adapters import AdaptedExperts, adapt_experts, bare_experts, merge_experts
from meshwright.models.model_config import AdapterConfig
from meshwright.models.weights.initial_values import derive_seed, keep_slice
from meshwright.models.weights.packed import Packs, pack_linear
from meshwright.plan.axes.tensor.styles import canonical
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.inspection import PACKED_ATTRIBUTE
from meshwright.plan.given.names import generalize, match_names, within
from meshwright.plan.given.parameter_storage import is_conv1d
from meshwright.plan.given.spec import UnitRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "adapt",
    "adapters_off",
    "initialize_adapters",
    "merge",
    "remarks_of_adapter",
    "unit_of_adapters",
    "without_adapters",
]

REMARKS = "_meshwright_adapter_remarks"
"""Attribute of an adapted model."""


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

    from meshwright.models.specs.registry import spec_of

    spec = spec_of(model, param_dtype)
    modules = [name for name, _ in model.named_modules()]
    inside, idle = (
        [name for pattern in patterns for name in match_names(pattern, modules)] for patterns in (spec.layers, spec.idle)
    )
    chosen = choose(model, config, [name for name in inside if not within(name, idle)])
    saved = chosen.saved
    if saved and param_dtype is None and next(model.parameters()).dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            "adapter.save_modules",
            "adapter.save_modules: are trained in fp32, and without parallel.param_dtype nothing casts their input; set it",
        )
    fp32 = {name for pattern in spec.fp32 for name, _ in model.named_modules() if match_names(pattern, [name])}
    master = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    for name, parameter in model.named_parameters():
        trained = within(name, saved)
        parameter.requires_grad_(trained)
        if param_dtype is not None and not trained and not within(name, fp32) and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(getattr(torch, param_dtype))
    if chosen.targets:
        # Names are chosen already. In a holder without a config, peft translates none of them to those of fused experts.
        holder = nn.Module()
        holder.model = model
        targets = [f"model.{name}" for name in chosen.targets]
        settings = peft_config(config.model_copy(update={"save_modules": []}), targets)  # those are no wrappers here
        try:
            with torch.device("meta"):
                peft.inject_adapter_in_model(settings, holder, adapter_name=NAME, low_cpu_mem_usage=True)
        except Exception as error:  # peft raises errors of many kinds, all about what the adapter is for
            raise ModelError("adapter.peft", f"adapter: peft refuses {class_name(model)}: {described(error)}") from error
    if _share(model) and config.reduce == "once":
        raise ConfigError(
            "adapter.reduce",
            f"adapter.reduce=once: modules of {class_name(model)} share matrices, and run apart; the legal value is unit",
        )
    remarks = [f"adapter: all-linear leaves out {names}: {why}" for names, why in _together(chosen.left_out)]
    if config.kind == "dora" and (as_experts := named_as_experts(model, chosen.targets)):
        remarks.append(f"adapter: {NOT_FOR_PEFT.format(name=min(as_experts))}")
    setattr(model, REMARKS, tuple(remarks))
    adapt_experts(model, config, chosen.experts)
    if config.base is not None:
        _pack(model, config.base, chosen)
    for name, parameter in model.named_parameters():  # peft freezes all but its own
        parameter.requires_grad_(is_adapter_name(name) or within(name, saved))
        if parameter.requires_grad:  # the values that an optimizer adds to
            parameter.data = parameter.data.to(master)


def _together(left_out: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield patterns of names with a reason, one for each pattern."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, why in left_out.items():
        alike.setdefault((generalize(name), why), []).append(name)
    for (pattern, why), names in alike.items():
        yield (names[0] if len(names) == 1 else f"{pattern} ({len(names)})"), why


def remarks_of_adapter(model: nn.Module) -> tuple[str, ...]:
    """Return what the plan of an adapted model should say of its adapter, a sentence each."""
    return getattr(model, REMARKS, ())


def _pack(model: nn.Module, base: str, chosen: Chosen) -> None:
    """Let frozen matrices take their values in 4 bits.

    Raises:
        ConfigError: there are none.
        UnsupportedError: this torch does not gather bytes.
    """
    _torch_compat.check_gathers_bytes(f"adapter.base={base}")
    frozen = set(chosen.frozen)
    for name, module in list(model.named_modules()):
        if canonical(name) in frozen and not hasattr(module, "base_layer"):  # its wrapper has the same name
            pack_linear(module)
    if not any(getattr(module, PACKED_ATTRIBUTE, ()) for module in model.modules()):
        raise ConfigError(
            "adapter.base", f"adapter.base={base}: {class_name(model)} has no frozen matrix that can be in 4 bits; leave it out"
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


def unit_of_adapters(model: nn.Module) -> UnitRule:
    """Return the rule that makes the adapters of linear layers one unit, gathered and reduced once a step.

    Raises:
        ConfigError: there are none.
    """
    pattern = f"**.lora_*.{NAME}"
    if not any(wrapper.lora_A for _, _, wrapper in wrappers(model)):
        raise ConfigError("adapter.reduce", "adapter.reduce=once: no linear layer has an adapter; the legal value is unit")
    return UnitRule(pattern, reshard_after_forward=False, sync=SyncPolicy.DEFER, together=True)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
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


def initialize_adapters(
    model: nn.Module, device: torch.device, seed: int, path: str | None = None, elsewhere: Collection[str] = ()
) -> None:
    """Give the adapters of a model their first values, the same on every layout. The frozen matrices have theirs already.

    A is drawn as peft draws it, B is zero (of an embedding, it is the other way round), and the magnitudes of DoRA are the
    norms of the frozen rows; or all of them are read from a directory of peft, and so are modules that are trained whole.

    Args:
        model: the model, which may be parallelized.
        device: device of the shards.
        seed: seed of the run.
        path: such a directory.
        elsewhere: names of modules that other stages of a pipeline have.

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
    given = None if path is None else read_adapter(model, path, elsewhere)
    with torch.no_grad(), fork_rng(device):
        for name, parameter in model.named_parameters():
            if given is not None and parameter.requires_grad:
                keep_slice(parameter, given[name])
            elif given is None and is_adapter_name(name):
                keep_slice(parameter, _first(model, name, parameter, device, seed))


def _first(model: nn.Module, name: str, parameter: torch.Tensor, device: torch.device, seed: int) -> torch.Tensor:
    """Return the first value of a parameter of an adapter, whole."""
    holder, _, own = name.rpartition("lora_")
    if own.startswith("magnitude"):
        return _norms(model.get_submodule(holder.removesuffix(".")))
    if own.startswith("embedding_B"):
        seed_generators(derive_seed(seed, holder[:-1], "adapter"), device)
        return torch.randn(parameter.shape, dtype=parameter.dtype, device=device)
    value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    if own.startswith("A"):
        seed_generators(derive_seed(seed, holder[:-1], "adapter"), device)
        nn.init.kaiming_uniform_(value.view(-1, value.shape[-1]), a=math.sqrt(5))
    return value


def _norms(wrapper: Any) -> torch.Tensor:
    """Return the norm of each row of a frozen matrix."""
    weight = wrapper.base_layer.weight.data
    weight = whole_tensor(weight) if isinstance(weight, DTensor) else weight
    if isinstance(wrapper.base_layer, Packs) and wrapper.base_layer.packed_weights:  # stored in 4 bits, if not yet, then later
        dtype = wrapper.base_layer.unpacked_dtype
        weight = dequantize(weight if is_packed(weight) else quantize(weight), dtype)
    weight = weight.T if is_conv1d(wrapper.base_layer) else weight
    return torch.linalg.norm(weight.to(torch.promote_types(weight.dtype, torch.float32)), dim=1)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, a model computes as its base model does: adapters have no part in it."""
    wrapped = [wrapper for _, _, wrapper in wrappers(model)]
    experts = [(module, module.adapter_scale) for module in model.modules() if isinstance(module, AdaptedExperts)]
    for wrapper in wrapped:
        wrapper._disable_adapters = True
    for module, _ in experts:
        module.adapter_scale = None
    try:
        yield
    finally:
        for wrapper in wrapped:
            wrapper._disable_adapters = False
        for module, scale in experts:
            module.adapter_scale = scale


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
        if NAME in wrapper.lora_embedding_A:
            small_a, small_b = (getattr(wrapper, f"lora_embedding_{part}")[NAME].data.to(wide) for part in "AB")
            base.weight.data = (base.weight.data.to(wide) + scale * (small_b @ small_a).T).to(base.weight.dtype)
            continue
        delta = scale * (wrapper.lora_B[NAME].weight.data.to(wide) @ wrapper.lora_A[NAME].weight.data.to(wide))
        turned = is_conv1d(base)
        whole = (base.weight.data.T if turned else base.weight.data).to(wide) + delta
        if NAME in wrapper.lora_magnitude_vector:
            magnitude = wrapper.lora_magnitude_vector[NAME].weight.data.to(wide)
            whole = whole * (magnitude / torch.linalg.norm(whole, dim=1))[:, None]
        base.weight.data = (whole.T.contiguous() if turned else whole).to(base.weight.dtype)
    merge_experts(model)
