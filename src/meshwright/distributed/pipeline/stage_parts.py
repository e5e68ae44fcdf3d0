"""What a rank of a pipeline holds: the models of its stages, under the names of the whole model."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.mesh import ParallelMesh
from meshwright.plan.axes.pipeline.stage_plan import parts_of_rank, stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import on_stages
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["StageParts", "make_parts", "models_of"]


class StageParts(nn.Module):
    """The models of a rank's stages under the names of the whole model.

    Args:
        parts: number of a stage to its model. Several stages may be those of one model.
        copied: names of parameters that two of the stages hold. Only that of the first is a parameter of the whole: the other
            gets its values from it, and gives it its gradient.
    """

    def __init__(self, parts: Mapping[int, nn.Module], copied: Collection[str] = ()) -> None:
        super().__init__()
        first = {id(parts[index]): str(index) for index in sorted(parts, reverse=True)}
        self.parts = nn.ModuleDict({first[id(part)]: part for part in parts.values()})
        self._place = {index: first[id(part)] for index, part in parts.items()}
        self._copied = tuple(copied)

    @property
    def copied(self) -> dict[str, nn.Parameter]:
        """The second copies by name. They are looked up anew each time: reading files puts new parameters in their place."""
        *_, last = self.parts.values()
        return {name: last.get_parameter(name) for name in self._copied}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all parts, without second copies."""
        copies = {id(parameter) for parameter in self.copied.values()}
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if id(parameter) not in copies:
                yield name, parameter

    def __getitem__(self, stage: int) -> nn.Module:
        """Return the model of a stage."""
        return self.parts[self._place[stage]]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of all parts, each under its name in the whole model."""
        memo = set() if memo is None else memo
        for part in self.parts.values():
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name in the whole model, from the first part that has it."""
        reasons = []
        for part in self.parts.values():
            try:
                return part.get_submodule(target)
            except AttributeError as error:
                reasons.append(error)
        raise reasons[0]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of all parts, under the names of the whole model. Of a second copy, the first one counts."""
        parts = reversed(list(self.parts.values()))
        return {name: value for part in parts for name, value in part.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Give each part its own names of a state: what :meth:`state_dict` returned, or that of the whole model."""
        for part in self.parts.values():
            own = part.state_dict().keys()
            part.load_state_dict({name: value for name, value in state_dict.items() if name in own}, strict, assign)


def make_parts(
    make: Callable[[], nn.Module],
    plan: ShardingPlan,
    mesh: ParallelMesh,
    carry_out: Callable[[nn.Module, ShardingPlan, ParallelMesh], nn.Module] = parallelize,
) -> StageParts:
    """Cut and parallelize a model for each stage of this rank.

    Args:
        make: returns the whole model on the meta device, a new one each time.
        plan: the plan of the whole model.
        mesh: the mesh of its layout.
        carry_out: carries the plan of a stage out on a model, as a strategy does.
    """
    stages = stages_of_rank(plan, mesh.rank("pp"))
    copied = [row.name for row in plan.parameters if row.copies and {*row.stages} <= {*stages}]
    parts: dict[int, nn.Module] = {}
    for own in parts_of_rank(plan, mesh.rank("pp")):
        parts |= dict.fromkeys(own, carry_out(make(), on_stages(plan, own), mesh))
    return StageParts(parts, copied)


def models_of(model: nn.Module) -> list[nn.Module]:
    """Return a model, or those of a rank's stages."""
    return [*model.parts.values()] if isinstance(model, StageParts) else [model]
