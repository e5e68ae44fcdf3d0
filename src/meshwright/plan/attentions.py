"""The facts of a model's attentions, which a plan with context parallel needs."""

from dataclasses import dataclass

__all__ = ["AttentionFacts", "Attentions"]


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
    problem: str = ""


@dataclass(frozen=True)
class Attentions:
    """What mixes the tokens of a sequence in a model.

    Attributes:
        rows: its attentions, in the order in which they run.
        problems: what mixes tokens outside of them, or why this cannot be known.
        kernel: what they compute with, the value of ``attn_implementation``.
    """

    rows: tuple[AttentionFacts, ...]
    problems: tuple[str, ...] = ()
    kernel: str = ""
