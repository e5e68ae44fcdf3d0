"""ParallelOptions: the choices of a run that are neither sizes (layout) nor facts of the model (spec)."""

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache, cached_property
from typing import Any, NamedTuple, get_args

from meshwright.errors import PlanError, Problems
from meshwright.layout import Layout
from meshwright.once import Once
from meshwright.plan.given.closed_choices import (
    ActivationCheckpointing,
    ContextBalance,
    ContextMethod,
    GradientReduction,
    PipelineSchedule,
    SyncPolicy,
)

__all__ = [
    "DTYPES",
    "ParallelOptions",
    "UpdateRule",
]

NF4 = "nf4"
"""Dtype, in a plan, of frozen matrices that are stored and gathered in 4 bits."""

NF4_BLOCK = 64
"""Numbers that share a scale: 32 bytes of codes and 4 of the scale."""

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Legal dtypes of parameters, reductions and outputs, with the bytes of one element."""


def _option(default: Any, description: str, **legal: Any) -> Any:
    """Return a field with its description and what is legal.

    Args:
        default: a class is called.
        description: for the option and the key of the configuration that is made from it.
        legal: ``choices``, an enum or words, of the value or of each value of a dict; ``least``, a number, and ``why``.
    """
    value: dict[str, Any] = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return field(**value, metadata={"description": description, **legal})


def _chosen(name: str, word: Any, choices: Any, problems: Problems) -> Any:
    """Return what a word means: a member of an enum, or itself; an illegal one is added to the problems."""
    if word not in tuple(choices):
        problems.add("plan.option", f"{name}={word!r}: legal are {', '.join(choices)}")
        return word
    return choices(word) if isinstance(choices, type) else word


class UpdateRule(NamedTuple):
    """How an optimizer changes parameters.

    Attributes:
        name: in the rows of the plan, such as ``adamw``, or ``my_parts:Own (gamma=2.0)``.
        kind: one of ours; empty: an optimizer of the user.
        options: those of the kind, as pairs; of an optimizer of the user what it keeps (:mod:`meshwright.plan.update.states`).
    """

    name: str
    kind: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class ParallelOptions(Once):
    """Choices that the resolver turns into rows of the plan. Each field says what it is (``metadata["description"]``).

    The keys of the section ``parallel`` of a configuration are made from these fields
    (:mod:`meshwright.train.schema.parallel_config`). The others come from the rest of the configuration.
    """

    param_dtype: str | None = _option("bfloat16", "Dtype of compute and of gathered parameters.", choices=DTYPES)
    reduce_dtype: str | None = _option("float32", "Dtype that gradients are added in.", choices=DTYPES)
    output_dtype: str | None = _option(None, "Dtype that the model's outputs are cast to.", choices=DTYPES)
    reshard_after_forward: bool | None = _option(
        None,
        "Free gathered parameters after forward. null: all layers but the last, and not the root. true excludes sync=defer, "
        "which keeps them.",
    )
    sync: SyncPolicy | None = _option(
        None,
        "Between microbatches: 'defer' gathers and reduces once a step (fastest; whole parameters and gradients stay), "
        "'reshard_each' gathers each time and reduces once (gradients stay), 'reduce_each' does both each time (least "
        "memory). null: defer if what it keeps is at most sync_budget_gib, otherwise reduce_each: for experts, and if that "
        "is not enough, for all.",
        choices=SyncPolicy,
    )
    sync_budget: int = _option(8 * 2**30, "Budget in bytes, see 'sync'.")
    sync_units: Mapping[str, SyncPolicy] = _option(
        dict,
        "Policies for some units, by pattern of their names, such as {'model.layers.*': reduce_each}.",
        choices=SyncPolicy,
    )
    exclude_units: tuple[str, ...] = _option(
        (),
        "Patterns of modules that are no units of their own, though the family declares them so; the unit around them has "
        "their parameters.",
    )
    all_reduce_once: bool = _option(
        True,
        "With reduce_each and replicas: all-reduce across replicas only in the last microbatch.",
    )
    microbatches: int = _option(
        1,
        "Number of forward-backward passes in an optimizer step; only prices, and the choice for 'sync=None', depend on it.",
        least=1,
    )
    tokens: int | None = _option(
        None,
        "Number of tokens of a microbatch on a rank, which with 'cp' is its part of each sequence; only the bytes of "
        "activations depend on it. 'None': unknown.",
    )
    experts_of_token: int | None = _option(
        None,
        "Number of experts that each mixture routes a token to; only the bytes of activations depend on it.",
    )
    packed: bool = _option(False, "Whether sequences hold several documents, which positions tell apart.")
    balance_loss: int = _option(
        0,
        "Number of sequences in a microbatch if the loss balances routers, otherwise 0; only collectives over 'cp' depend on "
        "it.",
    )
    sequences: int = _option(
        1,
        "Number of sequences in a microbatch; only the bytes of tokens that ranks of 'cp' get beside their own depend on it.",
    )
    objective_gathers: int = _option(0, "How often the objective gathers values of all data ranks in a microbatch.")
    objective_reductions: int = _option(0, "How often it sums the gradients of such values over data ranks.")
    objective_gathered: int | None = _option(
        None, "Bytes of the values that it gathers in a microbatch, on a rank before they are gathered. 'None': unknown."
    )
    objective_reduced: int | None = _option(None, "Bytes of those of them whose gradients it sums. 'None': unknown.")
    objective_sums: int = _option(0, "How often it sums over documents, or their gradients, over 'cp' in a microbatch.")
    prefetch_forward: int | None = _option(
        None,
        "How many layers ahead all-gathers are started in forward; each holds one layer more. null: FSDP2's own way, which "
        "overlaps one where the CPU runs ahead of the GPU.",
        least=1,
        why="; FSDP2 cannot be kept from running ahead",
    )
    prefetch_backward: int | None = _option(
        None,
        "The same in backward; 0: none. null: FSDP2's own way, one ahead. A number excludes sync=defer, under which backward "
        "gathers nothing.",
        least=0,
    )
    cpu_offload: bool = _option(False, "Keep shards, gradients and optimizer state in host memory.")
    activation_checkpointing: ActivationCheckpointing = _option(
        ActivationCheckpointing.NONE,
        "What is recomputed in backward instead of kept. 'full': each layer, from its input (least memory). 'submodule': its "
        "attention, MLP and norms, one by one. 'selective': each layer, but the results of attention, communication, expert "
        "routing and every second matrix product are kept.",
        choices=ActivationCheckpointing,
    )
    activation_checkpointing_layers: Mapping[str, ActivationCheckpointing] = _option(
        dict,
        "Modes for some layers, by pattern of their names; a later one wins, as in {'model.layers.*': selective, "
        "'model.layers.0': none}.",
        choices=ActivationCheckpointing,
    )
    activation_checkpointing_save: tuple[str, ...] = _option(
        (),
        "What 'selective' keeps instead: names of operators, as in [aten.mm.default, aten.addmm.default].",
    )
    compile: bool = _option(False, "torch.compile each layer.")
    compile_backend: str = _option("inductor", "Backend of torch.compile.")
    freeze: tuple[str, ...] = _option(
        (),
        "Patterns of parameter names that are not trained; '*' is one component of a name, '**' one or more, as in "
        "'model.layers.0.**'.",
    )
    decay: tuple[str, ...] = _option((), "Patterns of names of parameters that are decayed although they are no matrices.")
    no_decay: tuple[str, ...] = _option((), "Patterns of names of parameters that are not decayed although they are matrices.")
    groups: tuple[tuple[str, float, float | None, float | None, tuple[tuple[str, Any], ...]], ...] = _option(
        (),
        "Groups of the optimizer: a pattern of names of parameters or modules, a share of the learning rate, a factor for each "
        "layer from the last one down, the weight decay, and what else it changes (betas, eps, fused, rule), as pairs.",
    )
    updates: tuple[tuple[str, str, tuple[tuple[str, Any], ...]], ...] = _option(
        (("adamw", "adamw", ()),), "The rules of the optimizer: name, kind and options. The first is that of the run."
    )
    sharded_by: str = _option("", "Name of a function of the user that makes the units; empty: torch's 'fully_shard' does.")
    gradient_reduction: GradientReduction = _option(
        GradientReduction.SUM,
        "Whether gradients are added or averaged over data ranks.",
        choices=GradientReduction,
    )
    twin_units: bool | None = _option(
        None,
        "Where two layers share parameters (an encoder's and a decoder's): true makes a unit of each, which holds one "
        "layer's gradients and sends twice as much; false one of both, which holds those of the whole stack. null: one of "
        "both where these are at most sync_budget_gib.",
    )
    sequence_parallel: bool = _option(
        False,
        "With tp: between attention and MLP each rank holds its part of the sequence. Less activation memory; a gather and a "
        "scatter for each all-reduce. Sequences are padded to a multiple of tp.",
    )
    loss_parallel: bool | None = _option(
        False,
        "With tp: logits stay sharded over the vocabulary, and the loss is computed there. null: wherever the model's output "
        "head is known.",
    )
    loss_chunks: int | None = _option(
        0,
        "Compute logits and loss of a microbatch in so many chunks of tokens, so that only the logits of one chunk exist at "
        "a time. 0: at once. null: by vocabulary, tokens of a microbatch and dtype, so that a chunk has at most 512 MiB of "
        "logits.",
        least=0,
        why="; 0 and 1 compute all logits at once",
    )
    tp_plan: Mapping[str, Any] | str | None = _option(
        None,
        "Tensor parallel styles that win over the family's and the model's own: {pattern of modules: style}, or the import "
        "path of such a dict or of a function that returns one.",
    )
    context_parallel: ContextMethod = _option(
        ContextMethod.GATHER,
        "With cp, how attention gets the keys of the other ranks. 'gather': all-gather keys and values (any mask, any "
        "heads). 'ulysses': exchange sequence for heads, tp * cp must divide them. 'ring': pass keys on from rank to rank, "
        "so that none ever has all.",
        choices=ContextMethod,
    )
    context_balance: ContextBalance = _option(
        ContextBalance.ZIGZAG,
        "With cp, which positions a rank has. 'zigzag': a chunk from the front and one from the back, so that causal "
        "attention is equal work for all. 'contiguous': one chunk.",
        choices=ContextBalance,
    )
    context_recompute: bool | None = _option(
        None,
        "With cp: backward gets keys of other ranks again instead of keeping them. null: no; a layer that is recomputed gets "
        "them again anyway.",
    )
    pipeline_schedule: PipelineSchedule = _option(
        PipelineSchedule.ONE_F_ONE_B,
        "Order of forwards and backwards. 'gpipe': all forwards first. '1f1b': one forward, one backward. "
        "'interleaved_1f1b': the same with several stages a rank. 'interleaved_zero_bubble', 'zbv', 'dualpipe_v': backward "
        "is split in two halves, of which the second fills the bubble.",
        choices=PipelineSchedule,
    )
    stages_per_rank: int | None = _option(None, "Stages of each rank. null: 1 for gpipe and 1f1b, 2 for the others.", least=1)
    pipeline_cuts: tuple[int, ...] = _option(
        (),
        "For each stage but the first, the number of its first layer, counted from 0. Empty: the largest stage gets the "
        "least work, with embedding and head.",
    )
    runs_per_step: int = _option(1, "Runs of the schedule in a step, each with its share of the microbatches.", least=1)

    def __post_init__(self) -> None:
        """Convert plain strings to the enums of closed choices, and refuse illegal values.

        Raises:
            PlanError: all illegal values together.
        """
        problems = Problems()
        for item, optional in _checked():
            name, value, choices = item.name, getattr(self, item.name), item.metadata.get("choices")
            if isinstance(item.default, tuple):
                value = tuple(tuple(one) if isinstance(one, list) else one for one in value)
            elif isinstance(value, Mapping) and choices:
                value = {key: _chosen(f"{name}[{key!r}]", word, choices, problems) for key, word in value.items()}
            elif choices and not (optional and value is None):
                value = _chosen(name, value, choices, problems)
            elif (least := item.metadata.get("least")) is not None and value is not None and value < least:
                problems.add("plan.option", f"{name}={value}: must be at least {least}{item.metadata.get('why', '')}")
            if value is not getattr(self, name):
                object.__setattr__(self, name, value)
        if problems:
            raise PlanError(problems)

    def sequence_multiple(self, layout: Layout) -> int:
        """Return the number that must divide the length of a sequence, so that all ranks have parts of equal length."""
        cp, tp = layout.size("cp"), layout.size("tp")
        chunks = 2 * cp if cp > 1 and self.context_balance is ContextBalance.ZIGZAG else cp
        return math.lcm(chunks, cp * tp if self.sequence_parallel else 1)

    @cached_property
    def rules(self) -> dict[str, UpdateRule]:
        """The rules of the optimizer by their names; the first is that of the run."""
        return {name: UpdateRule(name, kind, options) for name, kind, options in self.updates}

    def to_dict(self) -> dict[str, object]:
        """Return the options as plain values, for JSON."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: _plain(value) for name, value in plain.items()}


@cache
def _checked() -> list[tuple[Field[Any], bool]]:
    """Return the fields with values that may be illegal, or of another type, and whether ``None`` is legal for each."""
    checked = [
        item
        for item in fields(ParallelOptions)
        if isinstance(item.default, tuple) or item.metadata.get("choices") or item.metadata.get("least") is not None
    ]
    return [(item, type(None) in get_args(item.type)) for item in checked]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
