"""ShardingPlan: one row for every parameter and every unit. Frozen, printable, comparable, JSON."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, get_type_hints

from meshwright.layout import Layout
from meshwright.plan.differences import PlanDifference, field_differences, row_differences
from meshwright.plan.moves import Move
from meshwright.plan.names import within
from meshwright.plan.options import DTYPES, ActivationCheckpointing, ParallelOptions, SyncPolicy
from meshwright.plan.program import ACTIONS, Action, Bias, Engine, Kernel, describe

__all__ = [
    "EXPERTS",
    "LAYER",
    "ROOT",
    "ExpertsRow",
    "ParameterRow",
    "ShardingPlan",
    "TensorParallelRow",
    "UnitRow",
    "itemsize",
    "nothing_is_sharded",
    "shard_axis",
    "unit_axes",
]

ROOT = ""
"""Name of the root unit: the model itself."""

LAYER = "layer"
"""Kind of the units that are layers."""

EXPERTS = "experts"
"""Kind of the units that are mixtures of experts."""


@dataclass(frozen=True)
class ParameterRow:
    """How one parameter is held.

    Attributes:
        name: its name in the model; ``aliases`` are the other names of a tied parameter.
        shape: global shape.
        dtype: dtype that it is stored in.
        unit: name of the unit that gathers and reduces it.
        placements: (axis, placement) pairs, only for axes larger than 1.
        local_shape: shape on rank 0 of each axis, which holds the most.
        bytes_per_rank: stored bytes on that rank, padding of uneven rows included.
        gathered_bytes: bytes of the gathered parameter in the dtype of compute, padding included.
        reduced_bytes: bytes that go into the reduction of its gradient, padding included; 0 if frozen.
        trainable: whether it has a gradient.
        stage: pipeline stage that holds it.
        tp_style: declared tensor parallel style; ``None``: replicated over ``tp``.
        decayed: whether weight decay pulls it towards zero: a trained matrix, and no bias, no norm
            (:mod:`meshwright.plan.decay`).
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

    @property
    def fsdp_dim(self) -> int:
        """The dimension that FSDP shards."""
        sharded = (placement for axis, placement in self.placements if axis in ("dp_shard", "dp_shard_cp", "ep_shard"))
        return int(next(sharded, "Shard(0)").removeprefix("Shard(").removesuffix(")"))

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class UnitRow:
    """How one unit behaves.

    Attributes:
        name: module name; the root is the empty string.
        kind: ``root``, ``layer``, ``experts``, ``unit`` (declared) or ``fp32`` (kept in fp32).
        parameters: names of its parameters.
        reshard_after_forward: whether its gathered parameters are freed after forward.
        param_dtype: dtype of compute. ``None``: as stored.
        reduce_dtype: dtype of reduction. ``None``: that of the gradient.
        output_dtype: dtype that its outputs are cast to. ``None``: no cast.
        sync: what it does between microbatches.
        activation_checkpointing: which of its activations are recomputed in backward; only layers have a mode.
        compile: whether it is compiled.
        gathers_in_backward: whether a gradient flows through it, so that backward needs its parameters.
        forwards: times that the module runs in a microbatch, the last of them with a backward; 0: it is idle.
        twin_of: unit whose sharded parameters this one gathers and reduces too (twin units); empty: its own.
        part_of: unit that this module was wrapped together with (a shared unit), so that it is none itself; empty: it is one.
        tokens: of its microbatch that come into it on a rank: ``all``, a part of each sequence, or those that are routed to it.
    """

    name: str
    kind: str
    parameters: tuple[str, ...]
    reshard_after_forward: bool
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    sync: SyncPolicy
    activation_checkpointing: ActivationCheckpointing
    compile: bool
    gathers_in_backward: bool
    forwards: int = 1
    twin_of: str = ""
    part_of: str = ""
    tokens: str = "all"

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name or "(root)"


@dataclass(frozen=True)
class TensorParallelRow:
    """How one module computes under tensor parallel.

    Attributes:
        module: its name.
        style: in the words of transformers; ``region``, ``adapted`` (around a matrix and its adapter), ``stack`` (the first of
            the layers) and ``sequence_parallel`` have no slices of their own.
        entry: how its input comes in.
        exit: how its output leaves.
        sums: its own parameters that every rank holds whole and uses in part, so that their gradients are summed over ``tp``.
        parts: sizes of the matrices that a fused one holds (``fused_colwise``, ``adapted``), all heads (``grouped_colwise``),
            or heads of queries and of keys on a rank (``region``).
    """

    module: str
    style: str
    entry: Move = Move.NONE
    exit: Move = Move.NONE
    sums: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """That of the module."""
        return self.module


@dataclass(frozen=True)
class ExpertsRow:
    """How one mixture of experts is held and fed.

    Attributes:
        module: its name.
        router: name of the module that chooses experts; empty: unknown.
        scores: what the first output of the router is (:class:`~meshwright.plan.spec.Scores`).
        bias: name of the buffer that balances the load; empty: none that is known.
        experts: routed experts of the layer, ``local`` of them on each rank of `ep`.
        token_axis: axis whose ranks have the same tokens, of which each sends its share; empty: none.
    """

    module: str
    router: str
    scores: str
    bias: str
    experts: int
    local: int
    token_axis: str = ""

    @property
    def name(self) -> str:
        """That of the module."""
        return self.module


@dataclass(frozen=True)
class ShardingPlan:
    """Spec x model x layout x options, resolved.

    Attributes:
        family: name of the spec.
        layout: resolved sizes.
        options: the choices that made it.
        layers: names of the layers, in forward order.
        parameters: one row each, in the order of the model.
        units: one row each, in the order of the model; the root is first. A module that is part of a shared unit has a row too.
        tensor_parallel: one row for each module that computes with slices or moves something; empty where ``tp`` is 1.
        experts: one row for each mixture of experts.
        tp_level: whose tensor parallel styles were taken: ``given``, ``family``, ``model`` or ``generic``.
        tp_passed_over: (level, reason) of the levels above it.
        flags_of_use: whether data ranks tell each other at the end of a step which parameters they used.
        program: what is done to the model, in this order.
    """

    family: str
    layout: Layout
    options: ParallelOptions
    layers: tuple[str, ...]
    parameters: tuple[ParameterRow, ...]
    units: tuple[UnitRow, ...]
    tensor_parallel: tuple[TensorParallelRow, ...] = ()
    experts: tuple[ExpertsRow, ...] = ()
    tp_level: str = ""
    tp_passed_over: tuple[tuple[str, str], ...] = ()
    flags_of_use: bool = False
    program: tuple[Action, ...] = ()

    @property
    def fsdp_units(self) -> tuple[UnitRow, ...]:
        """The rows that are units of FSDP."""
        return tuple(unit for unit in self.units if not unit.part_of)

    @cached_property
    def _rows_of_units(self) -> dict[str, list[ParameterRow]]:
        found: dict[str, list[ParameterRow]] = {}
        for row in self.parameters:
            found.setdefault(row.unit, []).append(row)
        return found

    def rows(self, unit: UnitRow) -> list[ParameterRow]:
        """The parameters that a unit gathers; of a twin, those that its other half owns."""
        return self._rows_of_units.get(unit.twin_of or unit.name, [])

    def parts(self, unit: UnitRow) -> tuple[UnitRow, ...]:
        """The rows of the modules of a unit: itself, and what was wrapped together with it."""
        return (unit, *(other for other in self.units if other.part_of == unit.name and unit.name))

    def forwards(self, module: str) -> int:
        """Times that a module runs in a microbatch: as often as the innermost unit around it."""
        around = [unit for unit in self.units if within(module, (unit.name,))]
        return max(around, key=lambda unit: len(unit.name)).forwards

    @property
    def sequence_multiple(self) -> int:
        """What the length of a batch must be a multiple of."""
        return self.layout.size("tp") if self.options.sequence_parallel else 1

    def unit(self, name: str) -> UnitRow:
        """The row of a unit by name."""
        return next(unit for unit in self.units if unit.name == name)

    def parameter(self, name: str) -> ParameterRow:
        """The row of a parameter by name or alias."""
        return next(row for row in self.parameters if name == row.name or name in row.aliases)

    def to_dict(self) -> dict[str, Any]:
        """Every row, as what JSON can hold."""
        return {
            "family": self.family,
            "world_size": self.layout.world_size,
            "layout": asdict(self.layout),
            "options": self.options.to_dict(),
            "layers": list(self.layers),
            "parameters": [asdict(row) for row in self.parameters],
            "units": [asdict(row) for row in self.units],
            "tensor_parallel": [asdict(row) for row in self.tensor_parallel],
            "experts": [asdict(row) for row in self.experts],
            "tp_level": self.tp_level,
            "tp_passed_over": [list(pair) for pair in self.tp_passed_over],
            "flags_of_use": self.flags_of_use,
            "program": [{"action": type(action).__name__, **asdict(action)} for action in self.program],
        }

    def to_json(self) -> str:
        """The whole plan as JSON text; with its totals, :func:`~meshwright.plan.price.priced_json`."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ShardingPlan":
        """The plan that :meth:`to_json` wrote, or :func:`~meshwright.plan.price.priced_json`."""
        content = json.loads(text)

        def tuples(value: Any) -> Any:
            return tuple(tuples(item) for item in value) if isinstance(value, list) else value

        def row(kind: type[Any], item: dict[str, Any]) -> Any:
            types = get_type_hints(kind)
            values = {name: tuples(value) for name, value in item.items()}
            choices = (SyncPolicy, ActivationCheckpointing, Move, Kernel, Bias, Engine)
            return kind(**{name: types[name](value) if types[name] in choices else value for name, value in values.items()})

        def action(item: dict[str, Any]) -> Action:
            return row(ACTIONS[item["action"]], {name: value for name, value in item.items() if name != "action"})

        return cls(
            family=content["family"],
            layout=Layout(**content["layout"]),
            options=ParallelOptions(**content["options"]),
            layers=tuple(content["layers"]),
            parameters=tuple(row(ParameterRow, {**_decayed_then(item), **item}) for item in content["parameters"]),
            units=tuple(row(UnitRow, item) for item in content["units"]),
            tensor_parallel=tuple(row(TensorParallelRow, item) for item in content.get("tensor_parallel", [])),
            experts=tuple(row(ExpertsRow, item) for item in content.get("experts", [])),
            tp_level=content.get("tp_level", ""),
            tp_passed_over=tuples(content.get("tp_passed_over", [])),
            flags_of_use=content.get("flags_of_use", False),
            program=tuple(action(item) for item in content.get("program", [])),
        )

    def diff(self, other: "ShardingPlan") -> list[PlanDifference]:
        """What ``other`` does differently, row by row, and where all rows are equal, action by action."""
        found = [
            *field_differences("layout", self.layout, other.layout),
            *field_differences("options", self.options, other.options),
            *row_differences("parameter", self.parameters, other.parameters),
            *row_differences("unit", self.units, other.units),
            *row_differences("tensor parallel", self.tensor_parallel, other.tensor_parallel),
            *row_differences("experts", self.experts, other.experts),
        ]
        if not found and self.program and other.program:  # an earlier version wrote none
            ours, theirs = (dict.fromkeys(map(_line, plan.program)) for plan in (self, other))
            found += [PlanDifference(f"action {line}", "", line, None) for line in ours if line not in theirs]
            found += [PlanDifference(f"action {line}", "", None, line) for line in theirs if line not in ours]
        return found


def _decayed_then(parameter: dict[str, Any]) -> dict[str, Any]:
    """What was decayed before plans said so, by the version that wrote this one: all that has two dimensions."""
    return {"decayed": parameter["trainable"] and len(parameter["shape"]) >= 2}


def _line(action: Action) -> str:
    return f"{type(action).__name__} {': '.join(describe(action))}"


def shard_axis(layout: Layout, kind: str) -> str:
    """The axis (or flattened submesh) that the parameters of units of a kind are sharded and gathered over."""
    return "ep_shard" if kind == EXPERTS and layout.ep > 1 else "dp_shard_cp"


def nothing_is_sharded(layout: Layout) -> bool:
    """Whether there are replicas, whose ranks hold whole parameters, but for `tp` and `ep`.

    With experts sharded over `ep_shard`, which takes in ranks of `tp`, it is not so: one model has one kind of unit, because a
    root of torch's ``replicate`` does not see units of ``fully_shard`` as its own.
    """
    return layout.size("dp_shard_cp") == 1 and layout.size("dp_replicate") > 1 and (layout.ep == 1 or layout.ep_shard == 1)


def unit_axes(layout: Layout, kind: str) -> tuple[str, ...]:
    """The axes that units of a kind are replicated and sharded over; replicas come first, where there are any."""
    if nothing_is_sharded(layout):
        return ("dp_replicate",)
    axis = shard_axis(layout, kind)
    native = "dp_shard" if axis == "dp_shard_cp" and layout.size("cp") == 1 else axis
    return ("dp_replicate", native) if layout.size("dp_replicate") > 1 else (native,)


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    sizes = {**DTYPES, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "int64": 8, "int32": 4, "bool": 1}
    return sizes[dtype]
