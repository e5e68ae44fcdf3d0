"""The facts of a model that sequence parallel needs: which modules of a layer need the whole sequence."""

from dataclasses import dataclass

__all__ = ["RegionFacts"]


@dataclass(frozen=True)
class RegionFacts:
    """Where the residual stream of a model can be shared by ranks that each have a slice of the sequence.

    Attributes:
        regions: names of the modules of layers that need the whole sequence or are sliced: attention, MLP, experts.
        tokenwise: names of the modules after the layers that process each token alone, in the order in which they run.
        around: names of the regions whose output has a part that passed no matrix of theirs, such as a residual inside an MLP.
            If they were split over features, that part would be added once for each rank.
        problem: why the stream cannot be shared; empty: it can.
        problem_in_stages: why it cannot be shared where the model is cut into stages; empty: it can.
    """

    regions: tuple[str, ...] = ()
    tokenwise: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    problem: str = ""
    problem_in_stages: str = ""
