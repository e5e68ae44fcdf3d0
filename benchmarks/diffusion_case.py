"""One optimizer step of a DiffusionGemma, and what it costs a rank: on gloo, under fake tensors, or on a GPU.

The three take one road from a configuration to the step, and differ in the process group, the device, and in whether tensors
have memory. Before the step the optimizer makes one of gradients that are zero, so that its state is there.
"""

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # FSDP's hooks import it on first use, which would cost every forked rank a second
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.distributed._torch_compat.fake import FakeStore, FakeTensorMode, FakeTensors
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.experts.dispatch import static_splits
from meshwright.distributed.mesh import build_mesh
from meshwright.models.specs.registry import get_parallelization_strategy
from meshwright.plan.cost.price import Totals, totals
from meshwright.plan.resolver import resolve
from meshwright.trace.live import LiveBytes
from meshwright.train.config import RunConfig
from meshwright.train.optimizer import build_optimizer
from meshwright.train.start.setup import RunSetup, make_setup

__all__ = ["Case", "Found", "forked", "measure_fake", "measure_gpu", "measure_real", "planned"]

TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Case:
    """What is compared.

    Args:
        config: of a run, as plain values; sizes of the batch are set here.
        world: ranks.
        experts: whether experts are units of their own, inside their layer.
        twin: twin units, or shared ones.
        sync: policy of all units; ``None``: as the plan chooses.
        microbatches: in the optimizer step.
    """

    config: dict[str, Any]
    world: int
    experts: bool
    twin: bool
    sync: str | None
    microbatches: int = 1


@dataclass(frozen=True)
class Found:
    """What the step cost a rank. Bytes, but for ``counts`` and ``seconds``.

    Attributes:
        counts: collectives by kind; ``sent`` are their bytes, of the larger buffer of each call.
        peak: of all that is alive; ``gathered`` and ``gradients`` are the most of parameters and of gradients that were whole.
        state: sharded parameters and the optimizer's state, before the step.
        seconds: that the step took.
    """

    counts: dict[str, int]
    sent: dict[str, int]
    peak: int
    gathered: int
    gradients: int
    state: int
    seconds: float


def planned(case: Case) -> RunSetup:
    """The run, resolved: model on the meta device, plan, and what it is trained to do."""
    parallel = {**case.config.get("parallel", {}), "twin_units": case.twin, "sync": case.sync}
    training = {**case.config["training"], "global_batch_size": 0, "microbatch_size": 1}
    training["global_batch_size"] = case.world * case.microbatches
    setup = make_setup(RunConfig.model_validate({**case.config, "parallel": parallel, "training": training}), case.world)
    if case.experts:
        return setup
    spec = replace(setup.spec, experts=())
    plan = resolve(spec, setup.model, setup.layout, setup.plan.options, world_size=case.world)
    return replace(setup, spec=spec, plan=plan)


def batches_of(case: Case, objective: Any, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens; the first quarter of each sequence is its prompt. The same on every rank: only shapes matter."""
    length = objective.sequence_length
    made = []
    for index in range(case.microbatches):
        ids = torch.randint(3, vocabulary, (1, length), generator=torch.Generator().manual_seed(index))
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = -100
        labels[:, : length // 4] = -100
        made.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)[None]})
    return objective.training(made, [range(1)] * case.microbatches)


def measure_real(case: Case) -> Found:
    """On this rank of a gloo group that is there."""
    return _measure(case, "cpu", nullcontext(), settle=True)


def measure_fake(case: Case) -> Found:
    """As rank 0 of a world that is not there, with tensors that have no memory."""
    with _fake_world(case.world):
        return _measure(case, "cpu", FakeTensors(allow_non_fake_inputs=True))


def measure_gpu(case: Case) -> tuple[Found, int]:
    """As rank 0 of a world that is not there, on a GPU that is; also the most bytes that its allocator gave out.

    What a rank would receive is never written, so numbers mean nothing, and memory is all true but for what NCCL takes.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with _fake_world(case.world):
        found = _measure(case, "cuda", nullcontext())
    return found, torch.cuda.max_memory_allocated()


@contextmanager
def _fake_world(world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with static_splits():
            yield
    finally:
        dist.destroy_process_group()


def _measure(case: Case, device: str, tensors: Any, *, settle: bool = False) -> Found:
    """Shards are made outside of fake tensors, as torch needs it; the rest is within."""
    setup = planned(case)
    model, plan, objective = setup.model, setup.plan, setup.objective
    batches = batches_of(case, objective, model.config.get_text_config().vocab_size)
    get_parallelization_strategy(model).carry_out(model, plan, build_mesh(plan.layout, device))
    objective.attach(model)
    with tensors:
        model.to_empty(device=device)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        model.train()
        optimizer = build_optimizer(model, setup.config.optimizer, plan.parameters)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
        held = [item for state in optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor)]
        on_device = [{key: _there(value, device, tensors) for key, value in batch.items()} for batch in batches]
        sync = GradSync.from_plan(model, plan)
        begun = time.perf_counter()
        with LiveBytes(model, held, settle=settle) as live, CommCounter() as counter:
            state = live.held
            for _, batch in sync.microbatches(on_device):
                sum(objective.sums(model, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - begun
    return Found(dict(counter.counts), dict(counter.bytes), live.peak, live.gathered, live.gradients, state, seconds)


def _there(tensor: torch.Tensor, device: str, tensors: Any) -> torch.Tensor:
    return tensors.from_tensor(tensor) if isinstance(tensors, FakeTensorMode) else tensor.to(device)


def totals_of(case: Case) -> Totals:
    """What the plan says of it."""
    return totals(planned(case).plan)


def forked(function: Callable[..., Any], ranks: int, *args: Any, gloo: bool) -> list[Any]:
    """``function(*args)`` in forked processes, with a gloo group of theirs or without a group; results by rank.

    Raises:
        SystemExit: a process that failed; its traceback is on the terminal.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-benchmark-") as folder:
        context = mp.get_context("fork")

        def on_rank(rank: int) -> None:
            torch.set_num_threads(1)
            if gloo:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
                store = f"file://{folder}/store"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
            Path(folder, str(rank)).write_bytes(pickle.dumps(function(*args)))
            os._exit(0)  # without waiting for gloo's threads

        processes = [context.Process(target=on_rank, args=(rank,)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{function.__name__}{args}: exit codes {[process.exitcode for process in processes]}")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]
