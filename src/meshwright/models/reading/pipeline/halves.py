"""Whether a model that is cut in two runs, and can be initialised: tried without values."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.distributed.pipeline.cut import crossing_of, cut_model
from meshwright.errors import Refusal
from meshwright.models.reading.repeated_layers import RepeatedLayers
from meshwright.models.reading.tracing import Tracer, first_that_runs, meta_positions, prime_length, traced
from meshwright.plan.axes.pipeline.stage_plan import cut_of
from meshwright.plan.given.cut_points import StageFacts
from meshwright.plan.given.names import holder_of
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["with_halves"]


def with_halves(
    model: "PreTrainedModel", facts: StageFacts, experts: Sequence[ExpertsRule], *, reads_all: bool = True
) -> StageFacts:
    """Add why a model that is cut in two does not run: it may read a module of a layer that is not there.

    Args:
        model: the model, which is not changed.
        facts: where it can be cut.
        experts: its mixtures, which are not called.
        reads_all: whether all layers run; otherwise those that repeat others do not.
    """
    if facts.problems or len(facts.layers) < 2:
        return facts
    count = len(facts.layers)
    legal = [index for index in range(1, count) if index not in facts.uncut]
    tried = {min(legal, key=lambda index: abs(index - count / 2)), *((legal[0], legal[-1]) if facts.carried else ())}
    for cut in sorted(tried):
        if why := _why_not(model, facts, experts, cut, reads_all):
            problem = Refusal("pp.halves", f"cut in two, it does not run, or cannot be initialised ({why})")
            return replace(facts, problems=(problem,))
    return facts


def _why_not(model: "PreTrainedModel", facts: StageFacts, experts: Sequence[ExpertsRule], cut: int, reads_all: bool) -> str:
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for begin, end in ((0, cut), (cut, len(facts.layers))):
        part = copy.deepcopy(model, dict(shared))
        cut_model(part, cut_of(facts, begin, end))
        positions = meta_positions(prime_length(model), rows=2)  # one row would not show what is added up over rows
        if begin:
            dtype, crossing = next(model.parameters()).dtype, crossing_of(part)
            crossing.received = torch.empty(crossing.shape(*positions.shape), dtype=dtype, device="meta")
        for few in [False] if reads_all else [True, False]:
            with RepeatedLayers(part).passed_over() if few else nullcontext():
                _, why = traced(part, experts, Tracer, positions=positions)
            if not why:
                break
        if not why and all(tensor.is_meta for tensor in shared.values()):
            _, why = first_that_runs(partial(_initialize, part), (None,))
        if why:
            return why
    return ""


def _initialize(part: nn.Module, _: object) -> None:
    """Give each module its initial values, by the rules of the innermost model around it."""
    owners: dict[str, Any] = {}
    for name, module in part.named_modules():  # a model before its modules
        owners[name] = module if hasattr(module, "_init_weights") else owners[holder_of(name)]
    for name, module in reversed(list(part.named_modules())):
        owners[name]._init_weights(module)
