"""Which rule updates each parameter: that of its group of the optimizer, or that of the run."""

from meshwright.errors import Problems
from meshwright.plan.draft import Draft, Found

__all__ = ["FROZEN", "choose_rules"]

FROZEN = "frozen"
"""Name of the rule of a parameter that is not trained."""


def choose_rules(draft: Draft) -> Found[dict[str, str]]:
    """Choose the names of the rules of all parameters, by their first names."""
    first = next(iter(draft.options.rules))
    chosen = {}
    for parameter in draft.parameters:
        rate = draft.rates.get(parameter.name)
        chosen[parameter.name] = (rate.rule if rate is not None else "") or first
        if parameter.name not in draft.trained:
            chosen[parameter.name] = FROZEN
    return Found(chosen, Problems())
