"""Slices of tensors over several axes, and back: also where placements do not say in which order the axes cut."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright.distributed import _torch_compat
from meshwright.distributed.slices import slice_like, whole_tensor
from tests.harness import run_ranks

WHOLE = torch.arange(14 * 6, dtype=torch.float64).reshape(14, 6)


def packed(pieces: int) -> Any:
    return _torch_compat.strided_shard(0, pieces)


def cut(whole: torch.Tensor, tp: int, shard: int) -> torch.Tensor:
    """What tensor parallel and then FSDP leave of a matrix that holds two, one after another."""
    own = torch.cat([one.chunk(2)[tp] for one in whole.chunk(2)])
    pieces = own.chunk(2)
    return pieces[shard]


@pytest.mark.parametrize("of_fsdp", [Shard(0), packed(2)], ids=["as torch 2.11 says it", "as torch 2.13 says it"])
def test_a_packed_matrix_is_cut_by_tensor_parallel_first(of_fsdp: Any) -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        shard, tp = mesh.get_coordinate()  # type: ignore[misc]
        own = cut(WHOLE, tp, shard)
        held = DTensor.from_local(own, mesh, [of_fsdp, packed(2)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())
        assert torch.equal(slice_like(held, WHOLE), own)
        assert torch.equal(whole_tensor(held), WHOLE)

    run_ranks(on_rank, 4)


def test_plain_shards_and_sums() -> None:
    """Uneven shards, some of them empty; parts that are to be added up, or averaged."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        for rows, placements in ((14, (Shard(0), Shard(1))), (3, (Shard(0), Shard(0))), (1, (Replicate(), Shard(0)))):
            whole = WHOLE[:rows]
            held = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(slice_like(held, whole), held.to_local())
            assert torch.equal(whole_tensor(held), whole)
        for kind, expected in (("sum", 2.0), ("avg", 1.0)):
            part = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial(kind)], run_check=False)
            assert whole_tensor(part).tolist() == [expected] * 2

    run_ranks(on_rank, 4)
