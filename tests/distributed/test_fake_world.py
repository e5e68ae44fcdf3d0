"""Every family parallelized at 8, 64 and 1,024 ranks of a fake process group: what torch shards is what the plan says."""

from collections.abc import Iterable

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.distributed import _torch_compat
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.mesh import build_mesh
from meshwright.layout import Layout
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import FAMILIES, SPARSE, make


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("replicas", [1, 4, None], ids=["shard", "replicate-x-shard", "replicate"])
def test_local_shapes_and_units_are_those_of_the_plan(world: int, replicas: int | None) -> None:
    check_shapes_and_units(Layout(dp_replicate=replicas or world), world, [*FAMILIES, "diffusion_gemma"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 4, "dp_replicate": 2}, {"ep": 4, "tp": 2}], ids=str)
def test_experts_are_placed_as_planned(world: int, axes: dict[str, int]) -> None:
    check_shapes_and_units(Layout(**axes), world, SPARSE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("axes", [{"cp": 4}, {"cp": 2, "tp": 2, "dp_shard": 2, "dp_replicate": None}], ids=str)
def test_parameters_are_sharded_over_the_ranks_that_share_sequences(world: int, axes: dict[str, int | None]) -> None:
    families = ("llama", "mixtral", "phi3", "gpt_oss") if "tp" in axes else [name for name in FAMILIES if name != "nemotron_h"]
    check_shapes_and_units(Layout(**axes), world, families)


def check_shapes_and_units(layout: Layout, world: int, families: Iterable[str]) -> None:
    layout = layout.resolve(world)

    def on_rank(_: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        mesh = build_mesh(layout, "cpu")
        for family in families:
            model, spec = make(family, meta=True)
            plan = resolve(spec, model, layout, ParallelOptions(), world_size=world)
            parallelize(model, plan, mesh)
            parameters = dict(model.named_parameters())
            for row in plan.parameters:
                tensor = parameters[row.name]
                assert isinstance(tensor, DTensor)
                assert tuple(tensor.to_local().shape) == row.local_shape, (family, row.name)
                placed = {
                    axis: repr(placement).replace("dim=", "").replace("_Strided", "").replace(", sf=", ", ")
                    for axis, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
                    if axis != "ep_shard" or tensor.device_mesh[axis].size() > 1
                }
                assert strides_of_fsdp_aside(placed) == strides_of_fsdp_aside(dict(row.placements)), (family, row.name)
            units = fsdp_units(model)
            assert list(units) == [unit.name for unit in plan.fsdp_units]
            for unit in plan.fsdp_units:
                owned = {id(tensor) for tensor in _torch_compat.owned_parameters(units[unit.name])}
                assert owned == {id(parameters[name]) for name in unit.parameters}
                resharding = _torch_compat.reshards_after_forward(units[unit.name], is_root=not unit.name)
                assert resharding is unit.reshard_after_forward

    run_ranks(on_rank, 1, group=False)


def strides_of_fsdp_aside(placements: dict[str, str]) -> dict[str, str]:
    """Where FSDP shards what another axis shards already, torch notes a stride; axes of size 1 are not in plans."""
    return {axis: placement.split(",")[0].rstrip(")").replace("Strided", "") for axis, placement in placements.items()}
