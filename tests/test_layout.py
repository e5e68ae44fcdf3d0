"""Layout: inference, every problem with its legal values, rank arithmetic."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.layout import AXES, EXPERT_AXES, FLATTENED, Layout, ModelSizes, divisors
from tests.harness import refuses


def problems(layout: Layout, world: int, sizes: ModelSizes | None = None) -> list[str]:
    with pytest.raises(LayoutError) as error:
        layout.resolve(world, sizes)
    return list(error.value.problems)


def test_one_axis_is_inferred() -> None:
    assert Layout(tp=2, cp=2, pp=2).resolve(16).dp_shard == 2
    assert Layout(dp_replicate=None, dp_shard=4).resolve(8).dp_replicate == 2
    assert Layout(dp_replicate=-1, dp_shard=4).resolve(8).dp_replicate == 2
    assert Layout().resolve(1) == Layout(dp_shard=1)


def test_resolving_is_idempotent() -> None:
    layout = Layout(dp_replicate=2).resolve(8)
    assert layout.resolve(8) == layout


def test_two_unknown_axes_are_refused() -> None:
    assert problems(Layout(dp_shard=None, tp=-1), 8) == [
        "dp_shard and tp: not set (or -1), and only one can be inferred from the number of ranks; set the other"
    ]


def test_a_world_that_does_not_factor_names_the_knob_and_its_legal_values() -> None:
    found = problems(Layout(tp=4), 10)
    assert found == [
        "10 ranks cannot be divided by tp=4",
        "tp=4: with 10 ranks and the other sizes as they are, legal are 1, 2, 5, 10",
    ]
    assert problems(Layout(tp=2, cp=3), 8)[0] == "8 ranks cannot be divided by cp=3 * tp=2 = 6"


def test_explicit_sizes_must_multiply_to_the_world() -> None:
    found = problems(Layout(dp_replicate=2, dp_shard=2), 8)
    assert found == [
        "dp_replicate=2 * dp_shard=2 make 4 ranks, and there are 8",
        "dp_replicate=2: with 8 ranks and the other sizes as they are, legal is 4",
        "dp_shard=2: with 8 ranks and the other sizes as they are, legal is 4",
    ]
    assert problems(Layout(dp_shard=3), 1)[0] == "dp_shard=3 makes 3 ranks, and there is 1"
    assert problems(Layout(dp_shard=1), 8) == [
        "the layout is one of 1 rank (all sizes are 1), and there are 8",
        "each size must divide 8: legal are 1, 2, 4, 8",
    ]


def test_heads_that_do_not_divide_list_the_divisors() -> None:
    assert "tp=3: 8 key/value heads cannot be divided by 3; legal are 1, 2, 4, 8" in problems(
        Layout(tp=3), 6, ModelSizes(heads=24, kv_heads=8)
    )


def test_only_key_value_heads_are_shared_by_ranks_also_where_there_are_as_many_as_heads() -> None:
    for heads in (4, 1000):  # a large number is another object each time
        sizes = ModelSizes(heads=heads, kv_heads=heads, kv_groups=True)
        assert problems(Layout(tp=2 * heads), 2 * heads, sizes)[0].startswith(
            f"tp={2 * heads}: {heads:,} attention heads cannot be divided"
        )
    assert Layout(tp=4).resolve(4, ModelSizes(heads=8, kv_heads=2, kv_groups=True)).dp_shard == 1


def test_all_problems_come_in_one_report() -> None:
    found = problems(Layout(tp=3, pp=5, ep=3), 64, ModelSizes(layers=4, heads=8, kv_heads=4, experts=8))
    for start in (
        "64 ranks cannot be divided by pp=5 * tp=3 = 15",
        "tp=3: 8 attention heads",
        "tp=3: 4 key/value heads",
        "pp=5: 4 layers",
        "ep=3: 8 experts",
    ):
        assert any(line.startswith(start) for line in found), (start, found)


def test_illegal_values_are_named() -> None:
    assert problems(Layout(tp=0, ep=-1), 4) == [
        "tp=0: must be a positive whole number, or -1 to infer it",
        "ep=-1: must be a positive whole number",
    ]


def test_expert_parallel_comes_from_the_ranks_of_a_replica() -> None:
    layout = Layout(dp_replicate=2, tp=2, ep=4).resolve(16)
    assert (layout.dp_shard, layout.ep_shard) == (4, 2)
    assert problems(Layout(ep=3), 8) == [
        "ep=3: a replica has dp_shard * cp * tp = 8 ranks, which cannot be divided by 3; legal are 1, 2, 4, 8"
    ]
    assert problems(Layout(ep=2), 8, ModelSizes(experts=0)) == ["ep=2: the model has no experts; the legal value is 1"]


def test_an_unresolved_layout_has_no_ranks() -> None:
    with refuses(LayoutError, "layout.unknown"):
        Layout().coordinates(0)


SIZES = st.sampled_from([1, 2, 3, 4])


@settings(deadline=None)  # a slow machine is no failure
@given(st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES))
def test_coordinates_are_row_major_and_groups_partition_the_world(sizes: tuple[int, ...]) -> None:
    layout = Layout(**dict(zip(AXES, sizes, strict=True)))
    expected = dict(enumerate(product(*(range(size) for size in sizes))))
    assert all(tuple(layout.coordinates(rank).values()) == place for rank, place in expected.items())
    for axes in (*AXES, *FLATTENED):
        groups = layout.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {layout.size(axes)}


@settings(deadline=None)
@given(SIZES, SIZES, SIZES, st.sampled_from([1, 2, 4]))
def test_expert_coordinates_tile_the_ranks_inside_each_replica(pp: int, replicate: int, shard: int, ep: int) -> None:
    layout = Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=2, tp=2, ep=ep).resolve(pp * replicate * shard * 4)
    places = [layout.coordinates(rank, experts=True) for rank in range(layout.world_size)]
    assert len({tuple(place.values()) for place in places}) == layout.world_size
    assert all(tuple(place) == EXPERT_AXES for place in places)
    for rank, place in enumerate(places):
        outer = layout.coordinates(rank)
        assert (place["pp"], place["dp_replicate"]) == (outer["pp"], outer["dp_replicate"])


def test_divisors() -> None:
    assert divisors(1) == (1,)
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(16) == (1, 2, 4, 8, 16)


def test_it_prints_only_what_is_not_one() -> None:
    assert str(Layout(dp_replicate=2, dp_shard=4)) == "dp_replicate=2 dp_shard=4"
    assert str(Layout(dp_shard=1)) == "one process"


def test_what_the_ranks_allow_is_what_the_model_allows_too() -> None:
    """A value that one line recommends must not be refused by the next."""
    with pytest.raises(LayoutError) as error:
        Layout(tp=3).resolve(8, ModelSizes(heads=4))
    assert "tp=3: with 8 ranks and the other sizes as they are, legal are 1, 2, 4" in error.value.problems
    with pytest.raises(LayoutError) as error:
        Layout(pp=3).resolve(8, ModelSizes(layers=2))
    assert "pp=3: with 8 ranks and the other sizes as they are, legal are 1, 2" in error.value.problems
