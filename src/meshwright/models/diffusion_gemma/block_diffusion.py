"""Block diffusion: what a training step denoises, and which losses it has."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from meshwright.errors import Problems
from meshwright.models._transformers_compat import attention_of
from meshwright.models.diffusion_gemma.block_diffusion_options import DiffusionConfig
from meshwright.models.diffusion_gemma.canvas import lay_out
from meshwright.models.diffusion_gemma.canvas_columns import COUNTS, in_blocks
from meshwright.models.diffusion_gemma.corruption import EVALUATION_RATES, corrupt, draw, one_block
from meshwright.models.diffusion_gemma.model import ATTENTIONS, enable, rounds_losses
from meshwright.models.objective import Batch, Objective, RunFacts
from meshwright.models.token_loss import count_tokens, token_loss_sum
from meshwright.plan.given.closed_choices import ActivationCheckpointing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BlockDiffusion"]


class BlockDiffusion(Objective):
    """Denoise blocks of a response, given the clean text before each, and predict the next token with the encoder.

    Args:
        options: options of the noise and of the loss.
        seed: seed of the run.
        length: number of tokens in a block.
        vocabulary: number of token ids that noise is sampled from.
        sequence_length: number of tokens in a sequence of the run.

    Attributes:
        columns: number of columns that noise is drawn for, of every sequence.
    """

    name = "block_diffusion"
    purpose = "denoise blocks of text"
    section = "diffusion"
    chunks = False
    pipelines = shares = packs = True  # what it cannot do is refused in `problems` and by the plan
    uncounted = (
        "block diffusion runs routers over a sequence and over its canvases, which have no common balance; leave it out "
        "(moe.load_metrics counts both)"
    )

    def __init__(self, options: DiffusionConfig, seed: int, length: int, vocabulary: int, sequence_length: int) -> None:
        self.options, self.seed, self.length, self.vocabulary = options, seed, length, vocabulary
        self.sequence_length = sequence_length
        self.columns = -(-sequence_length // length) * length  # of the longest possible canvas
        self.canvas_sizes = (self.columns if options.mode == "all_blocks" else length, sequence_length)
        self.encoder = options.encoder_loss_weight > 0
        self.terms = ("denoising", "encoder") if self.encoder else ("denoising",)
        self.weights = (1.0, options.encoder_loss_weight) if self.encoder else (1.0,)
        # Images are not read, so the modules that read them get no gradient.
        self.frozen = ("model.encoder.vision_tower.**", "model.encoder.embed_vision.**")
        if options.freeze_router:
            self.frozen += ("model.**.router.**",)

    @classmethod
    def problems(cls, model: "PreTrainedModel", options: DiffusionConfig, run: RunFacts) -> Problems:
        """Return problems: packed documents, attention without masks, outputs that would be rounded, graphs that differ."""
        problems = Problems()
        if run.packing != "pad":
            problems.add(
                "data.packing.kind",
                f"data.packing={run.packing}: the blocks of a packed document would see the documents before it; "
                "with block diffusion the legal value is pad",
            )
        if model.config.canvas_length < 1:
            problems.add(
                "diffusion.canvas", f"model.config.canvas_length={model.config.canvas_length}: a block has at least 1 token"
            )
        if attention_of(model) not in ATTENTIONS:
            problems.add(
                "diffusion.attention",
                f"model.attn_implementation={attention_of(model)}: takes no mask of blocks; with block diffusion legal are "
                f"{' and '.join(ATTENTIONS)}",
            )
        if options.encoder_loss_weight > 0 and rounds_losses(run.output_dtype):
            problems.add(
                "diffusion.output_dtype",
                f"parallel.output_dtype={run.output_dtype}: the encoder's loss, a sum in nats, would be rounded to "
                "it as it leaves the model; with diffusion.encoder_loss_weight above 0 legal are null, float32 and float64",
            )
        if run.compiled and ActivationCheckpointing.FULL in run.recomputed:
            problems.add(
                "diffusion.compile",
                "parallel.activation_checkpointing=full with parallel.compile: an encoder layer stores its keys and values "
                "only in its first run, so its recomputation is another graph; legal are none and submodule",
            )
        return problems

    @classmethod
    def of(cls, model: "PreTrainedModel", options: DiffusionConfig, run: RunFacts) -> Self:
        """Return the objective, with blocks as long as the model's canvases and noise from its whole vocabulary."""
        config = model.config
        return cls(options, run.seed, config.canvas_length, config.get_text_config().vocab_size, run.sequence_length)

    def attach(self, model: nn.Module) -> None:
        """Give the model its training forward."""
        enable(model)

    def stage_arguments(self, batch: Batch) -> dict[str, Any]:
        """Return what the stages of a pipeline are called with."""
        return {"denoise": batch}

    def training(self, batches: list[Batch], numbers: Sequence[Sequence[int]]) -> list[Batch]:
        """Lay out the canvases and add noise to them. The noise of a sequence does not depend on the batch that it is in."""
        return [self._noised(*item, held_out=False) for item in zip(batches, numbers, strict=True)]

    def held_out(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Do the same as in training, with noise that is the same each time, at rates that are evenly spread over all rates."""
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
        columns = in_blocks(canvas, noised, self.length, batch["input_ids"].shape[1])
        return {**batch, **columns, "self_conditioned": noised.conditioned}

    def counts(self, batches: list[Batch]) -> list[int]:
        """Return the number of supervised columns of the canvases, and of labels of the encoder."""
        denoised = sum(int(batch[COUNTS].sum()) for batch in batches)
        return [denoised, count_tokens(batches)] if self.encoder else [denoised]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the cross-entropy of the clean tokens of the canvases (with or without noise), and of the next token."""
        output = model(denoise=batch, encoder_loss=partial(token_loss_sum, labels=batch["labels"]) if self.encoder else None)
        denoising = token_loss_sum(output.logits, output.labels) + output.anchor
        return (denoising, output.encoder_loss) if self.encoder else (denoising,)
