"""The learning rate as a function of the step: ours, or one of the user."""

import json
import math
from collections.abc import Callable
from functools import cache, partial

import torch

from meshwright.errors import ConfigError, PartError
from meshwright.objectives.call import in_part
from meshwright.train.config import ScheduleConfig
from meshwright.user_code import check_arguments, find_part

__all__ = ["SHARE", "learning_rate", "set_learning_rate"]

SHARE = "share"
"""Key of a parameter group: its learning rate, as a share of that of the configuration."""

Factor = Callable[[int, int], float]


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
        own = rate * group.get(SHARE, 1.0)
        if isinstance(group["lr"], torch.Tensor):  # of torchao, whose compiled step reads it
            group["lr"].fill_(own)
        else:
            group["lr"] = own
