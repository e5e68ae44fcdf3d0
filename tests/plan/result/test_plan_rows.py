"""What is found of rows by way and by kind of layer is what all rows one by one say, and plans share it that have the same."""

import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.plan.axes.data.prefetch import gathered_peak, layer_groups
from meshwright.plan.axes.data.unit_traffic import gradients_between
from meshwright.plan.axes.pipeline.stage_rows import rows_on_stages
from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.inspection import inspect_model
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.remembered_passes import RememberedPasses
from meshwright.plan.resolver import resolve
from meshwright.plan.result.alike_layers import alike_layers
from meshwright.plan.result.arrangement import ArrangedRows, Arrangement
from meshwright.plan.result.plan_rows import RowsByWay
from meshwright.plan.result.rows import ParameterRow, UnitRow
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.trace.fewer import kinds_of_layers
from tests.harness import refuses
from tests.tiny import make
from tests.trace.test_memory import setup_of

FAMILIES = ["llama", "gpt2", "mixtral", "diffusion_gemma", "nemotron_h"]
LAYOUT = Layout(dp_replicate=2, dp_shard=2)
NAMES = ("name", "aliases", "unit", "stage", "copies")


def planned(family: str, layout: Layout = LAYOUT, remembered: RememberedPasses | None = None, **options: Any) -> ShardingPlan:
    model, spec = make(family, meta=True)
    return resolve(spec, model, layout, ParallelOptions(**options), remembered=remembered)


def beside_names(row: ParameterRow) -> tuple[Any, ...]:
    return tuple(getattr(row, item.name) for item in fields(row) if item.name not in NAMES)


def sums(rows: Sequence[ParameterRow]) -> tuple[int, ...]:
    return (
        sum(row.gathered_bytes for row in rows),
        sum(row.reduced_bytes for row in rows),
        sum(row.bytes_per_rank for row in rows),
        sum(row.bytes_per_rank for row in rows if row.trainable),
    )


def sums_by_way(rows: RowsByWay) -> tuple[int, ...]:
    return rows.gathered_bytes, rows.reduced_bytes, rows.parameter_bytes, rows.gradient_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_way_say_the_same(family: str) -> None:
    plan = planned(family, freeze=("**.bias",) if family == "gpt2" else ())
    ways: dict[object, set[Any]] = {}
    for row in plan.parameters:
        ways.setdefault(row.way, set()).add(beside_names(row))
    assert all(len(said) == 1 for said in ways.values())
    assert len(ways) < len(plan.parameters)
    assert {row.way for row, _ in plan.shared.ways} == {*ways}
    assert sum(number for _, number in plan.shared.ways) == len(plan.parameters)
    assert sums_by_way(plan.shared.ways) == sums(plan.parameters)
    for unit in plan.units:
        own = [row for row in plan.parameters if row.unit == (unit.twin_of or unit.name)]
        assert plan.rows(unit) == own
        assert sums_by_way(plan.shared.ways_of(unit)) == sums(own)
    assert plan.numbers == tuple(sum(row.numel for row in plan.parameters if row.trainable >= only) for only in (False, True))


def test_a_row_that_is_changed_has_a_way_of_its_own() -> None:
    plan = planned("llama")
    row = plan.parameters[5]
    changed = replace(row, bytes_per_rank=row.bytes_per_rank + 8)
    assert changed.way is not row.way
    other = replace(plan, parameters=tuple(changed if one is row else one for one in plan.parameters))
    assert totals(other).parameter_bytes == totals(plan).parameter_bytes + 8


def rows_of_layer(plan: ShardingPlan, layer: str) -> list[Any]:
    """What rows say of a layer, one by one, without its name."""

    def rest(name: str) -> str:
        return name.removeprefix(layer)

    own = [row for row in plan.parameters if row.name.startswith(f"{layer}.")]
    said: list[Any] = [(rest(row.name), rest(row.unit), beside_names(row)) for row in own]
    units = [unit for unit in plan.units if unit.name == layer or unit.name.startswith(f"{layer}.")]
    names = ("name", "parameters")
    return said + [
        (rest(unit.name), *(getattr(unit, item.name) for item in fields(unit) if item.name not in names)) for unit in units
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "choices",
    [{}, {"sync": "defer", "sync_units": {"**.1": "reduce_each"}}, {"activation_checkpointing_layers": {"**.1": "full"}}],
    ids=["same", "sync", "recomputed"],
)
def test_layers_of_a_kind_say_the_same(family: str, choices: dict[str, Any]) -> None:
    plan = planned(family, **choices)
    alike, said = alike_layers(plan.shared), [rows_of_layer(plan, layer) for layer in plan.layers]
    for kind, own in zip(alike.kinds, said, strict=True):
        assert [other == own for other in said] == [other == kind for other in alike.kinds]
    assert list(dict.fromkeys(alike.kinds)) == list(range(len(alike.examples)))
    held = [*alike.parameters_outside, *(row for example in alike.examples for _, row in example.parameters)]
    assert {id(row) for row in held} <= {id(row) for row in plan.parameters}
    inside = {row.name for row in plan.parameters if any(row.name.startswith(f"{layer}.") for layer in plan.layers)}
    assert {row.name for row in alike.parameters_outside} == {row.name for row in plan.parameters} - inside


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_layers_are_alike_though_adapters_are_one_unit_over_all_of_them(family: str) -> None:
    adapter = {"rank": 4, "reduce": "once", **({"experts": True} if family == "mixtral" else {})}
    plan = setup_of(4, family, layers=4, layout={"dp_shard": 4}, adapter=adapter).plan
    assert any(unit.together for unit in plan.units)
    assert kinds_of_layers(plan) == [0] * 4
    # The unit has its name of the first one; the last one stays gathered after forward.
    assert alike_layers(plan.shared).kinds == [0, 1, 1, 2]


def test_a_layer_with_a_parameter_in_another_unit_is_of_another_kind() -> None:
    plan = setup_of(2, layers=4, layout={"dp_shard": 2}).plan
    kinds, layer = alike_layers(plan.shared).kinds, plan.layers[1]
    assert kinds.count(kinds[1]) > 1

    def moved(to: str) -> list[int]:
        rows = tuple(
            row.like(row.name, row.aliases, to, row.stages) if row.name.startswith(f"{layer}.mlp.") else row
            for row in plan.parameters
        )
        return list(alike_layers(replace(plan, parameters=rows).shared).kinds)

    assert moved(layer) == list(kinds)
    for unit in ("", plan.layers[2]):
        assert moved(unit).count(moved(unit)[1]) == 1


def test_kinds_do_not_depend_on_how_rows_were_made() -> None:
    """A plan that was read, or pickled, has other objects; only where all rows are made one by one is each a way of its own."""
    plan = setup_of(4, "mixtral", layers=4, layout={"dp_shard": 4}).plan
    read = ShardingPlan.from_json(plan.to_json())
    pickled = pickle.loads(pickle.dumps(plan))
    assert kinds_of_layers(read) == kinds_of_layers(pickled) == kinds_of_layers(plan)
    assert alike_layers(pickled.shared).kinds == alike_layers(plan.shared).kinds
    assert totals(read) == totals(pickled) == totals(plan)
    assert len(pickled.shared.ways.pairs) == len(plan.shared.ways.pairs) < len(read.shared.ways.pairs)


def test_plans_with_the_same_rows_share_them() -> None:
    model, spec = make("mixtral", meta=True)
    facts, remembered = inspect_model(spec, model), RememberedPasses()

    def of(replicas: int, shards: int, tp: int = 1) -> ShardingPlan:
        layout = Layout(dp_replicate=replicas, dp_shard=shards, tp=tp)
        return resolve(spec, facts, layout, ParallelOptions(), remembered=remembered)

    two, four, alone, more = of(2, 2), of(4, 2), of(1, 2), of(2, 4)
    assert four.shared is two.shared
    assert alone.shared is not two.shared  # its rows say of no axis that they are replicated over it
    assert more.shared is not two.shared
    assert of(8, 2, tp=2).shared is of(4, 2, tp=2).shared
    assert more.parameters[0].bytes_per_rank < two.parameters[0].bytes_per_rank
    assert more.shared.arrangement is two.shared.arrangement  # the number of shards changes bytes alone
    assert of(2, 2, tp=2).shared.arrangement is not two.shared.arrangement
    apart = resolve(spec, facts, Layout(dp_replicate=4, dp_shard=2), ParallelOptions())
    assert apart == four
    assert apart.shared is not four.shared
    assert totals(apart) == totals(four)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("pp", [1, 2])
def test_rows_are_arranged_as_they_say(family: str, pp: int) -> None:
    """The arrangement that a plan shares with others is that of its rows, one by one, also of those of each part."""
    plan = planned(family, Layout(pp=pp, dp_shard=2), microbatches=2)
    read = ShardingPlan.from_json(plan.to_json())
    assert isinstance(plan.parameters, ArrangedRows)
    assert plan.shared.arrangement.entries == Arrangement.of(tuple(plan.parameters)).entries
    assert type(pickle.loads(pickle.dumps(plan)).parameters) is tuple
    for stages in ([0], [1], [0, 1]) if pp > 1 else ():
        part = rows_on_stages(plan, stages)
        arrangement = part.shared.arrangement
        own = [row for row in read.parameters if {*stages} & {*row.stages}]
        assert list(part.parameters) == own == list(rows_on_stages(read, stages).parameters)
        assert [entry.name for entry in arrangement.entries] == [row.name for row in own]
        assert [own[place].name for place in arrangement.tied] == [row.name for row in own if row.aliases or row.copies]
        assert sums_by_way(part.shared.ways) == sums(own)
        for stage in (0, 1):
            held = [own[place].name for place in arrangement.of_stages.get(stage, ())]
            assert held == [row.name for row in own if stage in row.stages]
    tied = [row for row in plan.parameters if row.aliases]
    assert bool(tied) == (family == "qwen2")
    assert all(row.copies == (pp - 1,) * (pp > 1) for row in tied)


def test_rows_that_were_copied_have_the_same_ways() -> None:
    plan = planned("llama")
    copied = replace(plan, parameters=type(plan.parameters)(plan.parameters))  # without an arrangement
    assert copied.shared.arrangement.entries == plan.shared.arrangement.entries
    turned = replace(plan, parameters=tuple(reversed(plan.parameters)))
    assert alike_layers(turned.shared).kinds == alike_layers(plan.shared).kinds


def test_parts_of_plans_with_the_same_rows_share_them() -> None:
    model, spec = make("llama", meta=True)
    facts, remembered = inspect_model(spec, model), RememberedPasses()
    options = ParallelOptions(microbatches=4)
    two, four = (
        resolve(spec, facts, Layout(pp=2, dp_replicate=replicas, dp_shard=1), options, remembered=remembered)
        for replicas in (2, 4)
    )
    parts = [rows_on_stages(plan, [1]) for plan in (two, four)]
    assert parts[0].shared is parts[1].shared
    more = rows_on_stages(resolve(spec, facts, Layout(pp=2, dp_shard=2), options, remembered=remembered), [1])
    assert more.shared.arrangement is parts[0].shared.arrangement
    assert [entry[:4] for entry in more.shared.arrangement.entries] == [
        (row.name, row.aliases, row.unit, row.stages) for row in more.parameters
    ]
    assert more.shared.arrangement.ways == Arrangement.of(more.parameters).ways
    assert [part.layout.size("dp_replicate") for part in parts] == [2, 4]
    assert parts[1] == rows_on_stages(resolve(spec, facts, four.layout, options), [1])


def peak_of(plan: ShardingPlan) -> int:
    """The peak of gathered parameters, as its definition says: the units that are gathered at each turn, one by one."""
    groups, options = layer_groups(plan.shared), plan.options
    turns = groups.turns

    def stays(unit: UnitRow) -> bool:
        return unit.sync is SyncPolicy.DEFER or not unit.reshard_after_forward

    def ahead(index: int, number: int | None, step: int) -> list[UnitRow]:
        places = [index + step * away for away in range(1, 1 + (1 if number is None else number))]
        found = [turns[place] for place in places if 0 <= place < len(turns)]
        return [turn[0] for turn in found] if number is None else [unit for turn in found for unit in turn]

    held: list[set[UnitRow]] = []
    for index, turn in enumerate(turns):
        before = {unit for other in turns[:index] for unit in other if stays(unit)}
        later = {unit for other in turns[index:] for unit in other if unit.sync is SyncPolicy.DEFER}
        held.append({*before, *turn, *ahead(index, options.prefetch_forward, 1)})
        held.append({*before, *later, *turn, *ahead(index, options.prefetch_backward, -1)})
    sizes = {unit.name: sum(row.gathered_bytes for row in plan.rows(unit)) for unit in plan.fsdp_units}
    return max(sum(sizes[unit.name] for unit in units) for units in held) + sum(sizes[unit.name] for unit in groups.around)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("ahead", [(None, None), (1, None), (2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize(
    "choices",
    [
        {"sync": "reduce_each"},
        {"sync": "reduce_each", "sync_units": {"**.1": "defer"}},
        {"sync": "defer", "sync_units": {"**.0": "reduce_each"}},
        {"sync": "reduce_each", "reshard_after_forward": False},
    ],
    ids=["each", "one defers", "one does not", "stays"],
)
def test_the_gathered_peak_is_its_definition(family: str, ahead: tuple[int | None, ...], choices: dict[str, Any]) -> None:
    before, behind = ahead
    choices = {**choices, "prefetch_forward": before, "prefetch_backward": behind, "microbatches": 2}
    if behind is not None and choices.get("reshard_after_forward") is False:
        with refuses(PlanError, "fsdp.prefetch"):  # nothing is gathered in backward
            planned(family, **choices)
        return
    plan = planned(family, **choices)
    assert gathered_peak(plan) == peak_of(plan)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "diffusion_gemma"])
@pytest.mark.parametrize(
    "choices", [{"sync": "reduce_each"}, {"sync": "defer"}, {"sync": "defer", "sync_units": {"**.1": "reduce_each"}}]
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_between_microbatches_are_those_of_each_parameter(
    family: str, choices: dict[str, Any], microbatches: int
) -> None:
    plan = planned(family, microbatches=microbatches, **choices)
    unsharded = shards = 0
    for row in plan.parameters:
        copies = [unit for unit in plan.fsdp_units if (unit.twin_of or unit.name) == row.unit and unit.forwards]
        waiting = [microbatches > 1 and unit.sync is not SyncPolicy.REDUCE_EACH for unit in copies]
        unsharded += sum(waiting) * row.reduced_bytes
        shards += row.bytes_per_rank if row.trainable and not all(waiting) else 0
    assert gradients_between(plan) == (unsharded, shards)
    assert (unsharded > 0) == (microbatches > 1 and choices["sync"] == "defer")


def test_a_plan_without_its_cut_has_no_parts() -> None:
    plan = setup_of(4, layers=4, layout={"pp": 2, "dp_shard": 2}).plan
    part = rows_on_stages(plan, [0])
    assert 0 < len(part.layers) < len(plan.layers)
    for without in (replace(plan, program=()), part):
        with refuses(PlanError, "plan.model"):
            rows_on_stages(without, [1])
