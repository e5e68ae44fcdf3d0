"""The draft of a plan: what is known, what was decided so far, and what is wrong. Every pass of the resolver takes one."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.errors import PlanError, Problems
from meshwright.layout import Layout
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.inspection import Inspection, ParameterFacts
from meshwright.plan.given.names import generalize, match_names, without_repetition
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.sliceable_pairs import Pairs
from meshwright.plan.given.spec import ParallelSpec, Structure
from meshwright.plan.result.sharding_plan import EXPERTS, LAYER, ParameterRow, shard_axis

__all__ = ["Draft", "UnitDraft"]


@dataclass
class UnitDraft:
    """A unit in the draft: the fields of its row (:class:`~meshwright.plan.result.sharding_plan.UnitRow`), and the rule that
    made it.

    ``sync`` is ``None`` if neither options nor spec choose it. It is then decided when the bytes are known.
    """

    name: str
    kind: str
    rule: str
    reshard_after_forward: bool
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    sync: SyncPolicy | None
    forwards: int = 1
    places: int = 1
    twin_of: str = ""
    part_of: str = ""
    together: bool = False


@dataclass
class Draft:
    """The state that the passes of the resolver share.

    Attributes:
        spec: what the family declares.
        model: the facts of the model.
        layout: resolved sizes.
        options: the choices.
        problems: what is wrong, one line each. Passes continue after a problem if they can, so that one report has all of them.
        error: type of the exception that :meth:`refuse` raises.
        units: drafts of the units by name, in model order.
        twins: name of each unit of a second stack to that of its twin in the first.
        unit_of: first name of each parameter to the name of the unit that has it.
        trained: first names of the parameters that have a gradient.
        decay_rules: first name of each parameter to why weight decay pulls it towards zero or does not (a field of its row).
        tp_styles: first name of each parameter that has a tensor parallel style to that style.
        remarks: what was assumed, and which units of the spec were left out, a sentence each.
        stages_of: first name of each parameter to the pipeline stages that hold it; empty without a pipeline.
        rows: rows of the parameters.
    """

    spec: ParallelSpec
    model: Inspection
    layout: Layout
    options: ParallelOptions
    problems: Problems = field(default_factory=Problems)
    error: type[PlanError] = PlanError
    units: dict[str, UnitDraft] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    unit_of: dict[str, str] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    decay_rules: dict[str, str] = field(default_factory=dict)
    tp_styles: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    stages_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
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

    def shards(self, unit: UnitDraft) -> int:
        """Return the number of ranks that the parameters of a unit are sharded over."""
        return self.layout.size(shard_axis(self.layout, unit.kind))

    def whole(self, unit: UnitDraft) -> bool:
        """Return whether a unit is replicated and not sharded, so that every rank stores its parameters whole."""
        return self.layout.size("dp_replicate") > 1 and self.shards(unit) == 1

    def refuse(self) -> None:
        """Raise all problems found so far, in one report.

        Raises:
            PlanError: there are problems.
        """
        if self.problems:
            raise self.error(without_repetition(self.problems))

    def matched(self, patterns: Iterable[str]) -> list[str]:
        """Return the names of the modules that some patterns match, pattern by pattern; the root is in none."""
        return [name for pattern in patterns for name in match_names(pattern, self.model.names)]

    def match(self, rule: str, pattern: str, names: Iterable[str], kind: str) -> list[str]:
        """Return the names that a pattern matches; if there are none, note a problem.

        Args:
            rule: rule or option that the pattern belongs to, for the message.
            pattern: see :func:`~meshwright.plan.given.names.match_names`.
            names: names to match.
            kind: what the names belong to (modules, units, parameters), for the message.
        """
        names = list(names)
        matched = match_names(pattern, names)
        if not matched:
            there = "units are" if kind == "unit" else "there are, for example,"
            self.problems.add("plan.pattern", f"{rule} pattern {pattern!r} matches no {kind}; {there} {_examples(names)}")
        return matched


def _examples(names: Iterable[str]) -> str:
    """Return some of the names, for an error message."""
    return ", ".join(sorted({generalize(name) for name in names if name})[:12])
