"""The three passes of a training step through the stages of a pipeline.

A rank has some layers of the encoder, and the layers of the decoder with the same numbers. What goes from rank to rank:

| pass | what crosses a cut | what the last stage does |
|---|---|---|
| 0, the encoder | hidden states of the clean sequence | keeps its output; a number without meaning goes to the first stage |
| 1, drafts, without gradient | hidden states of the canvas | soft embeddings of its drafts go to the first stage |
| 2, the decoder | hidden states of the canvas | computes both losses |

Keys and values of the encoder stay on their rank, and so do their gradients. Soft embeddings are means of the rows of the
embedding with the probabilities of the drafts. The last stage has the matrix, which is that of the head, and keeps the
probabilities: backward sends the gradient of soft embeddings from the first stage to the last, as any pass does.

The losses are computed in the last pass, so that they are known together; the encoder's output waits until then.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.distributed.pipeline.cut import crossing_of, cut_of_model
from meshwright.distributed.pipeline.passes import Kept, Passes
from meshwright.errors import PlanError
from meshwright.models.diffusion_gemma.model import Denoised, decoder_arguments, encode, encoder_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["StagePasses"]

_ENCODE, _DRAFT, _DECODE = range(3)
Batch = dict[str, torch.Tensor]


class StagePasses(Passes):
    """The passes of a rank's model.

    Args:
        model: a ``DiffusionGemmaForBlockDiffusion`` that was cut, with its training forward.
    """

    without_gradient = (_DRAFT,)

    def __init__(self, model: "PreTrainedModel") -> None:
        cut = cut_of_model(model)
        assert cut is not None
        self.model, self.first, self.last = model, cut.begin == 0, cut.end == len(cut.order)
        self._soft: torch.Tensor | None = None
        if self.first:
            model.model.decoder.self_conditioning.register_forward_pre_hook(self._condition)

    def shapes(self, hidden: tuple[int, ...], ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """See :class:`~meshwright.distributed.pipeline.passes.Passes`."""
        if not self.columns:
            raise PlanError("pp.stage_call", "the stages do not know how many columns a canvas has; prepare them first")
        canvas = (hidden[0], self.columns // ranks, hidden[-1])
        return [(hidden, (1,)), (canvas, canvas), (canvas, ())]

    def run(
        self, number: int, received: torch.Tensor | None, arguments: Mapping[str, Any], state: dict[str, Any]
    ) -> torch.Tensor:
        """See :class:`~meshwright.distributed.pipeline.passes.Passes`."""
        own = {_ENCODE: self._encode, _DRAFT: self._draft, _DECODE: self._decode}[number]
        self.model.forward.multiple = self.columns
        sent: torch.Tensor = self.model(**arguments, stage=partial(own, received, state))
        return sent

    def enter_last(self, received: torch.Tensor, state: dict[str, Any]) -> None:
        """See :class:`~meshwright.distributed.pipeline.passes.Passes`."""
        self.model.forward.multiple = self.columns
        self.model.forward.last_pass = partial(self._finish, received, state)

    def _through(self, received: torch.Tensor | None, run: Callable[[], Any]) -> tuple[Any, torch.Tensor | None]:
        """Return what a stack returns, and the hidden state that leaves this stage; ``None``: it is the last one."""
        crossing = crossing_of(self.model)
        crossing.received = None if self.first else received
        try:
            return run(), crossing.sent
        finally:
            crossing.received = crossing.sent = None

    def _encode(self, received: torch.Tensor | None, state: dict[str, Any], batch: Batch) -> torch.Tensor:
        (written, encoded), sent = self._through(received, partial(encode, self.model, batch))
        layers = [layer for layer in written.layers if layer.is_initialized]
        kept = Kept([*([encoded] if self.last else []), *(part for layer in layers for part in (layer.keys, layer.values))])
        leaves = iter(kept.leaves)
        state["encoded"] = next(leaves) if self.last else None
        for layer in layers:
            layer.keys, layer.values = next(leaves), next(leaves)
        state["written"] = written
        return kept.behind(encoded.new_zeros(1) if sent is None else sent)

    def _draft(self, received: torch.Tensor | None, state: dict[str, Any], batch: Batch) -> torch.Tensor:
        given = decoder_arguments(self.model, batch, state["written"])
        with torch.no_grad():
            if not self.last:
                _, sent = self._through(received, partial(self.model.model.decoder, **given))
                assert sent is not None
                return sent
            output, _ = self._through(received, partial(self.model.forward.inner, **given))
            weight = self.model.lm_head.weight
            chances = output.logits.softmax(dim=-1, dtype=torch.float32).to(weight.dtype)
        embedding = self.model.model.encoder.language_model.embed_tokens
        return torch.matmul(chances, weight) * embedding.embed_scale.to(weight.dtype)

    def _decode(self, received: torch.Tensor | None, state: dict[str, Any], batch: Batch) -> torch.Tensor:
        given = decoder_arguments(self.model, batch, state["written"])
        if self.first:
            assert received is not None
            self._soft = received * batch["self_conditioned"][:, 0].to(received.dtype)[:, None, None]
        try:
            _, sent = self._through(received, partial(self.model.model.decoder, **given))
        finally:
            self._soft = None
        assert sent is not None
        return sent

    def _finish(
        self,
        received: torch.Tensor,
        state: dict[str, Any],
        batch: Batch,
        encoder_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Denoised:
        """Compute both losses."""
        read = None if encoder_loss is None else encoder_loss(encoder_logits(self.model, state["encoded"]))
        given = decoder_arguments(self.model, batch, state["written"])
        output, _ = self._through(received, partial(self.model.forward.inner, **given))
        return Denoised(output.logits, read, output.logits.new_zeros(()), batch.get("canvas_labels"))

    def _condition(self, module: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return None if self._soft is None else (given[0], self._soft)
