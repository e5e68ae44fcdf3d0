"""AdamW and the learning rate as a function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from meshwright.device import Ability, able
from meshwright.errors import PlanError
from meshwright.plan.result.sharding_plan import ParameterRow
from meshwright.train.config import OptimizerConfig, ScheduleConfig

__all__ = ["build_optimizer", "learning_rate", "set_learning_rate"]


def build_optimizer(model: nn.Module, config: OptimizerConfig, rows: Iterable[ParameterRow]) -> torch.optim.AdamW:
    """Return AdamW over the trained parameters of a model. The plan says which of them are decayed.

    Args:
        model: the model, parallelized or not; its parameters have the names of the plan.
        config: settings of the optimizer.
        rows: rows of the plan, one for each parameter.

    Raises:
        PlanError: the plan has no row for a trained parameter.
    """
    decayed = {name: row.decayed for row in rows for name in (row.name, *row.aliases)}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unknown := [name for name in trained if name not in decayed]:
        raise PlanError(
            "plan.model", f"the plan has no row for the trained parameter {unknown[0]!r}, so its weight decay is unknown"
        )
    groups = [
        {"params": [p for name, p in trained.items() if decayed[name]], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trained.items() if not decayed[name]], "weight_decay": 0.0},
    ]
    fused = config.fused
    if fused is None:
        fused = all(able(p.device.type, Ability.FUSED) and p.is_floating_point() for p in trained.values())
    return torch.optim.AdamW(
        [group for group in groups if group["params"]] or groups[:1],  # a stage may have no trained parameter
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of a step, counted from 0, in a run of ``steps`` steps.

    Warmup is linear and reaches the peak in its last step. The decay reaches ``final_ratio * peak`` in the run's last step.
    The cosine decay is that of Loshchilov and Hutter 2017 (arXiv 1608.03983), without restarts.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    left = max(1, steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / left)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
