"""ParallelSpec: what a model family declares of itself, as patterns over module names. No sizes, no tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from meshwright.plan.options import SyncPolicy

__all__ = [
    "ExpertsRule",
    "ParallelSpec",
    "Scores",
    "Structure",
    "TwinStacks",
    "UnitRule",
    "under_prefix",
]


T = TypeVar("T")


@dataclass(frozen=True)
class UnitRule:
    """Modules that are FSDP units besides the layers.

    Args:
        pattern: which modules; each match is a unit of its own.
        reshard_after_forward: free the gathered parameters after forward; ``None``: yes.
        sync: when the unit's gradients are reduced; ``None``: as the options say.
    """

    pattern: str
    reshard_after_forward: bool | None = None
    sync: SyncPolicy | None = None


class Scores(StrEnum):
    """What the first output of a router is, of which its probabilities are made."""

    SOFTMAX = "softmax"
    """Logits, of which a softmax makes probabilities."""

    SIGMOID = "sigmoid"
    """Logits, of which a sigmoid makes the affinity of each expert (DeepSeek-V3, arXiv 2412.19437, equation 15)."""

    PROBABILITIES = "probabilities"
    """Probabilities already."""

    UNKNOWN = "unknown"
    """Not declared. Everything but a balance loss, which is made of probabilities, can do without."""


@dataclass(frozen=True)
class ExpertsRule:
    """Mixtures of experts: modules that hold the routed experts of a layer, all in the same parameters.

    Each is called ``experts(hidden [tokens, features], index [tokens, k], weights [tokens, k])``, and is linear in the weights;
    the first dimension of its parameters counts experts. Each is an FSDP unit of its own.

    Args:
        pattern: the modules.
        router: pattern of the module beside each that chooses experts. It returns (scores, weights, index); ``None``: unknown.
        scores: what the scores are.
        bias: buffer of the router, or of the module that holds router and experts, that is added for the choice and gets no
            gradient, which balances the load without a loss.
    """

    pattern: str
    router: str | None = None
    scores: Scores = Scores.UNKNOWN
    bias: str | None = None


@dataclass(frozen=True)
class TwinStacks:
    """Two stacks of layers that are the same parameters under two names, one run behind the other: a stack that runs twice.

    Args:
        first: pattern of the layers that run first.
        second: pattern of the others, in the same order; each has the parameters of its twin, under the same names.
        forwards: of the second stack in a microbatch, the last of them with a gradient; the first has one.
    """

    first: str
    second: str
    forwards: int = 1


@dataclass(frozen=True)
class Structure:
    """What is known of the inside of a family's layers: what tensor parallel needs beyond styles.

    Args:
        styles: tensor parallel styles written for the family; empty: the model's own are as good.
        regions: patterns of the modules of a layer that mix tokens or features, such as its attention and its MLP. Each
            takes the hidden state [batch, sequence, features] as its first argument or as ``hidden_states``, and what is
            inside it gets activations only from there. All else in a layer treats each token alone.
        tokenwise: modules outside of the layers, behind them, that treat each token alone: the last norm.
        head: the module that makes logits of hidden states.
        kv_projections: the matrices of keys and of values, where the attention can do with one head of them for several ranks.
        fused: pattern of a fused matrix of queries, keys and values to the rows of each (``fused_colwise``). An attention with
            one reads head counts from its config to take them apart, so that it is given those of its rank.
        divisible: what else ``tp`` must divide: what it is, and how many.
        no_sequence_parallel: why the family cannot shard its residual stream over the sequence; empty: it can.
        uses_all_parameters: see :class:`ParallelSpec`.
    """

    styles: Mapping[str, str] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    tokenwise: tuple[str, ...] = ()
    head: str | None = None
    kv_projections: tuple[str, ...] = ()
    fused: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    divisible: tuple[tuple[str, int], ...] = ()
    no_sequence_parallel: str = ""
    uses_all_parameters: bool = False


@dataclass(frozen=True)
class ParallelSpec:
    """What a family declares of itself.

    Args:
        family: name for people.
        layers: patterns of the repeated layers: units of FSDP, of activation checkpointing and of compilation.
        units: further FSDP units, inside or outside the layers.
        experts: mixtures of experts; their modules are units too.
        twins: stacks of layers that share their parameters.
        idle: patterns of modules that training does not run, such as a vision tower where text is learned: nothing gathers
            the units in them.
        fp32: patterns of modules that compute in fp32 whatever the parameter dtype of the rest.
        tied: groups of parameter names that are one tensor.
        tp_styles: parameter or module pattern to tensor parallel style, in the words of transformers, as the model declares it.
        sizes: field of :class:`~meshwright.layout.ModelSizes` to the attribute of the model's config that holds it.
        structure: of its layers; ``None``: unknown.
        uses_all_parameters: whether the loss of every microbatch depends on every trainable parameter, idle modules apart. Then
            ranks need not tell each other which they used. It is not so for a vision tower without images, nor for experts
            that are modules of a list.
    """

    family: str
    layers: tuple[str, ...]
    units: tuple[UnitRule, ...] = ()
    experts: tuple[ExpertsRule, ...] = ()
    twins: tuple[TwinStacks, ...] = ()
    idle: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    tp_styles: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    structure: Structure | None = None
    uses_all_parameters: bool = False


def under_prefix(spec: ParallelSpec, prefix: str) -> ParallelSpec:
    """The spec of a model that stands inside another one, under names that begin with ``prefix``."""

    def all_of(patterns: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + pattern for pattern in patterns)

    def keys(named: Mapping[str, T]) -> dict[str, T]:
        return {prefix + pattern: value for pattern, value in named.items()}

    known = spec.structure
    return replace(
        spec,
        layers=all_of(spec.layers),
        units=tuple(replace(rule, pattern=prefix + rule.pattern) for rule in spec.units),
        experts=tuple(
            replace(rule, pattern=prefix + rule.pattern, router=None if rule.router is None else prefix + rule.router)
            for rule in spec.experts
        ),
        twins=tuple(replace(pair, first=prefix + pair.first, second=prefix + pair.second) for pair in spec.twins),
        idle=all_of(spec.idle),
        fp32=all_of(spec.fp32),
        tied=tuple(all_of(names) for names in spec.tied),
        tp_styles=keys(spec.tp_styles),
        structure=known
        and replace(
            known,
            styles=keys(known.styles),
            regions=all_of(known.regions),
            tokenwise=all_of(known.tokenwise),
            head=None if known.head is None else prefix + known.head,
            kv_projections=all_of(known.kv_projections),
            fused=keys(known.fused),
        ),
    )
