"""What the simulated device reports when a program is made wrong: orders between streams left out, and bugs planted in a step.

The program is a step of FSDP2 itself on two ranks. Its orders are named by the function that sets them up and their number in
it, because line numbers differ between versions of torch.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.accelerator.workers import Workers, in_workers, module_of, reports, waits

REPORTED = {
    "foreach_all_gather 1": "read by allgather",  # copy-in, all-gather
    "foreach_all_gather_copy_out 1": "write by allgather",  # all-gather, copy-out
    "_wait_all_gather_streams_on_event 1": "reuse of memory",  # copy-out, the next copy-in, which gets the output's memory
    "foreach_reduce 1": "read by reduce_scatter",  # gradients, reduce-scatter
    "post_backward 1": "reuse of memory",  # reduce-scatter, the gradients of the next unit, which get its input's memory
    "finalize_backward 1": "read by aten::",  # reduced gradients, their use
    "_root_pre_forward 1": "not ordered after the write by aten::",  # optimizer, the next step's copy-in
    "work.wait _ops 1": "write by allreduce",  # norms of gradients, an all-reduce that is asynchronous
    "_post_forward 1": "reuse of memory",  # as _wait_all_gather_streams_on_event, for the last unit
}
"""Orders of FSDP whose absence is reported, with words of a report."""

# These are redundant.
# - The all-gather stream runs all-gathers alone, each after `all_gather_stream.wait_stream(all_gather_copy_in_stream)` in
#   foreach_all_gather (order 1 above), and no memory is allocated on it (the output is allocated on the copy-in stream). Each
#   of the three functions has made the copy-in stream wait for the same event or stream one line before. So all-gathers come
#   after it through the copy-in stream.
# - The final callback makes the compute stream wait for events of reduce-scatters. finalize_backward has made it wait before
#   for the last post-reduce event of each stream (`_last_post_reduce_events`). That event is recorded on the reduce-scatter
#   stream after the reduce-scatter's event, or on the all-reduce stream, which has waited for the reduce-scatter stream then.
#   Without both orders, what only the callback's protects (memory of inputs of reduce-scatters) is reported: PAIR.
REDUNDANT = {
    "_wait_all_gather_streams_on_event 2",
    "_root_pre_forward 2",
    "_post_forward 2",
    "_root_post_backward_final_callback 1",
}
# - A collective that is not asynchronous runs on the caller's stream, as NCCL's: waiting for its work orders that stream after
#   itself. torch.distributed waits by itself for such works alone.
OF_SYNCHRONOUS_WORKS = "work.wait distributed_c10d"
PAIR = ("finalize_backward 1", "_root_post_backward_final_callback 1")

DEFAULT = "foreach_all_gather_copy_out 1"


class Training:
    """Steps of a small model under FSDP2, two microbatches each. The host waits for nothing."""

    def __init__(self, device: torch.device, mesh_shape: tuple[int, ...] = (2,)) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.device = device
        blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
        self.model = nn.Sequential(*blocks).to(device)
        names = ("replicas", "shards")[-len(mesh_shape) :]
        mesh = dist.init_device_mesh(device.type, mesh_shape, mesh_dim_names=names)
        for unit in (*self.model, self.model):
            fully_shard(unit, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batches = [torch.randn(8, 16).pin_memory() for _ in range(2)]

    def step(self, plant: Callable[["Training", torch.Tensor], object] = lambda training, x: None) -> None:
        for batch in self.batches:
            x = batch.to(self.device, non_blocking=True)
            plant(self, x)
            self.model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def orders(self) -> dict[str, str]:
        """Names of the orders between streams in a step, with the part of their text by which they can be ignored."""
        module = module_of(self.device)
        module.reset_counts()
        self.step()
        lines = defaultdict(set)
        for text in module.orders():
            kind, place = text.split(" [")
            file, line, function = re.match(r"(\S+):(\d+) (\w+)", place.rpartition(" < ")[2]).groups()
            stem = file.rpartition("/")[2].removesuffix(".py")
            name = function if kind == "event" else f"{kind} {stem}"
            lines[name].add((int(line), f"{file.rpartition('/')[2]}:{line} {function}"))
        return {f"{name} {n}": part for name, all in lines.items() for n, (_, part) in enumerate(sorted(all), start=1)}


def _mutate(device: torch.device, mesh_shape: tuple[int, ...], wanted: list[tuple[str, ...]] | None) -> dict[str, list[str]]:
    """Leave out one order after another, or those wanted together, for two steps. Return the races by the orders' names."""
    module, training = module_of(device), Training(device, mesh_shape)
    training.step()
    orders = training.orders()
    assert not reports(device)
    found = {}
    for names in wanted or [(name,) for name in orders]:
        module.ignore_orders([orders[name] for name in names])
        training.step()
        training.step()
        module.ignore_orders([])
        module.synchronize(device)
        found[" and ".join(names)] = [report.text for report in reports(device) if report.kind == "race"]
    return found


def test_an_order_left_out_is_reported(two: Workers) -> None:
    for found in two.run(_mutate, (2,), [(DEFAULT,)]):
        assert any(REPORTED[DEFAULT] in text for text in found[DEFAULT])


@pytest.mark.thorough
def test_every_order_left_out_is_reported_or_redundant(two: Workers) -> None:
    for found in two.run(_mutate, (2,), None):
        own = {name: texts for name, texts in found.items() if not name.startswith(OF_SYNCHRONOUS_WORKS)}
        assert own.keys() == REPORTED.keys() | REDUNDANT
        for name, words in REPORTED.items():
            assert any(words in text for text in found[name]), (name, found[name][:3])
        assert {name for name, texts in found.items() if not texts} == found.keys() - REPORTED.keys()
    for found in two.run(_mutate, (2,), [PAIR, PAIR[:1]]):
        both, alone = found.values()
        assert any("reduce_scatter" in text and "reuse of memory" in text for text in both)
        assert not any("reduce_scatter" in text and "reuse of memory" in text for text in alone)


@pytest.mark.thorough
def test_the_order_of_a_hybrid_mesh(two: Workers) -> None:
    """Reduce-scatter, all-reduce."""
    for found in two.run(_mutate, (2, 1), None):
        assert any("read by allreduce" in text for text in found["foreach_reduce 2"])


# ---------------------------------------------------------------- bugs planted in a step
def _item(training: Training, x: torch.Tensor) -> None:
    x.sum().item()


def _forgotten_wait(training: Training, x: torch.Tensor) -> None:
    work = dist.all_reduce(x, async_op=True)
    x.mul_(2)
    work.wait()


def _side_stream(training: Training, x: torch.Tensor) -> None:
    module = module_of(x.device)
    side, made = module.Stream(x.device), x * 2
    side.wait_stream(module.current_stream(x.device))
    with module.stream(side):
        _ = made + 1
    made.record_stream(side)
    del made
    torch.zeros_like(x)


def _filled_early(training: Training, x: torch.Tensor) -> None:
    training.batches[0].fill_(1.0)


def _host_tensor(training: Training, x: torch.Tensor) -> None:
    torch.cat([x, torch.ones(1, 16)])


def _first_device(training: Training, x: torch.Tensor) -> None:
    x @ torch.ones(16, 16, device=torch.device(x.device.type, 0))  # of rank 1: another device than its own


@in_workers(2)
def test_a_step_is_clean(device: torch.device) -> None:
    training = Training(device)
    training.step()
    module_of(device).reports.take()
    training.step()
    assert not waits(device)


@in_workers(2)
def test_a_value_read_in_a_step_is_counted_where_it_is_read(device: torch.device) -> None:
    training = Training(device)
    module_of(device).reports.take()
    training.step(_item)
    found = Counter((wait.text, wait.place.partition(" < ")[0]) for wait in waits(device))
    line = _item.__code__.co_firstlineno + 1
    assert found["aten::_local_scalar_dense", f"tests/accelerator/test_mutations.py:{line} _item"] == 2


@in_workers(2)
@pytest.mark.parametrize(
    ("plant", "kind", "words"),
    [
        (_forgotten_wait, "race", "not ordered after the write by allreduce"),
        (_filled_early, "reuse", "a pinned tensor changed"),
    ],
)
def test_a_bug_in_a_step_is_reported(device: torch.device, plant: Callable[..., None], kind: str, words: str) -> None:
    training = Training(device)
    training.step(plant)
    module_of(device).synchronize(device)
    found = reports(device)
    assert {report.kind for report in found} == {kind}
    assert any(words in report.text and "test_mutations.py:" in report.text for report in found)


@in_workers(2)
@pytest.mark.parametrize("removed", [False, True])
def test_a_record_stream_that_is_removed_is_reported(device: torch.device, removed: bool) -> None:
    training = Training(device)
    module_of(device).ignore_orders(["record_stream"] if removed else [])
    training.step(_side_stream)
    found = reports(device)
    assert bool(found) == removed
    assert all("reuse of memory" in report.text and " _side_stream" in report.text for report in found)


@in_workers(2)
@pytest.mark.parametrize("plant", [_host_tensor, _first_device])
def test_a_tensor_of_another_device_is_refused(device: torch.device, plant: Callable[..., None]) -> None:
    training = Training(device)
    if plant is _first_device and dist.get_rank() == 0:
        plant(training, torch.ones(8, 16, device=device))
        return
    with pytest.raises(RuntimeError, match=r"on the same device, but aten::(cat|mm) got a tensor on"):
        plant(training, torch.ones(8, 16, device=device))
    assert [report.kind for report in reports(device)] == ["mixed"]
