"""Stages that a user of the reference cuts: the manager parallelizes each over its ranks, and torch's schedules run them."""

import copy
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleZBVZeroBubble

from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.slices import whole_tensor
from meshwright.errors import UnsupportedError
from meshwright.moe.fsdp_mixin import MoEFSDPSyncMixin, patch_stage
from tests.harness import run_ranks
from tests.tiny import tiny_model

LENGTH = 8


def stage_of(whole: nn.Module, stage: int, stages: int) -> nn.Module:
    """A stage with the parts of other stages left out, and a forward of its own, as the reference makes one."""
    part: Any = copy.deepcopy(whole)
    count = len(part.model.layers) // stages
    own = range(stage * count, (stage + 1) * count)
    part.model.layers = nn.ModuleDict({str(index): part.model.layers[index] for index in own})
    if stage > 0:
        part.model.embed_tokens = None
    if stage < stages - 1:
        part.model.norm = part.lm_head = None

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        if self.model.embed_tokens is not None:
            hidden = self.model.embed_tokens(hidden)
        places = torch.arange(LENGTH)[None]
        tables = self.model.rotary_emb(hidden, places)
        for layer in self.model.layers.values():
            hidden = layer(hidden, position_ids=places, position_embeddings=tables)
        return hidden if self.lm_head is None else self.lm_head(self.model.norm(hidden))

    part.forward = types.MethodType(forward, part)
    part.__class__ = type("Stage", (MoEFSDPSyncMixin, type(part)), {})
    return part  # type: ignore[no-any-return]


def summed(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="sum")


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        (Schedule1F1B, {"dp_size": 2}),
        pytest.param(Schedule1F1B, {"tp_size": 2}, marks=pytest.mark.thorough),
        pytest.param(ScheduleZBVZeroBubble, {"dp_size": 2}, marks=pytest.mark.thorough),
    ],
    ids=["1f1b-dp", "1f1b-tp", "zbv-dp"],
)
def test_stages_under_a_schedule_of_torch(schedule: type[Any], sizes: dict[str, int]) -> None:
    def on_rank(rank: int) -> None:
        whole = tiny_model("llama", num_hidden_layers=4)
        several = schedule is ScheduleZBVZeroBubble
        manager = FSDP2Manager(pp_size=2, mp_policy=MixedPrecisionPolicy(), **sizes)
        assert (manager.pp_size, manager.dp_size) == (2, sizes.get("dp_size", 1))
        pp, dp = (manager.mesh[axis] for axis in ("pp", "dp"))
        own = [pp.get_local_rank(), 3 - pp.get_local_rank()] if several else [pp.get_local_rank()]
        count = 4 if several else 2
        stages = []
        for index in own:
            part = manager.parallelize(stage_of(whole, index, count))
            assert part is not None
            between = torch.zeros(1, LENGTH, 32, requires_grad=True)
            stage = PipelineStage(
                part,
                index,
                count,
                torch.device("cpu"),
                input_args=(between if index else torch.zeros(1, LENGTH, dtype=torch.long),),
                output_args=(torch.zeros(1, LENGTH, 67, requires_grad=True) if index == count - 1 else between,),
                group=pp.get_group(),
            )
            stages.append(patch_stage(stage))
            part.prepare_for_final_backward(pp_enabled=True)
        tokens = torch.randint(0, 67, (8, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        mine = tokens[dp.get_local_rank() :: dp.size()]
        run = schedule(stages if several else stages[0], len(mine), loss_fn=summed, scale_grads=False)
        first, last = 0 in own, count - 1 in own
        run.step(
            *([mine[:, :-1].contiguous()] if first else []), target=mine[:, 1:] if last else None, losses=[] if last else None
        )

        summed(whole(tokens[:, :-1]).logits, tokens[:, 1:]).backward()
        truth = dict(whole.named_parameters())
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                assert parameter.grad is not None, name
                gradient = whole_tensor(parameter.grad) if hasattr(parameter.grad, "placements") else parameter.grad
                gradient = gradient * dp.size()  # a manager averages over data ranks, as torch does
                expected = truth[name].grad
                assert expected is not None
                assert (gradient - expected).abs().max() <= 5e-6 * expected.abs().max(), name
        dist.barrier()

    run_ranks(on_rank, 4)


def test_slices_of_a_sequence_cannot_cross_a_cut_made_elsewhere() -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(pp_size=2, tp_size=2, sequence_parallel=True)
        with pytest.raises(UnsupportedError, match=r"legal are sequence_parallel=False, and meshwright\.Pipeline"):
            manager.parallelize(stage_of(tiny_model("llama"), 0, 2))

    run_ranks(on_rank, 4)
