"""The engine of optimizer steps: a model on its layout, its optimizer, and the order of what one step does.

The trainer runs on it, and the engine for a loop of one's own (:mod:`~meshwright.train.engine.own_loop`). Every rank has one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint import state, storage
from meshwright.checkpoint.directory import read_meta
from meshwright.checkpoint.manager import check_same_model
from meshwright.distributed.data.fsdp_units import move_buffers
from meshwright.distributed.pipeline.stage_parts import models_of
from meshwright.errors import CheckpointError
from meshwright.models.objective import Batch
from meshwright.models.weights.initial_values import initialize_buffers
from meshwright.objectives.call import calling
from meshwright.train.batches import RankBatches
from meshwright.train.engine.guard import Guard
from meshwright.train.engine.runner import COUNT, SUM, Sums
from meshwright.train.engine.teacher import Teacher
from meshwright.train.learning_rate import set_learning_rate
from meshwright.train.parts import PARTS, Parts, RankSetup, balance_of_plan, seed_of_dropout
from meshwright.train.start.setup import RunSetup, plain_config

__all__ = ["Gathered", "StepEngine"]


@dataclass(frozen=True)
class Gathered:
    """What the microbatches of a step gave, before any rank knows of the others.

    Attributes:
        sums: loss, terms and metrics, summed over the microbatches of this rank.
        counts: [terms], number of targets of each term over all ranks, on the device.
        tokens: number of tokens that are learned, over all ranks.
        divisors: the same, at least 1.
    """

    sums: Sums
    counts: torch.Tensor
    tokens: torch.Tensor
    divisors: torch.Tensor


class StepEngine:
    """Runs optimizer steps. All ranks call every method.

    Args:
        setup: the resolved run; its model is parallelized and gets its values here.
        device: device of this rank.
        parts: the functions that make the parts.
        resumes: whether everything that a checkpoint of the run holds will be read after this.
        fills: whether the model gets its first values all the same, because something is computed with them before.

    Attributes:
        model: the parallelized model.
        mesh: the mesh of the layout.
        objective: what the model is trained to do.
        batches: makes a rank's part of a batch.
        runner: runs the microbatches.
        teacher: the model that says what this one learns; ``None``: there is none.
        guard: makes steps that are not finite change nothing.
        steps_done: number of optimizer steps done.
        progress: called before each microbatch with words such as ``step 12``.
    """

    def __init__(
        self, setup: RunSetup, device: torch.device, parts: Parts = PARTS, *, resumes: bool = False, fills: bool = False
    ) -> None:
        self.setup, self.config, self.device = setup, setup.config, device
        self.mesh, self.rank, self.steps_done = parts.mesh(setup, device), dist.get_rank(), 0
        self.progress: Callable[[str], None] = lambda what: None
        self._run = run = RankSetup(setup, device, self.mesh)
        self.objective, training = setup.objective, self.config.training
        self.model = parts.distribute(run)
        self.objective.attach(self.model)
        shards_on = torch.device("cpu") if setup.plan.options.cpu_offload else device
        if fills or not resumes or self.config.saves_trained_only:
            parts.fill(run, self.model, shards_on)
        else:
            for model in models_of(self.model):
                initialize_buffers(model, shards_on)
        move_buffers(self.model, device)
        self.model.train()
        self.optimizer = parts.optimizer(run, self.model)
        if self.config.optimizer.is_ours or resumes:  # the state of others may begin otherwise than with zeros
            state.initialize_optimizer(self.optimizer)
        most = training.max_skipped if training.on_nonfinite == "skip" else 1
        self.guard = Guard(self.optimizer, device, most, self.config.optimizer.use)
        self.sync, self.balance = parts.sync(run, self.model), balance_of_plan(run, self.model)
        self.batches = RankBatches(run, self.objective)
        made = (self.model, self.objective, self.sync, self.balance)
        self.runner = parts.runner(run, *made, self._before_microbatch)
        self.teacher: Teacher | None = None
        if setup.teacher is not None and self.config.teacher is not None:
            count, progress = self.config.teacher.top_k, self._before_microbatch
            self.runner.teach = self.teacher = Teacher(setup.teacher, device, self.mesh, count, progress)
        torch.manual_seed(seed_of_dropout(run))

    def _before_microbatch(self, words: str = "") -> None:
        self.progress(f"step {self.steps_done + 1}{words and ', '}{words}")

    # -- a step ------------------------------------------------------------------------------------------------------------

    def run_microbatches(
        self, on_host: list[Batch], tell: Callable[[int, Mapping[str, torch.Tensor]], None] | None = None
    ) -> Gathered:
        """Run forward and backward of the microbatches of a step.

        Args:
            on_host: this rank's part of them (:class:`RankBatches`).
            tell: called with the number of each, and what the model gave for it, where the loss is computed.
        """
        # Tokens are counted before backward: the loss is divided by all tokens of the step, so no factor depends on the layout.
        *batches, counted = map(self.batches.to_device, (*on_host, {"counts": self.batches.counts(on_host)}))
        counts = self.mesh.sum(counted["counts"])
        counts, tokens, routed = counts[:-2], counts[-2], counts[-1]
        self.balance.begin_step(routed)
        divisors = counts.clamp(min=1)
        batches = list(self.runner.prepared(batches))
        numbers = {id(batch): number for number, batch in enumerate(batches)}
        self.runner.tell = None if tell is None else lambda batch, values: tell(numbers[id(batch)], values)
        return Gathered(self.runner.forward_backward(batches, divisors), counts, tokens, divisors)

    def clip(self) -> torch.Tensor:
        """Clip the gradient of the whole model, and return its norm before clipping."""
        return self.runner.clip(self.config.training.clip_norm)

    def update(self, gathered: Gathered, rate: float, *, logged: bool) -> dict[str, torch.Tensor]:
        """Clip the gradients and run the optimizer, unless the step is not finite. The host does not wait.

        Args:
            gathered: what :meth:`run_microbatches` returned.
            rate: the learning rate.
            logged: whether the metrics of the balance of experts will be read.

        Returns:
            The metrics of the step, over all ranks, on the device.
        """
        set_learning_rate(self.optimizer, rate)
        norm = self.clip()
        return self.apply(self.means(gathered), norm, logged=logged)

    def apply(self, metrics: dict[str, torch.Tensor], norm: torch.Tensor, *, logged: bool) -> dict[str, torch.Tensor]:
        """Run the optimizer, unless the step is not finite. The gradients are used up.

        Args:
            metrics: what :meth:`means` returned.
            norm: norm of the gradient.
            logged: whether the metrics of the balance of experts will be read.
        """
        metrics = metrics | {"gradient_norm": norm.to(self.device)}
        self.guard.judge(metrics["loss"], metrics["gradient_norm"])
        self.guard.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics | self.balance.finish_step(
            lambda loads: self.mesh.sum(self.mesh.sum(loads), "pp"), unless=self.guard.flag, logged=logged
        )

    def means(self, gathered: Gathered) -> dict[str, torch.Tensor]:
        """Return loss, terms, metrics of the objective and targets over all ranks. Collective over data ranks."""
        metrics = gathered.sums.over_ranks(self.mesh)
        for term, count in zip(self.objective.terms, gathered.divisors, strict=True):
            if len(self.objective.terms) > 1:
                metrics[f"{term}_loss"] = metrics.pop(term).double() / count
        pairs = {name: (metrics.pop(f"{name}{SUM}"), metrics.pop(f"{name}{COUNT}")) for name in self.objective.metric_names}
        with calling(self.objective, "summary"):
            metrics |= self.objective.summary(pairs)
        return {**metrics, "tokens": gathered.tokens}

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, torch.Tensor]:
        saved = state.model_tensors(self.model, trained=self.config.saves_trained_only)
        return {**saved, **state.optimizer_tensors(self.model, self.optimizer)}

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint: model, optimizer, and the random numbers of this rank."""
        return {**self._tensors(), **state.rng_tensors(self.rank, self.device)}

    def facts_to_save(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides its tensors: of which model, configuration and layout it is."""
        return {
            "world_size": dist.get_world_size(),
            "layout": str(self.setup.layout),
            "parameters": list(self.setup.stored),
            "model_config": plain_config(self.setup.model),
            "config": self.config.model_dump(mode="json"),
        }

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Refuse a checkpoint by what it holds besides its tensors, before anything is read."""

    def read(self, checkpoint: Path) -> dict[str, Any]:
        """Read a checkpoint of the same model, written on this or another layout, continue after its step, return its facts.

        Raises:
            CheckpointError: it is a checkpoint of another model or optimizer; then nothing was changed.
        """
        check_same_model(checkpoint, self.setup.stored, plain_config(self.setup.model))
        meta, stored = read_meta(checkpoint), storage.contents(checkpoint)
        self.check_facts(meta)
        tensors = self._tensors()
        if not self.config.optimizer.is_ours:  # a parameter without a gradient so far has no state there
            tensors = state.without_absent(self.model, self.optimizer, tensors, stored)
        if missing := sorted(tensors.keys() - stored.keys()):
            shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
            said = f"{checkpoint}: lacks {shown}; its run trained other parameters (parallel.freeze), or with another optimizer"
            raise CheckpointError("checkpoint.model", said)
        generators = state.rng_tensors(self.rank, self.device)
        same_ranks = meta["world_size"] == dist.get_world_size() and generators.keys() <= stored.keys()
        if same_ranks:
            tensors.update(generators)
        storage.read(checkpoint, tensors)
        state.take_moments(self.model, self.optimizer, tensors)
        if same_ranks:
            state.set_rng(tensors, self.rank, self.device)
        else:
            # Other ranks wrote it. Each rank seeds a new random stream, which does not repeat the numbers drawn before.
            torch.manual_seed(seed_of_dropout(self._run, meta["step"]))
        self.steps_done = int(meta["step"])
        return meta
