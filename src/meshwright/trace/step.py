"""One optimizer step of one rank under fake tensors, in a world that is not there.

The plan is carried out as in a run, with the run's optimizer. Tensors have shapes and no memory, and collectives send nothing,
so a step of a large model takes seconds on a laptop. Tokens are routed to experts evenly, unless a load is given.
"""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from meshwright.device import synchronize
from meshwright.distributed._torch_compat.fake import FakeStore, FakeTensorMode, FakeTensors, forget_meshes, without_propagation
from meshwright.distributed.context.sequences import forget_kept, sequences_of
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.experts.dispatch import static_splits
from meshwright.distributed.mesh import ParallelMesh, build_mesh
from meshwright.errors import MeshwrightError, UnsupportedError
from meshwright.models._transformers_compat import attention_of
from meshwright.models.adapters.adapt import adapters_off
from meshwright.models.objective import Batch
from meshwright.models.reading.tracing import hooked
from meshwright.models.specs.registry import get_parallelization_strategy
from meshwright.models.token_loss import IGNORE
from meshwright.objectives.call import evaluate_batch, passes_before
from meshwright.objectives.running import Running, running
from meshwright.objectives.trying.invented import invented
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.trace.kernels import device_kernels, report_attention
from meshwright.trace.live import Kind, LiveBytes, by_kind, by_layer
from meshwright.trace.work import Work, WorkCounter, total
from meshwright.train.batches import RankBatches
from meshwright.train.optimizer import build_optimizer
from meshwright.train.parts import RankSetup
from meshwright.train.run_objective import columns_of
from meshwright.train.start.setup import RunSetup

__all__ = ["StepTrace", "prepared_step", "run_step", "time_step", "trace_step", "traced"]

T = TypeVar("T")

FORWARD, LOSS, UPDATE = "forward", "loss", "update"
"""Names of moments of a step; the others are the backward of each layer, by its name."""

BEFORE_LOSS, AFTER_LOSS = "before the loss", "after the loss"
"""Names of what is noted: when the last layer's forward is over, and when the loss is computed, both before any backward."""


@dataclass(frozen=True)
class StepTrace:
    """What a rank holds in a step.

    Attributes:
        moments: name of each moment to the bytes by kind when the rank held the most. The moments are ``forward``, ``loss``,
            the backward of each layer under its name, and ``update``.
        works: the same moments to the work of the rank by layer and kind, of all microbatches. Layers are as in
            :data:`~meshwright.trace.live.Held`.
        microbatches: number of microbatches of the step.
        noted: the bytes by kind in the first microbatch, before the loss and after it.
        of_layers: name of what was noted, and of the moments of the loss, of the backward of the first two layers and of the
            update, to these bytes by layer and kind.
        state: bytes of shards of parameters and of the optimizer's state, buffers, and the batches of all microbatches.
        batch: bytes of the batch of one microbatch.
        peak: the most bytes at once.
    """

    moments: Mapping[str, Mapping[Kind, int]]
    works: Mapping[str, Mapping[str, Mapping[Work, int]]]
    microbatches: int
    noted: Mapping[str, Mapping[Kind, int]]
    of_layers: Mapping[str, Mapping[str, Mapping[Kind, int]]]
    state: int
    batch: int
    peak: int

    @property
    def work(self) -> dict[str, Counter[Work]]:
        """The moments to the work by kind, that of all layers together."""
        return {moment: total(works.values()) for moment, works in self.works.items()}


@contextmanager
def fake_world(ranks: int, rank: int = 0, load: float = 1.0) -> Iterator[None]:
    """Be a rank of a world that is not there, with a load of experts (:func:`static_splits`). No process group may exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    forget_meshes()
    try:
        with static_splits(load):
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def trace_step(setup: RunSetup, *, device: bool = False, load: float = 1.0) -> StepTrace:
    """Run one step of rank 0 under fake tensors, and return what it held and computed.

    Args:
        setup: a run without a pipeline. Its model is on the meta device, and is used up.
        device: whether attention keeps what it keeps on a device, and not what it keeps on a CPU.
        load: tokens that the experts of this rank get, over an even share.

    Raises:
        UnsupportedError: what the model computes depends on values.
    """
    return traced(setup, run_step, device=device, load=load)


def traced(setup: RunSetup, run: Callable[[RunSetup, FakeTensorMode], T], *, device: bool, load: float) -> T:
    """Return what a function finds out of a run as rank 0 under fake tensors; see :func:`trace_step`."""
    causal = not setup.plan.options.packed and setup.layout.size("cp") == 1
    kernels = device_kernels(attention_of(setup.model), causal=causal) if device else nullcontext()
    with fake_world(setup.layout.world_size, load=load), torch.random.fork_rng(devices=[]), kernels:
        try:
            return run(setup, FakeTensors())
        except MeshwrightError:
            raise
        except Exception as error:  # whatever a model raises where values are missing
            words = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            where = _place(error, setup.model)
            raise UnsupportedError(
                "model.values", f"a step of this model cannot be traced without values{where} ({words})"
            ) from error


def _place(error: Exception, model: nn.Module) -> str:
    """The innermost module of a model that raised an error, as words; empty if none did."""
    names = {id(module): name for name, module in model.named_modules() if name}
    frames = traceback.walk_tb(error.__traceback__)
    found = [name for frame, _ in frames if (name := names.get(id(frame.f_locals.get("self"))))]
    return f": it fails in {found[-1]}" if found else ""


def run_step(setup: RunSetup, tensors: FakeTensorMode | None) -> StepTrace:
    """Run one step of this rank, and return what it held.

    Args:
        setup: a run without a pipeline. Its model is on the meta device, and is used up.
        tensors: fake tensors; ``None``: real ones on the CPU, with values that mean nothing. A process group must exist.
    """
    step = prepared_step(setup, "cpu", tensors)
    with tensors if tensors is not None else nullcontext():
        _make_state(setup.model, step.optimizer)
        held = [item for state in step.optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor)]
        for batch in step.batches:  # a run moves all to the device first
            moved = [*batch.values(), *_documents(batch["position_ids"], setup.plan.options.packed)]
            held += moved
        work = WorkCounter()
        units = fsdp_units(setup.model)
        together = [units[unit.name] for unit in setup.plan.fsdp_units if unit.together]
        live = LiveBytes(setup.model, held, together=together, settle=tensors is None, words=_words(setup), work=work)
        with live, report_attention(work.attended), without_propagation(live):
            state = live.held
            step(live, work)
    of_batch = sum(tensor.nbytes for tensor in moved)  # all microbatches have the same shapes
    moments, noted = ({name: by_kind(held) for name, held in found.items()} for found in (live.moments, live.noted))
    apart = {LOSS, UPDATE, *setup.plan.layers[:2]}
    of_layers = {name: by_layer(held) for name, held in (live.moments | live.noted).items() if name in apart | {*noted}}
    return StepTrace(moments, work.works, len(step.batches), noted, of_layers, state=state, batch=of_batch, peak=live.peak)


def _documents(positions: torch.Tensor, packed: bool) -> list[torch.Tensor]:
    """Return what a run moves to the device with positions, of which documents they are of (``models/moved_batch.py``)."""
    sequences = sequences_of(positions)
    known = () if sequences is None else (sequences.documents, sequences.prefix)
    return [tensor for tensor in (*known, torch.empty_like(positions) if packed else None) if tensor is not None]


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make what a rank has after its first step: the storages that FSDP gathers into, and the optimizer's state."""
    for unit in fsdp_units(model).values():
        unit.unshard()
        unit.reshard()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def time_step(setup: RunSetup, kind: str, runs: int = 5) -> float:
    """Return the median seconds of real steps of this rank. A process group must exist.

    Args:
        setup: as for :func:`run_step`.
        kind: kind of device, as in :mod:`meshwright.device`.
        runs: number of steps that are timed, after two others.
    """
    step, times = prepared_step(setup, kind, None), []
    for index in range(2 + runs):
        begun = time.perf_counter()
        step()
        synchronize(torch.device(kind))
        if index >= 2:
            times.append(time.perf_counter() - begun)
    return median(times)


@dataclass(frozen=True)
class _Step:
    """A step that can be run, with the same batches each time."""

    setup: RunSetup
    sync: GradSync
    mesh: ParallelMesh
    optimizer: torch.optim.Optimizer
    batches: list[Batch]

    def __call__(self, *watching: LiveBytes | WorkCounter) -> None:
        first = True

        def note(name: str) -> None:
            for one in watching if first else ():
                if isinstance(one, LiveBytes):
                    one.note(name)

        def begin(moment: str, layer: str = "") -> None:
            for one in watching:
                one.begin(moment, layer)
            if moment == LOSS:
                note(BEFORE_LOSS)

        setup = self.setup
        layers = [(name, setup.model.get_submodule(name)) for name in setup.plan.layers]
        handles: list[RemovableHandle] = []
        for name, layer in layers:
            # Before FSDP gathers its parameters, which are its own.
            handles.append(layer.register_forward_pre_hook(partial(_announce_forward, name, begin), prepend=True))
            handles.append(layer.register_forward_hook(_announce(name, begin, last=name == layers[-1][0])))
        with hooked(handles):
            for _, batch in self.sync.microbatches(self._prepared(begin)):
                begin(FORWARD)
                terms, _ = evaluate_batch(setup.objective, setup.model, batch, self._call())
                note(AFTER_LOSS)
                first = False
                loss = sum(terms)  # at least one term
                del terms  # scalars and values of tokens: what made them goes as backward uses it
                loss.backward()  # type: ignore[union-attr]
                del loss
                forget_kept(batch.get("position_ids"))
        begin(UPDATE)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _call(self) -> Running:
        return Running(self.setup.plan, self.mesh, self.setup.objective.wanted)

    def _prepared(self, begin: Callable[[str], None]) -> list[Batch]:
        """Return the batches with what the objective needs of the model before the step, as the engine of a run does."""
        batches, model = [dict(batch) for batch in self.batches], self.setup.model
        for one in passes_before(self.setup.objective):
            around = nullcontext() if one.adapted else adapters_off(model)
            with self.sync.forward_only(), torch.no_grad(), around:
                found = []
                for batch in batches:
                    begin(FORWARD)
                    with running(self._call()):
                        found.append(one.values(model, batch))
                one.add(batches, found, self.mesh.sum)
        return batches


def _parallelized(setup: RunSetup, kind: str) -> tuple[ParallelMesh, list[Batch]]:
    """Parallelize the model of a run, which gets no values, and return its mesh and this rank's batches."""
    model, plan = setup.model, setup.plan
    mesh = build_mesh(plan.layout, kind)
    get_parallelization_strategy(model).carry_out(model, plan, mesh)
    setup.objective.attach(model)
    whole = [_batch(setup, index) for index in range(plan.options.microbatches)]
    ours = RankBatches(RankSetup(setup, torch.device(kind), mesh), setup.objective)
    return mesh, ours.training(whole, [range(len(batch["input_ids"])) for batch in whole])


def prepared_step(setup: RunSetup, kind: str, tensors: FakeTensorMode | None) -> _Step:
    """Return the step of a run, whose model gets values that mean nothing."""
    mesh, batches = _parallelized(setup, kind)  # outside of fake tensors, because it makes many views of shards
    model, plan = setup.model, setup.plan
    with tensors if tensors is not None else nullcontext():
        model.to_empty(device=kind)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        model.train()
        optimizer = build_optimizer(model, setup.config.optimizer, plan.parameters)
        if tensors is not None:
            batches = [{key: _faked(value, tensors) for key, value in batch.items()} for batch in batches]
        elif kind != "cpu":
            batches = [{key: value.to(kind) for key, value in batch.items()} for batch in batches]
        return _Step(setup, GradSync.from_plan(model, plan), mesh, optimizer, batches)


def _batch(setup: RunSetup, index: int) -> Batch:
    """Return a microbatch of whole sequences; each has two documents if documents are packed."""
    rows, tokens = setup.config.training.microbatch_size, setup.plan.options.tokens
    assert tokens is not None
    length = tokens * setup.layout.size("cp") // rows
    vocabulary = setup.model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(index))
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORE  # what follows the last token is not known
    positions = torch.arange(length)
    if setup.plan.options.packed:
        positions[length // 2 :] -= length // 2
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions.expand(rows, -1).contiguous()}
    return {**batch, **invented(columns_of(setup.config, setup.objective), batch)}


def _faked(tensor: torch.Tensor, tensors: FakeTensorMode) -> torch.Tensor:
    """Return a tensor without values, with the attributes of one that has some: positions know their sequences."""
    fake = tensors.from_tensor(tensor)
    vars(fake).update({name: value for name, value in vars(tensor).items() if name not in vars(fake)})
    return fake


def _words(setup: RunSetup) -> int:
    """Return the words that a rank has logits of."""
    vocabulary: int = setup.model.config.get_text_config().vocab_size
    sliced = any(row.exit is Move.VOCABULARY for row in setup.plan.tensor_parallel)
    return -(-vocabulary // setup.layout.size("tp")) if sliced else vocabulary


def _announce_forward(name: str, begin: Callable[[str, str], None], *_: Any) -> None:
    begin(FORWARD, name)


def _announce(name: str, begin: Any, *, last: bool) -> Any:
    """Return a hook of a layer's forward: it says when the layer's backward begins, and when the last layer is through."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        left = [item for item in tree_iter(output) if isinstance(item, torch.Tensor) and item.requires_grad]
        if left:
            register_multi_grad_hook(left, lambda gradient: begin(name, name), mode="any")
        if last:
            begin(LOSS)

    return hook
