"""Stages in a loop of one's own: training, evaluation between training steps, weights that two stages hold."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.audit.case import local_part
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.pipeline.microbatch_work import Work
from meshwright.distributed.pipeline.scheduled_stages import ScheduledStages
from meshwright.distributed.pipeline.stage_parts import StageParts, make_parts
from meshwright.distributed.slices import whole_tensor
from meshwright.errors import ConfigError, PlanError, UnsupportedError
from meshwright.layout import Layout
from meshwright.models.pipeline_by_hand import Pipeline
from meshwright.models.specs.registry import spec_of
from meshwright.models.token_loss import forward_arguments, forward_logits
from meshwright.plan.cost.price import totals_of_rank
from meshwright.plan.given.closed_choices import ActivationCheckpointing, PipelineSchedule, SyncPolicy
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.harness import RankError, refuses, run_ranks
from tests.tiny import tiny_model

ROWS, LENGTH = 2, 12


def batches(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(3, 60, (ROWS, LENGTH), generator=generator),
            "position_ids": torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(ROWS, LENGTH),
            "weights": torch.randn((ROWS, LENGTH, 67), generator=generator),
        }
        for _ in range(count)
    ]


def loss_of(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (logits.float() * batch["weights"]).sum()


def loss_of_whole(whole: nn.Module, data: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([loss_of(forward_logits(whole, batch), batch) for batch in data]).sum()


def planned(model: nn.Module, layout: Layout, microbatches: int, **options: Any) -> ShardingPlan:
    return resolve(spec_of(model), model, layout, ParallelOptions(param_dtype=None, microbatches=microbatches, **options))


def pipeline_of(whole: nn.Module, layout: Layout, microbatches: int, **options: Any) -> Pipeline:
    """The stages of a model that is on the CPU already: each rank keeps its shards."""
    return Pipeline(whole, planned(whole, layout, microbatches, **options), build_mesh(layout, "cpu"))


def worst(parts: StageParts, reference: nn.Module) -> float:
    """The largest error of a gradient on this rank, relative to its largest entry."""
    truth = dict(reference.named_parameters())
    errors = []
    for name, parameter in parts.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        expected = truth[name].grad
        assert expected is not None, name
        errors.append(float((gradient - expected).abs().max() / expected.abs().max()))
    return max(errors)


SCHEDULES = [(schedule, runs) for schedule in PipelineSchedule for runs in (1, 2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("schedule", "runs"), SCHEDULES, ids=str)
def test_steps_with_an_evaluation_between_them(schedule: PipelineSchedule, runs: int, family: str) -> None:
    """qwen2 ties its head: in the form of a V both copies are on one rank."""

    def on_rank(rank: int) -> None:
        whole = tiny_model(family, num_hidden_layers=4)
        pipeline = pipeline_of(whole, Layout(pp=2, dp_shard=1), 8, pipeline_schedule=schedule, runs_per_step=runs)
        optimizer = torch.optim.SGD(pipeline.model.parameters(), lr=1e-3)
        other = torch.optim.SGD(whole.parameters(), lr=1e-3)
        for step in range(2):
            data = batches(8, step)
            if step == 1:  # a last batch, of any size
                data = [*data[:6], {name: tensor[:1] for name, tensor in data[6].items()}]
            expected = loss_of_whole(whole, data) / 7
            expected.backward()
            value = pipeline.step(data, loss_of, divisor=torch.tensor(7.0, dtype=torch.float64))
            torch.testing.assert_close(value.float(), expected.detach(), rtol=1e-4, atol=1e-4)
            assert worst(pipeline.model, whole) < 5e-6
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in whole.parameters()])
            torch.testing.assert_close(pipeline.clip_grad_norm_(None).to(norm), norm)
            held_out = batches(3, 7)
            held_out[1] = {name: tensor[:1, :7] for name, tensor in held_out[1].items()}
            value = pipeline.evaluate(held_out, loss_of)
            with torch.no_grad():
                torch.testing.assert_close(value.float(), loss_of_whole(whole, held_out), rtol=1e-4, atol=1e-4)
            assert worst(pipeline.model, whole) < 5e-6, "an evaluation changed the gradients"
            for chosen in (optimizer, other):
                chosen.step()
                chosen.zero_grad(set_to_none=True)

    run_ranks(on_rank, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("policy", list(SyncPolicy))
@pytest.mark.parametrize("schedule", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.ZBV], ids=str)
def test_units_that_reshard_keep_every_gradient(schedule: PipelineSchedule, policy: SyncPolicy, family: str) -> None:
    """Here torch's own stage loses gradients of a split backward, without an error.

    The backward of gpt2's norms takes their weights, and a layer of opt returns a view.
    """

    def on_rank(rank: int) -> None:
        whole = tiny_model(family, **{"gpt2": {"n_layer": 4}}.get(family, {"num_hidden_layers": 4}))
        data = batches(8)
        layout = Layout(pp=2, dp_shard=2)
        pipeline = pipeline_of(whole, layout, 4, pipeline_schedule=schedule, sync=policy)
        pipeline.step(data[layout.coordinates(rank)["dp_shard"] :: 2], loss_of)
        loss_of_whole(whole, data).backward()
        assert worst(pipeline.model, whole) < 5e-6

    run_ranks(on_rank, 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [SyncPolicy.DEFER, SyncPolicy.RESHARD_EACH])
@pytest.mark.parametrize("schedule", [PipelineSchedule.INTERLEAVED, PipelineSchedule.ZBV], ids=str)
def test_no_unit_is_gathered_for_nothing(schedule: PipelineSchedule, policy: SyncPolicy) -> None:
    """The first of several forwards has its backward first, where FSDP2 would prefetch by the latest forward."""

    def on_rank(rank: int) -> None:
        whole = tiny_model("llama", num_hidden_layers=8)
        layout = Layout(pp=2, dp_shard=2)
        plan = planned(whole, layout, 8, pipeline_schedule=schedule, sync=policy)
        pipeline = Pipeline(whole, plan, build_mesh(layout, "cpu"))
        due = totals_of_rank(plan, layout.coordinates(rank)["pp"]).traffic
        for _ in range(2):
            with CommCounter() as counter:
                pipeline.step(batches(8), loss_of)
            assert (counter.counts["all_gather"], counter.counts["reduce_scatter"]) == (due.all_gathers, due.reduce_scatters)

    run_ranks(on_rank, 4)


@pytest.mark.parametrize("schedule", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.ZBV], ids=str)
def test_a_stage_without_a_trained_parameter(schedule: PipelineSchedule) -> None:
    """No gradient flows into it, and none is awaited. Its units are gathered for forward alone."""

    def on_rank(rank: int) -> None:
        whole = tiny_model("llama", num_hidden_layers=4)
        layout, freeze = Layout(pp=2, dp_shard=2), ("model.embed_tokens.*", "model.layers.0.**", "model.layers.1.**")
        plan = planned(whole, layout, 4, pipeline_schedule=schedule, sync=SyncPolicy.RESHARD_EACH, freeze=freeze)
        pipeline = Pipeline(whole, plan, build_mesh(layout, "cpu"))
        data = batches(8)
        loss_of_whole(whole, data).backward()
        with CommCounter() as counter:
            pipeline.step(data[layout.coordinates(rank)["dp_shard"] :: 2], loss_of)
        assert counter.counts["all_gather"] == totals_of_rank(plan, layout.coordinates(rank)["pp"]).traffic.all_gathers
        trained = {row.name for row in plan.parameters if row.trainable}
        truth = {name: parameter.grad for name, parameter in whole.named_parameters()}
        for name, parameter in pipeline.model.named_parameters():
            assert (parameter.grad is None) == (name not in trained), name
            if parameter.grad is not None:
                assert (whole_tensor(parameter.grad) - truth[name]).abs().max() < 5e-6 * truth[name].abs().max(), name

    run_ranks(on_rank, 4)


@pytest.mark.parametrize("schedule", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.ZBV], ids=str)
def test_a_tied_weight_that_one_side_does_not_use(schedule: PipelineSchedule) -> None:
    """The first stage gets embeddings; the state of a rank is what a rank loads."""

    def on_rank(rank: int) -> None:
        whole = tiny_model("qwen2", num_hidden_layers=4)
        pipeline = pipeline_of(whole, Layout(pp=2, dp_shard=1), 4, pipeline_schedule=schedule)
        data = batches(4)
        for index, batch in enumerate(data):
            del batch["input_ids"]
            batch["inputs_embeds"] = torch.randn(ROWS, LENGTH, 32, generator=torch.Generator().manual_seed(index))
            logits = whole(inputs_embeds=batch["inputs_embeds"], position_ids=batch["position_ids"]).logits
            loss_of(logits, batch).backward()
        pipeline.step([{**batch, "attention_mask": None} for batch in data], loss_of)  # type: ignore[dict-item]
        assert worst(pipeline.model, whole) < 5e-6
        held = {name: value.clone() for name, value in pipeline.model.state_dict().items()}
        assert set(held) >= {name for name, _ in pipeline.model.named_parameters()}
        norms = {name: float(local_part(value).norm()) for name, value in held.items()}
        for parameter in pipeline.model.parameters():
            parameter.data.zero_()
        pipeline.model.load_state_dict(held)
        assert norms == {name: float(local_part(value).norm()) for name, value in pipeline.model.state_dict().items()}

    run_ranks(on_rank, 2)


def test_recomputation() -> None:
    def on_rank(rank: int) -> None:
        whole = tiny_model("llama", num_hidden_layers=4)
        mode = ActivationCheckpointing.FULL
        options = {"pipeline_schedule": "interleaved_1f1b", "activation_checkpointing": mode}
        pipeline = pipeline_of(whole, Layout(pp=2, dp_shard=1), 4, **options)
        pipeline.step(batches(4), loss_of)
        loss_of_whole(whole, batches(4)).backward()
        assert worst(pipeline.model, whole) < 5e-6

    run_ranks(on_rank, 2)


class Scaled(nn.Module):
    """A norm that no table knows: the gradient of its input reads its weight once more in the half for weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(hidden, hidden.shape[-1:], self.weight)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [SyncPolicy.DEFER, SyncPolicy.RESHARD_EACH])
def test_an_operator_that_reads_a_weight_in_the_half_for_weights(policy: SyncPolicy) -> None:
    def on_rank(rank: int) -> None:
        whole = tiny_model("llama", num_hidden_layers=4)
        for layer in whole.model.layers:
            layer.input_layernorm = Scaled(32)
        layout, data = Layout(pp=2, dp_shard=2), batches(8)
        pipeline = pipeline_of(whole, layout, 4, pipeline_schedule="zbv", sync=policy)
        pipeline.step(data[layout.coordinates(rank)["dp_shard"] :: 2], loss_of)
        loss_of_whole(whole, data).backward()
        assert worst(pipeline.model, whole) < 5e-6

    if policy is SyncPolicy.DEFER:
        run_ranks(on_rank, 4)
    else:
        with pytest.raises(RankError, match=r"when it is not gathered; set parallel\.sync=defer, or a schedule that does not"):
            run_ranks(on_rank, 4)


@pytest.mark.thorough
def test_compiled_layers() -> None:
    def on_rank(rank: int) -> tuple[int, int]:
        whole = tiny_model("llama", num_hidden_layers=4)
        options = {"pipeline_schedule": "interleaved_1f1b", "compile": True, "compile_backend": "aot_eager"}
        pipeline = pipeline_of(whole, Layout(pp=2, dp_shard=1), 4, **options)
        pipeline.step(batches(4), loss_of)
        loss_of_whole(whole, batches(4)).backward()
        assert worst(pipeline.model, whole) < 5e-6
        frames = torch._dynamo.utils.counters["frames"]
        return frames["total"], frames["ok"]

    for total, compiled in run_ranks(on_rank, 2):
        assert total == compiled > 0


def test_batches_that_do_not_fit_are_refused() -> None:
    def on_rank(rank: int) -> None:
        whole = tiny_model("llama", num_hidden_layers=2)
        layout = Layout(pp=2, dp_shard=1)
        pipeline = pipeline_of(whole, layout, 2)
        with pytest.raises(ConfigError, match="3 batches; the plan has 2"):
            pipeline.step(batches(3), loss_of)
        with pytest.raises(ConfigError, match="needs input_ids"):
            pipeline.step([{"labels": torch.zeros(2, 12)}], loss_of)
        pipeline.step([{name: tensor[:1] for name, tensor in batches(1)[0].items()}], loss_of)
        with pytest.raises(ConfigError, match="a batch has 2 sequences of 12 tokens; the first step had at most 1 of 12"):
            pipeline.step(batches(2), loss_of)
        tied = pipeline_of(tiny_model("qwen2", num_hidden_layers=2), layout, 2)
        tied.step(batches(2), loss_of)
        with refuses(PlanError, "pp.step"):
            tied.step(batches(2), loss_of)
        with pytest.raises(ConfigError, match=r"labels has the shape \(3, 12\); the batch has 2 rows of 12"):
            pipeline.step([{**batches(1)[0], "labels": torch.zeros(3, 12)}], loss_of)
        with pytest.raises(PlanError, match="names neither input_ids nor inputs_embeds"):
            Pipeline(nn.Linear(2, 2), planned(whole, layout, 2), build_mesh(layout, "cpu"))
        with pytest.raises(PlanError, match=r"loss_chunks=2: Pipeline\.step takes a loss of all logits; the legal value is 0"):
            Pipeline(whole, planned(whole, layout, 2, loss_chunks=2), build_mesh(layout, "cpu"))
        with pytest.raises(PlanError, match="the plan has no stages"):
            Pipeline(whole, planned(whole, Layout(dp_shard=2), 2), build_mesh(Layout(dp_shard=2), "cpu"))
        plan = planned(whole, layout, 2)
        mesh = build_mesh(layout, "cpu")
        stages = ScheduledStages(make_parts(lambda: copy.deepcopy(whole), plan, mesh), plan, mesh, torch.device("cpu"))
        stages.prepare(ROWS + 1, LENGTH)
        work = Work(forward_arguments(batches(1)[0]), lambda model: torch.zeros(()))
        with pytest.raises(PlanError, match="pipeline: 3 microbatches, and the plan has 2"):
            stages.forward_backward([work] * 3)
        if rank == 0:
            with pytest.raises(UnsupportedError, match=r"stage 0: sends torch.float32 \(2, 12, 32\), and the plan has"):
                stages.stages[0].submod(work=work)
            stages.stages[0].work = [work]
            stages.stages[0].submod.part.register_forward_pre_hook(lambda *_: {}["its own words"])
            with pytest.raises(KeyError, match="its own words"):  # torch wraps it in an error that prints the batch
                stages.stages[0].forward_one_chunk(0, (), {"work": work})

    run_ranks(on_rank, 2)


def test_the_parts_of_a_rank_have_the_names_of_the_whole() -> None:
    def on_rank(rank: int) -> None:
        whole = tiny_model("qwen2", num_hidden_layers=4)
        plan = planned(whole, Layout(pp=2, dp_shard=1), 4, pipeline_schedule="zbv")
        parts = Pipeline(whole, plan, build_mesh(plan.layout, "cpu")).model
        names = {name for name, _ in parts.named_parameters()}
        layers = {0: (0, 3), 1: (1, 2)}[rank]
        assert {name.split(".")[2] for name in names if ".layers." in name} == {str(layer) for layer in layers}
        assert ("model.embed_tokens.weight" in names) == ("model.norm.weight" in names) == (rank == 0)
        assert sum(name == "model.embed_tokens.weight" for name, _ in parts.named_parameters()) == (rank == 0)
        assert parts.get_submodule(f"model.layers.{layers[1]}.mlp") is parts[plan.stages[-1 - rank].index].get_submodule(
            f"model.layers.{layers[1]}.mlp"
        )

    run_ranks(on_rank, 2)
