"""Every family parallelized at 8, 64 and 1,024 ranks of a fake process group: what torch shards is what the plan says."""

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.distributed import _torch_compat
from meshwright.distributed.fsdp import fsdp_units
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.parallelizer import parallelize
from meshwright.layout import Layout
from meshwright.plan.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import FAMILIES, make


@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("replicas", [1, 4, None], ids=["shard", "replicate-x-shard", "replicate"])
def test_local_shapes_and_units_are_those_of_the_plan(world: int, replicas: int | None) -> None:
    layout = Layout(dp_replicate=replicas or world)

    def on_rank(_: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        mesh = build_mesh(layout, "cpu")
        for family in FAMILIES:
            model, spec = make(family, meta=True)
            plan = resolve(spec, model, layout, ParallelOptions(), world_size=world)
            parallelize(model, plan, mesh)
            parameters = dict(model.named_parameters())
            for row in plan.parameters:
                tensor = parameters[row.name]
                assert isinstance(tensor, DTensor)
                assert tuple(tensor.to_local().shape) == row.local_shape, (family, row.name)
                placed = {
                    axis: repr(placement)
                    for axis, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
                }
                planned = {axis: placement.replace("Shard(0)", "Shard(dim=0)") for axis, placement in row.placements}
                assert placed == planned, (family, row.name)
            units = fsdp_units(model)
            assert list(units) == [unit.name for unit in plan.units]
            for unit in plan.units:
                owned = {id(tensor) for tensor in _torch_compat.owned_parameters(units[unit.name])}
                assert owned == {id(parameters[name]) for name in unit.parameters}
                resharding = _torch_compat.reshards_after_forward(units[unit.name], is_root=not unit.name)
                assert resharding is unit.reshard_after_forward

    run_ranks(on_rank, 1, group=False)
