"""Which parameters weight decay pulls towards zero: matrices, but not biases and norms.

What a parameter is decides, and not what its module is called (:mod:`meshwright.plan.given.norms`). Dimensions are counted for
one expert. The experts of a mixture are stacked in one tensor, whose first dimension counts experts, so a bias of the experts,
`[experts, features]`, is a vector like any other bias.
"""

from collections.abc import Collection

from meshwright.errors import Problems
from meshwright.plan.draft import Draft, Found, names_for
from meshwright.plan.given.inspection import ParameterFacts
from meshwright.plan.given.names import holder_of, within

__all__ = ["choose_decayed"]


def choose_decayed(draft: Draft) -> Found[dict[str, str]]:
    """Choose the parameters that are decayed, trained or not. Patterns of the options win: ``decay`` and ``no_decay``."""
    problems = Problems()
    decay, no_decay = (_named(draft, rule, problems) for rule in ("decay", "no_decay"))
    for name in sorted(decay & no_decay):
        problems.add("plan.decay", f"parameter {name!r} is claimed twice: by decay and by no_decay; name it in one of them")
    named = {**dict.fromkeys(decay, "decay"), **dict.fromkeys(no_decay, "no_decay")}
    mixtures = set(draft.mixtures)
    rules = {parameter.name: named.get(parameter.name) or _kind(draft, parameter, mixtures) for parameter in draft.parameters}
    return Found(rules, problems)


def _named(draft: Draft, rule: str, problems: Problems) -> set[str]:
    patterns: tuple[str, ...] = getattr(draft.options, rule)
    first = {name: parameter.name for parameter in draft.parameters for name in parameter.names}
    return {first[name] for pattern in patterns for name in names_for(problems, rule, pattern, first, "parameter")}


def _kind(draft: Draft, parameter: ParameterFacts, mixtures: Collection[str]) -> str:
    in_stack = within(parameter.name, mixtures)
    if parameter.name.rpartition(".")[2].split("_")[-1] == "bias":
        return "bias"
    if len(parameter.shape) - in_stack < 2:
        return "vector"
    return "norm" if draft.model.modules[holder_of(parameter.name)].norm else "matrix"
