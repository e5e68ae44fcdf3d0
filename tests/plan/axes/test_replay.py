"""Schedules replayed: closed forms of the idle share, what is alive, and drawings."""

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.pipeline.replay import Replay, receive_buffers, replay, replay_of_plan
from meshwright.plan.axes.pipeline.schedule_turns import TORCH_SCHEDULES, Phase, ScheduledOp, order_of
from meshwright.plan.given.closed_choices import PipelineSchedule
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.pipeline_picture import timeline, timeline_svg
from tests.tiny import tiny_model


def run_of(schedule: PipelineSchedule, pp: int, microbatches: int, each: int) -> Replay:
    order = order_of(schedule, pp, each, microbatches)
    return replay(order, lambda turn: (2 if turn.phase is Phase.BACKWARD else 1) / each)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_the_idle_share_is_the_closed_form(schedule: PipelineSchedule, pp: int, microbatches: int) -> None:
    each = 1 if schedule.single else 2
    run = run_of(schedule, pp, microbatches, each)
    waits = pp - 1
    busy = {True: 3, False: 1}[schedule.splits] * each * microbatches
    assert run.bubble == pytest.approx(waits / (busy + waits))
    for rank, spans in enumerate(run.spans):
        turns = [span.turn for span in spans]
        own = {turn.stage for turn in turns}
        assert len(own) == each
        for stage in own:
            forwards = [turn.microbatch for turn in turns if turn == ScheduledOp(Phase.FORWARD, stage, turn.microbatch)]
            assert sorted(forwards) == list(range(microbatches)), rank
        backwards = {(turn.stage, turn.microbatch) for turn in turns if turn.phase in (Phase.BACKWARD, Phase.INPUT)}
        assert len(backwards) == each * microbatches
        assert all(before.end <= after.begin for before, after in pairwise(spans))


@pytest.mark.parametrize("pp", [2, 4])
def test_messages_take_time(pp: int) -> None:
    """They pass through all ranks and back. A rank that asks late waits for each of them."""
    order, microbatches = order_of(PipelineSchedule.ONE_F_ONE_B, pp, 1, 8), 8

    def length(message: float, late: bool) -> float:
        return replay(order, lambda turn: 2.0 if turn.phase is Phase.BACKWARD else 1.0, message, asked_late=late).length

    there_and_back = 2 * (pp - 1)
    assert length(0.1, False) >= length(0.0, False) + there_and_back * 0.1 - 1e-9
    assert length(0.1, True) >= length(0.0, True) + (microbatches + 1) * 0.1 - 1e-9
    assert length(0.0, True) == length(0.0, False)
    assert length(0.1, True) > length(0.1, False)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", [item for item in PipelineSchedule if not item.single])
def test_the_order_is_that_of_torch(schedule: PipelineSchedule, pp: int) -> None:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")  # private
    for each in (2,) if schedule.is_v_shaped else (2, 3):
        for microbatches in (2 * pp, 3 * pp, 4 * pp):
            name = TORCH_SCHEDULES[schedule].removeprefix("Schedule")
            slots = [[slot for slot in rank if slot] for rank in visualizer.get_schedule_ops(name, pp, microbatches, each)]
            actions = [[action for slot in rank for action in (slot.sub_actions or (slot,))] for rank in slots]
            assert order_of(schedule, pp, each, microbatches) == tuple(
                tuple(ScheduledOp(Phase(a.computation_type.value), a.stage_index, a.microbatch_index) for a in rank)
                for rank in actions
            )


def test_what_is_alive() -> None:
    def alive(schedule: PipelineSchedule, pp: int, microbatches: int) -> float:
        return max(run_of(schedule, pp, microbatches, 1 if schedule.single else 2).alive)

    assert alive(PipelineSchedule.GPIPE, 4, 8) == 8
    assert alive(PipelineSchedule.ONE_F_ONE_B, 4, 8) == alive(PipelineSchedule.ZBV, 4, 8) == 4
    assert alive(PipelineSchedule.INTERLEAVED, 4, 8) == 5.5
    assert alive(PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, 8, 16) == 8
    assert alive(PipelineSchedule.DUALPIPE_V, 8, 16) == 8.5
    assert run_of(PipelineSchedule.ONE_F_ONE_B, 4, 8, 1).alive == (4, 3, 2, 1)


def test_ranks_that_wait_for_each_other() -> None:
    order = [
        [ScheduledOp(Phase.BACKWARD, 0, 0), ScheduledOp(Phase.FORWARD, 0, 0)],
        [ScheduledOp(Phase.FORWARD, 1, 0), ScheduledOp(Phase.BACKWARD, 1, 0)],
    ]
    with pytest.raises(ValueError, match="wait for each other"):
        replay(order, lambda turn: 1.0)


def planned(**options: object) -> ShardingPlan:
    model = tiny_model("llama", meta=True, num_hidden_layers=4)
    chosen = {"microbatches": 8, "tokens": 64, **options}
    return resolve(spec_of(model), model, Layout(pp=2, dp_shard=1), ParallelOptions(**chosen))  # type: ignore[arg-type]


def test_the_work_of_stages_and_recomputation_count() -> None:
    even, real = replay_of_plan(planned(), even=True), replay_of_plan(planned())
    assert even.bubble == pytest.approx(1 / 9)
    assert real.bubble > even.bubble, "the head makes the last stage slower"
    again = replay_of_plan(planned(activation_checkpointing="full"), even=True)
    assert again.length == pytest.approx(even.length * 4 / 3)
    split = replay_of_plan(planned(pipeline_schedule="zbv"), even=True)
    first = {str(span.turn.phase): span.end - span.begin for span in split.spans[0] if span.turn.stage == 0}
    assert first["I"] == 0, "torch runs the whole backward of stage 0 in the turn for weights"
    assert first["W"] == pytest.approx(2 * first["F"])
    frozen = replay_of_plan(planned(freeze=("model.embed_tokens.*", "model.layers.0.**", "model.layers.1.**")), even=True)
    assert {span.end - span.begin for span in frozen.spans[0] if span.turn.phase is Phase.BACKWARD} == {0}
    twice = planned(runs_per_step=2)
    assert replay_of_plan(twice, even=True).bubble == pytest.approx(1 / 5)
    # A stage at an end of the model receives on one side, another on both.
    assert [receive_buffers(planned(), rank) for rank in (0, 1)] == [8, 8]
    assert [receive_buffers(twice, rank) for rank in (0, 1)] == [4, 4]
    assert [receive_buffers(planned(pipeline_schedule="zbv"), rank) for rank in (0, 1)] == [16, 32]


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_drawings_show_every_turn(schedule: PipelineSchedule) -> None:
    plan = planned(pipeline_schedule=schedule)
    turns = sum(len(spans) for spans in replay_of_plan(plan).spans)
    svg = timeline_svg(plan)
    assert len(re.findall(r"<title>stage \d, .*? of microbatch \d</title>", svg)) == turns
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(timeline(plan, 100))
    lines = console.export_text().splitlines()
    assert [line[:6] for line in lines[1:3]] == ["rank 0", "rank 1"]
    assert {len(line.rstrip()) for line in lines[1:3]} == {100}
    wanted = {str(span.turn.phase).lower() for spans in replay_of_plan(plan).spans for span in spans}
    assert wanted <= {*lines[1][9:]}
    assert wanted | {"·"} >= {letter for letter in lines[1][9:] if not letter.isdigit()}
