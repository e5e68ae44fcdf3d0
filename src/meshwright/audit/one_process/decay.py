"""The optimizer of the reference, from the words of the configuration alone: what it decays, and how it updates each parameter.

The words are: "Matrices; vectors (norms, biases, also those of experts, which lie behind each other in one tensor) are never
decayed." The plan decides from a spec. This module reads names and shapes of the model, and no plan. The number of experts
comes from the caller, which reads it from the config, under the key that the spec names.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from meshwright.audit.one_process.plain_muon import PlainMuon, is_matrix_of_layer
from meshwright.plan.given.names import match_names
from meshwright.plan.given.parameter_storage import names_of_parameters
from meshwright.train.config import OptimizerConfig
from meshwright.train.learning_rate import SHARE
from meshwright.train.optimizer import SeveralOptimizers, users_optimizer
from meshwright.train.schema.optimizer_kinds import ADAMW, MUON

__all__ = ["decayed_by_optimizer", "plain_groups", "plain_optimizer", "to_be_decayed"]


def to_be_decayed(model: nn.Module, experts: int, no_decay: Iterable[str], decay: Iterable[str] = ()) -> list[str]:
    """Return the names of the trained parameters that the words mean.

    Args:
        model: the plain model, in one process.
        experts: number of experts of a layer, from the model's config; 0: unknown.
        no_decay: patterns of the names that the user excepts.
        decay: patterns of the names that the user adds.
    """
    decayed = []
    for parameter, names in names_of_parameters(model).items():
        excepted, added = (any(match_names(pattern, names) for pattern in patterns) for patterns in (no_decay, decay))
        if parameter.requires_grad and not excepted and (added or not _is_vector(model, names[0], parameter, experts)):
            decayed.append(names[0])
    return decayed


def _is_vector(model: nn.Module, name: str, parameter: torch.Tensor, experts: int) -> bool:
    path, _, own = name.rpartition(".")
    holder = model.get_submodule(path)
    shape = list(parameter.shape)
    beside = [tuple(other.shape) for other in holder.parameters()]
    behind_each_other = any(len(other) == 3 and other[0] == shape[0] for other in beside)
    if behind_each_other and (shape[0] == experts or "expert" in type(holder).__name__.lower()):
        shape = shape[1:]
    return len(shape) < 2 or own.split("_")[-1] == "bias" or _scales_each_feature(holder, own)


def _scales_each_feature(holder: nn.Module, own: str) -> bool:
    """Return whether a module is a norm and a parameter its scale, by what it computes.

    A norm gives the same for twice its input, but for its epsilon. An entry of its scale changes one feature, its own.
    The plan decides by operators instead (:mod:`meshwright.plan.given.norms`).
    """
    if any(True for _ in holder.children()) or isinstance(holder, nn.Linear | nn.Embedding):
        return False
    draw = torch.Generator().manual_seed(0)
    module = copy.deepcopy(holder).to_empty(device="cpu").double()
    scale = module._parameters[own]
    assert scale is not None
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(1 + torch.rand(tensor.shape, generator=draw))
        features = torch.randn(3, *scale.shape, dtype=scale.dtype, generator=draw)
        try:
            once, twice = module(features), module(2 * features)
            scale.view(-1)[0] += 1
            changed = (module(features) != once).flatten(1)
        except Exception:  # it takes something else
            return False
    if not isinstance(once, torch.Tensor) or once.shape != features.shape or not torch.allclose(once, twice, 1e-3, 1e-3):
        return False
    return bool(changed[:, 0].all()) and not bool(changed[:, 1:].any())


def plain_groups(
    model: nn.Module, settings: OptimizerConfig, decayed: Collection[str], experts: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Return groups of parameters for optimizers in one process, by the names of these (those of rows of a plan).

    How each parameter is updated is read from names and words alone. The words of a group are: the first whose pattern matches
    the name of a parameter, or of a module that holds it; with ``lr_decay``, once for each layer above; what the model lists
    before its first layer is one below it. Muon, where no group says it, takes matrices of layers only, and AdamW the rest.
    """
    names = {name: own for one, own in names_of_parameters(model).items() for name in own[:1] if one.requires_grad}
    numbered = {name: re.match(r"(.*?)\.(\d+)\.", name) for name in (own[0] for own in names_of_parameters(model).values())}
    layers = [(match[1], int(match[2])) for match in numbered.values() if match]
    made: dict[tuple[str, float, float, tuple[float, float], float], list[nn.Parameter]] = {}
    parameters, whole = dict(model.named_parameters()), next(iter(settings.updaters))
    for name, own in names.items():
        group = next((one for one in settings.groups if any(_held_by(one.match, alias) for alias in own)), None)
        share, decay, betas, eps, updater = 1.0, settings.weight_decay, settings.betas, settings.eps, whole
        if group is not None:
            share, updater = group.share(settings.lr), settings.updater_of(group).name
            decay = decay if group.weight_decay is None else group.weight_decay
            betas, eps = group.betas or betas, group.eps or eps
            if group.lr_decay is not None and layers:
                place, listed = numbered[name], list(numbered)
                early = listed.index(name) < next(at for at, other in enumerate(listed) if numbered[other])
                stack, layer = (place[1], int(place[2])) if place else (layers[0][0], -1 if early else None)
                top = max(number for other, number in layers if other == stack)
                share *= group.lr_decay ** (0 if layer is None else top - layer)
        by_group = group is not None and "rule" in dict(settings.others(group))
        if settings.updaters[whole].kind == MUON and not by_group and not is_matrix_of_layer(model, name, experts):
            updater = ADAMW
        made.setdefault((updater, share, decay if name in decayed else 0.0, betas, eps), []).append(parameters[name])
    groups: dict[str, list[dict[str, Any]]] = {}
    for (updater, share, decay, betas, eps), held in made.items():
        found = {"params": held, "lr": settings.lr * share, SHARE: share, "weight_decay": decay}
        of_adamw = {"betas": betas, "eps": eps} if settings.updaters[updater].kind == ADAMW else {}
        groups.setdefault(updater, []).append({**found, **of_adamw})
    return groups


def _held_by(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(match_names(pattern, [".".join(parts[:end])]) for end in range(1, len(parts) + 1))


def plain_optimizer(
    model: nn.Module, settings: OptimizerConfig, decayed: Collection[str], experts: int = 0
) -> torch.optim.Optimizer:
    """Return the optimizer of a configuration for one process, with the groups of :func:`plain_groups`."""
    made, updaters = {}, settings.updaters
    for name, groups in plain_groups(model, settings, decayed, experts).items():
        updater = updaters[name]
        if updater.options is None:
            made[name] = users_optimizer(settings, updater, groups)
        elif updater.kind == ADAMW:
            made[name] = torch.optim.AdamW(groups, lr=settings.lr, fused=settings.fused)
        elif updater.kind == MUON:
            made[name] = PlainMuon(groups, settings.lr, model, updater.options.model_dump())
        else:
            made[name] = _PLAIN[updater.kind](groups, lr=settings.lr, **updater.options.model_dump())
    return SeveralOptimizers(made, updaters) if len(made) != 1 else next(iter(made.values()))


class _PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, line by line."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (one for one in group["params"] if one.grad is not None):
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                c = first * m + (1 - first) * p.grad
                p -= group["lr"] * (c.sign() + group["weight_decay"] * p)
                m.copy_(second * m + (1 - second) * p.grad)


_PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adafactor": torch.optim.Adafactor,
    "lion": _PlainLion,
    "sgd": torch.optim.SGD,
}


def decayed_by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the parameters that an optimizer decays."""
    decayed = {id(p) for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]}
    return [name for name, parameter in model.named_parameters() if id(parameter) in decayed]
