"""The stages of a rank, run by one of torch's schedules.

torch's schedule decides the order of forwards and backwards, and sends hidden states and their gradients. What is ours:

- A stage is a model that was cut in place (:mod:`~meshwright.distributed.pipeline.cut`). Every rank of `pp` has the whole
  microbatch, so that only hidden states travel. Their shape and dtype are known beforehand.
- The units of a stage gather and reduce by their sync policies (:mod:`~meshwright.distributed.pipeline.stage`), not once a
  schedule.
- torch's stage drops gradients when it is initialised anew, which it is between training and evaluation. Ours does not.
- Evaluation has an order of its own, since torch's schedules in the form of a V cannot run without backward.
- A weight that two stages hold gets the sum of both gradients on both (``parameter_copies``).

:class:`ScheduledStages` is the one engine of pipelines. The trainer and :class:`~meshwright.Pipeline`, for a loop of one's own,
give it their microbatches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from meshwright.distributed import _torch_compat
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.pipeline.crossing import receive_outermost
from meshwright.distributed.pipeline.cut import crossing_of
from meshwright.distributed.pipeline.microbatch_work import Work
from meshwright.distributed.pipeline.parameter_copies import local_shard, parameter_copies
from meshwright.distributed.pipeline.passes import passes_of_model
from meshwright.distributed.pipeline.stage import NoGradient, check_sent, explained_half, scale_gradients, stage_backward
from meshwright.distributed.pipeline.stage_parts import StageParts
from meshwright.distributed.update.grad_clip import clip_grad_norm_
from meshwright.errors import PlanError
from meshwright.plan.axes.pipeline.stage_plan import (
    crossing_dtype,
    crossing_shape,
    first_trained,
    parts_of_rank,
    stages_of_rank,
)
from meshwright.plan.axes.pipeline.stage_rows import on_stages
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["ScheduledStages"]


class _Runner(nn.Module):
    """The module that torch's stage calls: one forward of a stage for one microbatch.

    Args:
        part: the model of the stage.
        last: whether it is the last stage.
        sent: what it sends, on the meta device.
        name: of the stage.
        needless: whether no stage before has a trained parameter, so that no gradient of what was received is needed.
        number: of the pass that it is a part of, if a microbatch goes through the stages several times.
    """

    def __init__(self, part: nn.Module, last: bool, sent: torch.Tensor, name: str, needless: bool, number: int) -> None:
        super().__init__()
        self.part = part
        self.last, self.hidden, self.name, self.needless, self.number = last, sent, name, needless, number

    def forward(self, *received: torch.Tensor, work: Work) -> torch.Tensor:
        """Return the hidden state for the next stage, or the loss."""
        if not self.needless:
            return self._forward(*received, work=work)
        output = self._forward(*(tensor.detach() for tensor in received), work=work)
        if received:  # torch sends a gradient over each cut
            output = NoGradient.apply(output, *received)
        return output if output.requires_grad else output.requires_grad_()

    def _forward(self, *received: torch.Tensor, work: Work) -> torch.Tensor:
        crossing = crossing_of(self.part)
        if (passes := passes_of_model(self.part)) is not None and not self.last:
            sent = _torch_compat.detachable(
                passes.run(self.number, received[0] if received else None, work.arguments, work.state)
            )
            check_sent(sent, self.hidden.shape, self.hidden.dtype, self.name)
            return sent
        crossing.received = received[0] if received else None
        try:
            if passes is not None:
                passes.enter_last(received[0], work.state)
            if self.last:
                return work.loss(self.part)
            sent = self.part(**work.arguments)
        finally:
            crossing.received = None
        sent = _torch_compat.detachable(sent)
        check_sent(sent, self.hidden.shape, self.hidden.dtype, self.name)
        return sent


class _Stage(PipelineStage):
    """A stage of torch whose units follow their sync policies, and which keeps its gradients when it is initialised anew."""

    def __init__(self, runner: _Runner, sync: GradSync, report: Callable[[str], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(runner, *args, **kwargs)
        self.sync, self.report = sync, report
        self.ends = runner.number == 0  # the backward of the first pass comes last
        self.work: Sequence[Work] = ()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.report(f"stage {self.stage_index}, forward of microbatch {fwd_chunk_id + 1}")
        with self.work[fwd_chunk_id].around():
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:  # torch wraps the cause, and prints the batch
                raise error.__cause__ or error from None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.report(f"stage {self.stage_index}, backward of microbatch {bwd_chunk_id + 1}")
        work = self.work[bwd_chunk_id]
        with work.around():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.ends:
            work.state.clear()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.report(f"stage {self.stage_index}, backward for weights of microbatch {bwd_chunk_id + 1}")
        with self.work[bwd_chunk_id].around(), explained_half(self.stage_index):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        return stage_backward(self, self.sync, backward_type, bwd_kwargs, last_backward and self.ends)

    perform_reduce_grad = scale_gradients

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Nothing: torch 2.11 would refuse a loss that is not in fp32; hidden states are checked before they are sent."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep the gradients: shapes are given, so no forward ran that could have left any."""


class ScheduledStages:
    """Runs microbatches through the stages of all ranks of `pp`. All ranks call every method.

    Args:
        parts: the models of this rank's stages.
        plan: the plan of the whole model.
        mesh: the mesh of its layout.
        device: the device of this rank.
        report: called before each forward and backward with words such as ``stage 1, forward of microbatch 3``.
    """

    def __init__(
        self,
        parts: StageParts,
        plan: ShardingPlan,
        mesh: ParallelMesh,
        device: torch.device,
        report: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.parts, self.plan, self.device, self.report = parts, plan, device, report
        self.dtype: torch.dtype = getattr(torch, crossing_dtype(plan))
        self.group, self.rank = mesh["pp"].get_group(), mesh.rank("pp")
        self.count, self.runs = len(plan.stages), plan.options.runs_per_step
        self.own = stages_of_rank(plan, self.rank)
        own = parts_of_rank(plan, self.rank)
        self.passes, self.syncs = len(own[0]), dict[int, GradSync]()
        for together in own:
            receive_outermost(parts[together[0]])
            self.syncs |= dict.fromkeys(together, GradSync.from_plan(parts[together[0]], on_stages(plan, together)))
        self.copies = parameter_copies(parts, plan, self.own)
        # The norm counts a parameter of two ranks on that of the first stage.
        self.counted_elsewhere = [copy.mine[0] for copy in self.copies if copy.other is not None and not copy.first]

    def prepare(self, rows: int, length: int) -> None:
        """Make the connections and the buffers for training, before its first step.

        Args:
            rows: number of sequences in a microbatch.
            length: positions of a whole sequence.
        """
        options = self.plan.options
        sent = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in self._shapes(rows, length)]
        self.stages = [self._stage(stage, sent) for stage in self.own]
        self.schedule = _torch_compat.make_schedule(options.pipeline_schedule, self.stages, options.microbatches // self.runs)

    def _shapes(self, rows: int, length: int) -> list[tuple[int, ...]]:
        """Return the shape of what each stage sends."""
        entering = [crossing_shape(self.plan, stage, rows, length) for stage in range(self.count)]
        if (passes := passes_of_model(self.parts[self.own[0]])) is None:
            return [*entering[1:], entering[-1]]
        ranks, hidden = self.count // self.passes, entering[0]
        pairs = passes.shapes(hidden, self.plan.layout.size("cp"))
        return [shape for inner, handed in pairs for shape in (*[inner] * (ranks - 1), handed)]

    def _stage(self, index: int, sent: Sequence[torch.Tensor]) -> _Stage:
        last, number = index == self.count - 1, index * self.passes // self.count
        passes = passes_of_model(self.parts[index])
        needless = index <= first_trained(self.plan) or (passes is not None and number in passes.without_gradient)
        runner = _Runner(self.parts[index], last, sent[index], f"stage {index}", needless, number)
        entering, leaving = (sent[place].detach().clone().requires_grad_() for place in (max(index - 1, 0), index))
        stage = _Stage(
            runner,
            self.syncs[index],
            self.report,
            index,
            self.count,
            self.device,
            input_args=() if index == 0 else (entering,),
            output_args=(torch.empty((), device="meta", requires_grad=True),) if last else (leaving,),
            group=self.group,
        )
        stage.has_backward = True  # torch 2.11 reads it when buffers are made
        return stage

    def forward_backward(self, work: Sequence[Work]) -> None:
        """Run the microbatches of an optimizer step, after :meth:`prepare`. The gradients are reduced when it returns.

        Raises:
            PlanError: there are not as many as in the plan.
        """
        if len(work) != (planned := self.plan.options.microbatches):
            raise PlanError("pp.microbatches", f"pipeline: {len(work)} microbatches, and the plan has {planned}")
        if any(parameter.grad is not None for copy in self.copies for parameter in copy.mine):
            raise PlanError(
                "pp.step",
                "pipeline: there are gradients of an earlier step; call optimizer.zero_grad(set_to_none=True) first. Several "
                "runs of the schedule in one step are runs_per_step",
            )
        each = len(work) // self.runs
        self._refresh()
        for sync in self.syncs.values():
            sync.begin_step()
        try:
            for run in range(self.runs):
                self._run(work[run * each : (run + 1) * each], last=run == self.runs - 1)
        except BaseException:
            for sync in self.syncs.values():
                sync.abandon()
            for copy in self.copies:
                for parameter in copy.mine:
                    parameter.grad = None
            raise
        for copy in self.copies:
            copy.add_gradients(self.group)

    def clip(self, limit: float | None) -> torch.Tensor:
        """Clip the gradient of the whole model, and return its norm before; ``None`` only measures."""
        return clip_grad_norm_(self.parts.parameters(), limit, group=self.group, counted_elsewhere=self.counted_elsewhere)

    @torch.no_grad()
    def _refresh(self) -> None:
        """Give second copies on this rank the values of the first ones, which the optimizer or a checkpoint has changed."""
        for name, copy in self.parts.copied.items():
            local_shard(copy.data).copy_(local_shard(self.parts.get_parameter(name).data))

    def _run(self, work: Sequence[Work], *, last: bool) -> None:
        for stage in self.stages:
            stage.sync.ends_step = last
            stage.sync.begin_microbatch(last=False)
            stage.work, stage.has_backward = work, True
            stage.clear_runtime_states()
        try:
            _torch_compat.run_schedule(self.schedule, [{"work": item} for item in work])
        finally:
            for stage in self.stages:
                stage.work = ()

    def evaluate(self, work: Iterable[Work], *terms: int) -> torch.Tensor:
        """Run forwards in evaluation mode. Return the sum of what ``loss`` returns, in fp64, on all ranks.

        Args:
            work: the microbatches, of any number and any shapes that the plan allows.
            terms: the shape of what ``loss`` returns; none for a scalar.
        """
        total = torch.zeros(terms, dtype=torch.float64, device=self.device)
        for value in self.forwards(work):
            total += value.double()
        return self.sum(total)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up values over all ranks of `pp`, in place. Only the last stage knows a loss; the others have zeros."""
        dist.all_reduce(values, group=self.group)
        return values

    @torch.no_grad()
    def forwards(self, work: Iterable[Work]) -> Iterator[torch.Tensor]:
        """Run forwards in evaluation mode; yield what ``loss`` returns for each microbatch, on the rank of the last stage.

        A rank runs a microbatch through all its stages before it takes the next one. So no two ranks wait for each other.
        """
        training = self.parts.training
        self.parts.eval()
        try:
            with ExitStack() as stack:
                for sync in self.syncs.values():
                    stack.enter_context(sync.forward_only())
                self._refresh()
                yield from self._forwards(work)
        finally:
            self.parts.train(training)

    def _forwards(self, work: Iterable[Work]) -> Iterator[torch.Tensor]:
        sends: list[tuple[Any, torch.Tensor]] = []
        for number, item in enumerate(work):
            shapes = self._shapes(*item.size(self.plan))
            kept: torch.Tensor | None = None
            while len(sends) > self.count:
                sends.pop(0)[0].wait()
            for stage in self.own:
                self.report(f"stage {stage}, forward of microbatch {number + 1}")
                part, crossing = self.parts[stage], crossing_of(self.parts[stage])
                passes = passes_of_model(part)
                if stage == 0:
                    crossing.received = None
                elif (source := self.plan.stages[stage - 1].rank) == self.rank:
                    crossing.received = kept
                else:
                    received = torch.empty(shapes[stage - 1], dtype=self.dtype, device=self.device)
                    dist.recv(received, group=self.group, group_src=source)
                    crossing.received = received
                with item.around():
                    if stage == self.count - 1:
                        if passes is not None and crossing.received is not None:
                            passes.enter_last(crossing.received, item.state)
                        yield item.loss(part)
                    else:
                        if passes is None:
                            kept = part(**item.arguments).contiguous()
                        else:
                            nth = stage * self.passes // self.count
                            kept = passes.run(nth, crossing.received, item.arguments, item.state).contiguous()
                        check_sent(kept, shapes[stage], self.dtype, f"stage {stage}")
                        target = self.plan.stages[stage + 1].rank
                        if target != self.rank:
                            sends.append((dist.isend(kept, group=self.group, group_dst=target), kept))
                crossing.received = None
            item.state.clear()
        for send, _ in sends:
            send.wait()
