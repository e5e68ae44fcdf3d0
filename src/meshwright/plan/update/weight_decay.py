"""Which parameters weight decay pulls towards zero: matrices, but not biases and norms.

What a parameter is decides, and not what its module is called (:mod:`meshwright.plan.given.norms`). Dimensions are counted for
one expert. The experts of a mixture are stacked in one tensor, whose first dimension counts experts, so a bias of the experts,
`[experts, features]`, is a vector like any other bias.
"""

from meshwright.plan.draft import Draft
from meshwright.plan.given.inspection import ParameterFacts
from meshwright.plan.given.names import holder_of, within

__all__ = ["choose_decayed"]


def choose_decayed(draft: Draft) -> None:
    """Choose the parameters that are decayed, trained or not. Patterns of the options win: ``decay`` and ``no_decay``."""
    options = draft.options
    decay, no_decay = (_named(draft, rule, getattr(options, rule)) for rule in ("decay", "no_decay"))
    for name in sorted(decay & no_decay):
        draft.problems.add(
            "plan.decay", f"parameter {name!r} is claimed twice: by decay and by no_decay; name it in one of them"
        )
    for parameter in draft.parameters:
        name = parameter.name
        rule = "no_decay" if name in no_decay else "decay" if name in decay else _kind(draft, parameter)
        draft.decay_rules[name] = rule


def _named(draft: Draft, rule: str, patterns: tuple[str, ...]) -> set[str]:
    first = {name: parameter.name for parameter in draft.parameters for name in parameter.names}
    return {first[name] for pattern in patterns for name in draft.match(rule, pattern, first, "parameter")}


def _kind(draft: Draft, parameter: ParameterFacts) -> str:
    in_stack = within(parameter.name, draft.mixtures)
    if parameter.name.rpartition(".")[2].split("_")[-1] == "bias":
        return "bias"
    if len(parameter.shape) - in_stack < 2:
        return "vector"
    return "norm" if draft.model.modules[holder_of(parameter.name)].norm else "matrix"
