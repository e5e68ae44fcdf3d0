"""Attention masks of the decoder, for all blocks of a response at once.

The decoder reads the keys of the clean sequence, which the encoder wrote to the cache, and the keys of its own canvas.
Generation denoises one block at a time: the block sees all clean text before it, and all of itself. For all blocks of a
response in one pass, a canvas column sees

- the clean columns before the first position of its block; in sliding layers only the last ``window - 1`` of them, which the
  cache of generation keeps, and the same ones for all columns of the block;
- the canvas columns of its own block.

So a block sees nothing of the clean copy of itself, or of what comes after it.
"""

import torch

__all__ = ["as_additive", "block_causal_masks"]


def block_causal_masks(blocks: torch.Tensor, clean: int, window: int | None) -> dict[str, torch.Tensor]:
    """Return the masks of the decoder's attention, by kind of layer.

    Args:
        blocks: [B, R], position of the first column of each column's block. Hidden columns have a number that no block has, and
            see only one another.
        clean: S, number of tokens in the clean sequence.
        window: window of the sliding layers; ``None``: the model has none.

    Returns:
        ``full_attention`` and ``sliding_attention``, bool [B, 1, R, S + R], true if the query (row) sees the key.
    """
    keys = torch.arange(clean, device=blocks.device)
    begin = blocks[:, :, None]
    before = keys < begin
    own = begin == blocks[:, None, :]
    masks = {"full_attention": torch.cat([before, own], dim=-1)[:, None]}
    if window is not None:
        near = before & (keys >= begin - (window - 1))
        masks["sliding_attention"] = torch.cat([near, own], dim=-1)[:, None]
    return masks


def as_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what eager attention adds to its scores: 0 where the mask is true, the lowest number elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
