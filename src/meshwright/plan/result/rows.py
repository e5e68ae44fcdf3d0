"""The rows of a plan: what becomes of each parameter, unit, module under tensor parallel, mixture, attention and stage."""

from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any

from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.given.closed_choices import ActivationCheckpointing, ContextMethod, SyncPolicy
from meshwright.plan.update.matrices import Form

__all__ = [
    "DECAYED",
    "AttentionRow",
    "ExpertsRow",
    "ParameterRow",
    "StageRow",
    "TensorParallelRow",
    "UnitRow",
]

DECAYED = ("matrix", "decay")
"""The rules of :attr:`ParameterRow.decay_rule` that decay."""

_OF_SOME = ("betas", "eps", "fused", "form")


@dataclass(frozen=True)
class ParameterRow:
    """How one parameter is sharded and stored.

    Attributes:
        name: first name of the parameter in the model.
        aliases: the other names of a tied parameter.
        shape: global shape.
        dtype: dtype in which it is stored.
        unit: name of the unit that gathers it and reduces its gradient.
        placements: (axis, placement) pairs, only for axes larger than 1.
        local_shape: shape on rank 0 of each axis, which stores the most.
        bytes_per_rank: stored bytes on that rank, including the padding of uneven shards.
        gathered_bytes: bytes of the gathered parameter in the dtype of compute, padding included.
        reduced_bytes: bytes of its gradient in the buffer that the unit reduces, padding included; 0 if it is frozen.
        trainable: whether it has a gradient.
        stage: pipeline stage that it is in.
        copies: later stages that hold a copy of it: that of the head, for an embedding that is tied to it.
        tp_style: declared tensor parallel style; ``None``: replicated over ``tp``.
        decayed: whether weight decay pulls it towards zero, as it does trained matrices, but not biases and norms
            (:mod:`meshwright.plan.update.weight_decay`).
        decay_rule: why: ``matrix``, ``decay`` (a pattern of the user). Why not: ``vector``, ``bias``, ``norm``, ``no_decay``,
            ``group`` (of the optimizer, without decay).
        rate: its learning rate, as a share of that of the optimizer.
        weight_decay: that of its group of the optimizer; ``None``: that of the optimizer.
        betas: those of its group, so too.
        eps: so too.
        fused: whether one kernel updates the parameters of its group, so too.
        update: name of the rule that updates it, such as ``adamw``; ``frozen``: none does.
        form: what each of its weights is, if Muon updates it.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    unit: str
    placements: tuple[tuple[str, str], ...]
    local_shape: tuple[int, ...]
    bytes_per_rank: int
    gathered_bytes: int
    reduced_bytes: int
    trainable: bool
    stage: int = 0
    tp_style: str | None = None
    decayed: bool = False
    copies: tuple[int, ...] = ()
    decay_rule: str = ""
    rate: float = 1.0
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    fused: bool | None = None
    update: str = "adamw"
    form: Form | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON can hold. What only groups of the optimizer change stands there if they do."""
        return {name: own for name, own in asdict(self).items() if name not in _OF_SOME or own is not None}

    @property
    def decay_and_rate(self) -> str:
        """Whether it is decayed, in words, and what is other than for the optimizer: its rate and so on."""
        because = f"no ({self.decay_rule})" if self.trainable and self.decay_rule else "no"
        decay = because if not self.decayed else "yes" if self.weight_decay is None else f"{self.weight_decay:g}"
        if not self.trainable:
            return decay
        changes = [
            f"lr {self.rate:.3g}x" if self.rate != 1 else "",
            "" if self.betas is None else f"betas {self.betas[0]:g} {self.betas[1]:g}",
            "" if self.eps is None else f"eps {self.eps:g}",
            "" if self.fused is None else "fused" if self.fused else "not fused",
        ]
        return ", ".join(filter(None, (decay, *changes)))

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages that hold it."""
        return (self.stage, *self.copies)

    @property
    def fsdp_dim(self) -> int:
        """The dimension that FSDP shards; 0 if it shards none."""
        sharded = (placement for axis, placement in self.placements if axis in ("dp_shard", "dp_shard_cp", "ep_shard"))
        return int(next(sharded, "Shard(0)").removeprefix("Shard(").removesuffix(")"))

    @cached_property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return prod(self.shape)

    @cached_property
    def way(self) -> object:
        """In what way it is stored and updated: the rows that :meth:`like` made of one have the same."""
        return object()

    def like(self, name: str, aliases: tuple[str, ...], unit: str, stages: tuple[int, ...]) -> "ParameterRow":
        """Return the row of another parameter that is stored and updated in the same way."""
        row = object.__new__(ParameterRow)  # a model has thousands of rows, and few ways
        held = vars(row)
        held.update(vars(self))
        held["name"], held["aliases"], held["unit"] = name, aliases, unit
        held["stage"], held["copies"] = stages[0], stages[1:]
        held["numel"], held["way"] = self.numel, self.way
        return row


@dataclass(frozen=True)
class UnitRow:
    """How one unit gathers, computes and reduces.

    Attributes:
        name: module name; that of the root is the empty string.
        kind: ``root``, ``layer``, ``experts``, ``unit`` (declared), ``fp32`` (computes in fp32) or ``added`` (by the
            objective, which calls it).
        parameters: names of its parameters.
        reshard_after_forward: whether its gathered parameters are freed after forward.
        param_dtype: dtype of compute. ``None``: the stored dtype.
        reduce_dtype: dtype of gradient reduction. ``None``: the dtype of the gradient.
        output_dtype: dtype that its outputs are cast to. ``None``: no cast.
        sync: what it does between microbatches.
        activation_checkpointing: which of its activations are recomputed in backward. Only layers have a mode.
        compile: whether it is compiled.
        gathers_in_backward: whether backward needs its gathered parameters, because a gradient flows through it or FSDP2
            prefetches it. If they are gathered still (no reshard, or ``defer``), backward does not gather them again.
        forwards: forward runs of the module in a microbatch, of which only the last has a backward; 0: it is idle.
        places: number of places in the model where the module stands, such as a block that every sixth layer uses. It runs in
            each of them, with a backward.
        twin_of: for the second of two twin units, the first one, whose sharded parameters it gathers and reduces too; otherwise
            empty.
        part_of: for a module of a shared unit that is not its first, the unit; otherwise empty. Such a module is no unit
            itself.
        together: whether its modules have parameters of their own, and not the same.
        tokens: which tokens of its microbatch enter it on a rank: ``all``, a slice of each sequence, or those that are routed
            to it.
    """

    name: str
    kind: str
    parameters: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    sync: SyncPolicy = SyncPolicy.REDUCE_EACH
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    compile: bool = False
    gathers_in_backward: bool = False
    forwards: int = 1
    places: int = 1
    twin_of: str = ""
    part_of: str = ""
    tokens: str = "all"
    together: bool = False

    def __hash__(self) -> int:
        """Names tell the units of a plan apart."""
        return hash(self.name)

    @property
    def label(self) -> str:
        """The name to show to people."""
        return self.name or "(root)"


@dataclass(frozen=True)
class TensorParallelRow:
    """How one module computes under tensor parallel.

    Attributes:
        module: name of the module.
        style: a style of transformers, or one that the resolver derives (:data:`~meshwright.plan.axes.tensor.styles.DERIVED`),
            or one that has no slices of its own: ``region``, ``adapted`` (around a matrix and its adapter), ``stack`` (the
            first layer, and layers with parameters of their own), ``sequence_parallel``; ``span`` and ``whole_span`` (where the
            whole sequence is needed from one module to another), with ``on_parts`` and ``on_whole`` for what is in them.
        entry: move of its input.
        exit: move of its output.
        sums: its own parameters that every rank stores whole and uses in part, so that their gradients are summed over ``tp``.
        parts: sizes of the matrices in a fused one (``fused_colwise``, ``adapted``), the number of all key/value heads
            (``grouped_colwise``), or the numbers of query heads and key/value heads on a rank (``region``).
        features: number of features that enter, and of those that leave, over all ranks.
        flat: whether the rows of a batch are one dimension, [rows x positions, features], in what it returns. So they are in
            what it takes, too, where that has no dimension of rows.
    """

    module: str
    style: str
    entry: Move = Move.NONE
    exit: Move = Move.NONE
    sums: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    features: tuple[int, int] = (0, 0)
    flat: bool = False

    @property
    def name(self) -> str:
        """The name of the module."""
        return self.module


@dataclass(frozen=True)
class ExpertsRow:
    """How one mixture of experts is distributed, and which tokens it gets.

    Attributes:
        module: name of the mixture.
        router: name of the module that chooses experts; empty: unknown.
        scores: what the first output of the router is (:class:`~meshwright.plan.given.spec.Scores`).
        bias: name of the buffer that balances the load; empty: none is known.
        experts: number of routed experts of the layer.
        local: number of experts on each rank of `ep`.
        token_axis: axis whose ranks have the same tokens, so that each sends only its share; empty: there is none.
        features: number of features of a token that enters it.
        slice_axis: axis whose ranks have different slices of each sequence where its router runs, though other modules see them
            all; empty: there is none.
    """

    module: str
    router: str
    scores: str
    bias: str
    experts: int
    local: int
    token_axis: str = ""
    features: int = 0
    slice_axis: str = ""

    @property
    def name(self) -> str:
        """The name of the module."""
        return self.module


@dataclass(frozen=True)
class AttentionRow:
    """How one attention works on a part of each sequence, with context parallel.

    Attributes:
        module: name of the attention.
        method: how it gets the keys and values of the other ranks of `cp`.
        kernel: what it computes with, a value of ``attn_implementation``.
        heads: number of heads of queries on a rank of `tp`.
        kv_heads: number of heads of keys and values on a rank of `tp`.
        key_size: size of a head of queries and keys.
        value_size: size of a head of values.
        causal: whether a query sees no later key.
        window: number of keys up to its own that a query sees; ``None``: all.
        sinks: whether each head has a sink, one more logit without a value.
        recompute: whether backward gets keys and values again, instead of keeping them.
        carried: whether the forward of the model carries the positions to it, because no argument does.
        calls: how often the module attends when it runs once.
        cached: whether it computes itself, with the keys and values of all ranks from a cache of ours.
        trained: whether a gradient goes back through its keys and values.
    """

    module: str
    method: ContextMethod
    kernel: str
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    causal: bool
    window: int | None
    sinks: bool
    recompute: bool
    carried: bool = False
    calls: int = 1
    cached: bool = False
    trained: bool = True

    @property
    def name(self) -> str:
        """The name of the module."""
        return self.module

    @property
    def mask(self) -> str:
        """The mask within a document, in words."""
        return f"window of {self.window}" if self.window is not None else "causal" if self.causal else "whole document"


@dataclass(frozen=True)
class LossRow:
    """A loss that is computed in chunks of tokens.

    Attributes:
        module: name of the output head.
        vocabulary: number of words.
        chunks: number of chunks of a microbatch.
    """

    module: str
    vocabulary: int
    chunks: int

    @property
    def name(self) -> str:
        """The name of the head."""
        return self.module


@dataclass(frozen=True)
class StageRow:
    """One pipeline stage.

    Attributes:
        index: its place in the model: 0 has the embedding.
        rank: index on `pp` of the rank that has it.
        layers: names of its layers.
        cost: multiply-adds of a token in forward, over those of the whole model.
    """

    index: int
    rank: int
    layers: tuple[str, ...]
    cost: float

    @property
    def name(self) -> str:
        """The number of the stage, in words."""
        return f"stage {self.index}"
