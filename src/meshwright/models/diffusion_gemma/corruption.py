"""Noise on canvases: tokens replaced by random ones.

The model has no mask token; a noised token is drawn uniformly from the whole vocabulary, as the canvas that generation begins
with. Each sequence has one rate of noise and draws from a stream of its own, whose seed is that of the run and the number of
the sequence in the run. So a resumed run repeats its noise, and so does another layout: how many ranks and microbatches share
a step changes nothing. All is drawn on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.models.diffusion_gemma.canvas import HIDDEN, Canvas
from meshwright.models.init import derive_seed
from meshwright.models.loss import IGNORE

__all__ = ["EVALUATION_RATES", "Draw", "Noised", "corrupt", "draw", "one_block"]

EVALUATION_RATES = tuple((index + 0.5) / 8 for index in range(8))
"""Rates of noise of held-out sequences, in turn: an even sample of all rates, the same in every evaluation."""


@dataclass(frozen=True)
class Draw:
    """What one sequence draws.

    Attributes:
        rate: probability that a token is replaced.
        conditioned: whether it sees the first draft of itself (self-conditioning).
        pick: uniform in [0, 1): which of its blocks, where only one is denoised.
        chances: [columns], uniform in [0, 1); a column below the rate is replaced.
        tokens: [columns], by what.
    """

    rate: float
    conditioned: bool
    pick: float
    chances: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class Noised:
    """A batch of canvases with noise.

    Attributes:
        ids: [B, R].
        conditioned: [B, 1], bool.
    """

    ids: torch.Tensor
    conditioned: torch.Tensor


def draw(
    seed: int,
    number: int,
    columns: int,
    vocabulary: int,
    *,
    minimum: float,
    self_conditioning: float,
    rate: float | None = None,
    purpose: str = "train",
) -> Draw:
    """Draw the noise of a sequence.

    Args:
        seed: of the run.
        number: of the sequence, in the stream of all sequences of the run.
        columns: that are drawn; the same for every layout, whatever the batch needs of them.
        vocabulary: ids in it.
        minimum: of the rate, which is uniform from there to 1. Legal: 0 to 1.
        self_conditioning: probability of it.
        rate: instead of a drawn one.
        purpose: streams of training and of evaluation differ.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "diffusion", purpose, number))
    level, coin, pick = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
    chances = torch.rand(columns, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocabulary, (columns,), generator=generator)
    drawn = minimum + (1 - minimum) * level if rate is None else rate
    return Draw(drawn, coin < self_conditioning, pick, chances, tokens)


def corrupt(canvas: Canvas, draws: Sequence[Draw]) -> Noised:
    """Replace supervised tokens by noise; all others stay clean.

    Args:
        canvas: clean, of [B, R].
        draws: B of them, of R columns or more.
    """
    columns = canvas.ids.shape[1]
    replaced = torch.stack([item.chances[:columns] < item.rate for item in draws]) & (canvas.labels != IGNORE)
    tokens = torch.stack([item.tokens[:columns] for item in draws])
    return Noised(torch.where(replaced, tokens, canvas.ids), torch.tensor([[item.conditioned] for item in draws]))


def one_block(canvas: Canvas, noised: Noised, draws: Sequence[Draw], length: int) -> tuple[Canvas, Noised]:
    """Keep one block of each sequence, with the noise that it has among all of them.

    Returns:
        Canvases of ``length`` columns.
    """
    filled = ((canvas.blocks != HIDDEN).sum(dim=1) + length - 1) // length  # blocks of each sequence
    chosen = torch.tensor([int(item.pick * count) for item, count in zip(draws, filled.tolist(), strict=True)])
    columns = chosen[:, None] * length + torch.arange(length)
    fields = (canvas.ids, canvas.labels, canvas.positions, canvas.blocks)
    kept = Canvas(*(field.gather(1, columns) for field in fields))
    return kept, Noised(noised.ids.gather(1, columns), noised.conditioned)
