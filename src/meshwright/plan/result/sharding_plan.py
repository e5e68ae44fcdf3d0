"""ShardingPlan: a frozen plan with one row for each parameter and each unit. It can be printed, compared and saved as JSON."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.once import Once
from meshwright.plan.given.options import DTYPES, NF4, NF4_BLOCK, ParallelOptions
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.result.action_values import describe, read_action, read_row, read_tuples, values_of
from meshwright.plan.result.context.canvas_rows import CanvasRow
from meshwright.plan.result.differences import PlanDifference, field_differences, row_differences
from meshwright.plan.result.plan_rows import PlanRows, rows_of_plans
from meshwright.plan.result.program import Action, Cut
from meshwright.plan.result.rows import AttentionRow, ExpertsRow, LossRow, ParameterRow, StageRow, TensorParallelRow, UnitRow
from meshwright.plan.update.matrices import read_form

__all__ = [
    "EXPERTS",
    "LAYER",
    "NO_PROGRAM",
    "ROOT",
    "AttentionRow",
    "ExpertsRow",
    "ParameterRow",
    "ShardingPlan",
    "StageRow",
    "TensorParallelRow",
    "UnitRow",
    "bytes_of",
    "itemsize",
    "nothing_is_sharded",
    "shard_axis",
    "unit_axes",
]

ROOT = ""
"""Name of the root unit, which is the model itself."""

LAYER = "layer"
"""Kind of the units that are layers."""

EXPERTS = "experts"
"""Kind of the units that are mixtures of experts."""

ADDED = "added"
"""Kind of the units that an objective added to the model, and calls."""

_ITEMSIZES = {**DTYPES, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "int64": 8, "int32": 4, "bool": 1}

NO_PROGRAM = "the plan has no program: it is of an earlier version of Meshwright, or for prices; make it anew with resolve()"
"""What is wrong with a plan that has rows only."""


@dataclass(frozen=True)
class ShardingPlan(Once):
    """The result of resolving spec x model x layout x options.

    Attributes:
        family: name of the spec.
        layout: resolved sizes.
        options: the choices that the plan was made with.
        layers: names of the layers, in forward order.
        parameters: one row for each parameter, in model order.
        units: one row for each unit, in model order; the root is first. A module that is part of a shared unit has a row too.
        tensor_parallel: one row for each module that computes with slices or has a move; empty if ``tp`` is 1.
        experts: one row for each mixture of experts.
        attentions: one row for each attention that uses the attention function of context parallel; empty: none does.
        mixers: one row for each mixer whose heads the ranks of ``cp`` divide; empty if ``cp`` is 1.
        stages: one row for each pipeline stage, in the order of the model; empty if ``pp`` is 1.
        loss: the loss, if it is computed in chunks; ``None``: from all logits at once.
        tp_level: where the tensor parallel styles come from: ``given``, ``family``, ``model`` or ``derived``.
        tp_passed_over: (level, reason) for each level above it, and (module, reason) for each module that is kept whole despite
            its style.
        flags_of_use: whether data ranks exchange, at the end of a step, which parameters they used.
        remarks: what was assumed, and which units of the spec were left out, a sentence each.
        program: the actions that are performed on the model, in this order.
    """

    family: str
    layout: Layout
    options: ParallelOptions
    layers: tuple[str, ...]
    parameters: tuple[ParameterRow, ...]
    units: tuple[UnitRow, ...]
    tensor_parallel: tuple[TensorParallelRow, ...] = ()
    experts: tuple[ExpertsRow, ...] = ()
    attentions: tuple[AttentionRow, ...] = ()
    stages: tuple[StageRow, ...] = ()
    loss: LossRow | None = None
    tp_level: str = ""
    tp_passed_over: tuple[tuple[str, str], ...] = ()
    flags_of_use: bool = False
    remarks: tuple[str, ...] = ()
    program: tuple[Action, ...] = ()
    mixers: tuple[MixerShare, ...] = ()

    @cached_property
    def shared(self) -> PlanRows:
        """Its rows, with what they alone say: plans that have the same ones share it."""
        rows = (self.layers, self.parameters, self.units, self.tensor_parallel, self.experts, self.attentions, self.mixers)
        return rows_of_plans(*rows, self.stages, self.cut if self.stages and self.program else None)

    @property
    def fsdp_units(self) -> tuple[UnitRow, ...]:
        """The rows of modules that are FSDP units."""
        return self.shared.fsdp_units

    @property
    def first_trained_stage(self) -> int:
        """The first stage with a trained parameter; the number of stages if there is none."""
        return self.shared.first_trained_stage

    @cached_property
    def cut(self) -> Cut | None:
        """The action that makes its stages; ``None``: it has none.

        Raises:
            PlanError: it has stages, but no program.
        """
        if self.stages and not self.program:
            raise PlanError("plan.model", NO_PROGRAM)
        return next((action for action in self.program if isinstance(action, Cut)), None)

    def rows(self, unit: UnitRow) -> list[ParameterRow]:
        """Return the rows of the parameters that a unit gathers. The second of two twin units gathers those of the first."""
        return self.shared.rows(unit)

    def parts(self, unit: UnitRow) -> tuple[UnitRow, ...]:
        """Return the rows of the modules of a unit: its own row, and those of modules that were wrapped together with it."""
        return self.shared.parts(unit)

    @property
    def numbers(self) -> tuple[int, int]:
        """The number of elements of all parameters, each counted once, and of those that are trained."""
        return self.shared.numbers

    def runs(self, module: str) -> tuple[int, int]:
        """Return the forwards and the backwards of a module in a microbatch: those of the innermost unit around it."""
        return self.shared.runs(module)

    @property
    def sequence_multiple(self) -> int:
        """The number that must divide the sequence length of a batch."""
        return self.options.sequence_multiple(self.layout)

    @property
    def has_program(self) -> bool:
        """Whether it has a program, and not only the cut, which prices need too."""
        return any(not isinstance(action, Cut) for action in self.program)

    @property
    def sliced_modules(self) -> dict[str, TensorParallelRow]:
        """The rows of modules that compute with slices or have a move, by module."""
        return self.shared.sliced_modules

    def unit(self, name: str) -> UnitRow:
        """Return the row of a unit by name."""
        return self.shared.units_by_name[name]

    def parameter(self, name: str) -> ParameterRow:
        """Return the row of a parameter by name or alias."""
        return next(row for row in self.parameters if name == row.name or name in row.aliases)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole plan as values that JSON can hold."""
        return {
            "family": self.family,
            "world_size": self.layout.world_size,
            "layout": asdict(self.layout),
            "options": self.options.to_dict(),
            "layers": list(self.layers),
            "parameters": [row.to_dict() for row in self.parameters],
            "units": [asdict(row) for row in self.units],
            "tensor_parallel": [asdict(row) for row in self.tensor_parallel],
            "experts": [asdict(row) for row in self.experts],
            "attentions": [asdict(row) for row in self.attentions],
            **({"mixers": [asdict(row) for row in self.mixers]} if self.mixers else {}),
            "stages": [asdict(row) for row in self.stages],
            "loss": None if self.loss is None else asdict(self.loss),
            "tp_level": self.tp_level,
            "tp_passed_over": [list(pair) for pair in self.tp_passed_over],
            "flags_of_use": self.flags_of_use,
            "remarks": list(self.remarks),
            "program": [{"action": type(action).__name__, **values_of(action)} for action in self.program],
        }

    def to_json(self) -> str:
        """Return the whole plan as JSON text; :func:`~meshwright.plan.cost.price.priced_json` adds its totals."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ShardingPlan":
        """Return the plan that :meth:`to_json` or :func:`~meshwright.plan.cost.price.priced_json` wrote."""
        content = json.loads(text)

        units = tuple(read_row(UnitRow, item) for item in content["units"])
        sliced = tuple(read_row(TensorParallelRow, item) for item in content.get("tensor_parallel", []))
        experts = tuple(read_row(ExpertsRow, item) for item in content.get("experts", []))
        attentions = tuple(
            read_row(CanvasRow if "canvas" in item else AttentionRow, item) for item in content.get("attentions", [])
        )
        mixers = tuple(read_row(MixerShare, item) for item in content.get("mixers", []))
        loss = read_row(LossRow, content["loss"]) if content.get("loss") else None
        rows = {(type(own), own.name): own for own in (*units, *sliced, *experts, *mixers, *([loss] if loss else []))}
        rows |= {(AttentionRow, own.name): own for own in attentions}
        return cls(
            family=content["family"],
            layout=Layout(**content["layout"]),
            options=ParallelOptions(**{name: read_tuples(value) for name, value in content["options"].items()}),
            layers=tuple(content["layers"]),
            parameters=tuple(read_row(ParameterRow, _completed(item)) for item in content["parameters"]),
            units=units,
            tensor_parallel=sliced,
            experts=experts,
            attentions=attentions,
            stages=tuple(read_row(StageRow, item) for item in content.get("stages", [])),
            loss=loss,
            tp_level=content.get("tp_level", ""),
            tp_passed_over=read_tuples(content.get("tp_passed_over", [])),
            flags_of_use=content.get("flags_of_use", False),
            remarks=tuple(content.get("remarks", [])),
            program=tuple(read_action(item, rows) for item in content.get("program", [])),
            mixers=mixers,
        )

    def diff(self, other: "ShardingPlan") -> list[PlanDifference]:
        """Return what differs in ``other``: row by row and, if all rows are equal, action by action."""
        differences = [
            *field_differences("layout", self.layout, other.layout),
            *field_differences("options", self.options, other.options),
            *row_differences("parameter", self.parameters, other.parameters),
            *row_differences("unit", self.units, other.units),
            *row_differences("tensor parallel", self.tensor_parallel, other.tensor_parallel),
            *row_differences("experts", self.experts, other.experts),
            *row_differences("attention", self.attentions, other.attentions),
            *row_differences("mixer", self.mixers, other.mixers),
            *row_differences("pipeline", self.stages, other.stages),
            *row_differences("loss", *([plan.loss] if plan.loss else [] for plan in (self, other))),
        ]
        if not differences and self.has_program and other.has_program:
            ours, theirs = (dict.fromkeys(map(_line, plan.program)) for plan in (self, other))
            differences += [PlanDifference(f"action {line}", "", line, None) for line in ours if line not in theirs]
            differences += [PlanDifference(f"action {line}", "", None, line) for line in theirs if line not in ours]
        return differences


def _completed(parameter: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a row, also of an earlier version.

    That decayed all trained parameters of two or more dimensions, and knew the optimizer of a group only.
    """
    trained, of_group = parameter["trainable"], parameter.get("optimizer") or "adamw"
    then = {"decayed": trained and len(parameter["shape"]) >= 2, "update": of_group if trained else "frozen"}
    now = {name: own for name, own in parameter.items() if name != "optimizer"}
    return {**then, **now, **({"form": read_form(now["form"])} if "form" in now else {})}


def _line(action: Action) -> str:
    return f"{type(action).__name__} {': '.join(describe(action))}"


def shard_axis(layout: Layout, kind: str) -> str:
    """Return the axis (or flattened submesh) that units of a kind shard and gather their parameters over."""
    return "ep_shard" if kind == EXPERTS and layout.ep > 1 else "dp_shard_cp"


def nothing_is_sharded(layout: Layout) -> bool:
    """Return whether all units use ``replicate``: parameters are whole apart from slices of `tp` and `ep`, and have replicas.

    If experts are sharded over `ep_shard` (which includes ranks of `tp`), all units use ``fully_shard``, dense ones over one
    shard: a root made by torch's ``replicate`` does not treat units of ``fully_shard`` as its own.
    """
    return layout.size("dp_shard_cp") == 1 and layout.replicated and (layout.ep == 1 or layout.ep_shard == 1)


def unit_axes(layout: Layout, kind: str) -> tuple[str, ...]:
    """Return the axes that units of a kind are replicated and sharded over; the axis of replicas, if any, comes first."""
    if nothing_is_sharded(layout):
        return ("dp_replicate",)
    axis = shard_axis(layout, kind)
    native = "dp_shard" if axis == "dp_shard_cp" and layout.size("cp") == 1 else axis
    return ("dp_replicate", native) if layout.replicated else (native,)


def bytes_of(numel: int, dtype: str) -> int:
    """Return the bytes of some elements."""
    return numel // NF4_BLOCK * (NF4_BLOCK // 2 + 4) if dtype == NF4 else numel * itemsize(dtype)


def itemsize(dtype: str) -> int:
    """Return the bytes of one element."""
    return _ITEMSIZES[dtype]
