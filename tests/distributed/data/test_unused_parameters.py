"""Ranks and microbatches that use different parameters of a unit: each gradient is that of one process, and what nothing used
has none.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.distributed import _torch_compat
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.mesh import ParallelMesh, build_mesh
from meshwright.distributed.parallelizer import apply_fsdp2_sharding_recursively
from meshwright.errors import UnsupportedError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.harness import run_ranks
from tests.tiny import batches, make, summed_loss, whole

PARTS = ("image", "text", "wide")


class Block(nn.Module):
    """A unit with parts, of which a forward uses some: two of one shape, one of another, and one that nothing uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(width, width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width, bias=False))
        self.spare = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, parts: Sequence[str]) -> torch.Tensor:
        for part in parts:
            hidden = hidden + getattr(self, part)(hidden)
        return hidden


class Parted(nn.Module):
    """Blocks that use the parts that are named in ``parts``, and leave out the blocks in ``skipped``."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 29, bias=False)
        self.parts: Sequence[str] = PARTS
        self.skipped: Sequence[int] = ()
        self.dropped: Sequence[int] = ()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if index in self.dropped:
                block(hidden, self.parts)
            elif index not in self.skipped:
                hidden = block(hidden, self.parts)
        return self.head(hidden)


class Bare(nn.Module):
    """A root without parameters of its own; its blocks stand side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [block(x) for block in self.blocks]


SPEC = ParallelSpec("parted", layers=("blocks.*",))

USES = {
    "by microbatch": lambda number, each: ("image", "text") if number % each else ("wide", "text"),
    "equal shapes by microbatch": lambda number, each: ("text",) if number % each else ("image",),
    "by rank": lambda number, each: ("image",) if number // each % 2 else ("wide", "text"),
    "equal shapes by rank": lambda number, each: ("image",) if number // each % 2 else ("text",),
    "on one rank only": lambda number, each: PARTS if number // each == 1 else ("text",),
    "in one microbatch of one rank": lambda number, each: PARTS if number == 1 else ("text",),
    "on no rank": lambda number, each: ("text",),
    "nothing in the last microbatch": lambda number, each: () if number % each == each - 1 else PARTS,
}
"""What a microbatch uses, by its number over all ranks and the number of a rank's microbatches."""


def build(layout: Layout, world: int, spec: ParallelSpec = SPEC, **options) -> tuple[Parted, ShardingPlan]:
    torch.manual_seed(3)
    model = Parted()
    plan = resolve(spec, model, layout, ParallelOptions(**{"param_dtype": "float32", **options}), world_size=world)
    parallelize(model, plan, _mesh(plan.layout))
    return model, plan


@functools.cache
def _mesh(layout: Layout) -> ParallelMesh:
    """One for all models of a rank: its groups have threads."""
    return build_mesh(layout, "cpu")


def alone(uses: Sequence[Sequence[str]], steps: int = 1) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Gradients of the first step, and parameters after all, of one process."""
    torch.manual_seed(3)
    model = Parted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    gradients: list[torch.Tensor | None] = []
    for step in range(steps):
        for number, batch in enumerate(batches(len(uses), seed=step + 1)):
            model.parts = uses[number]
            summed_loss(model, batch).backward()
        gradients = gradients or [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return gradients, [p.detach().clone() for p in model.parameters()]


def run_steps(model: Parted, sync: GradSync, rank: int, uses: Sequence[Sequence[str]], world: int, steps: int = 1) -> None:
    each = len(uses) // world
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for step in range(steps):
        mine = list(enumerate(batches(len(uses), seed=step + 1)))[rank * each : (rank + 1) * each]
        for _, (number, batch) in sync.microbatches(mine):
            model.parts = uses[number]
            summed_loss(model, batch).backward()
        if step < steps - 1 or steps > 1:
            optimizer.step()
            optimizer.zero_grad()


def check_gradients(model: nn.Module, expected: Sequence[torch.Tensor | None], **tolerance: float) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), expected, strict=True):
        assert (ours.grad is None) == (theirs is None), name
        if theirs is not None:
            torch.testing.assert_close(whole(ours.grad), theirs, **{"rtol": 1e-4, "atol": 1e-5, **tolerance}, msg=name)


LAYOUTS = {
    "shard": (Layout(), 2),
    "replicate": (Layout(dp_replicate=2, dp_shard=1), 2),
    "2 x shard 2": (Layout(dp_replicate=2), 4),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", LAYOUTS)
def test_gradients_are_those_of_one_process_whatever_ranks_and_microbatches_use(where: str) -> None:
    layout, world = LAYOUTS[where]

    def on_rank(rank: int) -> None:
        for each in (1, 3) if world == 2 else (3,):
            for policy in SyncPolicy:
                for once in (True, False) if policy is SyncPolicy.REDUCE_EACH and each > 1 else (True,):
                    for name, use in USES.items():
                        uses = [use(number, each) for number in range(world * each)]
                        if each == 1 and name == "nothing in the last microbatch":
                            continue
                        model, plan = build(layout, world, sync=policy, microbatches=each, all_reduce_once=once)
                        sync = GradSync.from_plan(model, plan)
                        run_steps(model, sync, rank, uses, world)
                        try:
                            check_gradients(model, alone(uses)[0])
                        except AssertionError as error:
                            raise AssertionError(f"{name}, {policy}, {each} microbatches, once={once}: {error}") from error

    run_ranks(on_rank, world)


def test_kept_gradients_of_another_dtype_reduce_together() -> None:
    """In bfloat16 a gradient that was kept is fp32, one of the last microbatch is not."""

    def on_rank(rank: int) -> None:
        for policy in SyncPolicy:
            uses = [USES["by microbatch"](number, 2) for number in range(4)]
            model, plan = build(Layout(), 2, param_dtype="bfloat16", sync=policy, microbatches=2)
            run_steps(model, GradSync.from_plan(model, plan), rank, uses, 2)
            expected = alone(uses)[0]
            largest = max(float(gradient.abs().max()) for gradient in expected if gradient is not None)
            check_gradients(model, expected, rtol=0.05, atol=0.03 * largest)

    run_ranks(on_rank, 2)


def test_what_no_rank_used_is_neither_decayed_nor_moved() -> None:
    def on_rank(rank: int) -> None:
        uses = [("image",), ("text",)]
        model, plan = build(Layout(), 2)
        before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
        run_steps(model, GradSync.from_plan(model, plan), rank, uses, 2, steps=3)
        for (name, ours), theirs in zip(model.named_parameters(), alone(uses, 3)[1], strict=True):
            torch.testing.assert_close(whole(ours.detach()), theirs, rtol=1e-4, atol=1e-5, msg=name)
            if "spare" in name or "wide" in name:
                assert torch.equal(whole(ours.detach()), before[name])

    run_ranks(on_rank, 2)


def test_the_flags_are_one_all_reduce_that_the_plan_has() -> None:
    def on_rank(rank: int) -> None:
        for layout in (Layout(), Layout(dp_replicate=4, dp_shard=1), Layout(dp_replicate=2)):
            for claimed in (False, True):
                spec = replace(SPEC, uses_all_parameters=claimed)
                model, plan = build(layout, 4, spec, sync="defer", microbatches=2, freeze=("blocks.*.spare.*",))
                assert plan.flags_of_use is not claimed
                sync = GradSync.from_plan(model, plan)
                for step in range(2):
                    with CommCounter() as counter:
                        for _, batch in sync.microbatches(batches(2, seed=step + 1)):
                            summed_loss(model, batch).backward()
                    traffic = totals(plan).traffic
                    assert counter.counts["all_reduce"] == traffic.all_reduces
                    assert counter.bytes["all_reduce"] == traffic.all_reduce_bytes
                    assert counter.counts["reduce_scatter"] == traffic.reduce_scatters

    run_ranks(on_rank, 4)


def test_a_loop_without_grad_sync_has_the_same_gradients_and_zeros_for_what_nothing_used() -> None:
    def on_rank(rank: int) -> None:
        uses = [("image",), ("text", "wide")]
        model, _ = build(Layout(), 2, sync="reduce_each")
        model.parts = uses[rank]
        summed_loss(model, batches(2)[rank]).backward()
        for (name, parameter), expected in zip(model.named_parameters(), alone(uses)[0], strict=True):
            found = whole(parameter.grad)
            expected = torch.zeros_like(found) if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(on_rank, 2)


def test_units_that_were_made_by_hand_reduce_all_their_parameters_too() -> None:
    def on_rank(rank: int) -> None:
        uses = [("image",), ("text", "wide")]
        torch.manual_seed(3)
        model = Parted()
        fp32 = MixedPrecisionPolicy(param_dtype=torch.float32)
        apply_fsdp2_sharding_recursively(model, _mesh(Layout().resolve(2)).fsdp(), fp32)
        fully_shard(model, mesh=_mesh(Layout().resolve(2)).fsdp())
        GradSync(model)  # the root was made by torch alone
        model.parts = uses[rank]
        summed_loss(model, batches(2)[rank]).backward()
        for (name, parameter), expected in zip(model.named_parameters(), alone(uses)[0], strict=True):
            found = 2 * whole(parameter.grad)  # torch averages
            expected = torch.zeros_like(found) if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(on_rank, 2)


def ends(model: Parted, sync: GradSync, rank: int) -> None:
    """One step of one microbatch, to its end."""
    for _, batch in sync.microbatches(batches(2)[rank : rank + 1]):
        summed_loss(model, batch).backward()


@pytest.mark.parametrize("how", ["skipped", "dropped"])
@pytest.mark.parametrize("where", ["shard", "replicate"])
def test_a_unit_that_one_rank_leaves_out_is_refused_by_name(how: str, where: str) -> None:
    """In the first step before any collective of it meets another."""

    def on_rank(rank: int) -> None:
        for index in (0, 1, 2):
            model, plan = build(*LAYOUTS[where], sync="reduce_each")
            setattr(model, how, (index,) if rank == 1 else ())
            with pytest.raises(UnsupportedError, match=rf"rank 0 .* blocks\.{index} where rank 1 "):
                ends(model, GradSync.from_plan(model, plan), rank)

    run_ranks(on_rank, 2)


def test_ranks_that_leave_out_different_units_later_are_refused_after_the_step() -> None:
    """Their collectives are of one size, so each rank would compute with the other's layer."""

    def on_rank(rank: int) -> None:
        model, plan = build(Layout(), 2, sync="reduce_each")
        sync = GradSync.from_plan(model, plan)
        ends(model, sync, rank)
        model.zero_grad()
        model.skipped = (rank,)
        with pytest.raises(UnsupportedError, match=r"rank 0 runs blocks\.1 where rank 1 runs blocks\.0"):
            ends(model, sync, rank)
        assert all(parameter.grad is None for parameter in model.parameters())

    run_ranks(on_rank, 2)


def test_a_claim_that_all_parameters_are_used_is_checked() -> None:
    """By all ranks together in the first step: they raise alike, whichever of them left something out."""

    def on_rank(rank: int) -> None:
        claimed = replace(SPEC, uses_all_parameters=True)
        frozen = ("blocks.*.spare.*",)
        model, plan = build(Layout(), 2, claimed, freeze=frozen)
        model.parts = PARTS if rank else ("text",)
        with pytest.raises(UnsupportedError, match=r"'blocks\.0\.image\.weight'.*uses_all_parameters"):
            ends(model, GradSync.from_plan(model, plan), rank)
        assert all(parameter.grad is None for parameter in model.parameters())
        model, plan = build(Layout(), 2, claimed, freeze=frozen)
        model.skipped = (1,) if rank else ()
        with pytest.raises(UnsupportedError, match=r"rank 0 runs blocks\.1 where rank 1 runs blocks\.2"):
            ends(model, GradSync.from_plan(model, plan), rank)

    run_ranks(on_rank, 2)


def test_a_claim_is_made_for_the_classes_of_transformers_alone() -> None:
    model, spec = make("llama", meta=True)
    assert spec.uses_all_parameters
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "mine"})
    assert not spec_of(model).uses_all_parameters


def test_a_root_without_parameters_waits_for_reductions_that_no_backward_made() -> None:
    def on_rank(rank: int) -> None:
        model = Bare()
        plan = resolve(SPEC, model, Layout(), ParallelOptions(param_dtype="float32", microbatches=2), world_size=2)
        parallelize(model, plan, _mesh(plan.layout))
        for index, batch in GradSync.from_plan(model, plan).microbatches(torch.ones(2, 4, 8)):
            model(batch)[index].sum().backward()  # the other blocks have no part in the loss
        assert not _torch_compat.open_reductions(model)
        for block, used in zip(model.blocks, (True, True, False), strict=True):
            assert (block.weight.grad is not None) is used
            if used:  # of a sum of outputs: the sum of inputs, on two ranks
                torch.testing.assert_close(whole(block.weight.grad), torch.full((8, 8), 8.0))

    run_ranks(on_rank, 2)
