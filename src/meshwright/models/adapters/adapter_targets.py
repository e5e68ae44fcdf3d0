"""What an adapter is put on: which matrices and experts it adapts, which modules are trained whole, what stays frozen."""

import difflib
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError, Problems, Refusal
from meshwright.models import _transformers_compat as compat
from meshwright.models.heads import head_of
from meshwright.models.model_config import AdapterConfig
from meshwright.models.reading.read_weights import read_by_others
from meshwright.plan.given.names import match_names, within
from meshwright.plan.given.parameter_storage import is_conv1d, names_of_parameters

__all__ = ["Chosen", "choose", "saved_modules"]

PLAIN = ("FalconLinear",)
"""Subclasses of ``nn.Linear`` with a forward of their own that computes W x + b. Others may compute anything."""


@dataclass(frozen=True)
class Chosen:
    """Names of modules.

    Attributes:
        targets: matrices with an adapter.
        saved: modules that are trained whole.
        experts: fused experts that get adapters, or stay frozen.
        frozen: linear layers inside the model's layers that stay frozen, and may be in 4 bits.
        left_out: what ``all-linear`` does not name: name of each linear layer or mixture to why.
    """

    targets: list[str]
    saved: list[str]
    experts: list[str]
    frozen: list[str]
    left_out: dict[str, str]


def choose(model: nn.Module, config: AdapterConfig, inside: list[str]) -> Chosen:
    """Choose what a configuration names.

    Args:
        model: the model.
        config: which adapter.
        inside: names of the layers that text runs.

    Raises:
        ConfigError: a name matches nothing, or what cannot be adapted.
    """
    read, routes = read_by_others(model), _routers(model)
    linear, embeddings = _linear(model), _embeddings(model)
    barred = {
        name: "it is no plain linear layer or embedding"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and name not in linear and name not in embeddings
    }
    barred |= dict.fromkeys(read & {*linear, *embeddings}, "other code reads its weight, so that an adapter would not run")
    kernels = _read_by_kernels(model, {name.rpartition(".")[2] for name in linear})
    by_kernels = [name for name in linear if name.rpartition(".")[2] in kernels]
    barred = dict.fromkeys(by_kernels, "kernels read its weight, and peft refuses it") | barred
    layers = {name for name in linear if within(name, inside) and not within(name, routes) and not _weighs(linear[name])}
    matrices = [*linear, *embeddings, *barred]
    usual = [name for name in linear if name in layers and name not in barred]
    targets = usual if config.targets == "all-linear" else _targets(config.targets, matrices, barred)
    _refuse_shared(model, targets)
    if config.kind == "dora" and (tables := [name for name in targets if name in embeddings]):
        raise ConfigError(
            "adapter.targets",
            f"adapter.targets: {tables[0]!r} is an embedding, which has no dora; legal are linear layers, or kind: lora",
        )
    saved = _saved(model, config)
    experts = [name for name, module in model.named_modules() if compat.is_experts(module) and within(name, inside)]
    adapted = [*targets, *(experts if config.experts else ())]
    if both := [name for name in adapted if within(name, saved)]:
        knob = "adapter.experts" if both[0] in experts else "adapter.targets"
        raise ConfigError(
            "adapter.save_modules",
            f"adapter.save_modules: {both[0]!r} is trained whole, and is among {knob}; name it in one of them",
        )
    if config.experts and not experts:
        raise ConfigError(
            "adapter.experts",
            f"adapter.experts: {class_name(model)} has no experts with the interface of transformers for fused ones; the legal "
            "value is false",
        )
    if not adapted:
        raise ConfigError("adapter.targets", "adapter.targets: names no matrix; legal are all-linear, or a list of names")
    left_out: dict[str, str] = {}
    if config.targets == "all-linear":
        for name in [*linear, *(name for name in barred if name not in embeddings)]:
            if name not in targets and not within(name, saved):
                left_out[name] = _why(name, barred, routes, linear, inside)
        fused = "" if config.experts else "fused experts: adapter.experts=true gives each of them an adapter"
        stacked = [(name, fused) for name in experts if fused]
        mixtures = [name for name, module in model.named_modules() if _is_mixture(name, module) and name not in experts]
        stacked += [(name, "experts without transformers' interface for fused ones, which get no adapter") for name in mixtures]
        left_out |= {name: why for name, why in stacked if within(name, inside) and not within(name, saved)}
    experts = [name for name in experts if not within(name, saved)]
    return Chosen(targets, saved, experts, [name for name in layers - read if not within(name, saved)], left_out)


def _why(name: str, barred: dict[str, str], routes: list[str], linear: dict[str, nn.Module], inside: list[str]) -> str:
    if name in barred:
        return barred[name]
    if within(name, routes):
        return "it chooses or weighs experts"
    if within(name, inside) and _weighs(linear[name]):
        return "it computes a single number"
    return "it is outside of the layers that text runs; name it in adapter.targets or adapter.save_modules"


def _is_mixture(name: str, module: nn.Module) -> bool:
    """Return whether a module holds the matrices of experts, stacked in parameters of three dimensions."""
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)) and "expert" in name.rpartition(".")[2]


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that compute W x + b, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) and (type(module).forward is nn.Linear.forward or class_name(module) in PLAIN))
        or is_conv1d(module)
    }


def _embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that look up rows of a matrix, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    }


def _targets(wanted: list[str], matrices: list[str], barred: dict[str, str]) -> list[str]:
    """Return the names of the matrices that a list names.

    Args:
        wanted: the list of the configuration.
        matrices: names of the linear layers and embeddings.
        barred: name of each matrix that cannot be adapted to why.
    """
    ends = {name.rpartition(".")[2] for name in matrices}
    found: list[str] = []
    problems = Problems()
    for target in wanted:
        matched = [
            name
            for name in dict.fromkeys(matrices)
            if name == target or name.endswith(f".{target}") or match_names(target, [name])
        ]
        if not matched:
            near = difflib.get_close_matches(target, sorted(ends), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            legal = ", ".join(["all-linear", *sorted(ends)])
            problems.add("adapter.targets", f"adapter.targets: {target!r} matches no matrix; {hint}legal are {legal}")
        problems += [
            Refusal("adapter.targets", f"adapter.targets: {name!r} cannot be adapted: {barred[name]}")
            for name in matched
            if name in barred
        ][:1]
        found += [name for name in matched if name not in found]
    if problems:
        raise ConfigError(problems)
    return found


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


def _refuse_shared(model: nn.Module, targets: list[str]) -> None:
    """Refuse a matrix that several modules share, if one of them would have no adapter."""
    for tied in names_of_parameters(model).values():
        without = [name for name in tied if not within(name, targets)]
        kinds = {type(model.get_submodule(name.rpartition(".")[0])) for name in tied}
        if len(kinds) > 1 and not without:
            raise ConfigError(
                "adapter.targets",
                f"adapter.targets: {tied[0]!r} is also {tied[1]!r}, of a module of another kind, which cannot share its "
                "adapter; name neither",
            )
        if 0 < len(without) < len(tied):
            adapted = next(name for name in tied if name not in without)
            raise ConfigError(
                "adapter.targets",
                f"adapter.targets: {adapted!r} is also {without[0]!r}, which would compute without the adapter; legal are "
                "linear layers that are named together with all that share their matrix",
            )


def _routers(model: nn.Module) -> list[str]:
    """Return the names of the modules that choose experts, or weigh them."""
    classes = compat.router_classes(model)
    words = {"router", "gate", "shared_expert_gate"}
    return [name for name, module in model.named_modules() if isinstance(module, classes) or name.rpartition(".")[2] in words]


def _weighs(module: nn.Module) -> bool:
    """Return whether a linear layer computes a single number, such as the weight of shared experts."""
    return getattr(module, "out_features", 2) == 1


def saved_modules(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Return the modules that peft trains whole, as a configuration names them; it saves the head of another task too."""
    head = head_of(model)
    return [*config.save_modules, *([head] if head and head not in config.save_modules else [])]


def _saved(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Return the names of the modules that are trained whole: those of the configuration, and the head of another task."""
    modules = [name for name, _ in model.named_modules() if name]
    problems, found = Problems(), []
    for wanted in saved_modules(model, config):
        matched = [name for name in modules if name == wanted or name.endswith(f".{wanted}")]
        if not matched:
            problems.add("adapter.save_modules", f"adapter.save_modules: {wanted!r} is no module of {class_name(model)}")
        found += matched
    for tied in names_of_parameters(model).values():
        inside = [name for name in tied if within(name, found)]
        if inside and len(inside) < len(tied):
            other = next(name for name in tied if name not in inside)
            problems.add(
                "adapter.save_modules",
                f"adapter.save_modules: {inside[0]!r} is tied to {other!r}; name both, so that they stay tied, or neither",
            )
    if problems:
        raise ConfigError(problems)
    return found
