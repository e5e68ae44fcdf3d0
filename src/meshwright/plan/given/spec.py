"""ParallelSpec: what a model family declares of itself, as patterns of module names. It has no sizes and no tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from meshwright.plan.given.closed_choices import SyncPolicy

if TYPE_CHECKING:
    from torch import nn

    from meshwright.plan.given.traces import Traces

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
    """A pattern of modules that are FSDP units in addition to the layers.

    Args:
        pattern: pattern of module names; each match is a unit of its own.
        together: all matches are one unit instead, which is gathered and reduced once for all of them.
        added: whether an objective added the matches to the model and calls them itself, with values of any shape. They compute
            in the dtype in which they are stored, which is at least fp32.
        reshard_after_forward: whether to free the gathered parameters after forward; ``None``: yes.
        sync: sync policy of the unit, which says when its gradients are reduced; ``None``: that of the options.
    """

    pattern: str
    reshard_after_forward: bool | None = None
    sync: SyncPolicy | None = None
    together: bool = False
    added: bool = False


class Scores(StrEnum):
    """The kind of the first output of a router, from which its probabilities are computed."""

    SOFTMAX = "softmax"
    """Logits; a softmax turns them into probabilities."""

    SIGMOID = "sigmoid"
    """Logits; a sigmoid turns them into the affinity of each expert (DeepSeek-V3, arXiv 2412.19437, equation 15)."""

    PROBABILITIES = "probabilities"
    """Probabilities already."""

    UNKNOWN = "unknown"
    """Not declared. Only a balance loss, which is computed from probabilities, needs to know."""


@dataclass(frozen=True)
class ExpertsRule:
    """A pattern of mixtures of experts: modules that store the routed experts of a layer, all in the same parameters.

    A mixture is called as ``experts(hidden [tokens, features], index [tokens, k], weights [tokens, k])``, and is linear in the
    weights. The first dimension of its parameters counts experts. Each mixture is an FSDP unit of its own.

    Args:
        pattern: pattern of the mixtures.
        router: pattern of the modules that choose experts, each in the module that also holds its mixture. A router returns
            (scores, weights, index); ``None``: unknown.
        scores: what the scores are.
        bias: name of a buffer, of the router or of the module that holds router and experts. It is added to the scores for the
            choice of experts and gets no gradient. It balances the load without a loss.
    """

    pattern: str
    router: str | None = None
    scores: Scores = Scores.UNKNOWN
    bias: str | None = None


@dataclass(frozen=True)
class TwinStacks:
    """Two stacks of layers that have the same parameters under two names and run one after the other: a stack that runs twice.

    Args:
        first: pattern of the layers that run first.
        second: pattern of the other layers, in the same order; each has the parameters of its twin, under the same names.
        forwards: forward runs of the second stack in a microbatch, of which only the last has a gradient; the first stack runs
            once.
    """

    first: str
    second: str
    forwards: int = 1


@dataclass(frozen=True)
class Structure:
    """What is known about the inside of a family's layers, which tensor parallel needs in addition to styles.

    Args:
        styles: tensor parallel styles written for the family; empty: those that the model declares are as good.
        regions: patterns of the modules of a layer that mix tokens or features, such as its attention and its MLP. A region
            takes the hidden state [batch, sequence, features] as its first argument or as ``hidden_states``, and the modules
            inside it get activations only from there. The rest of the layer processes each token alone.
        tokenwise: modules after the layers, outside of them, that process each token alone: the last norm.
        head: the module that computes logits from hidden states.
        kv_projections: the matrices of keys and of values, if the attention allows several ranks to share one key/value head.
        fused: pattern of a fused matrix of queries, keys and values to the number of rows of each (``fused_colwise``). An
            attention with such a matrix reads head counts from its config to split the output, so it is given the counts of its
            rank.
        divisible: (one of them, number) pairs of what else ``tp`` must divide, such as ``("head of a layer", 8)``.
        no_sequence_parallel: why the family cannot shard its residual stream over the sequence; empty: it can.
        stream_traced: whether sequence parallel takes regions and what follows the layers from a trace of the model, though
            regions are declared here: these do not tell all that it needs.
        leaks_documents: whether the masks that the model makes let packed documents see each other. Then packed documents are
            computed with the attention function of context parallel, which keeps them apart.
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
    stream_traced: bool = False
    leaks_documents: bool = False
    uses_all_parameters: bool = False


@dataclass(frozen=True)
class ParallelSpec:
    """What a family declares of itself.

    Args:
        family: name to show to people.
        layers: patterns of the repeated layers, which are the units of FSDP, of activation checkpointing and of compilation.
        units: further FSDP units, inside or outside the layers.
        experts: mixtures of experts; these modules are units too.
        twins: stacks of layers that share their parameters.
        idle: patterns of modules that training does not run, such as a vision tower in training on text. The units in them are
            never gathered.
        fp32: patterns of modules that compute in fp32, whatever the parameter dtype of the rest is.
        tied: groups of parameter names; those of a group are one tensor.
        tp_styles: pattern of parameters or modules to tensor parallel style, in the terms of transformers, as the model
            declares it.
        sizes: field of :class:`~meshwright.layout.ModelSizes` to the attribute of the model's config that has the value.
        structure: the inside of its layers; ``None``: unknown.
        uses_all_parameters: whether the loss of every microbatch depends on every trainable parameter outside idle modules. If
            it does, ranks need not exchange which parameters they used. It does not for a vision tower without images, nor for
            experts that are modules of a list.
        traces: returns what is read from a model of the family by calling it without values; ``None``: nothing is known.
        remarks: what was assumed because nobody declared it, a sentence each; the plan repeats them.
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
    traces: "Callable[[nn.Module], Traces] | None" = field(default=None, compare=False, repr=False)
    remarks: tuple[str, ...] = ()


def under_prefix(spec: ParallelSpec, prefix: str) -> ParallelSpec:
    """Return the spec of a model that is inside another one, under names that begin with ``prefix``."""

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
