"""How many experts of a token each router chooses, and whether it does so by one ``topk``."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from meshwright.models.reading.tracing import Inputs, Operator, Tracer, traced
from meshwright.plan.given.names import within
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["count_choices"]


def count_choices(model: "PreTrainedModel", experts: Sequence[ExpertsRule], routers: Mapping[str, int]) -> dict[str, int]:
    """Return for each router how many experts of a token its one topk chooses; 0: it has none, or several.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        experts: its mixtures.
        routers: name of each router to the number of its experts.
    """
    tracer, _ = traced(model, experts, partial(_Choices, routers))
    found = {} if tracer is None else tracer.found
    return {router: sizes[0] if len(sizes := found.get(router, [])) == 1 else 0 for router in routers}


class _Choices(Tracer):
    """Notes each topk over the scores of all experts of a router, a row for each token."""

    def __init__(self, routers: Mapping[str, int], inputs: Inputs) -> None:
        super().__init__(inputs)
        self.routers, self.rows = routers, inputs.positions.shape
        self.found: dict[str, list[int]] = {}

    def operator(self, operator: Operator) -> None:
        if operator.name != "topk":
            return
        router = next((name for name in self.routers if within(operator.module, [name])), None)
        scores: torch.Tensor = operator.args[0]
        if router is None or scores.shape[-1] != self.routers[router]:
            return
        if scores.shape[:-1] in (self.rows, (self.rows.numel(),)):
            self.found.setdefault(router, []).append(operator.results[0].shape[-1])
