"""How the attentions of both stacks are called, and how the streams can be sliced: read from training forwards without values.

The encoder's attentions are those of any causal model. Those of the decoder get queries of the canvas, keys of the clean
sequence and of the canvas, and one of the masks that the training forward makes. Here these masks have no values, and say which
they are.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from meshwright.errors import Refusal
from meshwright.models import _transformers_compat as compat
from meshwright.models.diffusion_gemma.masks import window_of
from meshwright.models.diffusion_gemma.model import ATTENTIONS, three_passes
from meshwright.models.diffusion_gemma.stack_stages import trace_both_stacks
from meshwright.models.reading.context.attention_calls import AttentionTracer
from meshwright.models.reading.model_traces import ModelTraces
from meshwright.models.reading.tracing import Attention, attributes, traced
from meshwright.models.specs.derived import base_of_peft
from meshwright.plan.given.attentions import Attentions, unknown_argument
from meshwright.plan.given.cut_points import StageFacts
from meshwright.plan.given.sequence.canvas_facts import CanvasFacts
from meshwright.plan.given.spec import ExpertsRule
from meshwright.plan.given.traces import RegionFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["StackTraces", "trace_stacks"]

_KIND = "_meshwright_kind"


class StackTraces(ModelTraces):
    """The traces of a model with two stacks; its attentions are read from a training forward.

    Args:
        model: as for :class:`~meshwright.models.reading.model_traces.ModelTraces`.
        experts: its mixtures.
        counts_runs: as there.
        canvas: number of columns of the canvas of a sequence, at most, and of tokens of the sequence; ``None``: unknown.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        experts: Sequence[ExpertsRule] = (),
        *,
        counts_runs: bool = True,
        canvas: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(model, experts, counts_runs=counts_runs)
        self.canvas = canvas

    @cached_property
    def attentions(self) -> Attentions:
        """See :func:`trace_stacks`."""
        return trace_stacks(self.model, self.experts, self.canvas)

    def stages(self, layers: Sequence[str]) -> StageFacts:
        """See :func:`~meshwright.models.diffusion_gemma.stack_stages.trace_both_stacks`."""
        return replace(self._once("stages", layers, trace_both_stacks), canvas=self.canvas)

    def regions(self, layers: Sequence[str]) -> RegionFacts:
        """See :func:`~meshwright.models.reading.tensor.regions.trace_regions`, which follows a training forward."""
        with _in_training(self.model):
            return super().regions(layers)


def trace_stacks(
    model: "PreTrainedModel", experts: Sequence[ExpertsRule] = (), canvas: tuple[int, int] | None = None
) -> Attentions:
    """Return the attentions of both stacks, and what else of them mixes tokens.

    Args:
        model: a ``DiffusionGemmaForBlockDiffusion``, which may be inside a ``PeftModel``, on any device. It is not changed.
        experts: its mixtures. They are not called, because what they do depends on values.
        canvas: number of columns of the canvas of a sequence, at most, and of tokens of the sequence; ``None``: unknown.
    """
    kernel = compat.attention_of(model)
    with _in_training(model):
        found, why = traced(model, experts, partial(_StacksTracer, canvas), ("cpu", "meta"))
    if found is None:
        return Attentions((), (Refusal("model.values", f"its training forward cannot be traced without values ({why})"),))
    problems = list(dict.fromkeys(found.problems))
    if kernel not in ATTENTIONS:
        problems.append(
            Refusal(
                "cp.kernel",
                f"attn_implementation={kernel!r} takes no mask of blocks; legal are {' and '.join(ATTENTIONS)}",
            )
        )
    return Attentions(found.attentions(), tuple(problems), kernel)


def _in_training(model: "PreTrainedModel") -> AbstractContextManager[None]:
    """Inside, a call of the model makes the three passes of a training step."""
    inner = base_of_peft(model) or model
    return attributes([(inner, {"forward": partial(_train, inner, type(inner).forward.__get__(inner))})])


def _train(
    model: "PreTrainedModel",
    forward: Any,
    *,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """Run the three passes of a training step, with canvases as long as the sequences: so both have one prime length."""
    rows, length = input_ids.shape
    masks: dict[str, torch.Tensor | None] = {}
    for kind in ("full_attention", "sliding_attention"):
        masks[kind] = mask = torch.empty((rows, 1, length, 2 * length), device="meta")
        setattr(mask, _KIND, kind)
    batch = {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "canvas_ids": torch.zeros_like(input_ids),
        "canvas_positions": torch.empty_like(position_ids),
        "canvas_blocks": torch.empty_like(position_ids),
        "self_conditioned": torch.empty((rows, 1), dtype=torch.bool, device="meta"),
    }
    if attention_mask is not None:
        batch["attention_mask"] = attention_mask
    with torch.no_grad():
        return three_passes(model, forward, batch, lambda _: masks)


class _StacksTracer(AttentionTracer):
    """Records calls with a mask of the encoder as any tracer of attentions does, and those with one of a canvas."""

    def __init__(self, canvas: tuple[int, int] | None, inputs: Any) -> None:
        super().__init__(inputs)
        self.canvas = canvas

    def attention(self, call: Attention) -> None:
        """Record one call."""
        kind = getattr(call.mask, _KIND, None)
        if kind is None:
            super().attention(call)
            return
        options = dict(call.options)
        dropout = options.pop("dropout", 0.0)
        facts = CanvasFacts(
            call.module, call.query.shape[1], call.key.shape[1], call.key.shape[3], call.value.shape[3],
            causal=False, window=window_of(kind, options.get("sliding_window")), dropout=float(dropout or 0.0),
            problem=self._problem(call, options), canvas=self.canvas,
        )  # fmt: skip
        if self.rows.setdefault(call.module, facts) != facts:
            self.problems.add("cp.twice", f"{call.module!r} runs twice in a forward, and not in the same way")

    def _problem(self, call: Attention, options: Mapping[str, Any]) -> str:
        """Return why the ranks of `cp` cannot share an attention over a canvas; empty: they can."""
        length, positions = self.tokens.length, options.get("position_ids")
        if call.query.shape[2] != length or call.key.shape[2] != 2 * length:
            words = f"has {call.query.shape[2]} queries and {call.key.shape[2]} keys for {length} columns and {length} tokens"
            return Refusal("cp.attention", words)
        if positions is None or positions is self.inputs.positions:
            return Refusal("cp.positions", "does not get the positions of its canvas")
        if isinstance(options.get("s_aux"), torch.Tensor):
            return Refusal("cp.sinks", "has sinks over a canvas, which nobody compared")
        if unknown := unknown_argument(options):
            words = f"calls its attention function with {unknown!r}, which context parallel does not know"
            return Refusal("cp.argument", words)
        return ""
