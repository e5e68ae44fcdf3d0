"""The draft of a plan: what is known, and what the passes of the resolver have found so far.

A pass is a function that takes a draft and returns what it found (:class:`Found`). It changes nothing; the resolver puts what
was found into the next draft.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from meshwright.errors import MissingPlanError, PlanError, Problems, Refusal
from meshwright.layout import Layout
from meshwright.once import Once
from meshwright.plan.given.closed_choices import ActivationCheckpointing, SyncPolicy
from meshwright.plan.given.inspection import Inspection, ParameterFacts
from meshwright.plan.given.names import generalize, match_names, without_repetition
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.given.sliceable_pairs import Pairs
from meshwright.plan.given.spec import ParallelSpec, Structure
from meshwright.plan.result.arrangement import Arrangement
from meshwright.plan.result.program import Cut
from meshwright.plan.result.rows import AttentionRow, ExpertsRow, LossRow, ParameterRow, StageRow, TensorParallelRow, UnitRow
from meshwright.plan.result.sharding_plan import EXPERTS, LAYER, shard_axis
from meshwright.plan.update.matrices import Form

__all__ = ["Arranged", "Draft", "Found", "Rate", "Stages", "TensorParallel", "Twin", "Way", "names_for"]

T = TypeVar("T")


@dataclass(frozen=True)
class Found(Generic[T]):
    """What a pass of the resolver found.

    Attributes:
        value: the value of its field of the draft.
        problems: what is wrong. A pass continues after a problem if it can, so that one report has all of them.
        remarks: what was assumed, and which units of the spec were left out, a sentence each.
    """

    value: T
    problems: Sequence[Refusal] = ()
    remarks: Sequence[str] = ()


class Twin(NamedTuple):
    """The unit of a first stack that has the parameters of a unit of a second stack, and the forwards of the second."""

    first: str
    forwards: int


@dataclass(frozen=True)
class TensorParallel:
    """How a model is sliced.

    Attributes:
        level: where the styles come from: ``given``, ``family``, ``model`` or ``derived``; empty if ``tp`` is 1.
        passed_over: (level, reason) for each level above it, and (module, reason) for each module that is kept whole despite
            its style.
        rows: row of each module that computes with slices or has a move.
        styles: style of each parameter that has one, by its first name.
        pairs: what can be sliced together, as a trace found it.
        on_slices: names of the mixtures that take tokens of slices of the sequence.
    """

    level: str = ""
    passed_over: tuple[tuple[str, str], ...] = ()
    rows: tuple[TensorParallelRow, ...] = ()
    styles: Mapping[str, str] = field(default_factory=dict)
    pairs: Pairs = field(default_factory=Pairs)
    on_slices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rate:
    """How a parameter is updated.

    Attributes:
        share: its learning rate, as a share of that of the optimizer.
        weight_decay: that of its group; ``None``: that of the optimizer.
        betas: those of its group, so too.
        eps: so too.
        fused: so too.
        rule: name of the rule of its group; empty: that of the run.
    """

    share: float = 1.0
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    fused: bool | None = None
    rule: str = ""


class Way(NamedTuple):
    """In what way a parameter is stored and updated, without sizes of the layout.

    Attributes:
        shape: its shape.
        dtype: in which it is stored.
        of_unit: kind of its unit, and the dtypes in which that computes and reduces.
        style: how `tp` or `ep` slices it.
        trainable: whether it is trained.
        rate: what its group of the optimizer changes.
        decay_rule: the rule that says whether it is decayed.
        update: the rule that updates it.
        form: what its weights are for Muon.
    """

    shape: tuple[int, ...]
    dtype: str
    of_unit: tuple[str, str | None, str | None]
    style: str | None
    trainable: bool
    rate: Rate
    decay_rule: str
    update: str
    form: Form | None


class Arranged(NamedTuple):
    """The parameters with their ways.

    Attributes:
        arrangement: units, stages and ways of the parameters.
        ways: the ways, in order of their numbers.
    """

    arrangement: Arrangement
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class Stages:
    """The pipeline stages.

    Attributes:
        rows: their rows, in the order of the model; none without a pipeline.
        cut: the action that cuts the model; ``None`` without a pipeline.
        holding: first name of each parameter to the stages that hold it.
    """

    rows: tuple[StageRow, ...] = ()
    cut: Cut | None = None
    holding: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft(Once):
    """What is given, and below it the field of each pass. A pass sees what the passes before it found.

    Attributes:
        spec: what the family declares.
        model: the facts of the model.
        layout: resolved sizes.
        options: the choices.
        problems: what is wrong.
        remarks: what was assumed.
        units: rows of the units by name, in model order. Those of their values that depend on bytes come last.
        twins: name of each unit of a second stack to its twin in the first.
        unit_of: first name of each parameter to the name of the unit that has it.
        trained: first names of the parameters that have a gradient.
        decay_rules: first name of each parameter to why weight decay pulls it towards zero or does not (a field of its row).
        rates: first name of each parameter that a group of the optimizer names to what the group changes.
        rules: first name of each parameter to the name of the rule that updates it.
        forms: first name of each parameter that Muon updates to what each of its weights is.
        policies: the sync policy of each unit for which options or spec choose one; those of others depend on bytes.
        modes: activation checkpointing mode of each layer.
        tensor: how the model is sliced.
        experts: rows of the mixtures.
        attentions: rows of the attentions.
        mixers: rows of the mixers that ranks of `cp` divide by heads.
        stages: the pipeline stages.
        loss: the loss, if it is computed in chunks.
        arranged: the parameters by the way in which they are stored and updated.
        rows: rows of the parameters.
    """

    spec: ParallelSpec
    model: Inspection
    layout: Layout
    options: ParallelOptions
    problems: tuple[Refusal, ...] = ()
    remarks: tuple[str, ...] = ()
    units: Mapping[str, UnitRow] = field(default_factory=dict)
    twins: Mapping[str, Twin] = field(default_factory=dict)
    unit_of: Mapping[str, str] = field(default_factory=dict)
    trained: AbstractSet[str] = frozenset()
    decay_rules: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, Rate] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)
    policies: Mapping[str, SyncPolicy] = field(default_factory=dict)
    modes: Mapping[str, ActivationCheckpointing] = field(default_factory=dict)
    tensor: TensorParallel = field(default_factory=TensorParallel)
    experts: tuple[ExpertsRow, ...] = ()
    attentions: tuple[AttentionRow, ...] = ()
    mixers: tuple[MixerShare, ...] = ()
    stages: Stages = field(default_factory=Stages)
    loss: LossRow | None = None
    arranged: Arranged = field(default_factory=lambda: Arranged(Arrangement(()), ()))
    rows: tuple[ParameterRow, ...] = ()

    @property
    def parameters(self) -> tuple[ParameterFacts, ...]:
        """The facts of the model's parameters."""
        return self.model.parameters

    @property
    def structure(self) -> Structure:
        """The inside of the layers, as the spec declares it."""
        return self.spec.structure or Structure()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(name for name, unit in self.units.items() if unit.kind == LAYER)

    @cached_property
    def traced_pairs(self) -> Pairs | None:
        """What a trace of the model found about its linear layers; ``None``: it cannot be traced."""
        return self.model.traces.pairs(self.layers) if self.layers else None

    @property
    def pairs(self) -> Pairs:
        """The same; none if it cannot be traced."""
        return self.traced_pairs or Pairs()

    @property
    def mixtures(self) -> list[str]:
        """Names of the mixtures of experts."""
        return [name for name, unit in self.units.items() if unit.kind == EXPERTS]

    def shards(self, unit: UnitRow) -> int:
        """Return the number of ranks that the parameters of a unit are sharded over."""
        return self.layout.size(shard_axis(self.layout, unit.kind))

    def whole(self, unit: UnitRow) -> bool:
        """Return whether a unit is replicated and not sharded, so that every rank stores its parameters whole."""
        return self.layout.replicated and self.shards(unit) == 1

    def matched(self, patterns: Iterable[str]) -> list[str]:
        """Return the names of the modules that some patterns match, pattern by pattern; the root is in none."""
        return [name for pattern in patterns for name in self.model.matched(pattern)]

    def extended(self, field_name: str, found: Found[Any]) -> "Draft":
        """Return the draft with what a pass found; an empty name stands for no field, where only problems are looked for."""
        value = {field_name: found.value} if field_name else {}
        problems, remarks = (*self.problems, *found.problems), (*self.remarks, *found.remarks)
        return replace(self, problems=problems, remarks=remarks, **value)

    def refuse(self, more: Iterable[Refusal] = ()) -> None:
        """Raise all problems found so far, and ``more``, in one report.

        Raises:
            MissingPlanError: there are problems, and one is that there is no plan to slice the model by.
            PlanError: there are problems.
        """
        if problems := [*self.problems, *more]:
            missing = any(problem.code == "tp.no_styles" for problem in problems)
            raise (MissingPlanError if missing else PlanError)(without_repetition(problems))


def names_for(problems: Problems, rule: str, pattern: str, names: Iterable[str], kind: str) -> list[str]:
    """Return the names that a pattern matches; if there are none, add a problem.

    Args:
        problems: those of the pass that asks.
        rule: rule or option that the pattern belongs to, for the message.
        pattern: see :func:`~meshwright.plan.given.names.match_names`.
        names: names to match.
        kind: what the names belong to (modules, units, parameters), for the message.
    """
    names = list(names)
    matched = match_names(pattern, names)
    if not matched:
        there = "units are" if kind == "unit" else "there are, for example,"
        problems.add("plan.pattern", f"{rule} pattern {pattern!r} matches no {kind}; {there} {_examples(names)}")
    return matched


def _examples(names: Iterable[str]) -> str:
    """Return some of the names, for an error message."""
    return ", ".join(sorted({generalize(name) for name in names if name})[:12])
