"""How many operations a model computes for a token, in closed form; a multiply-add is two.

A matrix of n entries computes 2 n operations for each token forward, as many for the gradient of its input, and as many for
its own gradient if it is trained (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Of a mixture, only the experts that a
token is sent to count. An attention computes 2 (key size + value size) operations for each head, query and key that it sees,
and twice that backward. Recomputation does not count, nor do recurrences and elementwise operators.
"""

from math import prod

from meshwright.plan.given.attentions import AttentionFacts
from meshwright.plan.given.inspection import Inspection
from meshwright.plan.given.names import holder_of, match_names, nearest
from meshwright.plan.given.spec import ParallelSpec

__all__ = ["operations_of_token"]


def operations_of_token(
    model: Inspection, spec: ParallelSpec, length: int, experts_of_token: int | None, trained: frozenset[str]
) -> float:
    """Return the operations of forward and backward for a token.

    Args:
        model: the model.
        spec: names its mixtures.
        length: length of a sequence.
        experts_of_token: number of experts that a token is sent to; ``None``: unknown, so all count.
        trained: names of the parameters that are trained.
    """
    mixtures = frozenset(name for rule in spec.experts for name in match_names(rule.pattern, model.names))
    return model.once(_operations_of_token, mixtures, length, experts_of_token, trained)


def _operations_of_token(
    model: Inspection, mixtures: frozenset[str], length: int, experts_of_token: int | None, trained: frozenset[str]
) -> float:
    forward = own = 0.0
    for parameter in model.parameters:
        mixture = nearest(parameter.name, mixtures) or None
        if len(parameter.shape) < (2 if mixture is None else 3):
            continue  # a bias or a scale
        entries = float(prod(parameter.shape))
        if mixture is not None and experts_of_token is not None:
            entries *= min(1.0, experts_of_token / parameter.shape[0])
        for name in parameter.names:
            holder = holder_of(name)
            if not model.modules[holder].embedding:
                uses = entries * _runs(model, mixture or holder)
                forward += uses
                own += uses if parameter.name in trained else 0.0
    attended = sum(_attention_operations(row, length) * _runs(model, row.module) for row in _attentions(model))
    return 2 * (2 * forward + own) + 3 * attended


def _attentions(model: Inspection) -> tuple[AttentionFacts, ...]:
    return () if model.traces.attentions is None else model.traces.attentions.rows


def _attention_operations(row: AttentionFacts, length: int) -> float:
    keys = length / 2 if row.causal else float(length)
    if row.window is not None and row.window < length:
        keys = row.window - row.window**2 / (2 * length)
    return 2.0 * row.calls * row.heads * (row.key_size + row.value_size) * keys


def _runs(model: Inspection, module: str) -> int:
    """Return how often a module runs in a forward; once if that is unknown."""
    return model.traces.runs.get(module, (1, 1))[0]
