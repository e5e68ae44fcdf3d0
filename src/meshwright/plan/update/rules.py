"""Which rule updates each parameter: that of its group of the optimizer, or that of the run."""

from meshwright.errors import Problems
from meshwright.plan.draft import Draft, Found
from meshwright.plan.update.matrices import Form
from meshwright.plan.update.muon_choice import forms_of, muon_problem, takes

__all__ = ["FROZEN", "choose_forms", "choose_rules"]

FROZEN = "frozen"
"""Name of the rule of a parameter that is not trained."""


def choose_rules(draft: Draft) -> Found[dict[str, str]]:
    """Choose the names of the rules of all parameters, by their first names.

    Where the rule of the run is Muon, what it does not take is updated by AdamW, whose rule is then one of the options.
    """
    problems, rules = Problems(), draft.options.rules
    first = next(iter(rules))
    beside = next((name for name, rule in rules.items() if rule.kind == "adamw"), first)
    chosen = {}
    for parameter in draft.parameters:
        rate = draft.rates.get(parameter.name)
        name = rate.rule if rate is not None else ""
        if parameter.name not in draft.trained:
            chosen[parameter.name] = FROZEN
            continue
        if name and rules[name].kind == "muon" and (problem := muon_problem(draft, parameter)):
            problems.add("plan.update", f"optimizer.groups: kind=muon for {parameter.name!r}, which {problem}")
        if not name and rules[first].kind == "muon" and not takes(draft, parameter):
            name = beside
        chosen[parameter.name] = name or first
    return Found(chosen, problems)


def choose_forms(draft: Draft) -> Found[dict[str, Form]]:
    """Choose what each weight of the parameters that Muon updates is, by their first names."""
    found: dict[str, Form] = {}
    for name, rule in draft.options.rules.items():
        own = [parameter for parameter, chosen in draft.rules.items() if chosen == name]
        if rule.kind == "muon" and own:
            found |= forms_of(draft, own, by_head=dict(rule.options).get("by_head", False))
    return Found(found)
