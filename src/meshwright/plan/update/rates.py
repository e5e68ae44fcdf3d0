"""Learning rate, weight decay and other settings of each parameter, where groups of the configuration change them.

A group names parameters by a pattern of their names, or of the modules that hold them; a parameter is in the first group that
names it. With a factor per layer, the rate of the last layer is that of the group, and each layer below has the factor once
more (Howard and Ruder 2018, arXiv 1801.06146, section 3.2). What the model lists before its first layer, such as embeddings, is
one below that; what comes after the layers is where the last layer is.
"""

from collections.abc import Sequence

from meshwright.errors import Problems
from meshwright.plan.draft import Draft, Found, Rate, names_for
from meshwright.plan.given.names import holder_of, holders_of, outermost, within

__all__ = ["choose_rates"]


def choose_rates(draft: Draft) -> Found[dict[str, Rate]]:
    """Choose how the parameters that a group names are updated, by their first names."""
    problems, rates = Problems(), dict[str, Rate]()
    by_name: dict[str, list[str]] = {}  # also by the modules that hold them
    for parameter in draft.parameters if draft.options.groups else ():
        for name in parameter.names:
            for path in (name, *holders_of(name)):
                by_name.setdefault(path, []).append(parameter.name)
    for match, share, per_layer, weight_decay, others in draft.options.groups:
        named = names_for(problems, "optimizer.groups", match, by_name, "parameter")
        own = [name for name in dict.fromkeys(one for path in named for one in by_name[path]) if name not in rates]
        if named and not own:
            problems.add("plan.pattern", f"optimizer.groups pattern {match!r}: earlier groups have all its parameters")
        below = _layers_above(draft, own) if per_layer is not None else {}
        if own and per_layer is not None and not any(within(name, draft.layers) for name in own):
            problems.add("plan.pattern", f"optimizer.groups pattern {match!r}: has lr_decay, and names no layer")
        for name in own:
            rates[name] = Rate(share * (per_layer or 1.0) ** below.get(name, 0), weight_decay, **dict(others))
    return Found(rates, problems)


def _layers_above(draft: Draft, names: Sequence[str]) -> dict[str, int]:
    """Return for each parameter how many layers of its stack are above it."""
    layers = set(draft.layers)
    layer_of = {one.name: outermost(one.name, layers) for one in draft.parameters}
    listed = list(layer_of)
    first = next((place for place, name in enumerate(listed) if layer_of[name]), len(listed))

    def stack(layer: str) -> list[str]:
        return [other for other in draft.layers if holder_of(other) == holder_of(layer)]

    found = {}
    for name in names:
        if layer := layer_of[name]:
            found[name] = len(stack(layer)) - 1 - stack(layer).index(layer)
        elif listed.index(name) < first < len(listed):
            found[name] = len(stack(layer_of[listed[first]]))
    return found
