"""What is read from a model by calling it once without values: the facts that no name, shape or config states."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from meshwright.plan.given.attentions import Attentions
from meshwright.plan.given.cut_points import Carried, RankSlices, StageFacts
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.given.sliceable_pairs import Pairs
from meshwright.plan.update.matrices import Apart

__all__ = ["HeadFacts", "RegionFacts", "Span", "Stretch", "Traces"]


@dataclass(frozen=True)
class HeadFacts:
    """The output head of a model.

    Attributes:
        name: of its module.
        vocabulary: number of its words.
        problem: why its logits cannot be computed in chunks; empty: they can.
    """

    name: str = ""
    vocabulary: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Span:
    """A part of a layer that gets the whole sequence and gives a slice back, and is not one module.

    Attributes:
        entries: the modules whose hidden state is all-gathered: the first matrices of a pair, or what is around them.
        exit: the second matrix of the pair, whose output becomes a slice again.
        parameters: names of the parameters that are used in it.
        inner: the modules that run in it, and get something of the whole sequence.
        flat: whether the rows of a batch are one dimension in it, [rows x positions, features].
    """

    entries: tuple[str, ...]
    exit: str
    parameters: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    flat: bool = False


@dataclass(frozen=True)
class Stretch:
    """A part of the residual stream that ranks share, each a slice of the sequence. Most models have one.

    Attributes:
        layers: its layers, in the order in which they run. They may run several times, each time from the first to the last.
        tokenwise: names of the modules after them that process each token alone. The last gives the whole sequence to what
            follows; if there is none, the last layer does.
    """

    layers: tuple[str, ...]
    tokenwise: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegionFacts:
    """Where the residual stream of a model can be shared by ranks that each have a slice of the sequence.

    Attributes:
        regions: names of the modules of layers that need the whole sequence or are sliced: attention, MLP, experts.
        stretches: the parts of the stream that are shared, in the order in which they first run.
        with_residual: names of the regions whose output has a part that passed no matrix of theirs, such as a residual inside
            an MLP. If they were split over features, that part would be added once for each rank.
        problem: why the stream cannot be shared; empty: it can.
        problem_in_stages: why it cannot be shared where the model is cut into stages; empty: it can.
        spans: what gets the whole sequence and is no module of its own.
        on_slices: where there are spans, the parameters in layers that are used on slices.
        flat: the regions that return the rows of a batch as one dimension, [rows x positions, features].
        mixtures: the mixtures that take tokens [rows x positions, features] of the stream itself, and their routing, which was
            computed from slices.
    """

    regions: tuple[str, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    with_residual: tuple[str, ...] = ()
    problem: str = ""
    problem_in_stages: str = ""
    spans: tuple[Span, ...] = ()
    on_slices: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    mixtures: tuple[str, ...] = ()

    @property
    def tokenwise(self) -> tuple[str, ...]:
        """The modules after the layers that process each token alone, of all stretches."""
        return tuple(name for stretch in self.stretches for name in stretch.tokenwise)


class Traces:
    """What traces of a model find, each when it is first asked for. This base class is that of a model that nobody traces.

    A new fact is a method here, which says what holds if it is unknown, and one in
    :mod:`meshwright.models.reading.model_traces`.
    """

    @property
    def attentions(self) -> Attentions | None:
        """The attentions, for context parallel; ``None``: unknown, so ranks cannot share a sequence."""
        return None

    def mixers(self, ranks: int) -> Mapping[str, MixerShare]:
        """How the heads of mixers, which carry a state along the sequence, divide over ranks, by name; none: unknown.

        Args:
            ranks: number of ranks, above 1.
        """
        return {}

    def mixer_parameters(self, ranks: int) -> Mapping[str, tuple[str, ...]]:
        """The parameters that all heads of a mixer use, by name of the mixer; one that is absent: unknown.

        Args:
            ranks: number of ranks, above 1, over which heads divide.
        """
        return {}

    @property
    def head(self) -> HeadFacts | None:
        """The output head; ``None``: unknown, so the loss cannot be computed in chunks."""
        return None

    @property
    def runs(self) -> Mapping[str, tuple[int, int]]:
        """How often each module runs in a forward, and how often with gradient, by name; empty: unknown.

        Then all units run once but idle ones and twins.
        """
        return {}

    def choices(self, routers: Mapping[str, int]) -> Mapping[str, int]:
        """How many experts of a token each router chooses by its one topk, by name; empty: unknown.

        Args:
            routers: name of each router to the number of its experts.
        """
        return {}

    def stages(self, layers: Sequence[str]) -> StageFacts | None:
        """Where the model can be cut into pipeline stages, for the names of its layers; ``None``: unknown."""
        return None

    def carried(self, layers: Sequence[str], slices: RankSlices) -> tuple[Carried, ...] | None:
        """What crosses cuts beside the hidden state on a rank of `tp`, for the names of the layers that run; ``None``: unknown.

        Args:
            layers: their names, in the order in which they run.
            slices: what the rank has of the model.
        """
        return None

    def halves_backward(self, layers: Sequence[str], trained: AbstractSet[str], first: str, last: str) -> bool:
        """Whether the backward of a stage can be halved. It is so if that is unknown.

        Args:
            layers: names of all layers.
            trained: first names of the parameters that have a gradient.
            first: the first layer of the stage, which is not the model's first.
            last: its last layer.
        """
        return True

    def regions(self, layers: Sequence[str]) -> RegionFacts | None:
        """Which modules need the whole sequence, if no ``Structure`` says it; ``None``: unknown."""
        return None

    def pairs(self, layers: Sequence[str]) -> Pairs | None:
        """The pairs of matrices that can be sliced, and what mixes the features of others; ``None``: unknown."""
        return None

    def fused(self, layers: Sequence[str]) -> Mapping[str, Apart]:
        """The weights inside of layers that are several matrices, or that have heads, by name; none: unknown."""
        return {}
