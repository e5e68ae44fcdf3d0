"""The facts of a model that pipeline stages need: where it can be cut, and what belongs to which side of a cut."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["LayerFacts", "LeadingFacts", "StageFacts"]


@dataclass(frozen=True)
class LayerFacts:
    """How one layer is called.

    Attributes:
        name: name of the layer in the model.
        argument: position and name of the hidden state among its arguments.
        returned: number of items that it returns, the hidden state first; 0: it returns the hidden state itself.
    """

    name: str
    argument: tuple[int, str]
    returned: int = 0


@dataclass(frozen=True)
class LeadingFacts:
    """What a module that runs before the first layer returns.

    Attributes:
        name: name of the module in the model.
        features: size of the last dimension of its output.
        lookup: whether it looks rows up for numbers, as an embedding does, so that the output has one dimension more.
    """

    name: str
    features: int
    lookup: bool


@dataclass(frozen=True)
class StageFacts:
    """Where a model can be cut into stages.

    Attributes:
        layers: its layers, in the order in which they run, without those that do not.
        leading: modules with parameters that run before the first layer; the first stage has them.
        trailing: modules with parameters that run after the last layer; the last stage has them.
        body: the innermost module around all layers that is called with tokens. Stages but the last call it, not the
            model around it.
        used: name of each parameter outside of layers to the sides that use it: ``first``, ``last``, or both. What no side
            uses is with the first.
        hidden: size of the last dimension of the hidden state.
        uncut: indices of layers before which the model cannot be cut, to why: a layer reads more of an earlier one than its
            hidden state, such as the tokens that it chose.
        streams: sizes of its dimensions between positions and features, such as the number of residual streams.
        problems: why the model cannot be cut.
        after: modules without parameters that run after the last layer alone.
        idle: the outermost modules with parameters that do not run, such as an image tower in training on text, and other
            parameters that nobody uses.
        passes: how often a microbatch goes through all stages. Above 1, layers are those of two stacks in turn: both layers of
            one number, then those of the next. They share their parameters, so they are cut together. The first pass runs those
            of the first stack, each other pass those of the second, and the last alone has a gradient among these.
        canvas: number of columns that the second stack gets, and of tokens of a sequence; ``None``: unknown, or as many.
    """

    layers: tuple[LayerFacts, ...] = ()
    leading: tuple[LeadingFacts, ...] = ()
    trailing: tuple[str, ...] = ()
    body: str = ""
    used: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hidden: int = 0
    problems: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()
    uncut: Mapping[int, str] = field(default_factory=dict)
    passes: int = 1
    canvas: tuple[int, int] | None = None
