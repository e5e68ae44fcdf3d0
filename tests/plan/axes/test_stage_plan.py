"""Stages in the plan: where models are cut, what each stage has, what is refused."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.pipeline_by_hand import Pipeline
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.pipeline.replay import replay_of_plan
from meshwright.plan.axes.pipeline.stage_plan import (
    crossing_shape,
    elsewhere,
    passes_of,
    pipeline_counts,
    stages_of_rank,
    stages_with,
)
from meshwright.plan.axes.pipeline.stage_rows import on_stages
from meshwright.plan.cost.price import totals, totals_of_rank
from meshwright.plan.given.closed_choices import PipelineSchedule, SyncPolicy
from meshwright.plan.given.inspection import Inspection, inspect_model
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from meshwright.plan.result.program import Cut, Wrap
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.diffusion_gemma import tiny_diffusion_gemma
from tests.harness import refuses
from tests.tiny import PLAIN_SPEC, Plain, tiny_model

TWO = Layout(pp=2, dp_shard=1)


@cache
def known(family: str, layers: int) -> tuple[ParallelSpec, Inspection]:
    model = tiny_model(family, meta=True, num_hidden_layers=layers)
    return spec_of(model), inspect_model(spec_of(model), model)


def planned(family: str = "llama", layers: int = 4, layout: Layout = TWO, **options: Any) -> ShardingPlan:
    return resolve(*known(family, layers), layout, ParallelOptions(**{"microbatches": 8, **options}))


def refusal(**options: Any) -> str:
    with pytest.raises(PlanError) as error:
        planned(**options)
    return str(error.value)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("1f1b", [0, 1]),
        ("gpipe", [0, 1]),
        ("interleaved_1f1b", [0, 1, 0, 1]),
        ("zbv", [0, 1, 1, 0]),
        ("dualpipe_v", [0, 1, 1, 0]),
    ],
)
def test_which_rank_has_which_stage(schedule: str, ranks: list[int]) -> None:
    plan = planned(pipeline_schedule=schedule)
    assert [row.rank for row in plan.stages] == ranks
    assert [layer for row in plan.stages for layer in row.layers] == list(plan.layers)
    assert sum(row.cost for row in plan.stages) == pytest.approx(1.0)
    assert stages_of_rank(plan, 1) == tuple(index for index, rank in enumerate(ranks) if rank == 1)


def test_cuts_weigh_the_head() -> None:
    """A head as large as three layers takes them off the last stage."""
    model = tiny_model("llama", meta=True, num_hidden_layers=8, vocab_size=3 * 7_680 // 32)
    plan = resolve(spec_of(model), model, Layout(pp=2, dp_shard=1), ParallelOptions(microbatches=2))
    assert [len(row.layers) for row in plan.stages] == [5, 3]
    assert max(row.cost for row in plan.stages) < 0.56
    given = resolve(spec_of(model), model, Layout(pp=2, dp_shard=1), ParallelOptions(microbatches=2, pipeline_cuts=(1,)))
    assert [len(row.layers) for row in given.stages] == [1, 7]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "layout", [Layout(pp=2, dp_shard=1), Layout(pp=2, dp_shard=2), Layout(pp=2, dp_shard=1, tp=2)], ids=str
)
def test_every_parameter_is_on_its_stages(family: str, layout: Layout) -> None:
    plan = planned(family, layout=layout, pipeline_schedule="interleaved_1f1b")
    last = len(plan.stages) - 1
    for stage in range(last + 1):
        part = on_stages(plan, [stage])
        assert {row.name for row in part.parameters} == {row.name for row in plan.parameters if stage in row.stages}
        assert part.layers == plan.stages[stage].layers
        cut = part.program[0]
        assert isinstance(cut, Cut)
        assert [name for name, *_ in cut.order[cut.begin : cut.end]] == list(part.layers)
        modules = {getattr(action, "module", None) for action in part.program}
        assert not modules & set(elsewhere(plan, [stage]))
        assert {unit.name for unit in part.units if unit.kind == "layer"} == set(part.layers)
    tied = plan.parameter("lm_head.weight")
    assert tied.stages == ((0, last) if family == "qwen2" else (last,))
    assert ("model.embed_tokens.weight" in {row.name for row in on_stages(plan, [last]).parameters}) == (family == "qwen2")


def test_a_plan_with_stages_survives_json() -> None:
    plan = planned("qwen2", pipeline_schedule="zbv", layout=Layout(pp=2, dp_shard=1, tp=2), sequence_parallel=True)
    assert ShardingPlan.from_json(plan.to_json()) == plan
    other = planned("qwen2", pipeline_schedule="zbv", layout=Layout(pp=2, dp_shard=1, tp=2), pipeline_cuts=(1, 2, 3))
    assert plan.diff(plan) == []
    assert other.diff(plan)


@pytest.mark.parametrize("streams", [(), (4,)], ids=str)
def test_a_plan_of_an_earlier_version_says_what_crosses_a_cut(streams: tuple[int, ...]) -> None:
    plan = planned()
    content = plan.to_dict()
    for action in content["program"]:
        if action["action"] == "Cut":
            del action["sizes"]
            action |= {"features": 32, **({"streams": list(streams)} if streams else {})}
    older = ShardingPlan.from_json(json.dumps(content))
    assert crossing_shape(older, 1, 3, 64) == (3, 64, *streams, 32)
    assert streams or older == plan


@pytest.mark.parametrize(
    "asked", [passes_of, lambda plan: crossing_shape(plan, 1, 3, 64), lambda plan: stages_with(plan, "model")]
)
def test_stages_without_a_program_are_refused(asked: Callable[[ShardingPlan], Any]) -> None:
    with pytest.raises(PlanError, match="no program: it is of an earlier version of Meshwright, or for prices"):
        asked(replace(planned(), program=()))


def test_what_crosses_a_cut() -> None:
    plan = planned(layout=Layout(pp=2, dp_shard=1, tp=2, cp=2), sequence_parallel=True)
    assert crossing_shape(plan, 1, 3, 64) == (3, 64 // 4, 32)
    assert crossing_shape(planned(), 1, 3, 64) == (3, 64, 32)


def test_messages() -> None:
    assert pipeline_counts(planned(), 0) == {"send": 8, "all_reduce": 1}
    assert pipeline_counts(planned("qwen2"), 1) == {"send": 9, "all_reduce": 1}  # and the gradient of the tied head
    interleaved = planned(pipeline_schedule="interleaved_1f1b")  # stages 0 and 2: two cuts forward, one back; and the reverse
    assert [pipeline_counts(interleaved, rank)["send"] for rank in (0, 1)] == [24, 24]
    turned = planned("qwen2", pipeline_schedule="zbv")  # between stages 1 and 2 nothing is sent, nor for the tied head
    assert [pipeline_counts(turned, rank)["send"] for rank in (0, 1)] == [16, 16]
    assert pipeline_counts(planned(layout=Layout(dp_shard=1)), 0) == {}


def test_the_totals_are_those_of_the_rank_that_holds_most() -> None:
    plan = planned("llama", layers=8, pipeline_cuts=(1,))
    each = [totals_of_rank(plan, rank).parameter_bytes for rank in (0, 1)]
    assert totals(plan).parameter_bytes == max(each) == each[1]
    assert sum(each) == sum(row.bytes_per_rank for row in plan.parameters)
    assert totals(plan).parameters == sum(math.prod(row.shape) for row in plan.parameters)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_worlds(world: int, schedule: PipelineSchedule) -> None:
    options = ParallelOptions(microbatches=16, pipeline_schedule=schedule)
    plan = resolve(*known("llama", 16), Layout(pp=4, dp_shard=None, tp=2), options, world_size=world)
    each = 1 if schedule.single else 2
    assert [len(stages_of_rank(plan, rank)) for rank in range(4)] == [each] * 4


def test_refusals() -> None:
    with refuses(PlanError, "pp.unknown"):
        resolve(PLAIN_SPEC, Plain(), Layout(pp=2, dp_shard=1), ParallelOptions(microbatches=2))
    assert "6 stages, but 4 layers make at most 4 stages" in refusal(layout=Layout(pp=3, dp_shard=1), pipeline_schedule="zbv")
    assert "a run has 1 microbatch (" in refusal(microbatches=1)
    assert "legal are 2, 3, 4, 5" in refusal(microbatches=1)
    assert "legal are 1, 2, 3, 4, 6, 8" in refusal(microbatches=5, pipeline_schedule="interleaved_1f1b")
    assert "legal are 4, 5, 6" in refusal(microbatches=3, pipeline_schedule="dualpipe_v")
    assert "runs_per_step=3: 8 microbatches cannot be divided by 3; legal are 1, 2, 4, 8" in refusal(runs_per_step=3)
    assert "stages_per_rank=2: pipeline_schedule=1f1b has 1 on each rank" in refusal(stages_per_rank=2)
    assert "pipeline_cuts=[3, 2, 1]: 4 stages need 3 ascending numbers" in refusal(
        pipeline_schedule="zbv", pipeline_cuts=(3, 2, 1)
    )
    assert "pipeline_cuts=[4]: 2 stages need 1 ascending numbers from 1 to 3" in refusal(pipeline_cuts=(4,))
    assert "compile=True: pipeline_schedule=zbv splits backward" in refusal(pipeline_schedule="zbv", compile=True)
    assert "each half would recompute" in refusal(pipeline_schedule="zbv", activation_checkpointing="full")
    for name, value in (("pipeline_schedule", "gpipe"), ("stages_per_rank", 2), ("pipeline_cuts", (1,)), ("runs_per_step", 2)):
        assert f"{name}=" in refusal(layout=Layout(dp_shard=1), **{name: value})
    with pytest.raises(PlanError, match="pipeline_schedule='2f2b': legal are gpipe, 1f1b"):
        ParallelOptions(pipeline_schedule="2f2b")  # type: ignore[arg-type]


def test_a_backward_that_cannot_be_halved_is_refused() -> None:
    """A layer of Gemma 3n uses the weight of a router twice. The first stage runs both halves at once."""
    for schedule in ("interleaved_zero_bubble", "zbv", "dualpipe_v"):
        with refuses(PlanError, "pp.split_backward"):
            planned("gemma3n_text", pipeline_schedule=schedule)
    text = refusal(family="gemma3n_text", pipeline_schedule="zbv")
    assert text.startswith("pipeline_schedule=zbv splits backward, and of stage 1 the half for weights needs what the half for")
    assert text.endswith("legal are gpipe, 1f1b, interleaved_1f1b")
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
        planned("gemma3n_text", pipeline_schedule=schedule)
    model = tiny_model("gemma3n_text", meta=True)
    for name, parameter in model.named_parameters():  # what is not trained is in no half
        parameter.requires_grad_("altup" not in name)
    chosen = ParallelOptions(microbatches=8, pipeline_schedule=PipelineSchedule.ZBV)
    assert len(resolve(spec_of(model), model, TWO, chosen).stages) == 4
    for name, parameter in model.named_parameters():  # nor has the first stage with a trained one halves
        parameter.requires_grad_("layers.3." in name)
    assert len(resolve(spec_of(model), model, TWO, chosen).stages) == 4


def test_what_is_carried_has_the_heads_of_a_rank_of_tp() -> None:
    """Keys and values do, but not the embeddings of layers, which are made before the first one."""
    plan, sliced = planned("gemma3n_text"), planned("gemma3n_text", layout=Layout(pp=2, tp=2, dp_shard=1))
    sizes = [[item[0] for item in own.cut.carried] for own in (plan, sliced) if own.cut is not None]
    assert [size for size in sizes[0] if len(size) == 4] == [(-1, 2, -2, 8)] * 4
    assert [size for size in sizes[1] if len(size) == 4] == [(-1, 1, -2, 8)] * 4
    assert [size for size in sizes[0] if len(size) == 3] == [size for size in sizes[1] if len(size) == 3]
    features = [crossing_shape(own, 1, 1, 64)[-1] for own in (plan, sliced)]
    assert features[0] - features[1] == 4 * 8  # keys and values of two layers, each of one head less


def test_only_the_outputs_of_the_model_are_cast() -> None:
    """A hidden state is sent in the dtype of compute."""
    plan = planned(output_dtype="float32")
    for stage, dtype in ((0, None), (1, "float32")):
        part = on_stages(plan, [stage])
        assert part.unit("").output_dtype == dtype
        assert {action.row.output_dtype for action in part.program if isinstance(action, Wrap) and not action.unit} == {dtype}


@pytest.mark.thorough
def test_stacks_that_share_layers_have_a_stage_in_each_pass() -> None:
    """A rank has layers with the same numbers of both stacks: with the encoder's in one stage, with the decoder's in two."""
    model = tiny_diffusion_gemma()
    spec, facts = spec_of(model), inspect_model(spec_of(model), model)

    def stages(layout: Layout = TWO, **options: Any) -> ShardingPlan:
        chosen = ParallelOptions(**{"microbatches": 2, "pipeline_schedule": PipelineSchedule.INTERLEAVED, **options})
        return resolve(spec, facts, layout, chosen)

    plan = stages()
    assert [row.rank for row in plan.stages] == [0, 1] * 3
    assert [row.layers for row in plan.stages[1::2]] == [
        ("model.encoder.language_model.layers.1",), ("model.decoder.layers.1",), ("model.decoder.layers.1",),
    ]  # fmt: skip
    held = {row.name: row.stages for row in plan.parameters}
    assert held["model.encoder.language_model.layers.1.router.scale"] == (1,)
    assert held["model.encoder.language_model.embed_tokens.weight"] == (0, 5)
    assert held["model.encoder.language_model.norm.weight"] == (5,)
    assert held["model.decoder.self_conditioning.gate_proj.weight"] == (0,)
    assert pipeline_counts(plan, 0)["send"] == 2 * 5 + 1  # forward three times, a gradient twice; that of the embedding
    turns = [span.turn for span in replay_of_plan(plan).spans[0] if span.begin == span.end]
    assert {turn.stage for turn in turns} == {2}  # the draft has no backward
    for options, why in (
        ({"pipeline_schedule": PipelineSchedule.ONE_F_ONE_B}, "so each rank has 3 stages; legal is interleaved_1f1b"),
        ({"stages_per_rank": 2}, "each rank has a stage in each of 3 passes; legal is 3"),
        ({"pipeline_cuts": (1,)}, "stacks that share layers are cut evenly; legal is none"),
        ({"sync": SyncPolicy.REDUCE_EACH, "layout": Layout(pp=2, dp_shard=2)}, "whose collectives are not planned; legal is"),
        ({"layout": Layout(pp=2, tp=2, dp_shard=1), "sequence_parallel": True}, "is not traced for each; the legal value is"),
    ):
        with pytest.raises(PlanError, match=why):
            stages(**options)
    with pytest.raises(PlanError, match=r"through the stages of DiffusionGemma.* 3 times"):
        Pipeline(model, plan, None)  # type: ignore[arg-type]
