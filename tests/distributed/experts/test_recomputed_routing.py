"""The choice of experts is kept where a layer is recomputed: gradients belong to the experts that forward used."""

from typing import Any

import pytest
import torch

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.mesh import build_mesh
from meshwright.layout import Layout
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import batches, make, summed_loss, whole

NONE, *MODES = ActivationCheckpointing


def watch(model: Any, routers: list[str], *, fickle: bool) -> dict[str, list[torch.Tensor]]:
    """The experts that each call of each router chose; a fickle one turns its logits around whenever it is called again."""
    seen: dict[str, list[torch.Tensor]] = {}

    def attach(name: str) -> None:
        router = model.get_submodule(name)
        inner, seen[name] = router.forward, []

        def forward(hidden: torch.Tensor) -> Any:
            again = fickle and torch._C._current_graph_task_id() != -1
            # Not by so much that the layer would compute another function: the gradient of what is left out is zero.
            output = inner(hidden + again * (-2 * hidden).detach())
            seen[name].append(output[2].clone())
            return output

        router.forward = forward

    for name in routers:
        attach(name)
    return seen


def step(
    family: str, mode: ActivationCheckpointing, layout: Layout, rank: int, *, fickle: bool = False
) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    model, spec = make(family)
    plan = resolve(spec, model, layout, ParallelOptions(param_dtype="float32", activation_checkpointing=mode))
    seen = watch(model, [row.router for row in plan.experts], fickle=fickle)
    parallelize(model, plan, build_mesh(plan.layout, "cpu")).train()
    ranks = layout.size("dp")
    for _, batch in GradSync.from_plan(model, plan).microbatches(batches(ranks)[rank % ranks : rank % ranks + 1]):
        summed_loss(model, batch).backward()
    return [whole(p.grad).clone() for p in model.parameters() if p.grad is not None], seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gemma4_moe"])
def test_the_same_bits_as_without(family: str) -> None:
    def on_rank(rank: int) -> None:
        layout = Layout(dp_shard=1)
        expected, _ = step(family, NONE, layout, rank)
        for mode in MODES:
            found, seen = step(family, mode, layout, rank)
            if mode is ActivationCheckpointing.FULL:
                assert all(len(calls) == 2 for calls in seen.values())  # the forward, and its recomputation
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs), mode

    run_ranks(on_rank, 1)


@pytest.mark.parametrize("ep", [1, 2])
def test_a_router_that_would_choose_otherwise_does_not(ep: int) -> None:
    """With `ep` another choice would also be another number of rows for each rank."""

    def on_rank(rank: int) -> None:
        layout = Layout(dp_shard=2, ep=ep)
        for mode in MODES:
            _, seen = step("mixtral", mode, layout, rank, fickle=True)
            for first, again in seen.values():
                assert torch.equal(first, again), mode

    run_ranks(on_rank, 2)


def test_such_a_router_does_choose_otherwise_where_nothing_is_kept() -> None:
    """What the test above would find."""
    from tests.recompute import checkpoint_layer

    def on_rank(rank: int) -> None:
        model, _ = make("mixtral")
        seen = watch(model, ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"], fickle=True)
        for layer in model.model.layers:
            checkpoint_layer(layer, ActivationCheckpointing.FULL)  # told of no router
        summed_loss(model.train(), batches(1)[0]).backward()
        assert any(not torch.equal(first, again) for first, again in seen.values())

    run_ranks(on_rank, 1)


def test_expert_parallel_recomputed_in_full() -> None:
    def on_rank(rank: int) -> None:
        layout = Layout(dp_shard=2, ep=2)
        expected, _ = step("mixtral", NONE, layout, rank)
        for mode in MODES:
            found, _ = step("mixtral", mode, layout, rank)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs), mode

    run_ranks(on_rank, 2)
