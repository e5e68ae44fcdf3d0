"""What a microbatch needs on the stages of a pipeline. Apart from what runs it, which loads torch's schedules."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.plan.axes.pipeline.stage_plan import crossing_shape
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["Work"]


@dataclass(frozen=True)
class Work:
    """What a microbatch needs on the stages.

    Attributes:
        arguments: what the model of an inner stage is called with: this rank's part of the batch, with ``input_ids`` or
            ``inputs_embeds``.
        loss: calls that of the last stage. It returns a scalar for training; in evaluation, whatever is to be known.
        around: what every forward and backward of the microbatch runs in.
    """

    arguments: Mapping[str, Any]
    loss: Callable[[nn.Module], torch.Tensor]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def crossing(self, plan: ShardingPlan, stage: int) -> tuple[int, ...]:
        """Return the shape of what enters a stage."""
        tokens = self.arguments.get("input_ids")
        rows, length = (self.arguments["inputs_embeds"] if tokens is None else tokens).shape[:2]
        return crossing_shape(plan, stage, rows, length * plan.layout.size("cp"))
