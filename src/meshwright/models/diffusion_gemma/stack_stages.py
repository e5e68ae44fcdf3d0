"""Where a DiffusionGemma can be cut into stages: read from a forward of each of its stacks, without values.

A stage has some layers of the encoder, and the layers of the decoder with the same numbers, which have the same parameters. The
decoder's layers read the keys and values of the encoder's layers, which do not travel: the trace shows that each reads those of
its own number alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from meshwright.errors import Refusal
from meshwright.models.diffusion_gemma.model import encode, encoder_logits
from meshwright.models.reading.pipeline.cut_trace import StageTracer, stage_positions
from meshwright.models.reading.tracing import Inputs, Labels, attributes, traced
from meshwright.models.specs.derived import base_of_peft
from meshwright.plan.given.cut_points import StageFacts
from meshwright.plan.given.names import within
from meshwright.plan.given.parameter_storage import names_of_parameters
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_both_stacks"]

_DECODER = "model.decoder"


def trace_both_stacks(model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule] = ()) -> StageFacts:
    """Return where a model can be cut, see :func:`~meshwright.models.reading.pipeline.trace_stages`."""
    if base_of_peft(model) is not None:
        return StageFacts(problems=(Refusal("pp.twice", "an adapter in a stack that runs twice was never cut into stages"),))
    if model.lm_head.weight is not model.model.decoder.embed_tokens.weight:
        words = "its head is not its embedding, which the last stage needs for the soft embeddings of drafts"
        return StageFacts(problems=(Refusal("pp.twice", words),))
    decoding = [name for name in layers if within(name, [_DECODER])]
    encoding = [name.replace(_DECODER, "model.encoder.language_model") for name in decoding]
    caches: list[Any] = []

    def read(**given: Any) -> Any:
        written, encoded = encode(model, {name: given[name] for name in ("input_ids", "position_ids")})
        caches.append(written)
        return encoder_logits(model, encoded)

    with attributes([(model, {"forward": read})]):
        encoder, why = traced(model, experts, partial(StageTracer, model, encoding), positions=stage_positions(model))
    if encoder is None:
        return _untraced(why)
    layers_of_cache = [(layer.keys, layer.values) for layer in caches[-1].layers]
    running: list[_DecoderTracer] = []

    def make(inputs: Inputs) -> "_DecoderTracer":
        running.append(_DecoderTracer(model, decoding, inputs))
        return running[-1]

    with attributes([(model, {"forward": partial(_decode, model, layers_of_cache, lambda: running[-1])})]):
        decoder, why = traced(model, experts, make, positions=stage_positions(model))
    if decoder is None:
        return _untraced(why)
    facts = decoder.facts()
    # Files may have the embedding under its name in the decoder, so both ends hold it under that name too.
    both = {name: sides for name, sides in facts.used.items() if len(sides) > 1}
    used = {**{decoder.whole_names[name]: sides for name, sides in facts.used.items()}, **both}
    return _together(encoder.facts(), replace(facts, used=used))


def _untraced(why: str) -> StageFacts:
    return StageFacts(problems=(Refusal("model.values", f"its forward cannot be traced without values ({why})"),))


def _decode(
    model: "PreTrainedModel",
    shapes: Sequence[tuple[torch.Tensor, torch.Tensor]],
    tracer: "Callable[[], _DecoderTracer]",
    *,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Run the decoder over a canvas as long as the sequence, with keys and values that come from layers of the encoder."""
    from transformers import DynamicCache

    written = DynamicCache()
    for number, (keys, values) in enumerate(shapes):
        own = torch.empty_like(keys), torch.empty_like(values)
        written.update(*own, number)
        layer = written.layers[number]
        tracer().origins.put((layer.keys, layer.values), {number})
    rows, length = input_ids.shape
    mask = torch.empty((rows, 1, length, 2 * length), device="meta")
    hidden = model.model.decoder(
        decoder_input_ids=input_ids,
        past_key_values=written,
        decoder_position_ids=position_ids,
        decoder_attention_mask=dict.fromkeys(("full_attention", "sliding_attention"), mask),
    ).last_hidden_state
    return encoder_logits(model, hidden)


class _DecoderTracer(StageTracer):
    """Knows parameters by their names in the decoder.

    Attributes:
        whole_names: each of these names to the first one in the model.
    """

    def __init__(self, model: "PreTrainedModel", layers: Sequence[str], inputs: Inputs) -> None:
        super().__init__(model, layers, inputs)
        tied = names_of_parameters(model).values()
        own = [next((name for name in names if within(name, [_DECODER])), names[0]) for names in tied]
        self.whole_names = {chosen: names[0] for names, chosen in zip(tied, own, strict=True)}
        self.all_names = dict(zip(own, tied, strict=True))
        self.first_names = {name: chosen for names, chosen in zip(tied, own, strict=True) for name in names}
        self.parameters = Labels({inputs.tensors[names[0]]: chosen for names, chosen in zip(tied, own, strict=True)})


def _together(encoder: StageFacts, decoder: StageFacts) -> StageFacts:
    """Return the facts of both stacks, which are cut together."""
    pairs = list(zip(encoder.layers, decoder.layers, strict=True))
    sides: dict[str, set[str]] = {}
    used: Mapping[str, tuple[str, ...]]
    for used in (encoder.used, decoder.used):
        for name, where in used.items():
            sides.setdefault(name, set()).update(where)
    why = "layers of both stacks with one number share their parameters"
    return StageFacts(
        layers=tuple(layer for pair in pairs for layer in pair),
        leading=tuple(dict.fromkeys((*encoder.leading, *decoder.leading))),
        trailing=tuple(dict.fromkeys((*encoder.trailing, *decoder.trailing))),
        used={name: tuple(side for side in ("first", "last") if side in where) for name, where in sides.items()},
        hidden=encoder.hidden,
        problems=tuple(dict.fromkeys((*encoder.problems, *decoder.problems))),
        after=tuple(dict.fromkeys((*encoder.after, *decoder.after))),
        idle=tuple(name for name in encoder.idle if name in decoder.idle),
        uncut=dict.fromkeys(range(1, 2 * len(pairs), 2), why),
        passes=3,
    )
