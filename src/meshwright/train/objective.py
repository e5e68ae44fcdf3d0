"""What a model is trained to do: how a batch is made ready, which losses it gives, and what each is divided by.

A loss has one or more *terms*, each a sum over its own targets. Every term is divided by the number of its targets in the whole
optimizer step, over all ranks and microbatches; then they are added with their weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.data.packing import IGNORE
from meshwright.distributed.names import class_name
from meshwright.errors import ConfigError
from meshwright.models._transformers_compat import attention_of
from meshwright.models.diffusion_gemma.canvas import lay_out
from meshwright.models.diffusion_gemma.corruption import EVALUATION_RATES, corrupt, draw, one_block
from meshwright.models.diffusion_gemma.model import ATTENTIONS, enable, rounds_losses
from meshwright.models.diffusion_gemma.options import DiffusionConfig
from meshwright.plan.options import ActivationCheckpointing
from meshwright.train.config import RunConfig
from meshwright.train.loss import count_tokens, forward_logits, token_loss_sum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BlockDiffusion", "NextToken", "Objective", "make_objective"]

Batch = dict[str, torch.Tensor]


class Objective(ABC):
    """What a model is trained to do. It has no state: the same batch gives the same loss.

    Attributes:
        terms: names of the losses.
        weights: of the terms.
        perplexity: whether the exponential of the loss is one.
        counts_routed: whether :meth:`routed` tells tokens apart.
        frozen: patterns of parameters that are not trained, besides those of ``parallel.freeze``.
    """

    terms: tuple[str, ...]
    weights: tuple[float, ...]
    perplexity = False
    counts_routed = False
    frozen: tuple[str, ...] = ()

    @abstractmethod
    def attach(self, model: nn.Module) -> None:
        """Make a parallelized model ready for :meth:`sums`."""

    def training(self, batches: list[Batch], numbers: Sequence[Sequence[int]]) -> list[Batch]:
        """Make the microbatches of a step ready, on the host.

        Args:
            batches: of this rank.
            numbers: of their sequences in the stream of all sequences of the run.
        """
        return batches

    def held_out(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Make a batch of held-out sequences ready, the same in every evaluation; ``numbers``: among all held out."""
        return batch

    @abstractmethod
    def counts(self, batches: list[Batch]) -> list[int]:
        """Targets of each term in some batches that are ready."""

    def routed(self, batch: Batch) -> torch.Tensor | None:
        """The tokens, bool [B, S], that count for the balance of experts; ``None``: all that routers are given, in any pass."""
        return None

    @abstractmethod
    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Each term, summed over its targets, in nats."""

    def combine(self, sums: Sequence[torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
        """The loss times ``counts[0]``.

        Args:
            sums: terms of some of a step's tokens.
            counts: targets of each term in the whole step.
        """
        total = sums[0]
        for index, weight in enumerate(self.weights[1:], start=1):
            share = (counts[0].clamp(min=1).double() / counts[index].clamp(min=1)).to(total.dtype)
            total = total + weight * share * sums[index]
        return total


class NextToken(Objective):
    """Say the next token: the loss of a causal language model."""

    terms = ("next_token",)
    weights = (1.0,)
    perplexity = True
    counts_routed = True

    def attach(self, model: nn.Module) -> None:
        """The model's own forward will do."""

    def counts(self, batches: list[Batch]) -> list[int]:
        """Valid labels."""
        return [count_tokens(batches)]

    def routed(self, batch: Batch) -> torch.Tensor:
        """Tokens up to the last label of their sequence: what is behind it was read for nothing, as padding is."""
        return (batch["labels"] != IGNORE).flip(1).cumsum(1).flip(1) > 0

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Cross-entropy of the next token."""
        return (token_loss_sum(forward_logits(model, batch), batch["labels"]),)


class BlockDiffusion(Objective):
    """Denoise blocks of a response, given the clean text before each (DiffusionGemma); and let the encoder say the next token.

    Args:
        options: of the noise.
        seed: of the run.
        length: of a block.
        vocabulary: ids that noise is drawn from.
        sequence_length: of the run.
    """

    def __init__(self, options: DiffusionConfig, seed: int, length: int, vocabulary: int, sequence_length: int) -> None:
        self.options, self.seed, self.length, self.vocabulary = options, seed, length, vocabulary
        self.sequence_length = sequence_length
        self.columns = -(-sequence_length // length) * length  # of the longest canvas that there can be
        self.encoder = options.encoder_loss_weight > 0
        self.terms = ("denoising", "encoder") if self.encoder else ("denoising",)
        self.weights = (1.0, options.encoder_loss_weight) if self.encoder else (1.0,)
        # No image is read, so no gradient reaches what reads images.
        self.frozen = ("model.encoder.vision_tower.**", "model.encoder.embed_vision.**")
        if options.freeze_router:
            self.frozen += ("model.**.router.**",)

    def attach(self, model: nn.Module) -> None:
        """Give the model its training forward."""
        enable(model)

    def training(self, batches: list[Batch], numbers: Sequence[Sequence[int]]) -> list[Batch]:
        """Lay out the canvases and put noise on them; a sequence gets the same in whatever batch it stands."""
        return [self._noised(*item, held_out=False) for item in zip(batches, numbers, strict=True)]

    def held_out(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """As in training, with noise that is the same each time, at rates that go evenly through all there are."""
        return self._noised(batch, numbers, held_out=True)

    def _noised(self, batch: Batch, numbers: Sequence[int], *, held_out: bool) -> Batch:
        canvas = lay_out(
            batch["input_ids"],
            batch["labels"],
            self.length,
            fill=self.options.fill_last_block,
            end=self.sequence_length,
        )
        draws = [
            draw(
                self.seed,
                number,
                self.columns,
                self.vocabulary,
                minimum=self.options.minimum_noise,
                self_conditioning=self.options.self_conditioning,
                rate=EVALUATION_RATES[number % len(EVALUATION_RATES)] if held_out else None,
                purpose="held out" if held_out else "train",
            )
            for number in numbers
        ]
        noised = corrupt(canvas, draws)
        if self.options.mode == "one_block":
            canvas, noised = one_block(canvas, noised, draws, self.length)
        return {
            **batch,
            "canvas_ids": noised.ids,
            "canvas_labels": canvas.labels,
            "canvas_positions": canvas.positions,
            "canvas_blocks": canvas.blocks,
            "self_conditioned": noised.conditioned,
        }

    def counts(self, batches: list[Batch]) -> list[int]:
        """Supervised columns of the canvases, and labels of the encoder."""
        denoised = sum(int((batch["canvas_labels"] != IGNORE).sum()) for batch in batches)
        return [denoised, count_tokens(batches)] if self.encoder else [denoised]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Cross-entropy of the clean tokens of the canvases (of noised ones and of others alike), and of the next token."""
        found = model(denoise=batch, encoder_loss=partial(token_loss_sum, labels=batch["labels"]) if self.encoder else None)
        denoising = token_loss_sum(found.logits, batch["canvas_labels"]) + found.anchor
        return (denoising, found.encoder_loss) if self.encoder else (denoising,)


def make_objective(config: RunConfig, model: "PreTrainedModel") -> Objective:
    """The objective of a run.

    Args:
        config: of the run.
        model: on any device.

    Raises:
        ConfigError: an objective that the model is not made for, or settings that the objective has no use for.
    """
    name = class_name(model)
    diffusion = any(kind.__name__ == "DiffusionGemmaForBlockDiffusion" for kind in type(model).__mro__)
    natural = "block_diffusion" if diffusion else "next_token"
    wish = config.training.objective
    problems = []
    if wish not in (None, natural):
        problems.append(f"training.objective={wish}: {name} is made for {natural}; legal are {natural} and null")
    if not diffusion:
        default = DiffusionConfig()
        problems += [
            f"diffusion.{key}={getattr(config.diffusion, key)!r}: says something of block diffusion, and {name} is trained "
            "to say the next token; leave it out"
            for key in DiffusionConfig.model_fields
            if getattr(config.diffusion, key) != getattr(default, key)
        ]
    else:
        if config.data.packing != "pad":
            problems.append(
                f"data.packing={config.data.packing}: the blocks of a packed document would see the documents before it; "
                "with block diffusion the legal value is pad"
            )
        if model.config.canvas_length < 1:
            problems.append(f"model.config.canvas_length={model.config.canvas_length}: a block has at least 1 token")
        if attention_of(model) not in ATTENTIONS:
            problems.append(
                f"model.attn_implementation={attention_of(model)}: takes no mask of blocks; with block diffusion legal are "
                f"{' and '.join(ATTENTIONS)}"
            )
        if config.diffusion.encoder_loss_weight > 0 and rounds_losses(config.parallel.output_dtype):
            problems.append(
                f"parallel.output_dtype={config.parallel.output_dtype}: the encoder's loss, a sum in nats, would be rounded to "
                "it as it leaves the model; with diffusion.encoder_loss_weight above 0 legal are null, float32 and float64"
            )
        parallel = config.parallel
        modes = {parallel.activation_checkpointing, *parallel.activation_checkpointing_layers.values()}
        if parallel.compile and ActivationCheckpointing.FULL in modes:
            problems.append(
                "parallel.activation_checkpointing=full with parallel.compile: an encoder layer writes its keys and values "
                "down in its first run and not when it runs again, which are two graphs; legal are none and submodule"
            )
    if problems:
        raise ConfigError(problems)
    if not diffusion:
        return NextToken()
    return BlockDiffusion(
        config.diffusion,
        config.training.seed,
        model.config.canvas_length,
        model.config.get_text_config().vocab_size,
        config.data.sequence_length,
    )
