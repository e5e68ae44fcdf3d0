"""Twin units: two FSDP units that share one sharded parameter (:mod:`meshwright.plan.twins` says why).

FSDP2 refuses a parameter that two units hold. So the second unit is wrapped around stand-ins, and afterwards gets the sharded
parameters of the first: one tensor in the optimizer, in checkpoints and in clipping, whose gradient both add to.
"""

from collections.abc import Callable

from torch import nn

from meshwright.distributed import _torch_compat
from meshwright.distributed.fsdp import fsdp_units
from meshwright.distributed.mesh import ParallelMesh
from meshwright.plan.program import JoinTwins, PartTwins

__all__ = ["join_twins", "part_twins", "shard_as_twin"]


def part_twins(model: nn.Module, action: PartTwins, mesh: ParallelMesh) -> None:
    """Replace the parameters of second units by stand-ins."""
    for _, second in action.parameters:
        parameter = model.get_parameter(second)
        _set(model, second, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))


def join_twins(model: nn.Module, action: JoinTwins, mesh: ParallelMesh) -> None:
    """Make one of the two copies, by name now, and in memory before the first forward."""
    for first, second in action.parameters:
        _set(model, second, model.get_parameter(first))

    def share() -> None:
        for first, second in action.units:
            _torch_compat.share_shards(model.get_submodule(first), model.get_submodule(second))

    _torch_compat.before_each_run(model, share)


def shard_as_twin(first: nn.Module, second: nn.Module, shard: Callable[[nn.Module], None]) -> None:
    """Make units of a module that has the parameters of another one, which has its units already.

    Args:
        first: with units.
        second: its parameters are those of ``first`` before that, under the same names.
        shard: makes units of ``second``, at the same places in it.
    """
    names = [name for name, _ in second.named_parameters()]
    for name in names:
        parameter = second.get_parameter(name)
        _set(second, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
    shard(second)
    for name in names:
        _set(second, name, first.get_parameter(name))
    units = list(fsdp_units(second))

    def share() -> None:
        for unit in units:
            _torch_compat.share_shards(first.get_submodule(unit), second.get_submodule(unit))

    for unit in units:
        _torch_compat.before_first_run(second.get_submodule(unit), share)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, own = name.rpartition(".")
    model.get_submodule(module)._parameters[own] = parameter
