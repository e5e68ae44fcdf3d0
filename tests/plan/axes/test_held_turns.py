"""What a rank of a pipeline holds at its turns."""

import pytest

from meshwright.plan.axes.pipeline.held_turns import held_turns, turns_of_rank
from meshwright.plan.axes.pipeline.replay import replay_of_plan
from meshwright.plan.axes.pipeline.schedule_turns import Phase, order_of
from meshwright.plan.given.closed_choices import PipelineSchedule
from tests.plan.axes.test_stage_plan import planned


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_turns_hold_what_the_replay_says(schedule: PipelineSchedule) -> None:
    plan = planned(pipeline_schedule=schedule, microbatches=8)
    for rank, alive in enumerate(replay_of_plan(plan).alive):
        turns = turns_of_rank(plan, rank)
        stages = len(turns[0].alive)
        assert max(sum(turn.alive) for turn in turns) == alive * stages
        assert any(any(turn.halved) for turn in turns) == schedule.splits
        assert sum(turn.last for turn in turns) >= stages
        assert max(max(turn.returned) for turn in turns) == 8


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_no_turn_holds_more_than_those_that_are_left(schedule: PipelineSchedule) -> None:
    order = order_of(schedule, 2, 1 if schedule.single else 2, 8)
    plan = planned(pipeline_schedule=schedule, microbatches=8)
    for rank, turns in enumerate(order):
        fullest = turns_of_rank(plan, rank)
        assert len(fullest) < len(turns)
        for turn in held_turns(turns):
            kind = (turn.phase, turn.stage, turn.last, turn.begun, turn.over)
            assert any(kind == (one.phase, one.stage, one.last, one.begun, one.over) and turn <= one for one in fullest)


def test_gradients_wait_from_the_first_backward_to_the_last() -> None:
    turns = list(held_turns(order_of(PipelineSchedule.ONE_F_ONE_B, 2, 1, 3)[0]))
    assert [turn.phase for turn in turns] == [Phase(letter) for letter in "FFBFBB"]
    assert [turn.alive[0] for turn in turns] == [1, 2, 2, 2, 2, 1]
    assert [turn.begun[0] for turn in turns] == [False, False, False, True, True, True]
    assert [turn.last for turn in turns] == [False] * 5 + [True]


def test_a_later_run_begins_with_gradients() -> None:
    turns = turns_of_rank(planned(microbatches=8, runs_per_step=2), 0)
    assert all(all(turn.begun) for turn in turns)
