"""Durations: what overlaps, what waits for what, and which seconds of collectives nothing hides."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.test_mutations import Training
from tests.accelerator.workers import in_workers, module_of

SECONDS = {"aten::mm": 2.0, "aten::addmm": 2.0, "allreduce": 5.0, "allgather": 3.0, "send": 1.0, "recv": 1.0}


def timed(device: torch.device, launch: float = 0.0) -> AbstractContextManager[list[Any]]:
    return module_of(device).timeline(
        lambda name, flops, size: SECONDS.get(name, 0.0), lambda name, ranks, size: SECONDS[name], launch
    )


def times(spans: list[Any]) -> list[tuple[str, float, float]]:
    """Of what takes time, by its begin."""
    return sorted(((span.name, span.begin, span.end) for span in spans if span.end > span.begin), key=lambda item: item[1:])


@in_workers(1)
def test_a_stream_does_one_thing_after_another(device: torch.device) -> None:
    a = torch.ones(4, 4, device=device)
    with timed(device) as spans:
        _ = a @ a @ a
    assert times(spans) == [("aten::mm", 0, 2), ("aten::mm", 2, 4)]


@in_workers(1)
@pytest.mark.parametrize("ordered", [False, True])
def test_streams_overlap_unless_they_are_ordered(device: torch.device, ordered: bool) -> None:
    module, a = module_of(device), torch.ones(4, 4, device=device)
    side = module.Stream(device)
    with timed(device) as spans:
        _first = a @ a
        if ordered:
            side.wait_stream(module.current_stream(device))
        with module.stream(side):
            _second = a @ a
    assert times(spans) == [("aten::mm", 0, 2), ("aten::mm", *((2, 4) if ordered else (0, 2)))]


@in_workers(1)
@pytest.mark.parametrize("waits", [False, True])
def test_a_host_that_waits_launches_late(device: torch.device, waits: bool) -> None:
    module, a = module_of(device), torch.ones(4, 4, device=device)
    side = module.Stream(device)
    with timed(device, launch=0.5) as spans:
        first = a @ a
        if waits:
            first[0, 0].item()
        with module.stream(side):
            _second = a @ a
    assert times(spans) == [("aten::mm", 0, 2), ("aten::mm", *((2, 4) if waits else (0.5, 2.5)))]


@in_workers(1)
def test_a_slow_host_delays_the_device(device: torch.device) -> None:
    a = torch.ones(4, 4, device=device)
    with timed(device, launch=3.0) as spans:
        _ = a @ a @ a
    assert times(spans) == [("aten::mm", 0, 2), ("aten::mm", 3, 5)]


@in_workers(1)
def test_flops_and_bytes_are_given(device: torch.device) -> None:
    given: dict[str, tuple[float, float]] = {}

    def operators(name: str, flops: float, size: float) -> float:
        given[name] = flops, size
        return 0.0

    a, b = torch.ones(2, 3, device=device), torch.ones(3, 5, device=device)
    q = torch.ones(1, 2, 7, 4, device=device)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    with module_of(device).timeline(operators, lambda *_: 0.0):
        _ = a @ b
        torch.nn.functional.linear(a, b.t(), torch.ones(5, device=device))
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        whole = given[attention][0]
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        a[:1].expand(9, 3).exp()  # of which one row is in memory
    assert given["aten::mm"] == (2 * 2 * 3 * 5, 4 * (6 + 15 + 10))
    assert given["aten::addmm"][0] == 2 * 2 * 3 * 5
    assert whole == 2 * given[attention][0] == 2 * 2 * (2 * 7 * 7 * 4)
    assert given["aten::exp"] == (0, 4 * (6 + 27))


@in_workers(2)
@pytest.mark.parametrize(("products", "exposed"), [(0, 5.0), (1, 3.0), (3, 0.0)])
def test_what_operators_do_not_hide_is_exposed(device: torch.device, products: int, exposed: float) -> None:
    module, a, b = module_of(device), torch.ones(4, 4, device=device), torch.ones(4, device=device)
    with timed(device) as spans:
        work = dist.all_reduce(b, async_op=True)
        for _ in range(products):
            a @ a
        work.wait()
        a @ a
    assert module.exposed(spans) == module.exposed(spans, "allreduce") == exposed
    assert module.exposed(spans, "allgather") == 0
    assert max(span.end for span in spans) == max(5, 2 * products) + 2


@in_workers(2)
def test_a_collective_begins_when_the_last_rank_is_ready(device: torch.device) -> None:
    a, b, late = torch.ones(4, 4, device=device), torch.ones(4, device=device), 2 * dist.get_rank()
    with timed(device) as spans:
        for _ in range(late):
            a @ a
        dist.all_reduce(b)
        a @ a
    assert times(spans)[late:] == [("allreduce", 4, 9), ("aten::mm", 9, 11)]


@in_workers(2)
def test_collectives_of_a_group_run_in_the_order_of_their_calls(device: torch.device) -> None:
    b, whole = torch.ones(4, device=device), torch.empty(8, device=device)
    with timed(device) as spans:
        first = dist.all_reduce(b, async_op=True)
        second = dist.all_gather_into_tensor(whole, torch.ones(4, device=device), async_op=True)
        second.wait()
        first.wait()
    assert times(spans) == [("allreduce", 0, 5), ("allgather", 5, 8)]


@in_workers(2)
def test_collectives_of_a_group_run_one_after_another_on_any_stream(device: torch.device) -> None:
    module, b = module_of(device), torch.ones(4, device=device)
    with timed(device) as spans:
        with module.stream(module.Stream(device)):
            dist.all_reduce(b)
        dist.all_gather_into_tensor(torch.empty(8, device=device), torch.ones(4, device=device))
    assert times(spans) == [("allreduce", 0, 5), ("allgather", 5, 8)]


@in_workers(2)
def test_a_batch_sends_and_receives_at_once(device: torch.device) -> None:
    peer, b = 1 - dist.get_rank(), torch.ones(4, device=device)
    operations = [dist.P2POp(dist.isend, b, peer), dist.P2POp(dist.irecv, torch.empty_like(b), peer)]
    with timed(device) as spans:
        for work in dist.batch_isend_irecv(operations if peer else operations[::-1]):
            work.wait()
        dist.all_reduce(b)
    assert sorted(times(spans)) == [("allreduce", 1, 6), ("recv", 0, 1), ("send", 0, 1)]


@in_workers(2)
def test_exposed_seconds_have_an_axis(device: torch.device) -> None:
    module, b, here = module_of(device), torch.ones(4, device=device), ["first"]
    with module.timeline(lambda *_: 0.0, lambda *_: 1.0, axis=lambda: here[0]) as spans:
        dist.all_reduce(b)
        here[0] = "second"
        dist.all_reduce(b)
        dist.all_reduce(b)
    assert [module.exposed(spans, axis=axis) for axis in ("first", "second", "")] == [1.0, 2.0, 3.0]


@in_workers(2)
def test_what_is_received_was_sent_first(device: torch.device) -> None:
    a, b = torch.ones(4, 4, device=device), torch.ones(4, device=device)
    with timed(device) as spans:
        if dist.get_rank() == 0:
            a @ a
            dist.send(b, 1)
        else:
            dist.recv(b, 0)
            a @ a
    assert times(spans)[-1] == (("send", 2, 3) if dist.get_rank() == 0 else ("aten::mm", 3, 5))


@in_workers(2)
def test_fully_sharded_training_gathers_ahead(device: torch.device) -> None:
    """Forward gathers the next unit while one computes: of three gathers, the first is exposed."""
    training = Training(device)
    training.step()
    x = torch.ones(8, 16, device=device)
    with timed(device) as spans, torch.no_grad():
        training.model(x)
    gathers = [span for span in times(spans) if span[0] == "allgather"]
    assert len(gathers) == 3
    assert module_of(device).exposed(spans, "allgather") == 3.0  # two products of 2 s a unit hide the other gathers of 3 s
