"""The optimizer of a run: ours, or one of the user."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.device import CPU, Ability, able
from meshwright.distributed.update.adafactor import Adafactor
from meshwright.distributed.update.lion import Lion
from meshwright.distributed.update.quantized import quantized_optimizer
from meshwright.distributed.update.sgd import Sgd
from meshwright.distributed.update.sharded_muon import Muon
from meshwright.errors import ConfigError, PartError, PlanError, Refusal
from meshwright.objectives.call import in_part
from meshwright.plan.given.options import UpdateRule
from meshwright.plan.result.sharding_plan import ParameterRow
from meshwright.plan.update.matrices import Form
from meshwright.plan.update.states import ALL, COLUMNS, ROWS
from meshwright.train.config import OptimizerConfig, RunConfig
from meshwright.train.learning_rate import SHARE, learning_rate
from meshwright.train.schema.optimizer_config import Updater
from meshwright.train.schema.optimizer_kinds import KEYS, MUON, QUANTIZED
from meshwright.user_code import check_arguments, find_part

__all__ = ["SeveralOptimizers", "build_optimizer", "check_parts", "skips_by_flag", "update_rules", "users_optimizer"]


def build_optimizer(model: nn.Module, config: OptimizerConfig, rows: Iterable[ParameterRow]) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters of a model. The plan says which of them are decayed, and their rates.

    Args:
        model: the model, parallelized or not; its parameters have the names of the plan.
        config: settings of the optimizer.
        rows: rows of the plan, one for each parameter.

    Raises:
        PlanError: the plan has no row for a trained parameter.
        ConfigError: an optimizer of the user does not exist, or its arguments are wrong.
        PartError: it cannot be made.
    """
    row_of = {name: row for row in rows for name in (row.name, *row.aliases)}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unknown := [name for name in trained if name not in row_of]:
        raise PlanError(
            "plan.model", f"the plan has no row for the trained parameter {unknown[0]!r}, so its weight decay is unknown"
        )
    everywhere = config.fused
    if everywhere is None:
        everywhere = all(able(p.device.type, Ability.FUSED) and p.is_floating_point() for p in trained.values())
    whole = _Settings(1.0, config.weight_decay, config.betas, config.eps, everywhere)
    updaters = config.updaters
    alike: dict[str, dict[_Settings, list[torch.Tensor]]] = {}
    for name, parameter in trained.items():
        row = row_of[name]
        decay = config.weight_decay if row.weight_decay is None else row.weight_decay
        fused = everywhere if row.fused is None else row.fused
        settings = _Settings(row.rate, decay if row.decayed else 0.0, row.betas or config.betas, row.eps or config.eps, fused)
        if row.update not in updaters:
            said = f"the plan has {name!r} updated by {row.update}, and the configuration has {', '.join(updaters)}"
            raise PlanError("plan.model", said)
        alike.setdefault(row.update, {}).setdefault(settings, []).append(parameter)
    alike = alike or {next(iter(updaters)): {whole: []}}  # a stage may have no trained parameter
    forms: dict[torch.Tensor, Form] = {
        trained[name]: row.form for name, row in row_of.items() if name in trained and row.form is not None
    }
    names: dict[torch.Tensor, str] = {parameter: row_of[name].name for name, parameter in trained.items()}
    made = {name: _make(config, one, alike[name], whole, forms, names) for name, one in updaters.items() if name in alike}
    return SeveralOptimizers(made, updaters) if len(made) > 1 else next(iter(made.values()))


class _Settings(NamedTuple):
    """The settings of parameters that are updated alike."""

    share: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    fused: bool


def _make(
    config: OptimizerConfig,
    updater: Updater,
    alike: Mapping[_Settings, list[torch.Tensor]],
    whole: _Settings,
    forms: Mapping[torch.Tensor, Form],
    names: Mapping[torch.Tensor, str],
) -> torch.optim.Optimizer:
    """Return one of the optimizers of a configuration for its parameters."""
    groups: list[dict[str, Any]] = []
    for settings in sorted(alike, reverse=True):
        own = {"params": alike[settings], "weight_decay": settings.weight_decay}
        groups.append({**own, "lr": config.lr * settings.share, SHARE: settings.share})
    if updater.part is not None:
        return users_optimizer(config, updater, groups)
    keys = KEYS.get(updater.kind, ())
    for group, settings in zip(groups, sorted(alike, reverse=True), strict=True):
        group |= {key: getattr(settings, key) for key in keys}
    options = {} if updater.options is None else updater.options.model_dump()
    if updater.kind == MUON:
        del options["by_head"]  # the forms say it
        options |= {"dtype": getattr(torch, options["dtype"]), "forms": forms}
    if updater.kind in QUANTIZED:
        options["names"] = names
    return _OURS[updater.kind](groups, lr=config.lr, **{key: getattr(whole, key) for key in keys}, **options)


def _quantized(kind: str, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of torchao. On a CPU, and where nothing can be compiled, its step is made of several operators."""
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    compiled = all(device != CPU and able(device, Ability.COMPILED) for device in devices)
    return quantized_optimizer(kind)(groups, compiled=compiled, **options)


_OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adafactor": Adafactor,
    "lion": Lion,
    **{kind: partial(_quantized, kind) for kind in QUANTIZED},
    "muon": Muon,
    "sgd": Sgd,
}


def users_optimizer(config: OptimizerConfig, updater: Updater, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of the user for groups of parameters."""
    kind, arguments = _users(config, updater)
    if "weight_decay" not in inspect.signature(kind).parameters:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    assert updater.part is not None
    with in_part(f"optimizer {updater.part.use}", "__init__"):
        return kind(groups, lr=config.lr, **arguments)


class SeveralOptimizers(torch.optim.Optimizer):
    """Several optimizers as one. Its groups and its state are theirs, the same objects.

    Args:
        optimizers: the optimizers by their names; no two have a parameter in common.
        updaters: what the configuration says of them, for the names of what those of the user raise.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], updaters: Mapping[str, Updater]) -> None:
        super().__init__([group for one in optimizers.values() for group in one.param_groups], {})
        self.optimizers, self.updaters = optimizers, updaters
        for one in optimizers.values():
            self.state.update(one.state)  # some have a state before their first step
            one.state = self.state

    @property
    def skips_by_flag(self) -> bool:
        """Whether each skips a step by itself, if the tensor ``found_inf`` says so."""
        return all(map(skips_by_flag, self.optimizers.values()))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run the step of each. A flag of the guard, if there is one, is for all."""
        for name, one in self.optimizers.items():
            part = self.updaters[name].part
            if hasattr(self, "found_inf"):
                one.found_inf = self.found_inf  # type: ignore[attr-defined]
            try:
                with in_part(f"optimizer {part.use}", "step") if part is not None else nullcontext():
                    one.step()
            finally:
                vars(one).pop("found_inf", None)


def skips_by_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer skips a step by itself, if the tensor ``found_inf`` says so: ours and torch's fused ones."""
    own = getattr(optimizer, "skips_by_flag", None)
    return all(group.get("fused") for group in optimizer.param_groups) if own is None else own


def _users(config: OptimizerConfig, updater: Updater) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of an optimizer of the user, and its arguments, checked."""
    part, of_group = updater.part, [one for one in config.groups if config.updater_of(one) == updater]
    assert part is not None
    is_first = next(iter(config.updaters.values())) == updater
    match = None if is_first else next(repr(one.match) for one in of_group)
    where = "optimizer.use" if match is None else f"optimizer.groups: {match}: use"
    kind = find_part(where, part.use, "optimizers", ["kind=adamw"])
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError("part.signature", f"{where}={part.use}: is no class of torch.optim.Optimizer")
    takes = inspect.signature(kind).parameters
    if "lr" not in takes:
        raise ConfigError("part.signature", f"{where}={part.use}: takes no lr, which is its second argument in torch.optim")
    decays = {"optimizer.weight_decay": config.weight_decay} if is_first else {}
    for one in of_group:
        own = config.weight_decay if one.weight_decay is None else one.weight_decay
        if not is_first or one.weight_decay is not None:
            decays[f"optimizer.groups: {one.match!r}: weight_decay"] = own
    if "weight_decay" not in takes and (found := [(key, decay) for key, decay in decays.items() if decay]):
        raise ConfigError(
            Refusal("config.value", f"{key}={decay:g}: {part.use} takes no weight_decay; the legal value is 0")
            for key, decay in found
        )
    arguments = check_arguments(
        "optimizer" if match is None else f"optimizer.groups: {match}",
        kind,
        part.arguments,
        given=("params", "lr", "weight_decay"),
    )
    return kind, arguments


def check_parts(config: RunConfig, steps: int) -> None:
    """Try the optimizer and the schedule of the user on a tensor, before any process starts.

    Args:
        config: the configuration.
        steps: number of optimizer steps, or 1 where it is not known yet.

    Raises:
        ConfigError: one does not exist, or its arguments are wrong.
        PartError: it raises something, or does not return what it should.
    """
    settings, schedule = config.optimizer, config.schedule
    if schedule.use is not None:
        for step in dict.fromkeys((0, steps // 2, steps - 1)):
            learning_rate(step, steps, settings.lr, schedule)
    update_rules(settings)
    if (kinds := settings.kinds & set(QUANTIZED)) and find_spec("torchao") is None:
        raise ConfigError("run.extra", f"optimizer.kind={min(kinds)}: torchao is missing: pip install 'meshwright[torchao]'")


def update_rules(config: OptimizerConfig) -> tuple[UpdateRule, ...]:
    """Return the rules of the optimizer for a plan. One of the user is tried on small tensors, which tells what it keeps.

    Raises:
        ConfigError: an optimizer of the user does not exist, or its arguments are wrong.
        PartError: it raises something, or its state is no tensor.
    """
    return tuple(
        UpdateRule(
            one.name,
            one.kind,
            _tried(config, one) if one.options is None else tuple(sorted(one.options.model_dump().items())),
        )
        for one in config.updaters.values()
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else bool(one == other)


def _tried(config: OptimizerConfig, updater: Updater) -> tuple[tuple[str, Any], ...]:
    """Return what an optimizer of the user keeps for a matrix and for a vector: pairs of what for, and bytes of a number.

    The bytes are 0 where the dtype is that of the parameter.
    """
    kind, arguments = _users(config, updater)
    assert updater.part is not None
    name_of = updater.part.use

    def states(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = kind([parameter], lr=config.lr, **arguments)
        parameter.grad = torch.ones_like(parameter)
        [group] = optimizer.param_groups
        before = copy.deepcopy(_settings(group))
        optimizer.step()
        if changed := [key for key, value in _settings(group).items() if key not in before or not _same(before[key], value)]:
            raise PartError(
                "part.returned",
                f"optimizer {name_of}: its step changes {', '.join(changed)} in its param_groups, which a checkpoint does not "
                "hold; legal is to keep it in state[parameter], as a tensor",
            )
        return {key: value for state in optimizer.state.values() for key, value in state.items()}

    found = {}
    for name, shape in (("matrix", (6, 10)), ("vector", (6,))):
        with in_part(f"optimizer {name_of}", "step"):
            kept = states(shape, torch.float32)
        if lost := [
            f"{key} ({type(value).__name__})" for key, value in kept.items() if not isinstance(value, torch.Tensor | None)
        ]:
            raise PartError(
                "part.returned",
                f"optimizer {name_of}: its state {', '.join(lost)} is no tensor, so that a checkpoint cannot keep it",
            )
        wide: dict[str, Any] = {}
        with suppress(Exception):  # it may be for single precision only
            wide = states(shape, torch.float64)
        kinds = {prod(shape): ALL, shape[0]: ROWS, shape[-1]: COLUMNS}
        found[name] = tuple(
            (kinds.get(one.numel(), ALL), 0 if getattr(wide.get(key), "dtype", None) is torch.float64 else one.element_size())
            for key, one in kept.items()
            if isinstance(one, torch.Tensor) and one.numel() > 1
        )
    return tuple(found.items())
