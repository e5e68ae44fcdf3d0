"""The canvases: where the blocks of a response are.

A token is supervised if it is the label of the token before it. So the first token of a document never is; in generation it
belongs to the prompt. The *response* is the last run of supervised tokens: of a text, all but its first token; of a chat, its
last reply (everything before it, with earlier replies, is read as clean text). The response is cut into blocks of
``canvas_length`` tokens, starting at its first token, as in generation.

Shapes: B sequences, S tokens of a sequence, R columns of the canvas.
"""

from dataclasses import dataclass

import torch

from meshwright.models.token_loss import IGNORE

__all__ = ["HIDDEN", "Canvas", "lay_out"]

HIDDEN = -1
"""Block of a column without content: no other column sees it."""


@dataclass(frozen=True)
class Canvas:
    """The clean canvases of a batch, all int64 [B, R].

    Attributes:
        ids: clean tokens.
        labels: the same tokens if the model is to learn them, otherwise :data:`IGNORE`.
        positions: positions of the columns in their sequence. The positions of a block may go beyond the end of the sequence.
        blocks: position of the first column of each column's block, or :data:`HIDDEN`.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor


def lay_out(input_ids: torch.Tensor, labels: torch.Tensor, length: int, *, fill: bool, end: int | None = None) -> Canvas:
    """Return the responses of a batch, laid out in blocks.

    Args:
        input_ids: [B, S], padded on the right.
        labels: [B, S], shifted: the token that follows, or :data:`IGNORE`.
        length: number of tokens in a block.
        fill: if a response ends before its sequence does, fill the rest of its last block with its last token, and supervise
            these columns. A response that goes on to the end of the sequence may have been cut off there, so it is not filled.
        end: number of tokens in a sequence; ``None``: S. It is less than S if a batch is padded to a multiple of some length.

    Returns:
        As many columns as the longest response has, in whole blocks, and at least one block. Shorter responses have hidden
        columns.
    """
    end = input_ids.shape[1] if end is None else end
    spans = [_response(row) for row in labels]
    columns = length * max(1, *(-(-(last - first) // length) for first, last in spans))
    shape = (len(input_ids), columns)
    ids, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE)
    blocks = torch.full(shape, HIDDEN)
    positions = torch.arange(columns).repeat(len(input_ids), 1)
    for row, (first, last) in enumerate(spans):
        size = last - first
        filled = -(-size // length) * length
        positions[row] += first
        ids[row, :size] = input_ids[row, first:last]
        if fill and size and last < end:
            ids[row, size:filled] = input_ids[row, last - 1]
            size = filled
        targets[row, :size] = ids[row, :size]
        blocks[row, :size] = first + torch.arange(size) // length * length
    return Canvas(ids, targets, positions, blocks)


def _response(labels: torch.Tensor) -> tuple[int, int]:
    """Return the first position of the last run of supervised tokens, and the position after it; (0, 0) if there is none."""
    supervised = torch.nonzero(labels != IGNORE).flatten() + 1
    if len(supervised) == 0:
        return 0, 0
    last = int(supervised[-1])
    gaps = torch.nonzero(supervised.diff() > 1).flatten()
    first = int(supervised[int(gaps[-1]) + 1]) if len(gaps) else int(supervised[0])
    return first, last + 1
