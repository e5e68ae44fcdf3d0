"""The options of a run of block diffusion, as a schema. It is light to import: pydantic only."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DiffusionConfig"]


class DiffusionConfig(BaseModel):
    """Block diffusion (training.objective=block_diffusion). The length of a block is the model's own canvas_length."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mode: Literal["all_blocks", "one_block"] = Field(
        default="all_blocks",
        description="Blocks of a response that a step denoises: 'all_blocks' at once, each against the clean text before it "
        "(every token teaches; the decoder runs over the whole response), or 'one_block', drawn anew for each sequence (the "
        "published recipe; the decoder runs over canvas_length tokens).",
    )
    minimum_noise: float = Field(
        default=1e-3,
        ge=0,
        le=1,
        description="Smallest rate of noise. Each sequence draws its rate from minimum_noise to 1, and each of its tokens is "
        "replaced by a random one with that probability. 1: all tokens, always.",
    )
    self_conditioning: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Probability that a sequence is denoised with a look at a first draft of it. The draft costs a pass of the "
        "decoder without gradient, which is run in any case.",
    )
    encoder_loss_weight: float = Field(
        default=1.0, ge=0, description="Weight of the encoder's next-token loss beside the denoising loss; 0: none."
    )
    fill_last_block: bool = Field(
        default=True,
        description="Where a response ends within its last block, the rest of the block repeats its last token (that ends a "
        "text or a turn) and is learned too, as in generation every block is whole. false: the rest is left out.",
    )
    freeze_router: bool = Field(default=False, description="Do not train the routers of the experts.")
