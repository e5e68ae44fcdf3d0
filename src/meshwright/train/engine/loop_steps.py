"""The steps of a loop of one's own: its batches and losses, checked, made whole for the layout, and run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from meshwright.data.rows.columns import MEMBER
from meshwright.distributed.context.sequences import join_sequences
from meshwright.errors import ConfigError, Problems
from meshwright.models.objective import PRECOMPUTED, Batch, Column, Objective
from meshwright.objectives import given
from meshwright.objectives.call import named
from meshwright.objectives.layouts import layout_problems
from meshwright.objectives.running import running
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train import evaluation
from meshwright.train.engine.loop_batches import as_many, completed, padded
from meshwright.train.engine.loop_setup import on_meta
from meshwright.train.engine.steps import StepEngine
from meshwright.train.learning_rate import learning_rate, set_learning_rate
from meshwright.train.parts import Parts
from meshwright.train.run_objective import make_objective
from meshwright.train.start.given_routes import check_batch
from meshwright.train.start.setup import RunSetup

__all__ = ["LoopSteps", "Loss", "StepResult"]

Loss = Objective | type[Objective] | Callable[..., torch.Tensor]
MOST_LOSSES = 16
"""Losses that are kept, because each is tried when it is new."""

_ONCE = (
    "its reference is computed once for the tokens of a run, which a loop of one's own does not have; give batches "
    "reference_log_probs"
)

_ALWAYS = ("input_ids", "labels", "position_ids")

Batches = Sequence[Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class StepResult:
    """What a step gave, over all ranks. Tensors are on the device; to read a number waits for it.

    Attributes:
        metrics: ``loss`` in nats, its terms, the objective's metrics, ``tokens``; after the update also ``gradient_norm``, and
            ``skipped``, 1 if the step was not finite and changed nothing.
        log_probs: of each batch, the log-probabilities of its labels [B, S] that its loss was computed from, if asked for.
    """

    metrics: dict[str, torch.Tensor]
    log_probs: list[torch.Tensor] | None = None

    @property
    def loss(self) -> float:
        """The loss, in nats for each target."""
        return float(self.metrics["loss"])

    @property
    def gradient_norm(self) -> float:
        """Norm of the gradient before it was clipped."""
        return float(self.metrics["gradient_norm"])

    @property
    def skipped(self) -> bool:
        """Whether the step was not finite, and changed nothing."""
        return bool(self.metrics["skipped"])


class LoopSteps(StepEngine):
    """Runs the steps of a loop of one's own. All ranks call every method, in the same order.

    Args:
        setup: the resolved run.
        device: device of this rank.
        parts: the functions that make the parts.
        microbatches: largest number of batches of a step on each data rank.
        steps: number of optimizer steps in all; ``None``: unknown.
        fixed: whether the run says how many tokens a sequence has; otherwise the stages of a pipeline are made for the first.

    Attributes:
        described: the whole model on the meta device, with its adapters.
        lent: while another program uses the device: entries of the optimizer's state, by name, that are to come back to it.
    """

    def __init__(
        self, setup: RunSetup, device: torch.device, parts: Parts, *, microbatches: int, steps: int | None, fixed: bool
    ) -> None:
        if setup.objective.reference == PRECOMPUTED:
            raise ConfigError("engine.loss", f"objective {named(setup.objective)}: {_ONCE}")
        self.described = on_meta(setup.model)
        self.microbatches, self.steps, self._fixed = microbatches, steps, fixed
        self._lengths: tuple[int, int] | None = None
        self._objectives: dict[tuple[Any, ...], tuple[Any, Objective]] = {}
        self._metrics: dict[str, torch.Tensor] | None = None
        self.lent: list[tuple[dict[str, Any], str]] | None = None
        super().__init__(setup, device, parts)

    @property
    def plan(self) -> ShardingPlan:
        """What every rank holds and sends."""
        return self.setup.plan

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads."""
        return self.mesh.rank("dp")

    @property
    def data_ranks(self) -> int:
        """Number of parts of the data."""
        return self.setup.layout.size("dp")

    @property
    def rate(self) -> float:
        """The learning rate of the next step, by the schedule."""
        return learning_rate(self.steps_done, self.steps or 1, self.config.optimizer.lr, self.config.schedule)

    # -- a step --------------------------------------------------------------------------------------------------------------

    def step(self, batches: Batches, loss: Loss | None = None, *, lr: float | None = None) -> StepResult:
        """Run one optimizer step: :meth:`forward_backward`, then :meth:`optim_step`.

        Args:
            batches: the microbatches of this data rank; fewer than on other ranks are filled up by some without labels.
            loss: an objective, a class of one, or a function; ``None``: that of the engine. Sums are divided by the targets of
                the whole step, over all ranks and microbatches.
            lr: the learning rate; ``None``: by the schedule.

        Raises:
            ConfigError: a batch that cannot be used, or a loss that the plan of the engine was not made for.
            PartError: the loss raises something, or does not return what it should.
        """
        result = self.forward_backward(batches, loss)
        return replace(result, metrics=self.optim_step(lr=lr))

    def forward_backward(self, batches: Batches, loss: Loss | None = None, *, log_probs: bool = False) -> StepResult:
        """Run forward and backward of the microbatches of a step. The gradients stay until :meth:`optim_step`.

        Args:
            batches: the microbatches of this data rank.
            loss: see :meth:`step`.
            log_probs: whether to return the log-probabilities that the loss was computed from; it must ask for them
                (``given.log_probs``, or a function of ``log_probs``).

        Raises:
            ConfigError: also, the step before was not finished.
        """
        if self._metrics is not None:
            raise ConfigError("engine.order", "Engine.forward_backward: there are gradients already; optim_step first")
        shapes, whole = self._whole(batches)
        objective = self._use(_negative if loss is None and log_probs else loss, whole[0])
        on_host = self.batches.training(whole, self._numbers(whole))
        if log_probs and "log_probs" not in objective.wanted:
            raise ConfigError("engine.loss", f"Engine.forward_backward: {objective.name} computes no log-probabilities")
        told: dict[int, torch.Tensor] = {}

        def tell(number: int, values: Mapping[str, torch.Tensor]) -> None:
            told[number] = values["log_probs"].detach()

        try:
            gathered = self.run_microbatches(on_host, tell if log_probs else None)
        except BaseException:  # a loop that goes on must not add to a part of a step
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self._metrics = self.means(gathered)
        found = self._joined([told[number] for number in sorted(told)], whole, shapes) if log_probs else None
        return StepResult(dict(self._metrics), found)

    def optim_step(self, *, lr: float | None = None) -> dict[str, torch.Tensor]:
        """Clip the gradients, run the optimizer, and return the metrics of the step, on the device.

        Args:
            lr: the learning rate; ``None``: by the schedule.

        Raises:
            ConfigError: there are no gradients.
        """
        if self._metrics is None:
            raise ConfigError("engine.order", "Engine.optim_step: there are no gradients; forward_backward first")
        self._check_there()
        set_learning_rate(self.optimizer, self.rate if lr is None else lr)
        metrics = self.apply(self._metrics, self.clip(), logged=False)
        self._metrics = None
        self.steps_done += 1
        return {**metrics, "skipped": self.guard.flag}

    def log_probs(self, batches: Batches) -> list[torch.Tensor]:
        """Return the log-probabilities of the labels of each batch [B, S], 0 where there is none, on all ranks that share it.

        In evaluation mode, without gradient.

        Args:
            batches: the batches of this data rank, any number of at least 1.
        """
        shapes, whole = self._whole(batches, exactly=False)
        on_device = [self.batches.to_device(self.batches.share(batch)) for batch in whole]

        def values(model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
            with running(replace(self.runner.call(), wanted=frozenset())):
                return {"log_probs": given.log_probs(model, batch)}

        found = self.runner.forwards(on_device, values, nullcontext)
        return self._joined([one["log_probs"] for one in found if one], whole, shapes)

    def evaluate(self, batches: Iterable[Mapping[str, torch.Tensor]], loss: Loss | None = None) -> dict[str, float]:
        """Return ``loss``, its terms and metrics over some batches of each data rank. No gradient.

        Args:
            batches: the batches of this data rank, any number of at least 1.
            loss: see :meth:`step`.
        """
        _, whole = self._whole(list(batches), exactly=False)
        self._use(loss, whole[0])
        values = evaluation.evaluate(self.runner, self.batches, (self.batches.share(batch) for batch in whole))
        return {name.removeprefix("eval/"): value for name, value in values.items()}

    def _use(self, loss: Loss | None, batch: Batch) -> Objective:
        """Let the runner compute a loss, which is tried when it is new, with all that a batch has."""
        columns = {name: _column(name, one) for name, one in batch.items() if name not in (*_ALWAYS, *self.batches.spread)}
        own = loss if isinstance(loss, MethodType) else id(loss)  # `self.loss` is another object each time it is read
        key = (own, *columns.items())
        known = self._objectives.get(key)
        if known is None:
            objective = self.setup.objective
            if loss is not None:
                objective = make_objective(self.config, self.described, loss, columns)
                self._check(objective)
                objective.attach(self.model)
            known = self._objectives[key] = (loss, objective)
            while len(self._objectives) > MOST_LOSSES:  # a loop may make a new function for each step
                del self._objectives[next(iter(self._objectives))]
        self.objective = self.batches.objective = self.runner.objective = known[1]
        return known[1]

    def _check(self, objective: Objective) -> None:
        """Refuse a loss that needs another plan."""
        plan, made = self.plan, self.setup.objective
        problems = Problems(layout_problems(objective, self.setup.layout, self.config.data.packing))
        sliced = plan.options.loss_parallel is not False and self.setup.layout.size("tp") > 1
        needs = {
            "the logits of all words": objective.whole_logits and sliced,
            "a loss that is not computed in chunks": not objective.chunks and plan.loss is not None,
            "parameters to be frozen": bool(set(objective.frozen) - set(made.frozen)),
            f"parameters of its own, {', '.join(objective.added)}": bool(objective.added),
            "a model whose head has no gradient": objective.without_head and not made.without_head,
        }
        if wanted := [what for what, needed in needs.items() if needed]:
            said = f"loss {named(objective)}: needs {' and '.join(wanted)}, for which the plan was not made"
            problems.add("engine.loss", f"{said}; give it to the engine as objective=")
        if objective.reference == PRECOMPUTED:
            problems.add("engine.loss", f"loss {named(objective)}: {_ONCE}")
        elif objective.reference and self.config.adapter is None:
            problems.add("engine.loss", f"loss {named(objective)}: needs the model without an adapter; set adapter=")
        if problems:
            raise ConfigError(problems)

    def _whole(self, batches: Batches, *, exactly: bool = True) -> tuple[list[tuple[int, ...]], list[Batch]]:
        """Return the shapes of some batches, and the batches: completed, as many as on all ranks, padded for the layout."""
        self._check_there()
        packed, multiple = self.config.data.packing == "pack", self.plan.sequence_multiple
        found = [completed(batch, f"batch {number}", packed=packed) for number, batch in enumerate(batches)]
        for number, batch in enumerate(found):
            check_batch(batch, f"batch {number}", self.plan)
        shapes = [tuple(batch["input_ids"].shape) for batch in found]
        found = as_many(found, self.microbatches if exactly else self._most(len(found)))
        staged = bool(self.plan.stages) and exactly
        if staged and self._lengths is None:
            self._prepare_stages(found, multiple)
        rows, length = self._lengths if staged and self._lengths else (0, 0)
        whole = []
        for number, batch in enumerate(found):
            has, was = batch["input_ids"].shape
            if staged and (has > rows or was > length):
                raise ConfigError(
                    "engine.batch",
                    f"batch {number}: {has} rows of {was} tokens; the stages were made for at most {rows} of {length} "
                    "(microbatch_size and sequence_length of the engine, or its first step)",
                )
            whole.append(padded(batch, max(rows, has), max(length, -(-was // multiple) * multiple), packed=packed))
        return shapes, whole

    def _most(self, own: int) -> int:
        """Return the largest number of batches of a data rank, so that others fill up, and all run as many collectives."""
        numbers = torch.tensor([own, -own], device=self.device)
        if self.data_ranks > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.mesh["dp"].get_group())
        most, least = (abs(number) for number in numbers.tolist())
        if least == 0:
            raise ConfigError("engine.batch", "Engine: 0 batches on a data rank; legal is any number of at least 1")
        return most

    def _check_there(self) -> None:
        if self.lent is not None:
            raise ConfigError("engine.order", "Engine: the model is on the host; onload first")

    def _prepare_stages(self, batches: list[Batch], multiple: int) -> None:
        """Decide the shape that goes through the stages: that of the engine's arguments, or that of the first step."""
        if self._fixed:
            self._lengths = self.config.training.microbatch_size, -(-self.config.data.sequence_length // multiple) * multiple
            return
        shapes = [batch["input_ids"].shape for batch in batches]
        rows, length = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
        self._lengths = rows, -(-length // multiple) * multiple
        self.runner.prepare(*self._lengths)

    def _numbers(self, batches: list[Batch]) -> list[range]:
        """Return numbers of the sequences of some microbatches, which no other rank, microbatch or step has."""
        begin, found = (self.steps_done * self.data_ranks + self.data_rank) * 2**32, []
        for batch in batches:
            found.append(range(begin, begin := begin + len(batch["input_ids"])))
        return found

    def _joined(self, parts: list[torch.Tensor], whole: list[Batch], shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return values of tokens of whole batches, as they were given, on all ranks that share them."""
        found, dtype = [], torch.promote_types(getattr(torch, self.config.model.dtype), torch.float32)
        for number, (rows, length) in enumerate(shapes):
            full = whole[number]["input_ids"].shape
            shared = (full[0], full[1] // self.setup.layout.size("cp"))
            one = parts[number] if parts else torch.zeros(shared, dtype=dtype, device=self.device)
            if self.plan.stages:  # only the last one has them
                one = self.mesh.sum(one.to(dtype), "pp")
            found.append(join_sequences(self.plan, self.mesh, one)[:rows, :length])
        return found


def _column(name: str, tensor: torch.Tensor) -> Column:
    """Describe a tensor [B, S, ...] of a batch, as a column of the data is described."""
    if name == MEMBER:
        return Column("document", dtype="int64")
    width = tensor.shape[2] if tensor.ndim > 2 else None
    return Column("token", width, "float32" if tensor.is_floating_point() else "int64")


def _negative(log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The loss of a causal language model, as a function of the log-probabilities."""
    return -log_probs
