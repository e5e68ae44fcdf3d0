"""The action that makes a pipeline stage of a model."""

from dataclasses import dataclass

from meshwright.plan.given.cut_points import Carried

__all__ = ["Cut"]


@dataclass(frozen=True)
class Cut:
    """Make a pipeline stage of the model: replace the layers of other stages by modules that pass the hidden state on.

    Attributes:
        body: the module that runs all layers; stages but the last call only it.
        order: the layers of the whole model, in the order in which they run: the name of each, position and name of the hidden
            state among its arguments, and the number of items that it returns (0: the hidden state itself).
        begin: index of the first layer of the stage.
        end: index after its last layer.
        leading: each module that runs before the first layer: its name, the features of its output, and whether it looks rows
            up. Later stages get zeros instead. Fourth, if it is called without a tensor, the sizes of its output.
        held: parameters that modules before the first layer and after the last one share, by their first names. Both ends have
            them under these names, whatever stands for the module there.
        trailing: modules that run after the last layer. Earlier stages pass their input on.
        sizes: those of the hidden state, see :data:`~meshwright.plan.given.cut_points.Carried`.
        after: modules without parameters that run after the last layer, and in none. On earlier stages nobody uses what they
            return.
        idle: modules that do not run, such as an image tower, and parameters that nobody uses. The first stage has them.
        carried: what layers read beside their hidden state: of what runs before the first layer, or of earlier layers. It
            crosses every cut between where it is made and the last layer that reads it.
        blank: parameters of modules around the layers that are used before the first one. Later stages get zeros instead.
        passes: how often a microbatch goes through all ranks. Above 1, a rank has one model, which is that of all its stages.
        canvas: see :class:`~meshwright.plan.given.cut_points.StageFacts`.
    """

    body: str
    order: tuple[tuple[str, int, str, int], ...]
    begin: int
    end: int
    leading: tuple[tuple[str, int, bool, tuple[int, ...]], ...] = ()
    held: tuple[str, ...] = ()
    trailing: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    after: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    carried: tuple[Carried, ...] = ()
    blank: tuple[str, ...] = ()
    passes: int = 1
    canvas: tuple[int, int] | None = None
