"""Where a model is cut by default: the largest stage has the least work."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from math import inf, prod

from meshwright.plan.draft import Draft
from meshwright.plan.given.names import nearest

__all__ = ["costs_of_layers", "least_cuts"]


def costs_of_layers(
    draft: Draft, layers: Sequence[str], used: Mapping[str, tuple[str, ...]], mixtures: Mapping[str, int]
) -> tuple[list[float], list[int]]:
    """Return for each layer the multiply-adds of a token and the elements; embedding and head count for first and last."""
    costs, sizes = [0.0] * len(layers), [0] * len(layers)
    place = {name: index for index, name in enumerate(layers)}
    for row in draft.parameters:
        inside = place.get(nearest(row.name, place))
        elements = prod(row.shape)
        active = float(elements if len(row.shape) > 1 else 0)
        if draft.options.experts_of_token and (experts := mixtures.get(nearest(row.name, mixtures))):
            active *= min(1.0, draft.options.experts_of_token / experts)
        if inside is not None:
            costs[inside] += active
            sizes[inside] += elements
            continue
        if "first" in used[row.name]:
            sizes[0] += elements
        if "last" in used[row.name]:
            costs[-1] += active
            sizes[-1] += elements
    return costs, sizes


@lru_cache(maxsize=256)  # many layouts of a model have the same stages
def least_cuts(costs: tuple[float, ...], sizes: tuple[int, ...], stages: int, legal: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first layer of each stage but the first: the largest stage has the least cost, then the fewest elements.

    Args:
        costs: the cost of each layer.
        sizes: its elements.
        stages: number of stages.
        legal: the layers before which the model can be cut.
    """
    count = len(costs)
    cost_before, size_before = list(accumulate(costs, initial=0.0)), list(accumulate(sizes, initial=0))

    @cache
    def best(begin: int, left: int) -> tuple[tuple[float, int], tuple[int, ...]]:
        if left == 1:
            return (cost_before[-1] - cost_before[begin], size_before[-1] - size_before[begin]), ()
        options = []
        for end in (index for index in legal if begin < index < count - left + 2):
            (cost, size), cuts = best(end, left - 1)
            own = cost_before[end] - cost_before[begin], size_before[end] - size_before[begin]
            largest = (max(cost, own[0]), max(size, own[1]))
            options.append((largest, (end, *cuts)))
        return min(options, default=((inf, 0), ()))

    return best(0, stages)[1]
