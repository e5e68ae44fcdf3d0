"""A model in stages, for a loop of one's own: cut, parallelized, and run by the schedule of its plan."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.context.sequences import share_batch
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.pipeline.microbatch_work import Work
from meshwright.distributed.pipeline.stage_parts import make_parts
from meshwright.errors import ConfigError, PlanError
from meshwright.models.specs.registry import get_parallelization_strategy
from meshwright.plan.axes.pipeline.stage_plan import passes_of
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["Pipeline"]

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


class Pipeline:
    """The stages of this rank, with the loop of one optimizer step. All ranks call every method, with the same arguments on all
    ranks of `pp`.

    A batch holds tensors [rows, length, ...], among them ``input_ids`` or ``inputs_embeds``. The model gets those that its
    forward names, but no ``labels``: the loss is computed here, from logits. A loss of routers, which the model would add to
    its own, is not added. With `cp`, batches hold whole sequences with labels that are shifted already, and each rank takes its
    part (:func:`~meshwright.distributed.context.sequences.context_parallel`).

    Args:
        model: the whole model: on the meta device, or with the same values on all ranks, of which each keeps its shards. It is
            not changed.
        plan: its plan, with stages. Its ``options.microbatches`` is the number of batches of a step.
        mesh: the mesh of the plan's layout.
        device: where hidden states are received; ``None``: the current device of the mesh's type.

    Attributes:
        model: the stages of this rank as one module. Its parameters have the names of the whole model.

    Raises:
        PlanError: the plan has no stages, or does not belong to the model.
    """

    def __init__(self, model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh, device: torch.device | None = None) -> None:
        if not plan.stages:
            raise PlanError("pp.stages", "Pipeline: the plan has no stages; resolve it for a layout with pp > 1")
        if passes_of(plan) > 1:
            raise PlanError(
                "pp.twice",
                f"Pipeline: a batch goes through the stages of {plan.family} {passes_of(plan)} times, for its objective; only "
                "the trainer does that (meshwright.train)",
            )
        if plan.loss is not None:
            raise PlanError(
                "loss.chunks", f"loss_chunks={plan.loss.chunks}: Pipeline.step takes a loss of all logits; the legal value is 0"
            )
        device = device or torch.device(mesh.root.device_type)
        self.plan, self._rank = plan, mesh.rank("cp")
        named = signature(model.forward).parameters
        self._named = [name for name in named if name != "labels"]
        if not {"input_ids", "inputs_embeds"} & {*named}:
            raise PlanError("pp.batch", "Pipeline: the forward of the model names neither input_ids nor inputs_embeds")
        self._constant: dict[str, Any] = {"use_cache": False} if "use_cache" in named else {}
        carry_out = get_parallelization_strategy(model).carry_out
        self.model = make_parts(lambda: copy.deepcopy(model), plan, mesh, carry_out)
        from meshwright.distributed.pipeline.scheduled_stages import ScheduledStages  # torch's schedules load torch._dynamo

        self._stages = ScheduledStages(self.model, plan, mesh, device)
        self._shape: tuple[int, int] | None = None

    def step(self, batches: Sequence[Batch], loss: Loss, divisor: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Run forward and backward of all batches of an optimizer step. The gradients are reduced when it returns.

        Batches may have fewer rows than in the first step, and there may be fewer of them: they are padded by rows that the
        loss does not see.

        Args:
            batches: the microbatches of this data rank.
            loss: called with logits and the batch they are of; returns the sum of the losses of its targets.
            divisor: what the sums are divided by, such as the number of targets of the whole step over all data ranks. The plan
                says whether gradients are added or averaged over data ranks (``gradient_reduction``).

        Returns:
            The loss of this data rank, divided, in fp64, on all ranks of `pp`.

        Raises:
            ConfigError: there are more batches than in the plan, or a batch is larger than the largest of the first step.
        """
        planned = self.plan.options.microbatches
        if not 0 < len(batches) <= planned:
            raise ConfigError(
                "pp.microbatches",
                f"Pipeline.step: {len(batches)} batches; the plan has {planned} (microbatches of its options)",
            )
        given = [self._checked(batch) for batch in batches]
        shapes = [_shape(batch) for batch in given]
        rows, length = self._shape or (max(rows for rows, _ in shapes), shapes[0][1])
        for own in shapes:
            if own[0] > rows or own[1] != length:
                raise ConfigError(
                    "pp.batch",
                    f"Pipeline.step: a batch has {own[0]} sequences of {own[1]} tokens; the first step had at most {rows} of "
                    f"{length}, and buffers are for these. Pad sequences to one length, and put the largest batch first",
                )
        padded = [
            share_batch(self.plan, self._rank, {name: _rows(tensor, has, rows) for name, tensor in batch.items()})
            for batch, (has, _) in zip(given, shapes, strict=True)
        ]
        if self._shape is None:
            self._stages.prepare(rows, length)
            self._shape = (rows, length)
        # Only the last stage knows the dtype of the loss.
        total = torch.zeros((), dtype=torch.float64, device=self._stages.device)

        def batch_loss(batch: dict[str, torch.Tensor], real: int, model: nn.Module) -> torch.Tensor:
            nonlocal total
            logits = self._logits(batch, model)
            if not real:  # no loss of anyone's may be asked about nothing
                return (logits.to_local() if isinstance(logits, DTensor) else logits)[:0].sum()
            value = loss(logits[:real], {name: _rows(tensor, rows, real) for name, tensor in batch.items()}) / divisor
            total = total + value.detach().double()
            return value

        work = []
        for index in range(planned):
            source = min(index, len(given) - 1)  # what is missing is the last batch again, which the loss does not see
            real = shapes[source][0] if source == index else 0
            work.append(Work(self._arguments(padded[source]), partial(batch_loss, padded[source], real)))
        self._stages.forward_backward(work)
        return self._stages.sum(total)

    def evaluate(self, batches: Iterable[Batch], loss: Loss) -> torch.Tensor:
        """Run forward alone, in evaluation mode. Return the sum of the losses of some batches, in fp64, on all ranks of `pp`.

        Args:
            batches: of any number and any shapes that the plan allows.
            loss: see :meth:`step`.
        """

        def work(batch: Batch) -> Work:
            part = share_batch(self.plan, self._rank, self._checked(batch))
            return Work(self._arguments(part), lambda model: loss(self._logits(part, model), part))

        return self._stages.evaluate(map(work, batches))

    def clip_grad_norm_(self, max_norm: float | None) -> torch.Tensor:
        """Clip the gradient of the whole model, over all stages, and return its norm before.

        Args:
            max_norm: the largest norm of a clipped gradient; ``None`` only measures.
        """
        return self._stages.clip(max_norm)

    def _checked(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return a batch without empty entries, or refuse it before any rank waits for another one."""
        found = {name: tensor for name, tensor in batch.items() if tensor is not None}
        rows, length = _shape(found)
        if length % self.plan.sequence_multiple:
            raise ConfigError(
                "cp.length",
                f"Pipeline: sequences have {length} tokens; pad them to a multiple of {self.plan.sequence_multiple} "
                "(plan.sequence_multiple)",
            )
        for name, tensor in found.items():
            if tensor.ndim and tensor.shape[0] not in (rows, 1) and tuple(tensor.shape) != (length,):
                shape = tuple(tensor.shape)
                raise ConfigError("pp.batch", f"Pipeline: {name} has the shape {shape}; the batch has {rows} rows of {length}")
        return found

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        """What the model is called with."""
        return {name: batch[name] for name in self._named if name in batch} | self._constant

    def _logits(self, batch: Batch, model: nn.Module) -> torch.Tensor:
        output = model(**self._arguments(batch))
        logits: torch.Tensor = getattr(output, "logits", output)
        return logits


def _shape(batch: Batch) -> tuple[int, int]:
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if tokens is None or tokens.ndim < 2:
        raise ConfigError(
            "pp.batch", "Pipeline: a batch needs input_ids [rows, length] (or inputs_embeds [rows, length, width])"
        )
    return tokens.shape[0], tokens.shape[1]


def _rows(tensor: torch.Tensor, has: int, wanted: int) -> torch.Tensor:
    """Return the tensor of a batch of ``has`` rows with another number of them. One without rows, as positions may be, stays.

    The first row is repeated at the end: a row of zeros might be masked whole, and would then be NaN.
    """
    if not tensor.ndim or len(tensor) != has:
        return tensor
    return tensor[:wanted] if wanted <= has else torch.cat([tensor, tensor[:1].expand(wanted - has, *tensor.shape[1:])])
