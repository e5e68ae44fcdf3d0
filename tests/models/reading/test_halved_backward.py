"""Whether the backward of a stage can be halved: what a trial without values says, against torch's halves with values."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.distributed import _torch_compat
from meshwright.distributed.pipeline.cut import crossing_of, cut_model
from meshwright.models.reading.pipeline.halved_backward import halves_backward
from meshwright.plan.axes.pipeline.stage_plan import cut_of
from meshwright.plan.given.cut_points import StageFacts
from tests.models.reading.test_pipeline import LENGTH, facts_of, tiny


def model_of(family: str) -> nn.Module:
    if family != "shared":
        return tiny(family, 4)
    model: Any = tiny("llama", 6)
    for name in ("gate_proj", "up_proj", "down_proj"):
        model.model.layers[5].mlp.get_submodule(name).weight = model.model.layers[3].mlp.get_submodule(name).weight
    return model  # type: ignore[no-any-return]


def runs(model: nn.Module, facts: StageFacts, begin: int, end: int) -> bool:
    """Run both halves of a stage with values."""
    part = copy.deepcopy(model)
    cut_model(part, cut_of(facts, begin, end))
    received = torch.randn(crossing_of(part).shape(2, LENGTH), dtype=torch.float64).requires_grad_()
    crossing_of(part).received = received
    ids, positions = torch.randint(3, 60, (2, LENGTH)), torch.arange(LENGTH).expand(2, LENGTH)
    output = part(input_ids=ids, position_ids=positions, use_cache=False)
    sent, stage = getattr(output, "logits", output), SimpleNamespace(submod=part)
    given: dict[str, Any] = {"stage_output": [sent], "output_grads": [torch.ones_like(sent)], "input_values": [received]}
    _, groups = _torch_compat.backward_of_stage("input", stage, given)
    try:
        _torch_compat.backward_of_stage("weight", stage, {"param_groups": groups})
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("family", "begin", "end", "halved"),
    [
        ("llama", 1, 4, True),
        ("mixtral", 1, 4, True),
        ("gemma4_text", 1, 4, True),
        ("gemma3n_text", 2, 3, False),  # a router in each layer predicts, and then corrects
        ("shared", 2, 6, False),  # two layers share parameters
        ("shared", 1, 3, True),  # and are in another stage
    ],
)
def test_a_trial_says_what_torch_does(family: str, begin: int, end: int, halved: bool) -> None:
    model = model_of(family)
    facts = facts_of(model)
    assert facts.problems == ()
    first, last = facts.layers[begin].name, facts.layers[end - 1].name
    trained = {name for name, _ in model.named_parameters()}
    assert runs(model, facts, begin, end) == halves_backward(model, facts, (), trained, first, last) == halved


def test_weights_that_are_frozen_are_in_no_half() -> None:
    model = tiny("gemma3n_text", 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("altup" not in name)
    facts = facts_of(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert runs(model, facts, 2, 4)
    assert halves_backward(model, facts, (), trained, facts.layers[2].name, facts.layers[3].name)
