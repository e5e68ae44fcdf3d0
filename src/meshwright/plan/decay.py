"""Which parameters weight decay pulls towards zero: matrices, but not biases and norms.

Dimensions are counted for one expert. The experts of a mixture are stacked in one tensor, whose first dimension counts experts,
so a bias of the experts, `[experts, features]`, is a vector like any other bias.
"""

from meshwright.plan.draft import Draft
from meshwright.plan.inspection import ModuleFacts
from meshwright.plan.names import holder_of, within

__all__ = ["choose_decayed"]


def choose_decayed(draft: Draft) -> None:
    """Choose the parameters that are decayed, trained or not; ``no_decay`` of the options has the exceptions."""
    first = {name: parameter.name for parameter in draft.parameters for name in parameter.names}
    excepted = {
        first[name] for pattern in draft.options.no_decay for name in draft.match("no_decay", pattern, first, "parameter")
    }
    for parameter in draft.parameters:
        in_stack = within(parameter.name, draft.mixtures)
        matrix = len(parameter.shape) - in_stack >= 2
        own = parameter.name.rpartition(".")[2]
        bias = own.split("_")[-1] == "bias"
        if (
            matrix
            and not bias
            and parameter.name not in excepted
            and not _is_norm(draft.model.modules[holder_of(parameter.name)])
        ):
            draft.decayed.add(parameter.name)


def _is_norm(module: ModuleFacts) -> bool:
    """Return whether a module is a norm. Some norms have a vector for each head, `[heads, features]`, which is no matrix."""
    return "norm" in module.kind.lower() and not module.kind.endswith("Head")  # a NormHead is an output head
