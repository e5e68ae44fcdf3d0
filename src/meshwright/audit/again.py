"""What a run does besides its steps, under the layout: it evaluates, and goes on from a checkpoint."""

import math
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.audit.case import AuditTrainer, local_part
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.data.loader import EvalLoader
from meshwright.data.packing import SequenceDataset
from meshwright.train.metrics import Recorder

__all__ = ["difference", "evaluate", "go_on", "save_here"]

EVALUATED = 5
"""Number of sequences of an evaluation. No usual number of ranks divides it: some rank gets one that does not count."""


def evaluate(trainer: AuditTrainer) -> float:
    """Return the mean loss over some of the documents, as an evaluation of a run computes it. All ranks call this."""
    data, loader = trainer.config.data, trainer.loader
    dataset = SequenceDataset(loader.store, "train", data.sequence_length, data.packing, shuffle=False)
    trainer.evaluation = EvalLoader(
        dataset,
        trainer.config.training.microbatch_size,
        loader.data_rank,
        loader.data_ranks,
        EVALUATED,
        multiple=trainer.setup.plan.sequence_multiple,
    )
    trainer.recorder = Recorder(trainer.config, speaks=False)
    loss = trainer.evaluate()
    trainer.model.train()
    return math.nan if loss is None else loss


def save_here(trainer: AuditTrainer, folder: Path) -> Path:
    """Save a checkpoint of a trainer in a new folder, as a run does, and return its path. All ranks call this."""
    made = [tempfile.mkdtemp(prefix="checkpoint-", dir=folder) if trainer.rank == 0 else ""]
    dist.broadcast_object_list(made)
    trainer.checkpoints = CheckpointManager(Path(made[0]))
    trainer.recorder = Recorder(trainer.config, speaks=False)
    return trainer.save()


def go_on(trainer: AuditTrainer, checkpoint: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Load a checkpoint into a new trainer, and train to the last step.

    Returns:
        The tensors of a checkpoint after the last step, and the loss of each step that was done.
    """
    again = AuditTrainer(trainer.case, trainer.device, resume=checkpoint)
    again.config = trainer.config  # with the limit of clipping that takes effect
    losses = []
    while again.step < again.case.steps:
        again.train_step()
        again.step += 1
        losses.append(again.metrics()["loss"])
    return again._tensors(), losses


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor between two sides, relative to its largest entry; infinite if one lacks it.

    Only this rank's parts are compared.
    """
    found = {}
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            found[name] = math.inf
            continue
        mine, theirs = (local_part(of[name].detach()).double() for of in (one, other))
        if not mine.numel():
            continue
        scale = float(mine.abs().max()) or 1.0
        found[name] = float((mine - theirs).abs().max()) / scale
    return found
