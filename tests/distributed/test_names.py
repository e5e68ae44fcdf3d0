"""The name of a class, of modules that FSDP and torch's replicate gave a class of their own."""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.distributed import _torch_compat
from meshwright.distributed.class_names import class_name
from tests.harness import run_ranks


def names(rank: int) -> list[tuple[str, str]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    mesh = init_device_mesh("cpu", (1,))
    plain, sharded, replicated = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    fully_shard(sharded, mesh=mesh)
    _torch_compat.replicate_module([replicated], mesh, MixedPrecisionPolicy(), OffloadPolicy())
    return [(type(module).__name__, class_name(module)) for module in (plain, sharded, replicated)]


def test_a_wrapped_module_goes_by_its_own_name() -> None:
    (found,) = run_ranks(names, 1)
    assert [own for _, own in found] == ["Linear"] * 3
    assert {torch_name for torch_name, _ in found[1:]}.isdisjoint({"Linear"})  # torch's own names, which are not to be seen
