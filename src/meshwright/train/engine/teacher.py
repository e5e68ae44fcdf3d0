"""A teacher that runs beside the model: what it says of the next token of each batch, on a layout of its own.

Its ranks are those of the model. A rank of both reads the same data and has the same part of each sequence, so what a teacher
says is needed where it is computed, or on another stage of the same data rank. Only its likeliest words are sent.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from meshwright.distributed.data.fsdp_units import move_buffers
from meshwright.distributed.mesh import ParallelMesh, mesh_beside
from meshwright.models.objective import Batch
from meshwright.objectives import given
from meshwright.objectives.distillation import IDS, LOG_PROBS
from meshwright.objectives.running import Running, running
from meshwright.train.parts import RankSetup, balance_of_plan, carry_out, fill, runner_of_plan, sync_of_plan
from meshwright.train.start.setup import RunSetup
from meshwright.train.start.teacher_setup import about_teacher

__all__ = ["Teacher"]

READ = ("input_ids", "labels", "position_ids")
DTYPES = {IDS: torch.int64, LOG_PROBS: torch.float32}


class Teacher:
    """A model that is not trained. All ranks make it, and call it with the same batches on all ranks of a data rank.

    Args:
        setup: its own resolved run (:func:`~meshwright.train.start.teacher_setup.with_teacher`); its model is parallelized and
            gets its values here.
        device: device of this rank.
        beside: the mesh of the model that learns.
        count: number of the likeliest words that it says for a token.
        progress: called before each call, with words.
    """

    def __init__(
        self, setup: RunSetup, device: torch.device, beside: ParallelMesh, count: int, progress: Callable[..., None]
    ) -> None:
        self.setup, self.count, self.progress = setup, count, progress
        self.mesh = mesh_beside(beside, setup.layout)
        run = RankSetup(setup, device, self.mesh)
        self.model = carry_out(run)
        setup.objective.attach(self.model)
        with about_teacher():
            fill(run, self.model, device)
        move_buffers(self.model, device)
        self.model.eval()
        made = (self.model, setup.objective, sync_of_plan(run, self.model), balance_of_plan(run, self.model))
        self.runner = runner_of_plan(run, *made, lambda *_: None, prepares=False)

    @torch.no_grad()
    def __call__(self, batches: Iterable[Batch]) -> list[Batch]:
        """Return batches, on the device, with what the teacher says in the place of each label.

        They get ``teacher_ids`` int64 and ``teacher_log_probs`` float32, each [B, S, count], 0 where there is no label.
        """
        self.progress("the teacher")
        batches = list(batches)

        def values(model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
            with running(Running(self.setup.plan, self.mesh, trains=False)):
                ids, logs = given.top_k(model, batch, self.count)
            return {IDS: ids.contiguous(), LOG_PROBS: logs.float().contiguous()}  # float32, as in files

        plain = [{name: batch[name] for name in READ} for batch in batches]  # columns, such as routes, are for the other model
        found = self.runner.forwards(plain, values, nullcontext)
        if self.setup.plan.stages:  # only the last one has found something
            known = found or [{}] * len(batches)
            found = [self._of_all_stages(batch, own) for batch, own in zip(batches, known, strict=True)]
        return [{**batch, **own} for batch, own in zip(batches, found, strict=True)]

    def _of_all_stages(self, batch: Batch, own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return on all stages what the last one has found: what others have is nothing, so the sum is that."""
        labels, shape = batch["labels"], (*batch["labels"].shape, self.count)
        parts = own or {name: labels.new_zeros(shape, dtype=dtype) for name, dtype in DTYPES.items()}
        return {name: self.mesh.sum(parts[name], "pp") for name in DTYPES}
