"""The training forward: three passes of the stack, in one call of the model.

1. The encoder reads the clean sequence causally, and writes keys and values to a cache. Its own loss is computed at once.
   Backward starts with what was computed last, so it goes through the decoder first and through the encoder after that, and no
   unit of the encoder is gathered too early.
2. The decoder reads the cache and the noisy canvas, without gradient. This gives the draft for self-conditioning. It runs even
   if no sequence of the batch uses self-conditioning, so that all ranks gather the same units in the same order.
3. The decoder runs again, with gradient. Sequences without self-conditioning get a draft of zeros, as in the first step of
   generation.

The three passes are one ``model(denoise=batch)``. :func:`enable` puts a forward around that of the model, on the instance, so
everything that is attached to the root's forward (hooks of FSDP, of mixed precision, of a recorder) sees one call per
microbatch. The class is not changed, and ``model(...)`` without ``denoise`` computes the same as before, also with activation
checkpointing.

The embedding is used outside of its own forward here, as the output head and by self-conditioning, so it belongs to the root
unit.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from meshwright.distributed._torch_compat import in_backward
from meshwright.distributed.memory.activation_checkpointing import is_checkpointed
from meshwright.errors import PlanError, UnsupportedError
from meshwright.models._transformers_compat import attention_of
from meshwright.models.diffusion_gemma.canvas_columns import flat, own_columns, padded
from meshwright.models.diffusion_gemma.masks import as_additive, block_causal_masks
from meshwright.plan.axes.context.sharing import FUNCTION

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "ATTENTIONS",
    "Denoised",
    "decoder_arguments",
    "enable",
    "encode",
    "encoder_logits",
    "rounds_losses",
    "three_passes",
]

ATTENTIONS = ("sdpa", "eager")
"""The attention implementations of transformers that accept a mask of any pattern."""

Masks = dict[str, torch.Tensor | None]


class Denoised(NamedTuple):
    """The result of a training forward.

    Attributes:
        logits: [B, R, V], logits of the canvas; with context parallel, of the columns of this rank.
        encoder_loss: loss of the clean sequence; ``None`` if it was not asked for.
        anchor: zero, to be added to the loss. Without it and without a loss of the encoder, no gradient reaches the encoder's
            output. Then backward reaches the last layer of the encoder only through the cache. FSDP does not see this, and its
            backward reads memory that is freed already.
        labels: [B, R], ``canvas_labels`` of the same columns; ``None``: the batch has none.
    """

    logits: torch.Tensor
    encoder_loss: torch.Tensor | None
    anchor: torch.Tensor
    labels: torch.Tensor | None = None


def rounds_losses(output_dtype: str | None) -> bool:
    """Return whether the dtype that the root casts its outputs to makes a loss among them too inexact.

    A loss is a sum over tokens in nats. bfloat16 keeps three digits of it, and of the factor that its gradient is multiplied
    by; float16 ends at 65,504. FSDP casts every floating-point tensor that leaves the root, so the loss cannot be excluded.
    """
    return output_dtype is not None and getattr(torch, output_dtype).itemsize < torch.float32.itemsize


def enable(model: "PreTrainedModel", output_dtype: str | None = None, multiple: int = 1) -> None:
    """Make a ``DiffusionGemmaForBlockDiffusion`` accept ``model(denoise=batch, encoder_loss=...)``. It may be called twice.

    The batch has ``input_ids`` and ``position_ids`` [B, S], ``canvas_ids`` (with noise), ``canvas_positions`` and
    ``canvas_blocks`` [B, R] (or as :func:`~meshwright.models.diffusion_gemma.canvas_columns.in_blocks` makes them), and
    ``self_conditioned`` [B, 1]; see :mod:`~meshwright.models.diffusion_gemma.canvas`. ``encoder_loss`` is a function of the
    encoder's logits [B, S, V] of the next tokens, and returns their loss. The call returns a :class:`Denoised`.

    Args:
        model: the model, changed in place.
        output_dtype: dtype that its root casts outputs to. If :func:`rounds_losses` is true for it, calls with ``encoder_loss``
            raise a :class:`PlanError`.
        multiple: number that must divide the columns of a canvas, so that all ranks have equally many. Hidden columns are
            appended, whose logits are returned too.
    """
    if not isinstance(model.forward, _Forward):
        model.forward = _Forward(model, model.forward)
    if output_dtype is not None:
        model.forward.output_dtype = output_dtype
    model.forward.multiple = max(model.forward.multiple, multiple)


class _Forward:
    """A model's own forward, and the training forward, which replaces it in calls with ``denoise``."""

    def __init__(self, model: "PreTrainedModel", inner: Any) -> None:
        self.model, self.inner = model, inner
        self.signature = inspect.signature(inner)
        self.output_dtype: str | None = None
        self.multiple = 1
        self.last_pass: Callable[..., Denoised] | None = None
        """What computes the next call with ``denoise``: the last pass of the last stage of a pipeline."""

    def __call__(
        self,
        *args: Any,
        denoise: dict[str, torch.Tensor] | None = None,
        stage: Callable[[dict[str, torch.Tensor]], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        if denoise is None:
            return _anchored(self._own(args, kwargs))
        if stage is not None:  # a pass of a stage of a pipeline, inside of the hooks of the root
            return stage(_of_rank(self.model, padded(flat(denoise), self.multiple)))
        if kwargs.get("encoder_loss") is not None and rounds_losses(self.output_dtype):
            raise PlanError(
                "diffusion.output_dtype",
                f"output_dtype={self.output_dtype}: the encoder's loss, a sum in nats, would be rounded to it as it leaves the "
                "model; with encoder_loss legal are None, float32 and float64 (of mp_policy, or of parallel)",
            )
        batch = padded(flat(denoise), self.multiple)
        if (finish := self.last_pass) is not None:
            self.last_pass = None
            return finish(_of_rank(self.model, batch), **kwargs)
        return _denoised(self.model, self.inner, batch, *args, **kwargs)

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's own forward. In training, pass a cache that recomputation does not write, if none is given."""
        call = self.signature.bind_partial(*args, **kwargs)
        if self.model.training and call.arguments.get("input_ids") is not None:
            if call.arguments.get("past_key_values") is None:
                call.arguments["past_key_values"] = _cache_type()(config=self.model.config.get_text_config())
            elif torch.is_grad_enabled() and any(map(is_checkpointed, self.model.model.encoder.modules())):
                raise UnsupportedError(
                    "diffusion.cache",
                    "past_key_values: an encoder layer that activation checkpointing runs again would write to it again; in "
                    "training with activation checkpointing leave it out, and the model makes one",
                )
        return self.inner(*call.args, **call.kwargs)


def _anchored(output: Any) -> Any:
    """Connect the logits with the encoder's output by a gradient of zeros, so that a loss of the logits alone reaches it."""
    encoded, logits = getattr(output, "encoder_last_hidden_state", None), getattr(output, "logits", None)
    if encoded is not None and logits is not None and encoded.requires_grad and logits.requires_grad:
        output.logits = _Anchor.apply(logits, encoded)
    return output


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(encoded)
        return logits.view_as(logits)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (encoded,) = context.saved_tensors
        return gradient, torch.zeros_like(encoded)


def three_passes(
    model: "PreTrainedModel",
    forward: Any,
    batch: dict[str, torch.Tensor],
    masks: Callable[[torch.dtype], Masks],
    *,
    encoder_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Denoised:
    """Make the three passes of a training step, and return what :func:`enable` says.

    Args:
        model: the model.
        forward: its own forward.
        batch: see :func:`enable`, with canvases [B, R].
        masks: returns for each kind of layer the mask of the decoder, if hidden states have some dtype.
        encoder_loss: see :func:`enable`.
    """
    written, encoded = encode(model, batch)
    read = None if encoder_loss is None else encoder_loss(encoder_logits(model, encoded))
    nothing = torch.zeros((), dtype=encoded.dtype, device=encoded.device)
    anchor = (encoded[:, :1] * 0.0).sum() if torch.is_grad_enabled() else nothing
    decode = partial(
        forward,
        past_key_values=written,
        decoder_input_ids=batch["canvas_ids"],
        decoder_position_ids=batch["canvas_positions"],
        decoder_attention_mask=masks(encoded.dtype),
    )
    with torch.no_grad():
        draft = decode().logits
    logits = decode(self_conditioning_logits=draft, self_conditioning_mask=batch["self_conditioned"][:, 0]).logits
    return Denoised(logits, read, anchor, batch.get("canvas_labels"))


def decoder_arguments(model: "PreTrainedModel", batch: dict[str, torch.Tensor], written: Any) -> dict[str, Any]:
    """Return what the decoder is called with, for canvases [B, R] and the cache of the clean sequences."""
    dtype = model.dtype
    return {
        "past_key_values": written,
        "decoder_input_ids": batch["canvas_ids"],
        "decoder_position_ids": batch["canvas_positions"],
        "decoder_attention_mask": _masks(model, batch, dtype),
    }


def encode(model: "PreTrainedModel", batch: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """Run the encoder over clean sequences, and return the cache that it wrote and its last hidden state [B, S, features]."""
    written = _cache_type()()
    encoded = model.model.encoder(
        input_ids=batch["input_ids"],
        attention_mask=batch.get("attention_mask"),
        position_ids=batch["position_ids"],
        past_key_values=written,
    ).last_hidden_state
    return written, encoded


def _denoised(model: "PreTrainedModel", forward: Any, batch: dict[str, torch.Tensor], **more: Any) -> Denoised:
    batch = _of_rank(model, batch)
    return three_passes(model, forward, batch, partial(_masks, model, batch), **more)


def _of_rank(model: "PreTrainedModel", batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with the columns that this rank has."""
    return own_columns(model, batch) if attention_of(model) == FUNCTION else batch


@cache
def _cache_type() -> Any:
    from transformers import DynamicCache

    class WrittenOnce(DynamicCache):
        """Keys and values of one clean sequence. An encoder layer that is recomputed in backward writes nothing to it.

        For ``denoise`` it is created without the config, because a cache that knows windows would drop keys that earlier blocks
        need.
        """

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            # Outside of backward, a second write comes from a caller who continues with the cache that a forward returned.
            if layer_idx < len(self.layers) and self.layers[layer_idx].is_initialized and in_backward():
                return key_states, value_states
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    return WrittenOnce


def _masks(model: "PreTrainedModel", batch: dict[str, torch.Tensor], dtype: torch.dtype) -> Masks:
    if attention_of(model) == FUNCTION:  # attentions over canvases of `cp` know what each column sees
        return dict.fromkeys(("full_attention", "sliding_attention"))
    config = model.config.get_text_config()
    masks = block_causal_masks(batch["canvas_blocks"], batch["input_ids"].shape[1], config.sliding_window)
    if attention_of(model) == "eager":
        return {kind: as_additive(mask, dtype) for kind, mask in masks.items()}
    return dict(masks)


def encoder_logits(model: "PreTrainedModel", hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of hidden states, as the model computes them for the decoder: in fp32 or better, and capped."""
    logits = model.lm_head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    cap = model.final_logit_softcapping
    return torch.tanh(logits / cap) * cap
