"""The report of a run that stands still, on ranks of a test: one for each stand, and none that outlives it."""

import time

import pytest
import torch
import torch.distributed as dist

from meshwright.ranks.rank_state import RankState
from meshwright.ranks.watch import Watch, _together
from tests.harness import run_ranks


def _staggered(rank: int) -> tuple[list[list[str]], str | None, str | None]:
    """Ranks come to the same collective one after another; the last of them late."""
    dist.all_reduce(torch.zeros(1))
    said: list[list[str]] = []
    with Watch(2.0, "cpu", said.append) as watch:
        watch.tick("step 1")
        time.sleep(1.5 * rank if rank < 2 else 12)
        if rank < 2:
            dist.all_reduce(torch.zeros(1), group=None)
        else:
            before = watch.verdict()
            dist.all_reduce(torch.zeros(1))
            return said, before, watch.verdict()
        during = watch.verdict()
        watch.tick("step 2")
        return said, during, watch.verdict()


@pytest.mark.thorough
def test_one_report_for_one_stand_whoever_comes_to_it_when() -> None:
    outcomes = run_ranks(_staggered, 3)
    (report,) = [report for said, _, _ in outcomes for report in said]
    assert report[0].startswith("no progress for 2 s in step 1: rank 2 never entered all_reduce number "), report
    assert len(report) in (1 + 2, 1 + 3)  # ranks 0 and 1 may be on one line
    assert any(line.startswith("rank 2 is in no collective; it is at test_watch.py:") for line in report), report
    # The verdict belongs to the stand that it was made in.
    assert outcomes[0][1] == report[0]
    assert [after for _, _, after in outcomes[:2]] == [None, None]


def test_ranks_in_the_same_place_share_a_line() -> None:
    lines = [str(RankState(rank, silent="does not answer") if rank == 3 else RankState(rank, ())) for rank in range(6)]
    others = "each of ranks 0, 1, 2, 4, 5 is in no collective; it is at an unknown place"
    assert _together(lines) == ["rank 3 does not answer", others]
