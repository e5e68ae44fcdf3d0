"""A stack that runs twice: twin units and shared units, their collectives, and what they hold."""

import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from meshwright.distributed import _torch_compat
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import PlanError, UnsupportedError
from meshwright.layout import Layout
from meshwright.models.diffusion_gemma.block_diffusion import BlockDiffusion
from meshwright.models.diffusion_gemma.block_diffusion_options import DiffusionConfig
from meshwright.models.diffusion_gemma.model import enable
from meshwright.models.specs.registry import get_parallelization_strategy, spec_of
from meshwright.plan.axes.data.prefetch import prefetch_targets
from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import ActivationCheckpointing, SyncPolicy
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.diffusion_gemma import TOKENS, texts, tiny_diffusion_gemma
from tests.harness import run_ranks
from tests.recompute import checkpoint_layer
from tests.tiny import tiny_model, whole

VISION = ("model.encoder.vision_tower.**", "model.encoder.embed_vision.**")
FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


def planned(twin: bool | None, world: int = 2, model: Any = None, **options: Any) -> ShardingPlan:
    if model is None:
        with torch.device("meta"):
            model = tiny_diffusion_gemma(**FOUR)
    chosen = ParallelOptions(param_dtype=None, twin_units=twin, freeze=VISION, **options)
    return resolve(spec_of(model), model, Layout(), chosen, world_size=world)


def sharded(twin: bool, world: int = 2, **options: Any) -> tuple[Any, ShardingPlan, BlockDiffusion]:
    model = tiny_diffusion_gemma(**FOUR)
    plan = planned(twin, world, model, **options)
    get_parallelization_strategy(model).carry_out(model, plan, build_mesh(plan.layout, "cpu"))
    objective = BlockDiffusion(DiffusionConfig(), 0, 8, TOKENS["vocab_size"], 24)
    objective.attach(model)
    return model, plan, objective


def step(model: Any, sync: GradSync, objective: BlockDiffusion, microbatches: int) -> None:
    made = objective.training([texts(2, 24, seed=index) for index in range(microbatches)], [range(2)] * microbatches)
    for _, batch in sync.microbatches(made):
        sum(objective.sums(model, batch)).backward()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("twin", "policy", "expected"),
    [
        (False, SyncPolicy.DEFER, lambda m: (9, 9)),  # each of the nine units gathered and reduced once
        (True, SyncPolicy.DEFER, lambda m: (17, 17)),
        (False, SyncPolicy.RESHARD_EACH, lambda m: ((1 + 7 * 5 + 2) * m, 9)),
        (True, SyncPolicy.RESHARD_EACH, lambda m: ((1 + 8 * 2 + 7 * 3 + 1) * m, 17)),
        (False, SyncPolicy.REDUCE_EACH, lambda m: ((1 + 7 * 5 + 2) * m, 9 * m)),
        (True, SyncPolicy.REDUCE_EACH, lambda m: ((1 + 8 * 2 + 7 * 3 + 1) * m, 17 * m)),
    ],
)
def test_collectives_of_a_step(twin: bool, policy: SyncPolicy, microbatches: int, expected: Any) -> None:
    """Of four layers with experts, and the root. The last decoder layer stays gathered from its first pass to its backward."""

    def on_rank(rank: int) -> None:
        model, plan, objective = sharded(twin, sync=policy, microbatches=microbatches)
        sync = GradSync.from_plan(model, plan)
        for _ in range(2):
            with CommCounter() as counter:
                step(model, sync, objective, microbatches)
            found = (counter.counts["all_gather"], counter.counts["reduce_scatter"])
            assert found == expected(microbatches)
            traffic = totals(plan).traffic
            assert found == (traffic.all_gathers, traffic.reduce_scatters)
            assert counter.bytes["all_gather"] == traffic.all_gather_bytes
            assert counter.bytes["reduce_scatter"] == traffic.reduce_scatter_bytes
            assert not any(_torch_compat.is_unsharded(unit) for unit in fsdp_units(model).values())
            for parameter in model.parameters():
                parameter.grad = None

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("twin", [True, False])
def test_what_neither_pass_used_has_no_gradient(twin: bool) -> None:
    """Each twin reduces zeros for it. It would be decayed, and in one process it is not."""

    def on_rank(rank: int) -> None:
        model, plan, objective = sharded(twin, sync=SyncPolicy.REDUCE_EACH)
        for stack in ("encoder.language_model", "decoder"):
            model.get_submodule(f"model.{stack}.layers.1.self_attn.q_norm").forward = lambda hidden: hidden
        step(model, GradSync.from_plan(model, plan), objective, 1)
        attention = model.get_submodule("model.decoder.layers.1.self_attn")
        assert attention.q_norm.weight.grad is None
        assert attention.k_norm.weight.grad is not None

    run_ranks(on_rank, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("twin", [True, False])
def test_one_layer_is_gathered_at_a_time(twin: bool) -> None:
    """Under reduce_each: with its experts, beside the root, the last decoder layer and what is gathered ahead of its use."""

    def on_rank(rank: int) -> None:
        model, plan, objective = sharded(twin, sync=SyncPolicy.REDUCE_EACH, prefetch_backward=0)
        units = fsdp_units(model)
        kept = {name for name in units if not plan.unit(name).reshard_after_forward}
        most = 0

        def look(*_: Any) -> None:
            nonlocal most
            held = {name for name, unit in units.items() if _torch_compat.is_unsharded(unit)} - kept
            assert len({name.removesuffix(".experts") for name in held}) <= 1, held
            most = max(most, len(held))

        for name in plan.layers:
            if "vision" not in name:
                model.get_submodule(name).mlp.register_forward_hook(look)
                model.get_submodule(name).mlp.register_full_backward_hook(look)
        step(model, GradSync.from_plan(model, plan), objective, 2)
        assert most >= 1

    run_ranks(on_rank, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("twin", [True, False])
def test_ties_survive_steps_and_twins_gather_what_the_optimizer_changed(twin: bool) -> None:
    """On three ranks every shard is padded, into memory of each unit's own if nobody saw to it."""

    def on_rank(rank: int) -> None:
        model, plan, objective = sharded(twin, 3, sync=SyncPolicy.RESHARD_EACH)
        sync = GradSync.from_plan(model, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, sync, objective, 1)
            optimizer.step()
            optimizer.zero_grad()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for row in plan.parameters:
            assert all(parameters[name] is parameters[row.name] for name in row.aliases)
        stacks = model.model.encoder.language_model.layers, model.model.decoder.layers
        units = [[layer, layer.experts] for layers in stacks for layer in layers]
        for unit in (unit for pair in units for unit in pair):
            unit.unshard()
        for first, second in zip(*stacks, strict=True):
            for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
                assert torch.equal(one, other), name
        for unit in (unit for pair in units for unit in pair):
            unit.reshard()
        for row in plan.parameters:
            if row.trainable:
                assert whole(parameters[row.name]).isfinite().all()

    run_ranks(on_rank, 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("twin", "options"),
    [
        (None, {}),  # one process, and torch's checkpoint around the whole model
        (True, {"activation_checkpointing": "full"}),
        (False, {"activation_checkpointing": "full"}),
        (True, {"activation_checkpointing": "selective"}),
        (True, {"activation_checkpointing": "submodule"}),
    ],
)
def test_activation_checkpointing_in_a_loop_of_one_s_own(twin: bool | None, options: dict[str, Any]) -> None:
    """The encoder makes a cache that knows of windows (of eight tokens here), which a layer run again would write to again."""

    def gradients(model: Any, ranks: Any, around: Any = lambda call: call()) -> dict[str, torch.Tensor]:
        for rank in ranks:
            read = torch.arange(10, 34)[None] + rank
            call = functools.partial(model, read[:, :16], decoder_input_ids=read[:, 16:])  # ids by position
            around(lambda call=call: call().logits).square().sum().backward()
        return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    def on_rank(rank: int) -> None:
        expected = gradients(tiny_diffusion_gemma(**FOUR), range(2))
        if twin is None:
            model = tiny_diffusion_gemma(**FOUR)
            enable(model)
            for layer in (*model.model.encoder.language_model.layers, *model.model.decoder.layers):
                checkpoint_layer(layer, ActivationCheckpointing.FULL)
            found = gradients(model, range(2), functools.partial(checkpoint, use_reentrant=False))
        else:
            model = sharded(twin, sync=SyncPolicy.REDUCE_EACH, **options)[0]
            found = gradients(model, (rank,))
        assert expected.keys() >= found.keys() > set()
        assert any("encoder.language_model.layers" in name for name in found)
        for name, gradient in found.items():
            assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
        read = torch.arange(10, 34)[None]
        with pytest.raises(
            UnsupportedError, match="past_key_values: an encoder layer that activation checkpointing runs again"
        ):
            model(input_ids=read[:, :16], decoder_input_ids=read[:, 16:], past_key_values=DynamicCache())
        GradSync(model).abandon()  # what the root had begun
        with torch.no_grad():  # one goes on with a cache that a forward returned, as with transformers' own
            first = model(input_ids=read[:, :8], decoder_input_ids=read[:, 16:]).past_key_values
            logits = [
                model(input_ids=ids, past_key_values=cache, decoder_input_ids=read[:, 16:]).logits
                for ids, cache in ((read[:, :16], None), (read[:, 8:16], first))
            ]
        assert (logits[0] - logits[1]).abs().max() <= 1e-4 * logits[0].abs().max()

    run_ranks(on_rank, 2)


@pytest.mark.thorough
def test_a_loss_of_the_canvas_alone_reaches_the_last_encoder_layer() -> None:
    """Its output has no gradient then, only its keys and values, so that FSDP would not gather it: a segmentation fault."""

    def on_rank(rank: int) -> None:
        found = []
        for twin in (None, True, False):
            model = tiny_diffusion_gemma(**FOUR)
            if twin is not None:
                model = sharded(twin, sync=SyncPolicy.REDUCE_EACH)[0]
            for other in range(2) if twin is None else (rank,):
                read = torch.arange(10, 34)[None] + other
                logits = model(input_ids=read[:, :16], decoder_input_ids=read[:, 16:]).logits
                logits.square().sum().backward()
            found.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        for other in found[1:]:
            assert found[0].keys() >= other.keys() > set()
            for name, gradient in other.items():
                expected = found[0][name]
                assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name

    run_ranks(on_rank, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dropped", "policy", "options"),
    [
        ("before each step", SyncPolicy.DEFER, {}),
        ("in each microbatch", SyncPolicy.DEFER, {}),
        ("in each microbatch", SyncPolicy.RESHARD_EACH, {"activation_checkpointing": "full"}),
        ("instead of a microbatch", SyncPolicy.RESHARD_EACH, {}),
        ("in each microbatch", None, {"activation_checkpointing": "full"}),  # a loop without GradSync
        ("once", None, {}),
    ],
)
def test_a_forward_without_a_backward_keeps_no_later_gradient_back(
    dropped: str, policy: SyncPolicy | None, options: dict[str, Any]
) -> None:
    """An evaluation without ``no_grad``, or a loss that a loop leaves: shared layers would wait for its backward for ever."""

    def batches(objective: BlockDiffusion, rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
        """Of two steps of two microbatches, others on each rank."""
        rows = [range(2 * (number * ranks + rank), 2 * (number * ranks + rank) + 2) for number in range(4)]
        return objective.training([texts(2, 24, seed=row.start) for row in rows], rows)

    def on_rank(rank: int) -> None:
        alone = tiny_diffusion_gemma(**FOUR)
        expected = BlockDiffusion(DiffusionConfig(), 0, 8, TOKENS["vocab_size"], 24)
        expected.attach(alone)
        everywhere = [batches(expected, other, 2) for other in range(2)]
        model, plan, objective = sharded(False, sync=policy or SyncPolicy.REDUCE_EACH, **options)
        sync = GradSync.from_plan(model, plan)
        mine = everywhere[rank]
        held = []  # a graph that lives on is no reason to wait for its backward either
        for step in range(2):
            made = mine[2 * step : 2 * step + 2]
            left = set()
            if dropped == "before each step" or (dropped == "once" and step == 0):
                held.append(objective.sums(model, made[0]))
            for index, batch in enumerate(made) if policy is None else sync.microbatches(made):
                losses = objective.sums(model, batch)
                if dropped == "instead of a microbatch" and index == 0:
                    held.append(losses)
                    left.add(index)
                    continue
                if dropped == "in each microbatch":
                    held.append(objective.sums(model, batch))
                    with torch.no_grad():
                        objective.sums(model, batch)
                sum(losses).backward()
            for made in everywhere:
                for index, batch in enumerate(made[2 * step : 2 * step + 2]):
                    if index not in left:
                        sum(expected.sums(alone, batch)).backward()
            found = dict(model.named_parameters())
            reached = {name for name, parameter in alone.named_parameters() if parameter.grad is not None}
            assert reached == {name for name, parameter in found.items() if parameter.grad is not None}
            for name in sorted(reached):
                right = alone.get_parameter(name).grad
                assert (whole(found[name].grad) - right).abs().max() <= 1e-5 * right.abs().max(), (step, name)
            assert not any(_torch_compat.is_unsharded(unit) for unit in fsdp_units(model).values()) or policy is None
            for parameter in (*model.parameters(), *alone.parameters()):
                parameter.grad = None

    run_ranks(on_rank, 2)


@pytest.mark.thorough
def test_a_dropped_loss_costs_no_collective() -> None:
    """GradSync knows that no backward of what ran before is to come, so shared layers reduce once, behind their last one."""

    def on_rank(rank: int) -> None:
        model, plan, objective = sharded(False, sync=SyncPolicy.DEFER, microbatches=2)
        sync = GradSync.from_plan(model, plan)
        held = []
        for _ in range(2):
            with sync.forward_only():
                held += [sum(objective.sums(model, batch)) for batch in objective.training([texts(2, 24)], [range(2)])]
            with CommCounter() as counter:
                step(model, sync, objective, 2)
            assert (counter.counts["all_gather"], counter.counts["reduce_scatter"]) == (9, 9)

    run_ranks(on_rank, 2)


@pytest.mark.thorough
def test_no_loss_leaves_the_model_rounded() -> None:
    """FSDP casts all that leaves the root to ``output_dtype``; logits, and what is computed of them outside, may be."""

    def on_rank(rank: int) -> None:
        found = {}
        for dtype in (None, "float32", "bfloat16", "float16"):
            model, _, objective = sharded(True, sync=SyncPolicy.REDUCE_EACH, output_dtype=dtype)
            [batch] = objective.training([texts(2, 24)], [range(2)])
            if dtype in (None, "float32"):
                found[dtype] = objective.sums(model, batch)
                assert {loss.dtype for loss in found[dtype]} == {torch.float32}
                continue
            with pytest.raises(
                PlanError, match=f"output_dtype={dtype}: the encoder's loss.*legal are None, float32 and float64"
            ):
                objective.sums(model, batch)
            GradSync(model).abandon()
            denoised = model(denoise=batch)
            assert denoised.encoder_loss is None
            assert denoised.logits.dtype == getattr(torch, dtype)
        assert found[None] == found["float32"]

    run_ranks(on_rank, 2)


@pytest.mark.thorough
def test_it_generates_while_it_is_sharded() -> None:
    def on_rank(rank: int) -> None:
        prompt = torch.tensor([[5, 6, 7, 8]])
        answers = []
        for twin in (None, True, False):
            model = tiny_diffusion_gemma(**FOUR) if twin is None else sharded(twin)[0]
            torch.manual_seed(0)
            answers.append(
                model.eval().generate(prompt, max_new_tokens=8, max_denoising_steps=3, return_dict_in_generate=False)
            )
        assert torch.equal(answers[0], answers[1])
        assert torch.equal(answers[0], answers[2])

    run_ranks(on_rank, 2)


def test_what_never_runs_is_not_gathered_ahead() -> None:
    plan = planned(True, sync=SyncPolicy.REDUCE_EACH, prefetch_forward=4, prefetch_backward=4)
    idle = {unit.name for unit in plan.units if not unit.forwards}
    assert any("vision_tower" in name for name in idle)
    for targets in prefetch_targets(plan):
        ahead = {name for unit, names in targets.items() for name in names if name != unit}
        assert any("decoder.layers" in name for name in ahead)
        assert not ahead & idle


def test_the_plan_chooses_by_what_the_stack_would_hold() -> None:
    held = sum(row.gathered_bytes for row in planned(False).parameters if "layers" in row.name and row.trainable)
    for budget, twin in ((held, False), (held - 1, True)):
        plan = planned(None, sync_budget=budget)
        assert {bool(unit.twin_of) for unit in plan.units if unit.name.startswith("model.decoder.layers")} == {twin}
        assert {bool(unit.part_of) for unit in plan.units if unit.name.startswith("model.decoder.layers")} == {not twin}
    shared, twins = (totals(planned(twin, sync=SyncPolicy.REDUCE_EACH)) for twin in (False, True))
    assert shared.unsharded_gradient_peak_bytes > held > 2 * twins.unsharded_gradient_peak_bytes
    assert twins.traffic.reduce_scatter_bytes > 1.9 * shared.traffic.reduce_scatter_bytes
    assert twins.parameter_bytes == shared.parameter_bytes
    assert ShardingPlan.from_json(planned(True).to_json()) == planned(True)


def test_what_does_not_fit_is_refused() -> None:
    model = tiny_model(meta=True)
    with pytest.raises(PlanError, match="twin_units=True: no two layers of LlamaForCausalLM share parameters"):
        resolve(spec_of(model), model, Layout(), ParallelOptions(twin_units=True), world_size=2)
    with pytest.raises(PlanError, match="are one unit, but have the policies"):
        planned(False, sync_units={"model.decoder.layers.0": "reduce_each"})
