"""What a microbatch needs on the stages of a pipeline. Apart from what runs it, which loads torch's schedules."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

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
        state: what its passes leave on this rank (:class:`~meshwright.distributed.pipeline.passes.Passes`).
    """

    arguments: Mapping[str, Any]
    loss: Callable[[nn.Module], torch.Tensor]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    state: dict[str, Any] = field(default_factory=dict)

    def size(self, plan: ShardingPlan) -> tuple[int, int]:
        """Return the number of its sequences, and the positions of a whole one."""
        given = self.arguments.get("denoise", self.arguments)
        tokens = given.get("input_ids")
        rows, length = (given["inputs_embeds"] if tokens is None else tokens).shape[:2]
        return rows, length * plan.layout.size("cp")
