"""Twin units: two FSDP units that share one sharded parameter (:mod:`meshwright.plan.twins` says why).

FSDP2 refuses a parameter that two units hold. So the second unit is wrapped around stand-ins, and afterwards gets the sharded
parameters of the first: one tensor in the optimizer, in checkpoints and in clipping, whose gradient both add to.
"""

from typing import Any

from torch import nn

from meshwright.distributed import _torch_compat
from meshwright.plan.sharding_plan import ShardingPlan

__all__ = ["Twins"]


class Twins:
    """The twin units of a plan, before and after they are wrapped.

    Args:
        model: no unit is wrapped yet; the parameters of second units are replaced by stand-ins.
        plan: names the twins.
    """

    def __init__(self, model: nn.Module, plan: ShardingPlan) -> None:
        self.model = model
        self.pairs = [(unit.twin_of, unit.name) for unit in plan.units if unit.twin_of]
        self.places: list[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]] = []
        for first, second in self.pairs:
            inside = [other for _, other in self.pairs if other.startswith(f"{second}.")]
            for name, parameter in model.get_submodule(second).named_parameters():
                if any(f"{second}.{name}".startswith(f"{other}.") for other in inside):
                    continue
                ours, theirs = (_place(model, f"{unit}.{name}") for unit in (first, second))
                if ours[0]._parameters[ours[1]] is parameter:
                    self.places.append((ours, theirs))
                    stand_in = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                    theirs[0]._parameters[theirs[1]] = stand_in

    def join(self) -> None:
        """Make one of the two copies, by name now, and in memory before the first forward."""
        for (ours, name), (theirs, other) in self.places:
            theirs._parameters[other] = ours._parameters[name]
        if self.pairs:
            self.model.register_forward_pre_hook(self._share, prepend=True)

    def _share(self, *_: Any) -> None:
        for first, second in self.pairs:
            _torch_compat.share_shards(self.model.get_submodule(first), self.model.get_submodule(second))


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, own = name.rpartition(".")
    return model.get_submodule(module), own
