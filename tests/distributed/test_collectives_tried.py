"""Collectives that a backend lacks are refused before anything is trained."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.distributed.process_group import check_collectives
from meshwright.errors import UnsupportedError
from meshwright.layout import Layout
from meshwright.plan.cost.activation_traffic import kinds_of_collectives
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import make

ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def tried(rank: int, lacks: tuple[str, ...]) -> tuple[str, ...]:
    def absent(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not supported by this backend")

    with pytest.MonkeyPatch.context() as patch:
        for name in lacks:
            patch.setattr(dist, name, absent)
        try:
            check_collectives(ALL, torch.device("cpu"))
        except UnsupportedError as error:
            return (*error.codes, str(error))
    return ()


def test_what_gloo_has() -> None:
    assert run_ranks(tried, 2, ()) == [(), ()]


def test_all_that_a_backend_lacks_is_named() -> None:
    for code, text in run_ranks(tried, 2, ("all_to_all_single", "batch_isend_irecv")):
        assert code == "worker.collectives"
        assert "all_to_all (RuntimeError: not supported by this backend); send (" in text


def test_a_plan_says_what_it_needs() -> None:
    def kinds(**sizes: int) -> set[str]:
        model, spec = make("llama", meta=True)
        return kinds_of_collectives(resolve(spec, model, Layout(**sizes).resolve(2), ParallelOptions(microbatches=2)))

    assert kinds(dp_shard=2) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert not kinds(tp=2, dp_shard=1) & {"reduce_scatter", "send"}
    assert "send" in kinds(pp=2, dp_shard=1)
