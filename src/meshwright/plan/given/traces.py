"""What is read from a model by calling it once without values: the facts that no name, shape or config states."""

from collections.abc import Mapping, Sequence

from meshwright.plan.given.attentions import Attentions
from meshwright.plan.given.cut_points import StageFacts
from meshwright.plan.given.output_head import HeadFacts
from meshwright.plan.given.sequence_regions import RegionFacts
from meshwright.plan.given.sliceable_pairs import Pairs

__all__ = ["Traces"]


class Traces:
    """What traces of a model find, each when it is first asked for. This base class is that of a model that nobody traces.

    A new fact is a method here, which says what holds if it is unknown, and one in
    :mod:`meshwright.models.reading.model_traces`.
    """

    @property
    def attentions(self) -> Attentions | None:
        """The attentions, for context parallel; ``None``: unknown, so ranks cannot share a sequence."""
        return None

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

    def stages(self, layers: Sequence[str]) -> StageFacts | None:
        """Where the model can be cut into pipeline stages, for the names of its layers; ``None``: unknown."""
        return None

    def regions(self, layers: Sequence[str]) -> RegionFacts | None:
        """Which modules need the whole sequence, if no ``Structure`` says it; ``None``: unknown."""
        return None

    def pairs(self, layers: Sequence[str]) -> Pairs | None:
        """The pairs of matrices that can be sliced, and what mixes the features of others; ``None``: unknown."""
        return None
