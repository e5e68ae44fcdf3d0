"""What is audited, and the trainer that both sides share: the trainer of `train`, on the data of the audit."""

import functools
import hashlib
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.audit.causes.callback_notes import NotingCallbacks
from meshwright.audit.data import UnevenLoader, sequence_digests, unlabelled_microbatch, words_to_feed
from meshwright.audit.precision import KeepFloat64
from meshwright.checkpoint.state import optimizer_tensors
from meshwright.data.loader import TrainLoader
from meshwright.data.rows.columns import TensorColumn
from meshwright.data.store import TokenStore
from meshwright.distributed.memory.nf4 import dequantize, is_packed, quantize
from meshwright.distributed.mesh import ParallelMesh, build_mesh
from meshwright.distributed.slices import slice_like
from meshwright.layout import Layout
from meshwright.models.added_modules import ADDED
from meshwright.models.objective import PRECOMPUTED
from meshwright.models.weights.initial_values import derive_seed
from meshwright.objectives.distillation import IDS, LOG_PROBS
from meshwright.objectives.trying.invented import REFERENCE, spread_of
from meshwright.plan.given.inspection import model_sizes
from meshwright.plan.given.names import inside
from meshwright.plan.given.options import NF4
from meshwright.train.config import LayoutConfig, ParallelConfig, RunConfig
from meshwright.train.engine.runner import Batch, Runner, Sums, Values
from meshwright.train.parts import Parts, RankSetup, fill, runner_of_plan, train_loader
from meshwright.train.run_objective import columns_of
from meshwright.train.start.setup import RunSetup, make_setup
from meshwright.train.trainer import Trainer

__all__ = [
    "AuditTrainer",
    "Case",
    "NotingRunner",
    "digest",
    "in_dtype",
    "local_part",
    "modules_in_evaluation",
    "states_by_kind",
]

DROPOUT = r"dropout|pdrop|layerdrop|drop_path|jitter"
"""Pattern of attributes that hold a probability of dropout, or the strength of noise."""

NO_TEXT = r"^(image|video|audio|vision|speech|bo[iav]|eo[iav]).*_token_(id|index)$"
"""Pattern of config keys of token ids that stand for an image or a sound. The data contain neither."""

JITTER = 0.02
"""Standard deviation of the normal noise that is added to every parameter of a newly initialized model."""


@dataclass(frozen=True)
class Case:
    """One audit: a configuration that is ready to run, and its data.

    Attributes:
        config: configuration of the run; small enough for this machine.
        store: directory of the token store.
        steps: number of optimizer steps.
    """

    config: RunConfig
    store: Path
    steps: int

    @property
    def dtype(self) -> str:
        """The dtype of compute."""
        return self.config.parallel.param_dtype or self.config.model.dtype

    def on_one_process(self) -> "Case":
        """Return the same model, data and arithmetic for one process, without any of the options that carry out a layout."""
        kept = {name: getattr(self.config.parallel, name) for name in ("param_dtype", "output_dtype", "freeze")}
        changed = {"layout": LayoutConfig(dp_shard=1), "parallel": ParallelConfig(**kept, reduce_dtype=None)}
        return Case(self.config.model_copy(update=changed), self.store, self.steps)

    def with_steps(self, steps: int) -> "Case":
        """Return the same case with another number of steps."""
        training = self.config.training.model_copy(update={"steps": steps})
        return Case(self.config.model_copy(update={"training": training}), self.store, steps)

    def more_precise(self) -> "Case | None":
        """Return the same case in the next more precise dtype; ``None`` for float64."""
        better = {"bfloat16": "float32", "float32": "float64"}.get(self.dtype)
        if better is None:
            return None
        return Case(in_dtype(self.config, better, store=better), self.store, self.steps)


def in_dtype(config: RunConfig, compute: str, store: str | None = None) -> RunConfig:
    """Return a configuration that computes in one dtype, and stores parameters in the dtype ``store`` if that is given."""
    parallel = config.parallel
    reduce = parallel.reduce_dtype if compute == "bfloat16" else compute
    wider = compute == "bfloat16" and parallel.output_dtype in ("float32", "float64")
    output = parallel.output_dtype if parallel.output_dtype is None or wider else compute
    changed: dict[str, Any] = {
        "parallel": parallel.model_copy(update={"param_dtype": compute, "reduce_dtype": reduce, "output_dtype": output})
    }
    if store is not None:
        # The kernels that compute many experts at once do not support float64.
        experts = "eager" if compute == "float64" else config.model.experts_implementation
        changed["model"] = config.model.model_copy(update={"dtype": store, "experts_implementation": experts})
    return config.model_copy(update=changed)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of the bytes that this rank holds of a tensor."""
    local = local_part(tensor.detach()).cpu().contiguous()
    return hashlib.sha256(local.reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b"").hexdigest()[:16]


def states_by_kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states of an optimizer: kind, such as ``exp_avg``, to name of the parameter to the state."""
    by_kind: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in optimizer_tensors(model, optimizer).items():
        name, _, kind = key.removeprefix("optimizer.").rpartition(".")
        by_kind.setdefault(kind, {})[name] = value
    return by_kind


def modules_in_evaluation(model: nn.Module) -> list[str]:
    """Return the names of the modules that are in evaluation mode."""
    return [name for name, module in model.named_modules() if not module.training]


def silence_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to 0, in modules and in the configs that they read.

    The dropout masks of one process cannot be those of several. A model that was shrunk has no such probability left.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if isinstance(value, float) and re.search(DROPOUT, name):
                    setattr(holder, name, 0.0)


class NotingRunner(Runner):
    """Runs microbatches with the runner of a run, in the arithmetic of a case."""

    trainer: "AuditTrainer"

    def __init__(self, inner: Runner) -> None:
        self.inner = inner

    def evaluate(self, batches: Iterable[Batch]) -> torch.Tensor:
        """Return what the runner of the run returns, in the arithmetic of the case."""
        with KeepFloat64() if self.trainer.case.dtype == "float64" else nullcontext():
            return self.inner.evaluate(batches)

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return what the runner of the run returns."""
        return self.inner.logits(batch)

    def prepared(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Prepare batches in the arithmetic of the case."""
        with KeepFloat64() if self.trainer.case.dtype == "float64" else nullcontext():
            return self.inner.prepared(batches)

    def forwards(
        self, batches: Iterable[Batch], values: Values, around: Callable[[], AbstractContextManager[None]]
    ) -> list[Mapping[str, torch.Tensor]]:
        """Return what the runner of the run returns."""
        return self.inner.forwards(batches, values, around)

    def clip(self, limit: float | None) -> torch.Tensor:
        """Clip as the runner of the run does."""
        return self.inner.clip(limit)

    def forward_backward(self, batches: list[Batch], counts: torch.Tensor) -> Sums:
        """Run the microbatches of a step in the arithmetic of the case."""
        trainer = self.trainer
        with KeepFloat64() if trainer.case.dtype == "float64" else nullcontext():
            return self.inner.forward_backward(batches, counts)


class AuditTrainer(Trainer):
    """The trainer of a case on this rank.

    Args:
        case: the case.
        device: the device to compute on.
        runner: class of the runner that runs its microbatches.
        filled: is called with the model when it has its first values, before any are packed in 4 bits; ``None``: nothing is.
        resume: checkpoint to resume from; ``None``: none.
        parts: replacements for parts of an audit, by the names of the fields of :class:`~meshwright.train.parts.Parts`.

    Attributes:
        sequences: for each step, the digests of the sequences that this rank was fed.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        runner: type[NotingRunner] = NotingRunner,
        filled: Callable[[nn.Module], None] | None = None,
        resume: Path | None = None,
        **parts: Any,
    ) -> None:
        self.case = case
        self.sequences: list[list[str]] = []
        setup = make_setup(case.config, dist.get_world_size())
        silence_dropout(setup.model)

        def noting(*made: Any) -> Runner:
            chosen = runner(runner_of_plan(*made))
            chosen.trainer = self
            return chosen

        # All cases of a layout share one mesh: its process groups have threads, and cannot be destroyed one by one.
        own = {
            "mesh": lambda setup, device: _mesh(setup.layout, device.type),
            "loader": _loader,
            "fill": partial(_fill, filled=filled),
            "runner": noting,
            "callbacks": NotingCallbacks,
        }
        super().__init__(setup, TokenStore.open(case.store), device, resume, Parts(**{**own, **parts}))

    def find_reference(self, setup: RunSetup, store: TokenStore) -> None:
        """Return nothing: what a reference says is made up."""

    def with_reference(self, store: TokenStore) -> TokenStore:
        """Return the tokens with numbers in place of what a reference and a teacher say of them, the same on all layouts."""
        if self.config.teacher is not None:
            store = store.beside(_words_of_teacher(store, self.config.teacher.top_k))
        if self.objective.reference != PRECOMPUTED:
            return store
        numbers = (-0.5 - 0.4 * np.sin(store.tokens.astype(np.float32))).astype(np.float32)
        return store.beside({REFERENCE: (TensorColumn(per="token"), numbers)})

    def note_sequences(self, batches: list[Batch]) -> None:
        """Record which sequences this rank is fed in a step."""
        data = self.config.data
        names = spread_of(columns_of(self.config))  # they are not per token
        batches = [{name: tensor for name, tensor in batch.items() if name not in names} for batch in batches]
        self.sequences.append(sequence_digests(batches, data.sequence_length))


def _words_of_teacher(store: TokenStore, count: int) -> dict[str, tuple[TensorColumn, Any]]:
    """Return words and log-probabilities in the place of each token, as a teacher says them; the audit runs none."""
    numbers = store.tokens.astype(np.int64)[:, None] + np.arange(count)
    ids = store.tokens.astype(np.int64)[:, None] % 2 + np.arange(count)
    logs = (-0.5 - 0.4 * np.sin(numbers.astype(np.float32)) - np.log(count)).astype(np.float32)
    return {
        IDS: (TensorColumn(per="token", width=count, dtype="int64"), ids),
        LOG_PROBS: (TensorColumn(per="token", width=count), logs),
    }


def _loader(run: RankSetup, store: TokenStore) -> TrainLoader:
    """Build the loader of the audit. Some microbatches leave experts without a token, and the difficult cases are fed."""
    loader = train_loader(run, store, UnevenLoader)
    setup, training = run.setup, run.config.training
    loader.starves = bool(model_sizes(setup.spec, setup.model).experts)
    config = setup.model.config
    text = config.get_text_config()
    never = {value for key, value in config.to_dict().items() if re.search(NO_TEXT, key) and isinstance(value, int)}
    loader.words = words_to_feed(text.vocab_size, (store.index.pad_token_id, getattr(text, "pad_token_id", None)), never)
    loader.unlabelled = unlabelled_microbatch(training.global_batch_size, training.microbatch_size, training.steps or 0)
    return loader


def _fill(run: RankSetup, model: nn.Module, device: torch.device, filled: Callable[[nn.Module], None] | None) -> None:
    """Initialize the model as a run does. If its weights were not loaded, add noise to them.

    Biases that begin as zero, and norms that begin as one, would hide errors in them and behind them.
    """
    fill(run, model, device)
    packed = {row.name for row in run.plan.parameters if row.dtype == NF4}
    read = run.config.model.path is not None
    _jitter(model, run.config.training.seed, packed, [ADDED] if read else [""])
    if filled is not None and run.config.model.path is None:
        filled(model)
    _round(model, packed)


@functools.cache
def _mesh(layout: Layout, device_type: str) -> ParallelMesh:
    return build_mesh(layout, device_type)


@torch.no_grad()
def _jitter(model: nn.Module, seed: int, packed: Container[str], modules: Collection[str]) -> None:
    """Add noise to each parameter inside of some modules, but those that will be in 4 bits (``packed``).

    The noise is generated for the whole parameter, from a random stream of its own, so it does not depend on the layout.
    """
    for name, parameter in model.named_parameters():
        if name in packed or not any(inside(name, module) for module in modules):
            continue
        generator = torch.Generator().manual_seed(derive_seed(seed, "jitter", name))
        noise = (JITTER * torch.randn(parameter.shape, generator=generator)).to(parameter.device, parameter.dtype)
        value = parameter.data
        if isinstance(value, DTensor):
            noise = slice_like(value, noise)
        local_part(value).add_(noise)


@torch.no_grad()
def _round(model: nn.Module, packed: Container[str]) -> None:
    """Round the parameters that will be in 4 bits: the plain model computes with what the bytes mean."""
    for name, parameter in model.named_parameters():
        if name in packed and not is_packed(parameter):
            parameter.data = dequantize(quantize(parameter.data), parameter.dtype)
