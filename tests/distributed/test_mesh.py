"""The mesh at 8, 64 and 1,024 ranks of a fake process group: the ranks of every group, seen from several ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.distributed.mesh import ParallelMesh, build_mesh, mesh_beside
from meshwright.distributed.slices import whole_tensor
from meshwright.errors import LayoutError
from meshwright.layout import AXES, EXPERT_AXES, FLATTENED, Layout
from tests.harness import refuses, run_ranks

CASES = [
    (8, Layout(dp_replicate=2, dp_shard=2, tp=2)),
    (8, Layout(pp=2, cp=2, ep=2)),
    (64, Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=4, ep=8)),
    (1024, Layout(pp=4, dp_replicate=4, dp_shard=8, cp=2, tp=4, ep=16)),
]


def in_fake_world(world: int, rank: int, check) -> None:
    """Each fake rank in a process of its own: a process group can be started only once."""

    def on_rank(_: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        check()

    run_ranks(on_rank, 1, group=False)


def ranks_of(mesh: DeviceMesh, axis: int | str | None = None) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group(axis)))


BESIDE = [
    (8, Layout(dp_shard=4, tp=2), Layout(pp=2, dp_replicate=2, dp_shard=2)),
    (16, Layout(pp=2, dp_shard=2, cp=2, tp=2), Layout(dp_shard=2, cp=2, tp=4)),
    (16, Layout(pp=2, dp_shard=4, tp=2, ep=4), Layout(pp=2, dp_shard=4, tp=2, ep=2)),
]


@pytest.mark.parametrize(("world", "layout", "other"), BESIDE, ids=lambda value: str(value).replace(" ", "-"))
def test_a_mesh_beside_another_has_the_same_data_and_parts_on_each_rank(world: int, layout: Layout, other: Layout) -> None:
    for rank in (0, 1, world // 2 + 1, world - 1):

        def check() -> None:
            mesh = build_mesh(layout, "cpu")
            beside = mesh_beside(mesh, other.resolve(world))
            assert sorted(beside.root.mesh.flatten().tolist()) == list(range(world))
            assert [beside.rank(axis) for axis in ("dp", "cp")] == [mesh.rank(axis) for axis in ("dp", "cp")]
            for axis in (*AXES, *FLATTENED, *(("ep_shard", "ep") if other.ep > 1 else ())):
                group = ranks_of(beside[axis])
                assert beside[axis].mesh.tolist() == list(group)  # a group has its ranks in the order of their numbers
                assert len(group) == beside.layout.size(axis)
            shares = set(ranks_of(beside["pp"])) | set(ranks_of(beside["tp"]))
            assert shares <= {one for one in range(world) if mesh_place(mesh, one) == mesh_place(mesh, dist.get_rank())}

        in_fake_world(world, rank, check)


def mesh_place(mesh: ParallelMesh, rank: int) -> tuple[int, ...]:
    """Data rank and part of sequences of another rank."""
    place = mesh.layout.coordinates(rank)
    return tuple(place[axis] for axis in ("dp_replicate", "dp_shard", "cp"))


def test_a_mesh_that_does_not_fit_beside_another_is_refused() -> None:
    def check() -> None:
        mesh = build_mesh(Layout(dp_shard=4, tp=2), "cpu")
        for other in (Layout(dp_shard=8), Layout(dp_shard=2, cp=2, tp=2), Layout(pp=2, dp_shard=4, ep=2)):
            with refuses(LayoutError, "layout.device_mesh"):
                mesh_beside(mesh, other.resolve(8))

    in_fake_world(8, 0, check)


@pytest.mark.parametrize(("world", "layout"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_every_group_has_the_ranks_of_the_layout(world: int, layout: Layout) -> None:
    for rank in (0, world // 3, world - 1):

        def check(rank: int = rank) -> None:
            mesh = build_mesh(layout, "cpu")
            resolved = mesh.layout
            assert mesh.root.mesh_dim_names == AXES
            assert mesh.root.mesh.flatten().tolist() == list(range(world))
            for axis in AXES:
                assert ranks_of(mesh[axis]) == resolved.group(axis, rank)
            for name, parts in FLATTENED.items():
                assert ranks_of(mesh[name]) == resolved.group(parts, rank)
                assert mesh.rank(name) == resolved.group(parts, rank).index(rank)
            if resolved.ep > 1:
                assert mesh.experts is not None
                assert mesh.experts.mesh_dim_names == EXPERT_AXES
                for axis in ("ep_shard", "ep"):
                    assert ranks_of(mesh[axis]) == resolved.group(axis, rank)

        in_fake_world(world, rank, check)


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (Layout(dp_shard=1024), 1),  # one of this rank alone; the rest is the default group
        (Layout(dp_shard=128, tp=8), 1 + 128 + 8),
        (Layout(dp_replicate=8, dp_shard=16, tp=8), 1 + 128 + 64 + 128 + 8),  # the last: both axes of data, flattened
        (Layout(dp_shard=128, tp=8, ep=8), 1 + 128 + 8),  # `ep` has the ranks of `tp`
        (Layout(cp=1024), 1 + 1),  # and one more than the default group, so that attentions do not wait for FSDP's gathers
    ],
    ids=str,
)
def test_groups_of_a_world_of_1024(layout: Layout, groups: int) -> None:
    """Rounds of all ranks through the store, at a start: an axis of size 1 has none, and no ranks have two groups here."""

    def check() -> None:
        made: list[tuple[int, ...]] = []
        new_group = dist.new_group

        def counting(ranks: list[int], **options: object) -> object:
            made.append(tuple(ranks))
            return new_group(ranks, **options)

        dist.new_group = device_mesh.new_group = counting
        build_mesh(layout, "cpu")
        assert len(made) == groups
        assert len(set(made)) == len(made)
        build_mesh(layout, "cpu")  # a second mesh takes the groups of the first
        assert len(made) == groups

    in_fake_world(1024, 37, check)


@pytest.mark.parametrize(
    ("layout", "names", "shards", "replicas"),
    [
        (Layout(tp=2), ("dp_shard",), ("dp_shard",), None),
        (Layout(dp_replicate=2, tp=2), ("dp_replicate", "dp_shard"), ("dp_shard",), ("dp_replicate",)),
        (Layout(cp=2, tp=2), ("dp_shard_cp",), ("dp_shard", "cp"), None),
        (Layout(dp_replicate=2, cp=2, tp=2), ("dp_replicate", "dp_shard_cp"), ("dp_shard", "cp"), ("dp_replicate",)),
        (Layout(dp_replicate=8, dp_shard=1, tp=8), ("dp_replicate",), ("dp_replicate",), None),
    ],
    ids=["shard", "replicate-x-shard", "cp", "replicate-x-cp", "replicate-only"],
)
def test_fsdp_takes_the_right_submesh(layout: Layout, names, shards, replicas) -> None:
    def check() -> None:
        mesh = build_mesh(layout, "cpu")
        fsdp = mesh.fsdp()
        assert fsdp.mesh_dim_names == names
        assert ranks_of(fsdp, fsdp.ndim - 1) == mesh.layout.group(shards, 37)
        if replicas is not None:
            assert ranks_of(fsdp, 0) == mesh.layout.group(replicas, 37)

    in_fake_world(64, 37, check)


def test_an_axis_of_a_mesh_that_is_not_there_is_refused() -> None:
    with refuses(LayoutError, "run.process_group"):
        build_mesh(Layout())

    def check() -> None:
        with pytest.raises(LayoutError, match="ep=1"):
            build_mesh(Layout(), "cpu")["ep"]
        with pytest.raises(LayoutError, match="legal are 1, 2, 4, 8"):
            build_mesh(Layout(tp=3), "cpu")

    in_fake_world(8, 0, check)


def gathered_axis_by_axis(rank: int) -> list[tuple[int, int, bool]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for rows, dim in itertools.product((8, 7, 5, 3), (0, 1)):
        whole = torch.arange(rows * 6.0).reshape(rows, 6)
        linear = nn.Linear(6, rows, bias=False)
        linear._parameters["weight"] = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(dim)]))
        fully_shard(linear, mesh=mesh["dp"])
        assert isinstance(linear.weight, DTensor)
        found.append((rows, dim, torch.equal(whole_tensor(linear.weight.detach()), whole)))
    return found


def test_what_fsdp_shards_behind_tensor_parallel_is_gathered_axis_by_axis() -> None:
    for found in run_ranks(gathered_axis_by_axis, 4):
        assert all(equal for _, _, equal in found), found
