"""AdamW and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from meshwright.train.config import OptimizerConfig, ScheduleConfig

__all__ = ["build_optimizer", "learning_rate", "set_learning_rate"]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters; only tensors of two or more dimensions are decayed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = config.fused
    if fused is None:
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Learning rate of a step, counted from 0, of ``steps`` in all.

    Warmup is linear and reaches the peak in its last step; the decay reaches ``final_ratio * peak`` in the last step.
    Cosine after Loshchilov and Hutter 2017 (arXiv 1608.03983), without restarts.
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
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
