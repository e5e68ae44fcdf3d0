"""Noise on canvases: tokens are replaced by random ones.

The model has no mask token. A noisy token is a uniform sample of the whole vocabulary, like the canvas that generation begins
with. Each sequence has one rate of noise, and a random stream of its own. The seed of the stream is the run's seed and the
number of the sequence in the run. So a resumed run repeats its noise, and so does another layout: the number of ranks and
microbatches in a step changes nothing. All random numbers are generated on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.models.diffusion_gemma.canvas import HIDDEN, Canvas
from meshwright.models.token_loss import IGNORE
from meshwright.models.weights.initial_values import derive_seed

__all__ = ["EVALUATION_RATES", "Draw", "Noised", "corrupt", "draw", "one_block"]

EVALUATION_RATES = tuple((index + 0.5) / 8 for index in range(8))
"""Rates of noise for held-out sequences, which take them in turn: an even sample of all rates, the same in every evaluation."""


@dataclass(frozen=True)
class Draw:
    """The random numbers of one sequence.

    Attributes:
        rate: probability that a token is replaced.
        conditioned: whether it sees the first draft of itself (self-conditioning).
        pick: uniform in [0, 1); selects the block, if only one is denoised.
        chances: [columns], uniform in [0, 1); a column below the rate is replaced.
        tokens: [columns], the tokens that replace.
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
        ids: [B, R], the tokens.
        conditioned: bool [B, 1], whether each sequence sees a draft of itself.
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
    """Generate the random numbers of a sequence.

    Args:
        seed: seed of the run.
        number: number of the sequence, in the stream of all sequences of the run.
        columns: number of columns to generate; the same for every layout, however many of them the batch needs.
        vocabulary: number of token ids.
        minimum: lower end of the rate, which is uniform from there to 1. Legal are 0 to 1.
        self_conditioning: probability of self-conditioning.
        rate: a given rate, instead of a random one.
        purpose: training and evaluation have different streams.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "diffusion", purpose, number))
    level, coin, pick = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
    chances = torch.rand(columns, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocabulary, (columns,), generator=generator)
    drawn_rate = minimum + (1 - minimum) * level if rate is None else rate
    return Draw(drawn_rate, coin < self_conditioning, pick, chances, tokens)


def corrupt(canvas: Canvas, draws: Sequence[Draw]) -> Noised:
    """Replace supervised tokens by noise. All others stay clean.

    Args:
        canvas: clean canvases, [B, R].
        draws: the random numbers of the B sequences, with R columns or more.
    """
    columns = canvas.ids.shape[1]
    replaced = torch.stack([item.chances[:columns] < item.rate for item in draws]) & (canvas.labels != IGNORE)
    tokens = torch.stack([item.tokens[:columns] for item in draws])
    return Noised(torch.where(replaced, tokens, canvas.ids), torch.tensor([[item.conditioned] for item in draws]))


def one_block(canvas: Canvas, noised: Noised, draws: Sequence[Draw], length: int) -> tuple[Canvas, Noised]:
    """Keep one block of each sequence, with the noise that it has among all blocks.

    Returns:
        Canvases of ``length`` columns, without and with noise.
    """
    filled = ((canvas.blocks != HIDDEN).sum(dim=1) + length - 1) // length  # number of blocks of each sequence
    chosen = torch.tensor([int(item.pick * count) for item, count in zip(draws, filled.tolist(), strict=True)])
    columns = chosen[:, None] * length + torch.arange(length)
    fields = (canvas.ids, canvas.labels, canvas.positions, canvas.blocks)
    kept = Canvas(*(field.gather(1, columns) for field in fields))
    return kept, Noised(noised.ids.gather(1, columns), noised.conditioned)
