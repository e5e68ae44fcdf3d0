"""Mixtures of experts of transformers, from what their modules declare of themselves.

Every experts module of transformers 5 goes through one interface (``use_experts_implementation``), and every model says which
of its modules are routers (``router_logits`` of what it can record). Neither is found by its name.
"""

from typing import TYPE_CHECKING

from meshwright.models import _transformers_compat as compat
from meshwright.plan.spec import ExpertsRule, Scores, generalize

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["experts_of"]

_PROBABILITIES = {"Gemma4TextRouter", "DiffusionGemmaTextRouter"}
"""Routers that record probabilities under the name of logits."""

_BIAS = "e_score_correction_bias"
"""Of routers like that of DeepSeek-V3."""


def experts_of(model: "PreTrainedModel") -> tuple[ExpertsRule, ...]:
    """A rule for each kind of mixture in a model."""
    modules = dict(model.named_modules())
    routers = compat.router_classes(model)
    rules = {}
    for name, module in modules.items():
        if not compat.is_experts(module):
            continue
        parent = name.rpartition(".")[0]
        beside = {
            f"{parent}.{child}" if parent else child: router
            for child, router in modules[parent].named_children()
            if isinstance(router, routers)
        }
        rules[generalize(name)] = _rule(name, beside)
    return tuple(rules.values())


def _rule(name: str, routers: "dict[str, nn.Module]") -> ExpertsRule:
    if len(routers) != 1:
        return ExpertsRule(generalize(name))
    ((path, router),) = routers.items()
    bias = _BIAS if _BIAS in dict(router.named_buffers(recurse=False)) else None
    scores = Scores.SIGMOID if bias else Scores.SOFTMAX
    if type(router).__name__ in _PROBABILITIES:
        scores = Scores.PROBABILITIES
    return ExpertsRule(generalize(name), generalize(path), scores, bias)
