"""ParallelOptions: the choices of a run that are neither sizes (layout) nor facts of the model (spec)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import count
from typing import Any

from meshwright.errors import PlanError, Problems
from meshwright.layout import Layout

__all__ = [
    "DTYPES",
    "ActivationCheckpointing",
    "ContextBalance",
    "ContextMethod",
    "GradientReduction",
    "ParallelOptions",
    "PipelineSchedule",
    "SyncPolicy",
]

NF4 = "nf4"
"""Dtype, in a plan, of frozen matrices that are stored and gathered in 4 bits."""

NF4_BLOCK = 64
"""Numbers that share a scale: 32 bytes of codes and 4 of the scale."""

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Legal dtypes of parameters, reductions and outputs, with the bytes of one element."""


class SyncPolicy(StrEnum):
    """What a unit does between the microbatches of an optimizer step."""

    DEFER = "defer"
    """Gather once, reduce once. The gathered parameters and the unsharded gradients are kept through the step."""

    RESHARD_EACH = "reshard_each"
    """Gather in every microbatch, reduce once. Only the unsharded gradients are kept through the step."""

    REDUCE_EACH = "reduce_each"
    """Gather and reduce in every microbatch. Nothing unsharded is kept: the least memory, the most traffic."""


class ActivationCheckpointing(StrEnum):
    """Which activations of a layer are recomputed in backward instead of kept."""

    NONE = "none"
    """Keep all."""

    FULL = "full"
    """Keep the layer's input and recompute the rest at once: the least memory, a second forward of the whole layer."""

    SUBMODULE = "submodule"
    """Keep the inputs of its attention, its MLP and its norms, and recompute these modules one by one. This keeps more after
    forward than ``full``, and needs less memory at once in backward."""

    SELECTIVE = "selective"
    """Keep the layer's input and the results of operators that are expensive to repeat: attention, communication, the routing
    of experts and every second matrix product. Recompute the rest, which is cheap."""


class GradientReduction(StrEnum):
    """How the gradients of the data ranks are combined."""

    SUM = "sum"
    """Add them. The loss is divided by the number of valid tokens of the whole optimizer step, so no factor remains."""

    MEAN = "mean"
    """Average them over data ranks, as torch does by default, for loops whose loss is a mean on each rank."""


class ContextMethod(StrEnum):
    """How an attention gets the keys and values of the other ranks of `cp`."""

    GATHER = "gather"
    """All-gather keys and values. Any mask, any number of heads; a rank has all keys of an attention at once."""

    ULYSSES = "ulysses"
    """Exchange sequence for heads: a rank has all queries and keys of ``1 / cp`` of the heads. `cp` must divide the heads."""

    RING = "ring"
    """Pass keys and values from rank to rank. A rank never has more than two parts of them."""


class ContextBalance(StrEnum):
    """Which positions of a sequence each rank of `cp` has."""

    ZIGZAG = "zigzag"
    """Two chunks of ``2 cp``, one from the front and one from the back: under a causal mask all ranks have equal work."""

    CONTIGUOUS = "contiguous"
    """One chunk of ``cp``. Under a causal mask the last rank has the most work."""


class PipelineSchedule(StrEnum):
    """The order in which a rank of `pp` runs the forwards and backwards of its microbatches."""

    GPIPE = "gpipe"
    """All forwards, then all backwards (arXiv 1811.06965). The activations of all microbatches are alive at once."""

    ONE_F_ONE_B = "1f1b"
    """One forward, one backward (PipeDream-Flush, arXiv 2006.09503). At most as many microbatches as stages are alive."""

    INTERLEAVED = "interleaved_1f1b"
    """1f1b with several stages a rank (arXiv 2104.04473): a smaller bubble, more messages."""

    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"
    """The same with backward split in two halves, for inputs and for weights, of which the second fills the bubble."""

    ZBV = "zbv"
    """Zero bubble with two stages a rank in the form of a V (arXiv 2401.10241)."""

    DUALPIPE_V = "dualpipe_v"
    """DualPipe cut in half (arXiv 2412.19437): two stages a rank in the form of a V, forwards beside backwards."""

    @property
    def splits(self) -> bool:
        """Whether backward is split in two halves, for inputs and for weights."""
        return self not in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED)

    @property
    def single(self) -> bool:
        """Whether each rank has one stage; otherwise it has several."""
        return self in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B)

    def takes(self, pp: int, microbatches: int) -> bool:
        """Return whether torch's schedule runs a number of microbatches over ``pp`` ranks."""
        if self is PipelineSchedule.ONE_F_ONE_B:
            return microbatches >= pp
        if self is PipelineSchedule.DUALPIPE_V:
            return microbatches >= 2 * pp
        if self in (PipelineSchedule.INTERLEAVED, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE):
            return microbatches % max(1, microbatches // pp) == 0
        return True

    def least(self, pp: int, microbatches: int) -> int:
        """Return the least number of microbatches that the schedule runs, not below a given one."""
        return next(number for number in count(max(1, microbatches)) if self.takes(pp, number))

    @property
    def turns(self) -> bool:
        """Whether the stages of a rank have the form of a V: rank `i` of `p` has stages `i` and `2 p - 1 - i`."""
        return self in (PipelineSchedule.ZBV, PipelineSchedule.DUALPIPE_V)


@dataclass(frozen=True)
class ParallelOptions:
    """Choices that the resolver turns into rows of the plan.

    Args:
        param_dtype: dtype of gathered parameters and of compute; ``None``: that of the stored parameters.
        reduce_dtype: dtype of gradient reduction and accumulation; ``None``: ``param_dtype``.
        output_dtype: dtype that the root casts its floating-point outputs to; ``None``: no cast.
        reshard_after_forward: whether all units free their gathered parameters after forward; ``None``: the container rule (all
            layers but the last do, the root does not).
        sync: default policy of all units. ``None``: ``defer`` if everything that it keeps unsharded through a step (parameters
            and, with several microbatches, gradients) is at most ``sync_budget`` bytes. Otherwise ``reduce_each`` for experts,
            and for the rest too if that still does not fit.
        sync_budget: budget in bytes, see ``sync``.
        sync_units: pattern of unit names to policy; a later entry wins over an earlier one.
        exclude_units: patterns of modules that are no units, though the spec says so; the unit around holds what they have.
        all_reduce_once: with ``reduce_each`` and replicas, all-reduce across the replicas only in the last microbatch.
        microbatches: number of forward-backward passes in an optimizer step; only prices, and the choice for ``sync=None``,
            depend on it.
        tokens: number of tokens of a microbatch on a rank, which with ``cp`` is its part of each sequence; only the bytes of
            activations depend on it. ``None``: unknown.
        experts_of_token: number of experts that each mixture routes a token to; only the bytes of activations depend on it.
        packed: whether sequences hold several documents, which positions tell apart.
        balance_loss: number of sequences in a microbatch if the loss balances routers, otherwise 0; only collectives over
            ``cp`` depend on it.
        prefetch_forward: how many layers ahead all-gathers are started in forward; ``None``: FSDP2's default.
        prefetch_backward: the same in backward; 0: none.
        cpu_offload: keep sharded parameters, gradients and optimizer state in host memory.
        activation_checkpointing: what is recomputed in backward.
        activation_checkpointing_layers: pattern of layer names to mode; a later entry wins over an earlier one.
        activation_checkpointing_save: operators whose results ``selective`` keeps instead of its own choice, such as
            ``aten.mm.default``.
        compile: apply ``torch.compile`` to each layer.
        compile_backend: backend of ``torch.compile``.
        freeze: patterns of names of parameters that are not trained.
        decay: patterns of names of parameters that are decayed although they are no matrices.
        no_decay: patterns of names of parameters that are not decayed although they are matrices.
        sharded_by: name of a function of the user that makes the units; empty: torch's ``fully_shard`` does.
        gradient_reduction: whether gradients are added or averaged over data ranks.
        twin_units: for a stack that runs twice, where two layers share their parameters. ``True``: each layer is a unit (it
            gathers and reduces in each pass, and the gradients of one layer are held). ``False``: both layers are one unit (it
            reduces once, and the gradients of the whole stack wait for it). ``None``: one unit if these gradients are at most
            ``sync_budget`` bytes, otherwise two.
        sequence_parallel: with ``tp``, each rank has only its slice of the sequence between attention and MLP.
        loss_parallel: with ``tp``, leave logits sharded over the vocabulary (a DTensor), for the loss of
            :mod:`~meshwright.distributed.tensor.loss_parallel`. ``None``: do so if the model's head is known.
        loss_chunks: number of chunks of tokens whose logits and loss are computed one after another
            (:mod:`meshwright.plan.memory.loss_chunks`); 0: the model returns all logits. ``None``: by vocabulary, tokens and
            dtype.
        tp_plan: tensor parallel styles that win over all others: pattern of module names to style, or the import path of such a
            dict or of a function that returns one.
        context_parallel: how attentions get keys and values of the other ranks of ``cp``.
        context_balance: which positions of a sequence each rank of ``cp`` has.
        context_recompute: whether backward gets the keys and values of other ranks again, instead of keeping them from forward.
            ``None``: no. A layer that is recomputed gets them again in any case.
        pipeline_schedule: with ``pp``, the order of forwards and backwards.
        stages_per_rank: with ``pp``, the number of stages of a rank. ``None``: 1 for ``gpipe`` and ``1f1b``, otherwise 2.
        pipeline_cuts: with ``pp``, for each stage but the first, the index of its first layer; empty: cuts of least cost.
        runs_per_step: with ``pp``, the number of runs of the schedule in a step, each with its share of the microbatches.
    """

    param_dtype: str | None = "bfloat16"
    reduce_dtype: str | None = "float32"
    output_dtype: str | None = None
    reshard_after_forward: bool | None = None
    sync: SyncPolicy | None = None
    sync_budget: int = 8 * 2**30
    sync_units: Mapping[str, SyncPolicy] = field(default_factory=dict)
    exclude_units: tuple[str, ...] = ()
    all_reduce_once: bool = True
    microbatches: int = 1
    tokens: int | None = None
    experts_of_token: int | None = None
    packed: bool = False
    balance_loss: int = 0
    prefetch_forward: int | None = None
    prefetch_backward: int | None = None
    cpu_offload: bool = False
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    activation_checkpointing_layers: Mapping[str, ActivationCheckpointing] = field(default_factory=dict)
    activation_checkpointing_save: tuple[str, ...] = ()
    compile: bool = False
    compile_backend: str = "inductor"
    freeze: tuple[str, ...] = ()
    decay: tuple[str, ...] = ()
    no_decay: tuple[str, ...] = ()
    sharded_by: str = ""
    gradient_reduction: GradientReduction = GradientReduction.SUM
    twin_units: bool | None = None
    sequence_parallel: bool = False
    loss_parallel: bool | None = False
    loss_chunks: int | None = 0
    tp_plan: Mapping[str, Any] | str | None = None
    context_parallel: ContextMethod = ContextMethod.GATHER
    context_balance: ContextBalance = ContextBalance.ZIGZAG
    context_recompute: bool | None = None
    pipeline_schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    stages_per_rank: int | None = None
    pipeline_cuts: tuple[int, ...] = ()
    runs_per_step: int = 1

    def __post_init__(self) -> None:
        """Convert plain strings to the enums of closed choices, and refuse illegal values.

        Raises:
            PlanError: all illegal values together.
        """
        problems = Problems()
        for name, choices in (
            ("sync", SyncPolicy),
            ("activation_checkpointing", ActivationCheckpointing),
            ("gradient_reduction", GradientReduction),
            ("context_parallel", ContextMethod),
            ("context_balance", ContextBalance),
            ("pipeline_schedule", PipelineSchedule),
        ):
            if name == "sync" and self.sync is None:
                continue
            try:
                object.__setattr__(self, name, choices(getattr(self, name)))
            except ValueError:
                problems.add("plan.option", f"{name}={getattr(self, name)!r}: legal are {', '.join(choices)}")
        for name, choices in (("sync_units", SyncPolicy), ("activation_checkpointing_layers", ActivationCheckpointing)):
            chosen = {}
            for pattern, value in getattr(self, name).items():
                try:
                    chosen[pattern] = choices(value)
                except ValueError:
                    problems.add("plan.option", f"{name}[{pattern!r}]={value!r}: legal are {', '.join(choices)}")
            object.__setattr__(self, name, chosen)
        for name in ("exclude_units", "freeze", "decay", "no_decay", "activation_checkpointing_save", "pipeline_cuts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            if getattr(self, name) not in (None, *DTYPES):
                problems.add("plan.option", f"{name}={getattr(self, name)!r}: legal are {', '.join(DTYPES)}")
        if self.microbatches < 1:
            problems.add("plan.option", f"microbatches={self.microbatches}: must be at least 1")
        if self.prefetch_forward is not None and self.prefetch_forward < 1:
            problems.add(
                "plan.option",
                f"prefetch_forward={self.prefetch_forward}: must be at least 1; FSDP2 cannot be kept from running ahead",
            )
        if self.loss_chunks is not None and self.loss_chunks < 0:
            problems.add(
                "plan.option", f"loss_chunks={self.loss_chunks}: must be at least 0; 0 and 1 compute all logits at once"
            )
        if self.prefetch_backward is not None and self.prefetch_backward < 0:
            problems.add("plan.option", f"prefetch_backward={self.prefetch_backward}: must be at least 0")
        if problems:
            raise PlanError(problems)

    def sequence_multiple(self, layout: Layout) -> int:
        """Return the number that must divide the length of a sequence, so that all ranks have parts of equal length."""
        cp, tp = layout.size("cp"), layout.size("tp")
        chunks = 2 * cp if cp > 1 and self.context_balance is ContextBalance.ZIGZAG else cp
        return math.lcm(chunks, cp * tp if self.sequence_parallel else 1)

    def to_dict(self) -> dict[str, object]:
        """Return the options as plain values, for JSON."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            **plain,
            "sync_units": dict(self.sync_units),
            "activation_checkpointing_layers": dict(self.activation_checkpointing_layers),
            "activation_checkpointing_save": list(self.activation_checkpointing_save),
            "exclude_units": list(self.exclude_units),
            "freeze": list(self.freeze),
            "decay": list(self.decay),
            "no_decay": list(self.no_decay),
            "pipeline_cuts": list(self.pipeline_cuts),
            "tp_plan": dict(self.tp_plan) if isinstance(self.tp_plan, Mapping) else self.tp_plan,
        }
