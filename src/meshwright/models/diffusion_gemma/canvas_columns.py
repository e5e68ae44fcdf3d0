"""The canvases of a batch, block by block; and the columns of them that a rank of `cp` has.

What the ranks of `cp` share is cut by its shape: every tensor ``[batch, length]`` has a part of the positions. A canvas is no
part of its sequence, though it may be as long. So a batch has its canvases as ``[batch, blocks, canvas_length]``, whole on
every rank, and each rank takes its columns in the forward. So all ranks have the noise of one process by construction.

What a rank counts it must not count for others. So the number of supervised columns of a sequence stands at its first position,
in a tensor that is cut (:data:`COUNTS`).
"""

from functools import partial

import torch
from torch import nn

from meshwright.distributed.context.attend import share_of
from meshwright.distributed.context.canvases import Canvases, cut_columns, let_canvases_be_known
from meshwright.distributed.context.sequences import sequences_of
from meshwright.errors import UnsupportedError
from meshwright.models.diffusion_gemma.canvas import HIDDEN, Canvas
from meshwright.models.diffusion_gemma.corruption import Noised
from meshwright.models.diffusion_gemma.masks import sees
from meshwright.models.token_loss import IGNORE

__all__ = ["COUNTS", "flat", "in_blocks", "own_columns", "padded"]

COUNTS = "denoised_columns"
"""Key of the number of supervised columns, [B, S]."""
_FILLS = {"canvas_ids": 0, "canvas_labels": IGNORE, "canvas_positions": 0, "canvas_blocks": HIDDEN}
"""Keys of a canvas, and what a column has that belongs to none."""


def in_blocks(canvas: Canvas, noised: Noised, length: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return what a batch has of its canvases.

    Args:
        canvas: the clean canvases, [B, R].
        noised: the same with noise.
        length: number of columns of a block.
        tokens: S, number of tokens of a sequence.

    Returns:
        :data:`COUNTS` [B, S]; ``canvas_ids`` (with noise), ``canvas_labels``, ``canvas_positions`` and ``canvas_blocks``
        [B, R / length, length]. There are fewer blocks than tokens, as the first token of a sequence is in none.
    """
    columns = (noised.ids, canvas.labels, canvas.positions, canvas.blocks)
    whole = {name: one.unflatten(1, (-1, length)) for name, one in zip(_FILLS, columns, strict=True)}
    counts = torch.zeros((len(canvas.ids), tokens), dtype=torch.int64)
    counts[:, 0] = (canvas.labels != IGNORE).sum(dim=1)
    return {**whole, COUNTS: counts}


def flat(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with canvases [B, R]."""
    return {name: tensor.flatten(1) if name in _FILLS else tensor for name, tensor in batch.items()}


def padded(batch: dict[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Return a batch with canvases [B, R], where R is a multiple of some number: hidden columns fill them up."""
    lacking = -batch["canvas_ids"].shape[1] % multiple
    fills = {name: fill for name, fill in _FILLS.items() if name in batch and lacking}
    return {**batch, **{name: nn.functional.pad(batch[name], (0, lacking), value=fill) for name, fill in fills.items()}}


def own_columns(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with the columns of this rank, [B, R / cp], whose positions know the whole canvases.

    Args:
        model: the model, whose attentions work on a part of each sequence.
        batch: the part of it that this rank has, with whole canvases [B, R].

    Raises:
        UnsupportedError: the positions of the batch are not those of a shard.
    """
    sequences, share = sequences_of(batch["position_ids"]), share_of(model)
    if sequences is None:
        raise UnsupportedError(
            "cp.positions",
            "denoise: its position_ids are not those of a shard; make it inside `with context_parallel(plan, mesh, batch) as "
            "shard`, and pass on shard['position_ids'] itself",
        )
    columns = batch["canvas_blocks"].shape[1]
    missing = -columns % share.multiple
    blocks = nn.functional.pad(batch["canvas_blocks"], (0, missing), value=HIDDEN)
    own = {name: cut_columns(share, batch[name], fill) for name, fill in _FILLS.items() if name in batch}
    let_canvases_be_known(own["canvas_positions"], Canvases(sequences.length, columns + missing, partial(sees, blocks)))
    return {**batch, **own}
