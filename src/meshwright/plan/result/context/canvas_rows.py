"""Attentions over a canvas (:mod:`~meshwright.plan.given.sequence.canvas_facts`) in a plan with context parallel.

The ranks of ``cp`` share the columns of a canvas as they share positions.
"""

from dataclasses import dataclass

from meshwright.plan.result.rows import AttentionRow

__all__ = ["CanvasRow", "columns_of_rank"]


@dataclass(frozen=True)
class CanvasRow(AttentionRow):
    """How an attention over a canvas works on a part of it.

    Attributes:
        canvas: number of columns of the canvas of a sequence, at most, and of tokens of the sequence, both without padding;
            ``None``: unknown, and a canvas is taken to be as long as its sequence.
    """

    canvas: tuple[int, int] | None = None

    @property
    def mask(self) -> str:
        """The mask in words."""
        before = "" if self.window is None else f", the last {self.window - 1}"
        return f"own block, clean text before it{before}"


def columns_of_rank(row: AttentionRow, tokens: int, cp: int, multiple: int) -> int:
    """Return the number of columns of canvases that a rank has beside clean tokens, padding included.

    Args:
        row: the attention; one without a canvas has 0 columns.
        tokens: number of clean tokens of a microbatch on the rank.
        cp: number of ranks that share a sequence and its canvas.
        multiple: what the numbers of tokens and of columns of a sequence are padded to a multiple of.
    """
    if not isinstance(row, CanvasRow):
        return 0
    if row.canvas is None:
        return tokens
    columns, length = (-(-size // multiple) * multiple for size in row.canvas)
    return tokens * columns // length
