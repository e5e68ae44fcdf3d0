"""The facts of a model's attentions, which a plan with context parallel needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["AttentionFacts", "Attentions", "unknown_argument"]

_KNOWN = {
    "attention_mask", "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
}  # fmt: skip
"""Arguments of an attention function that context parallel computes with or knows from the plan (the window), or that change
nothing in training."""


def unknown_argument(arguments: Mapping[str, Any]) -> str:
    """Return the first argument of an attention function that may change what it computes and is not known; empty: none is."""
    for name, value in arguments.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            isinstance(value, torch.Tensor)
            if name in ("scaling", "softcap")
            else name not in _KNOWN and (number or isinstance(value, torch.Tensor))
        ):
            return name
    return ""


@dataclass(frozen=True)
class AttentionFacts:
    """How one attention calls the function between its projections and its output.

    Attributes:
        module: name of the attention in the model.
        heads: number of heads of the queries.
        kv_heads: number of heads of keys and values.
        key_size: size of a head of queries and keys.
        value_size: size of a head of values, and of the output.
        causal: whether a query sees no later key.
        window: number of keys up to its own that a query sees; ``None``: all.
        sinks: whether each head has a sink: one more logit in the softmax, without a value.
        dropout: probability of dropout on the attention weights.
        carried: whether the model does not pass its ``position_ids`` on to this attention.
        calls: how often the module calls the function when it runs once.
        cached: whether it computes itself, with keys and values that its cache returns: what it puts there is of these heads
            and sizes.
        trained: whether a gradient goes back through its keys and values.
        problem: why the ranks of ``cp`` cannot share it; empty: they can.
    """

    module: str
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    dropout: float = 0.0
    carried: bool = False
    calls: int = 1
    cached: bool = False
    trained: bool = True
    problem: str = ""


@dataclass(frozen=True)
class Attentions:
    """What mixes the tokens of a sequence in a model.

    Attributes:
        rows: its attentions, in the order in which they run.
        problems: what mixes tokens outside of them and of mixers, or why this cannot be known.
        kernel: what they compute with, the value of ``attn_implementation``.
        counted: (name of a module, file and line of its code), for each place where the model counts tokens itself and
            computes with these positions.
        states: (name of a mixer, what mixes tokens in it), for each module that does so between linear layers of its own.
    """

    rows: tuple[AttentionFacts, ...]
    problems: tuple[str, ...] = ()
    kernel: str = ""
    states: tuple[tuple[str, str], ...] = ()
    counted: tuple[tuple[str, tuple[str, int]], ...] = ()
