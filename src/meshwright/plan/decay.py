"""Which parameters weight decay pulls towards zero: matrices, and neither biases nor norms.

Dimensions are counted for one unit of computation: the experts of a mixture lie behind each other in one tensor, so its first
dimension counts experts, and a bias of theirs, `[experts, features]`, is as much a vector as any other bias.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from meshwright.plan.options import ParallelOptions
from meshwright.plan.spec import ParallelSpec, generalize, match_names

__all__ = ["decayed_names"]


def decayed_names(
    spec: ParallelSpec,
    model: nn.Module,
    options: ParallelOptions,
    names: Mapping[str, Sequence[str]],
    problems: list[str],
) -> set[str]:
    """The parameters that are decayed, whether they are trained or not.

    Args:
        spec: says which modules hold experts.
        model: to read shapes and classes from.
        options: ``no_decay`` has the exceptions.
        names: that of each parameter to all that it has.
        problems: a pattern of ``no_decay`` without a match is added to it.
    """
    modules = dict(model.named_modules())
    stacked = {name for rule in spec.experts for name in match_names(rule.pattern, modules)}
    excepted = _excepted(options.no_decay, names, problems)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = set()
    for name in names.keys() - excepted:
        holder, _, own = name.rpartition(".")
        in_stack = any(f"{name}.".startswith(f"{module}.") for module in stacked)
        matrix = parameters[name].ndim - in_stack >= 2
        if matrix and own.split("_")[-1] != "bias" and not _is_norm(modules[holder]):
            found.add(name)
    return found


def _is_norm(module: nn.Module) -> bool:
    """Some norms have a vector for each head: `[heads, features]`."""
    kind = type(module).__name__
    return "norm" in kind.lower() and not kind.endswith("Head")  # a NormHead is an output head


def _excepted(patterns: Iterable[str], names: Mapping[str, Sequence[str]], problems: list[str]) -> set[str]:
    every = {alias: name for name, aliases in names.items() for alias in aliases}
    excepted: set[str] = set()
    for pattern in patterns:
        matched = match_names(pattern, every)
        if not matched:
            there = ", ".join(sorted({generalize(name) for name in every})[:12])
            problems.append(f"no_decay pattern {pattern!r} matches no parameter; there are, for example, {there}")
        excepted.update(every[name] for name in matched)
    return excepted
