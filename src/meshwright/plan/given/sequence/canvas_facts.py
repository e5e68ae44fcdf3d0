"""What a trace says of an attention over a canvas.

A *canvas* is a second sequence beside the clean one. Its columns attend to earlier clean tokens and to the columns of their own
block, both by one rule that the family gives.
"""

from dataclasses import dataclass

from meshwright.plan.given.attentions import AttentionFacts

__all__ = ["CanvasFacts"]


@dataclass(frozen=True)
class CanvasFacts(AttentionFacts):
    """How the attention of a decoder calls its function: with queries of a canvas, and keys of the clean sequence and of it.

    Attributes:
        canvas: number of columns of the canvas of a sequence, at most, and of tokens of the sequence; ``None``: unknown.
    """

    canvas: tuple[int, int] | None = None
