"""The optimizer, and the learning rate as a function of the step: ours, or those of the user."""

import inspect
import json
import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from meshwright.device import Ability, able
from meshwright.errors import ConfigError, PartError, PlanError, Refusal
from meshwright.objectives.call import in_part
from meshwright.plan.result.sharding_plan import ParameterRow
from meshwright.train.config import OptimizerConfig, RunConfig, ScheduleConfig
from meshwright.user_code import check_arguments, find_part

__all__ = ["SHARE", "build_optimizer", "check_parts", "learning_rate", "set_learning_rate"]

SHARE = "share"
"""Key of a parameter group: its learning rate, as a share of that of the configuration."""

Factor = Callable[[int, int], float]


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
    alike: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name, parameter in trained.items():
        row = row_of[name]
        decay = config.weight_decay if row.weight_decay is None else row.weight_decay
        alike.setdefault((row.rate, decay if row.decayed else 0.0), []).append(parameter)
    kinds = sorted(alike, reverse=True) or [(1.0, config.weight_decay)]  # a stage may have no trained parameter
    groups: list[dict[str, Any]] = [
        {"params": alike.get(kind, []), "weight_decay": kind[1], "lr": config.lr * kind[0], SHARE: kind[0]} for kind in kinds
    ]
    if config.use is not None:
        kind, arguments = _users(config)
        if "weight_decay" not in inspect.signature(kind).parameters:
            groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
        with in_part(f"optimizer {config.use}", "__init__"):
            return kind(groups, lr=config.lr, **arguments)
    fused = config.fused
    if fused is None:
        fused = all(able(p.device.type, Ability.FUSED) and p.is_floating_point() for p in trained.values())
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _users(config: OptimizerConfig) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of an optimizer of the user, and its arguments, checked."""
    where = "optimizer.use"
    assert config.use is not None
    kind = find_part(where, config.use, "optimizers", ["kind=adamw"])
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError("part.signature", f"{where}={config.use}: is no class of torch.optim.Optimizer")
    takes = inspect.signature(kind).parameters
    if "lr" not in takes:
        raise ConfigError("part.signature", f"{where}={config.use}: takes no lr, which is its second argument in torch.optim")
    decays = {"optimizer.weight_decay": config.weight_decay}
    decays |= {f"optimizer.groups: {one.match!r}: weight_decay": one.weight_decay or 0.0 for one in config.groups}
    if "weight_decay" not in takes and (found := [(name, decay) for name, decay in decays.items() if decay]):
        raise ConfigError(
            Refusal("config.value", f"{name}={decay:g}: {config.use} takes no weight_decay; the legal value is 0")
            for name, decay in found
        )
    return kind, check_arguments("optimizer", kind, config.arguments, given=("params", "lr", "weight_decay"))


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
    if settings.use is None:
        return
    kind, arguments = _users(settings)
    with in_part(f"optimizer {settings.use}", "step"):
        parameter = nn.Parameter(torch.ones(4, 4))
        optimizer = kind([parameter], lr=settings.lr, **arguments)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    kept = {name: value for state in optimizer.state.values() for name, value in state.items()}
    if lost := [
        f"{name} ({type(value).__name__})" for name, value in kept.items() if not isinstance(value, torch.Tensor | None)
    ]:
        raise PartError(
            "part.returned",
            f"optimizer {settings.use}: its state {', '.join(lost)} is no tensor, so that a checkpoint cannot keep it",
        )


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of a step, counted from 0, in a run of ``steps`` steps.

    Warmup is linear and reaches the peak in its last step. The decay reaches ``final_ratio * peak`` in the run's last step.
    The cosine decay is that of Loshchilov and Hutter 2017 (arXiv 1608.03983), without restarts.

    Raises:
        ConfigError: a schedule of the user does not exist, or its arguments are wrong.
        PartError: it raises something, or returns no number of at least 0.
    """
    if schedule.use is not None:
        with in_part(f"schedule {schedule.use}", f"step {step} of {steps}"):
            factor = _factor(schedule.use, json.dumps(schedule.arguments, sort_keys=True))(step, steps)
        if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
            said = f"schedule {schedule.use}: returned {factor!r} for step {step} of {steps}; legal is a factor of at least 0"
            raise PartError("part.returned", said)
        return peak * factor
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    after, final = step - schedule.warmup_steps, schedule.final_ratio
    left = 1 - min(1.0, after / max(1, steps - 1 - schedule.warmup_steps))
    match schedule.kind:
        case "constant":
            return peak
        case "inverse_sqrt":
            start = max(1, schedule.warmup_steps)
            return peak * max(final, math.sqrt(start / (after + start)))
        case "wsd":
            decay = min(schedule.decay_steps or max(1, steps // 10), max(1, steps - schedule.warmup_steps))
            shape = min(1.0, (steps - 1 - step) / decay)
        case "cosine":
            shape = 0.5 * (1 + math.cos(math.pi * (1 - left)))
        case "polynomial":
            shape = left**schedule.power
        case _:
            shape = left
    return peak * (final + (1 - final) * shape)


@cache
def _factor(use: str, arguments: str) -> Factor:
    """Return the function of the user, with its arguments, given as JSON."""
    found = find_part("schedule.use", use, "schedules", ["kind=cosine, linear, constant, wsd, inverse_sqrt, polynomial"])
    if not callable(found):
        raise ConfigError("part.signature", f"schedule.use={use}: is no function of (step, steps)")
    return partial(found, **check_arguments("schedule", found, json.loads(arguments), given=2))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group: its share of a rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(SHARE, 1.0)
