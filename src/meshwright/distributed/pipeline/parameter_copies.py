"""Parameters that two stages hold, such as a tied embedding and head: both get the sum of both gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.pipeline.stage_parts import StageParts
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["ParameterCopy", "local_shard", "parameter_copies"]


@dataclass(frozen=True)
class ParameterCopy:
    """A parameter that two stages hold, on this rank.

    Attributes:
        mine: this rank's parameters, one or both, that of the first stage first.
        other: index on `pp` of the rank that has the other; ``None``: this rank has both.
        first: whether this rank has that of the first stage.
    """

    mine: tuple[nn.Parameter, ...]
    other: int | None
    first: bool

    @torch.no_grad()
    def add_gradients(self, group: dist.ProcessGroup) -> None:
        """Give both the sum of both gradients, added in the same order on both sides; on one rank, only the first."""
        if self.other is None:
            first, second = self.mine
            if first.grad is None:
                first.grad = second.grad
            elif second.grad is not None:
                local_shard(first.grad).add_(local_shard(second.grad))
            second.grad = None
            return
        (parameter,) = self.mine
        if parameter.grad is None:  # the other rank may have one, and waits
            parameter.grad = torch.zeros_like(parameter)
        gradient = local_shard(parameter.grad)
        own = gradient.contiguous()
        received = torch.empty_like(own)
        operations = [
            dist.P2POp(dist.isend, own, group=group, group_peer=self.other),
            dist.P2POp(dist.irecv, received, group=group, group_peer=self.other),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        gradient.copy_(own + received if self.first else received + own)


def parameter_copies(parts: StageParts, plan: ShardingPlan, own: Sequence[int]) -> list[ParameterCopy]:
    """Return the trained parameters of this rank's stages that another stage holds too."""
    copies = []
    for row in plan.parameters:
        here = [stage for stage in row.stages if stage in own]
        if row.copies and row.trainable and here:
            mine = tuple(dict(parts[stage].named_parameters())[row.name] for stage in here)
            other = next((plan.stages[stage].rank for stage in row.stages if stage not in own), None)
            copies.append(ParameterCopy(mine, other, row.stage in own))
    return copies


def local_shard(tensor: torch.Tensor | None) -> Any:
    """Return the shard of this rank, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
