"""Collectives of the simulated device on two ranks: values, NCCL's streams, and ranks that do not call the same."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.workers import Workers, in_workers, module_of, reports


@in_workers(2)
def test_values(device: torch.device) -> None:
    rank, mine = dist.get_rank(), torch.arange(4.0, device=device) + 10 * dist.get_rank()
    both = [torch.arange(4.0), torch.arange(4.0) + 10]
    total = mine.clone()
    dist.all_reduce(total)
    assert torch.equal(total.cpu(), both[0] + both[1])
    gathered = torch.empty(8, device=device)
    dist.all_gather_into_tensor(gathered, mine)
    assert torch.equal(gathered.cpu(), torch.cat(both))
    listed = [torch.empty(4, device=device) for _ in range(2)]
    dist.all_gather(listed, mine)
    assert torch.equal(torch.cat(listed).cpu(), torch.cat(both))
    scattered = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(scattered, mine)
    assert torch.equal(scattered.cpu(), (both[0] + both[1])[2 * rank : 2 * rank + 2])
    exchanged = torch.empty(4, device=device)
    dist.all_to_all_single(exchanged, mine)
    assert torch.equal(exchanged.cpu(), torch.cat([part[2 * rank : 2 * rank + 2] for part in both]))
    dist.broadcast(mine, 1)
    assert torch.equal(mine.cpu(), both[1])
    dist.reduce(total, 0)
    dist.gather(mine, listed if rank == 0 else None)
    dist.scatter(mine, listed if rank == 0 else None)
    dist.barrier()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


@in_workers(2)
def test_averages_and_scaled_sums_are_those_of_nccl(device: torch.device) -> None:
    """NCCL multiplies each rank's numbers first, in their own type; averages of integers divide the sum, toward zero."""
    rank, premul = dist.get_rank(), dist._make_nccl_premul_sum
    for dtype in (torch.float32, torch.bfloat16):
        given = [torch.tensor([1.0, 3.0, 5.0, 7.0], dtype=dtype), torch.tensor([2.0, 2.0, 6.0, -7.0], dtype=dtype)]
        factor = torch.tensor(0.3, dtype=dtype)
        for op, expected in (
            (dist.ReduceOp.AVG, given[0] / 2 + given[1] / 2),
            (premul(0.3), given[0] * factor + given[1] * factor),
            (premul(torch.tensor(0.3, device=device)), given[0] * factor + given[1] * factor),
        ):
            whole = given[rank].to(device)
            dist.all_reduce(whole, op)
            assert torch.equal(whole.cpu(), expected)
            own, kept = torch.empty(2, dtype=dtype, device=device), given[rank].to(device)
            dist.reduce_scatter_tensor(own, kept, op)
            assert torch.equal(own.cpu(), expected[2 * rank : 2 * rank + 2])
            assert torch.equal(kept.cpu(), given[rank])
    whole = torch.tensor([3, -4]).to(device) + rank
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.tolist() == [3, -3]  # 7 / 2, -7 / 2


@in_workers(2)
@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_asynchronous_is_on_the_stream_of_the_group(device: torch.device, ordered: bool) -> None:
    tensor = torch.ones(4, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    if ordered:
        work.wait()
    _ = tensor * 2
    found = reports(device)
    assert {report.kind for report in found} == (set() if ordered else {"race"})
    assert ordered or "not ordered after the write by allreduce" in found[0].text
    work.wait()


@in_workers(2)
def test_a_collective_comes_after_what_the_callers_stream_has(device: torch.device) -> None:
    module = module_of(device)
    side, main, tensor = module.Stream(device), module.current_stream(device), torch.ones(4, device=device)
    dist.all_reduce(tensor.mul_(2), async_op=True).wait()
    side.wait_stream(main)
    with module.stream(side):
        tensor.mul_(2)
    dist.all_reduce(tensor)
    assert {report.kind for report in reports(device)} == {"race"}
    main.wait_stream(side)
    dist.all_reduce(tensor)  # what is synchronous runs on the caller's stream


@in_workers(2)
@pytest.mark.parametrize("waited", [True, False])
def test_memory_of_a_collective(device: torch.device, waited: bool) -> None:
    """A work keeps its tensors until the first wait. One that nobody waits for has them recorded on its stream."""
    module = module_of(device)
    side = module.Stream(device)
    tensor = torch.ones(4, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    del tensor
    assert module.memory_allocated(device) > 0
    if waited:
        with module.stream(side):
            work.wait()  # the side stream, not the one that gets the memory back
    del work
    for _ in range(1000):  # gloo's thread may hold them a moment longer
        if module.memory_allocated(device):
            time.sleep(0.001)
    torch.empty(4, device=device).fill_(1)
    found = reports(device)
    assert {report.kind for report in found} == ({"race"} if waited else set())
    assert not waited or "reuse of memory" in found[0].text
    module.synchronize(device)
    assert module.memory_allocated(device) == 0


@in_workers(2)
@pytest.mark.parametrize("batched", [True, False])
def test_transfers(device: torch.device, batched: bool) -> None:
    """A batch is one work on the group's stream. Other transfers have a stream for each pair of ranks."""
    peer, results = 1 - dist.get_rank(), torch.empty(4, device=device)
    mine = torch.full((4,), dist.get_rank() + 1.0, device=device)

    def exchange() -> list[dist.Work]:
        if batched:
            return dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, results, peer)])
        return [dist.isend(mine, peer), dist.irecv(results, peer)]

    works = exchange()
    assert len(works) == (1 if batched else 2)
    for work in works:
        work.wait()
    assert results.tolist() == [peer + 1.0] * 4
    assert not reports(device)
    works = exchange()
    mine.add_(1)  # whatever the peer gets
    assert {report.kind for report in reports(device)} == {"race"}
    for work in works:
        work.wait()


# ---------------------------------------------------------------- ranks that do not call the same
def _other_order(device: torch.device) -> None:
    tensors = [torch.ones(4, device=device), torch.ones(8, device=device)]
    if dist.get_rank() == 0:
        dist.all_reduce(tensors[0])
    else:
        dist.all_gather_into_tensor(tensors[1], tensors[0])


def _other_shape(device: torch.device) -> None:
    dist.all_reduce(torch.ones(4 + dist.get_rank(), device=device))


def _other_dtype(device: torch.device) -> None:
    dist.all_reduce(torch.ones(4, device=device, dtype=(torch.float32, torch.int32)[dist.get_rank()]))


def _other_reduction(device: torch.device) -> None:
    dist.all_reduce(torch.ones(4, device=device), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[dist.get_rank()])


def _other_root(device: torch.device) -> None:
    dist.broadcast(torch.ones(4, device=device), dist.get_rank())


def _one_too_many(device: torch.device) -> None:
    works = []
    for _ in range(2 + dist.get_rank()):
        works.append(dist.all_reduce(torch.ones(4, device=device), async_op=True))
    works.append(dist.all_gather_into_tensor(torch.ones(8, device=device), torch.ones(4, device=device), async_op=True))
    for work in works:
        work.wait()


def _other_transfer(device: torch.device) -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(4, device=device), 1)
    else:
        dist.recv(torch.ones(8, device=device), 0)


_DIFFERENT = {
    "order": (_other_order, "allreduce by sum, Float x 4", "allgather of Float x 4 each"),
    "shape": (_other_shape, "Float x 4", "Float x 5"),
    "dtype": (_other_dtype, "Float x 4", "Int x 4"),
    "reduction": (_other_reduction, "allreduce by sum", "allreduce by avg"),
    "root": (_other_root, "broadcast from 0", "broadcast from 1"),
    "one too many": (_one_too_many, "call 3", "allreduce by sum"),
    "transfer": (_other_transfer, "Float x 4", "Float x 8"),
}
_DEFAULT = ("order", "transfer")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case", [name if name in _DEFAULT else pytest.param(name, marks=pytest.mark.thorough) for name in _DIFFERENT]
)
def test_different_collectives_are_named_on_both_ranks(accelerator: Path, case: str) -> None:
    job, *texts = _DIFFERENT[case]
    with Workers(2, accelerator) as workers:  # of its own: what comes after would differ too
        for said in workers.run(_complaint, job):
            assert "differ in call" in said
            assert all(text in said for text in texts), said
            assert said.count(f" {job.__name__}") == 2, said  # both places


def _complaint(device: torch.device, job: Callable[[torch.device], None]) -> str:
    """What a rank is told when it runs a job; an error of gloo may come with it, which the other rank's error causes."""
    try:
        job(device)
        module_of(device).synchronize(device)
    except RuntimeError as error:
        return str(error)
    return "nothing"
