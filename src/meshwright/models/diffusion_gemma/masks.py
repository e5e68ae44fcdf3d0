"""Attention masks of the decoder, for all blocks of a response at once.

The decoder reads the keys of the clean sequence, which the encoder wrote to the cache, and the keys of its own canvas.
Generation denoises one block at a time: the block sees all clean text before it, and all of itself. For all blocks of a
response in one pass, a canvas column sees

- the clean columns before the first position of its block; in sliding layers only the last ``window - 1`` of them, which the
  cache of generation keeps, and the same ones for all columns of the block;
- the canvas columns of its own block.

So a block sees nothing of the clean copy of itself, or of what comes after it.
"""

from functools import partial

import torch

__all__ = ["as_additive", "block_causal_masks", "sees", "window_of"]


def sees(blocks: torch.Tensor, ask: range, positions: range, asked: range, window: int | None) -> torch.Tensor:
    """Return what some columns see of some clean tokens and of some columns.

    Args:
        blocks: [B, R], position of the first column of each column's block. Hidden columns have a number that no block has, and
            see only one another.
        ask: the columns whose view it is.
        positions: the clean positions that may be seen.
        asked: the columns that may be seen.
        window: window of a sliding layer; ``None``: the layer has none.

    Returns:
        bool [B, 1, ask, positions + asked], true if the column (row) sees it.
    """
    begin = blocks[:, ask.start : ask.stop, None]
    keys = torch.arange(positions.start, positions.stop, device=blocks.device)
    before = keys < begin
    if window is not None:
        before &= keys >= begin - (window - 1)
    own = begin == blocks[:, None, asked.start : asked.stop]
    return torch.cat([before, own], dim=-1)[:, None]


def window_of(kind: str, window: int | None) -> int | None:
    """Return the window of the layers of a kind, given that of the sliding ones."""
    return window if kind == "sliding_attention" else None


def block_causal_masks(blocks: torch.Tensor, clean: int, window: int | None) -> dict[str, torch.Tensor]:
    """Return the masks of the decoder's attention, by kind of layer: what all columns see of everything.

    Args:
        blocks: [B, R], see :func:`sees`.
        clean: S, number of tokens in the clean sequence.
        window: window of the sliding layers; ``None``: the model has none.

    Returns:
        ``full_attention`` and ``sliding_attention``, bool [B, 1, R, S + R], true if the query (row) sees the key.
    """
    columns = range(blocks.shape[1])
    all_of = partial(sees, blocks, columns, range(clean), columns)
    kinds = ("full_attention", "sliding_attention") if window is not None else ("full_attention",)
    return {kind: all_of(window_of(kind, window)) for kind in kinds}


def as_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what eager attention adds to its scores: 0 where the mask is true, the lowest number elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
