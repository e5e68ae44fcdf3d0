"""Twin units: two FSDP units that share their sharded parameters (:mod:`meshwright.plan.axes.data.twin_stacks` says why).

FSDP2 refuses a parameter that two units hold. So there are three steps. Before anything is wrapped, the parameters of the
second module are replaced by copies. Then both modules are wrapped. Then the attributes of the second module are set to the
sharded parameters of the first unit. Before each forward of the root (:func:`shard_as_twin`: before the first of a unit) the
second unit is made to all-gather from them too, unless it does already (``_torch_compat.share_shards``). So the optimizer,
checkpoints and clipping see one tensor, and both units add to its gradient.
"""

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed import _torch_compat
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.slices import replace_parameter
from meshwright.plan.result.program import JoinTwins, PartTwins

__all__ = ["join_twins", "part_twins", "shard_as_twin"]


def part_twins(model: nn.Module, action: PartTwins, mesh: ParallelMesh) -> None:
    """Replace the parameters of second units by copies."""
    for _, second in action.parameters:
        parameter = model.get_parameter(second)
        copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        replace_parameter(model, [second], copied)


def join_twins(model: nn.Module, action: JoinTwins, mesh: ParallelMesh) -> None:
    """Make second units use the parameters of the first: as attributes now, and as shards before each forward of the root."""
    for first, second in action.parameters:
        replace_parameter(model, [second], model.get_parameter(first))

    def share() -> None:
        for first, second in action.units:
            _torch_compat.share_shards(model.get_submodule(first), model.get_submodule(second))

    _torch_compat.before_each_run(model, share)


def shard_as_twin(first: nn.Module, second: nn.Module, shard: Callable[[nn.Module], None]) -> None:
    """Shard a module as the twin of another module, which had the same parameters and is sharded already.

    Args:
        first: the module that is sharded.
        second: its parameters are those of ``first`` before it was sharded, under the same names.
        shard: makes units of ``second``, under the same names as in ``first``.
    """
    names = [name for name, parameter in second.named_parameters() if not isinstance(parameter, DTensor)]
    for name in names:
        parameter = second.get_parameter(name)
        copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        replace_parameter(second, [name], copied)
    shard(second)
    for name in names:
        replace_parameter(second, [name], first.get_parameter(name))
    units = list(fsdp_units(second))

    def share() -> None:
        for unit in units:
            _torch_compat.share_shards(first.get_submodule(unit), second.get_submodule(unit))

    for unit in units:
        _torch_compat.before_first_run(second.get_submodule(unit), share)
