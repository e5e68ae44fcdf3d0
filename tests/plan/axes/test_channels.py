"""How the ranks of `tp` share mixers: where each parameter is, what is sent, and why some mixers stay whole."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.reading.context.mixer_calls import MixerCalls
from meshwright.models.reading.context.mixers_of_model import DRAWS
from meshwright.models.reading.tensor.mixer_parameters import _differentiated
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.tensor import channels
from meshwright.plan.axes.tensor.traffic import tensor_parallel_counts
from meshwright.plan.draft import Draft
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.resolver import resolve
from meshwright.plan.result.program import MixChannels
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.tiny import needs_norm_of_groups

MAMBA_2 = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8}


def made(kind: str, **sizes: Any) -> PreTrainedModel:
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, vocab_size=29, hidden_size=32, num_hidden_layers=2, **sizes)
        model = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    return model


def planned(model: PreTrainedModel, tp: int = 2, **sizes: int) -> ShardingPlan:
    return resolve(spec_of(model), model, Layout(tp=tp, dp_shard=1, **sizes), ParallelOptions(param_dtype=None))


def of_mixer(plan: ShardingPlan) -> dict[str, tuple[str | None, int]]:
    """Style of each parameter of the second layer's mixer, and its numbers on a rank."""
    begin = "backbone.layers.1.mixer."
    rows = [row for row in plan.parameters if row.name.startswith(begin)]
    return {row.name.removeprefix(begin): (row.tp_style, prod(row.local_shape)) for row in rows}


def test_how_mixers_are_shared_is_asked_once_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each layer, nor for each matrix of one."""
    needs_norm_of_groups("mamba2")
    seen: list[Draft] = []
    asked = channels._shared_mixers

    def noted(draft: Draft) -> Mapping[str, MixerShare]:
        seen.append(draft)
        return asked(draft)

    monkeypatch.setattr(channels, "_shared_mixers", noted)
    assert of_mixer(planned(made("mamba", state_size=4)))
    assert 1 <= len(seen) == len({id(draft) for draft in seen})


def test_channels_of_mamba_1() -> None:
    needs_norm_of_groups("mamba2")
    plan = planned(made("mamba", state_size=4))
    assert of_mixer(plan) == {
        "A_log": ("channels", 32 * 4),
        "D": ("channels", 32),
        "conv1d.weight": ("channels", 32 * 4),
        "conv1d.bias": ("channels", 32),
        "in_proj.weight": ("packed_colwise", 2 * 32 * 32),
        "x_proj.weight": ("rowwise_within", (2 + 8) * 32),
        "dt_proj.weight": ("channels", 32 * 2),
        "dt_proj.bias": ("channels", 32),
        "out_proj.weight": ("rowwise", 32 * 32),
    }
    # Of each of two mixers, Mamba-1 sums twice for x_proj, and Mamba-2 for two gradients of a convolution.
    assert tensor_parallel_counts(plan) == tensor_parallel_counts(planned(made("mamba2", **MAMBA_2))) - Counter(all_to_all=4)


def test_heads_of_mamba_2() -> None:
    needs_norm_of_groups("mamba2")
    plan = planned(made("mamba2", **MAMBA_2))
    assert of_mixer(plan) == {
        "A_log": ("channels", 2),
        "D": ("channels", 2),
        "dt_bias": ("channels", 2),
        "conv1d.weight": ("replicated_with_grad_allreduce", (64 + 16 + 16) * 4),  # x, B and C have other sizes
        "conv1d.bias": ("replicated_with_grad_allreduce", 64 + 16 + 16),
        "in_proj.weight": ("fused_colwise", (64 + 64 + 16 + 16 + 4) // 2 * 32),
        "norm.weight": ("channels", 32),
        "out_proj.weight": ("rowwise", 32 * 32),
    }
    rows = {row.module: row for row in plan.tensor_parallel}
    assert rows["backbone.layers.1.mixer"].sums == ("conv1d.weight", "conv1d.bias")
    assert rows["backbone.layers.1.mixer.in_proj"].parts == (64, 64, 16, 16, 4)
    actions = [action for action in plan.program if isinstance(action, MixChannels)]
    assert [action.module for action in actions] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert dict(actions[0].values) == {"intermediate_size": 32, "conv_dim": 48, "num_heads": 2, "n_groups": 1}
    assert ShardingPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("sizes", "tp", "layout", "why", "legal"),
    [
        ({}, 4, {}, "it has fewer groups of them than ranks", "the legal values of tp up to 16 are 1, 2"),
        ({"n_groups": 1}, 2, {}, "it has fewer groups of them than ranks", "the legal value of tp is 1"),
        ({}, 2, {"cp": 2}, "cp divides its heads", "the legal value of tp is 1"),
    ],
)
def test_mixers_that_ranks_cannot_share_say_why(
    sizes: dict[str, int], tp: int, layout: dict[str, int], why: str, legal: str
) -> None:
    needs_norm_of_groups("mamba2")
    with pytest.raises(PlanError, match=why) as raised:
        planned(made("mamba2", **{**MAMBA_2, **sizes}), tp, **layout)
    assert legal in str(raised.value)
    assert set(raised.value.codes) <= {"tp.heads", "tp.no_styles"}


def test_the_plan_says_why_mixers_stay_whole_beside_slices() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64, "attn_layer_indices": [1]}
    mixers = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
    plan = planned(made("bamba", **sizes, **mixers))
    (why,) = [why for name, why in plan.tp_passed_over if name.endswith("mamba")]
    assert why.startswith("whole on each rank: the heads of several ranks need the same features")
    assert not [row for row in plan.tensor_parallel if row.module.endswith("mamba")]


class LateMixer(torch.nn.Module):
    """A mixer, one of whose parameters matters for negative values only."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.scale, self.low = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return states of two heads."""
        heads = self.entry(hidden).unflatten(-1, (2, 4))
        states = (heads * self.scale + torch.relu(-self.low)).cumsum(1)
        output: torch.Tensor = self.exit(states.flatten(-2))
        return output


def test_parameters_of_all_heads_are_found_in_several_draws() -> None:
    share = MixerShare("mixer", hidden=(0, "hidden"), openings=(("entry", ((8, 1),)),), closing="exit", features=(8,))
    call = ((torch.zeros(1, 6, 8),), {})
    mixer = LateMixer()
    draws = [MixerCalls(mixer, "mixer", share.hidden, *call, lowest) for lowest in DRAWS]
    assert _differentiated(draws, share) == ("low", "scale")
    assert _differentiated(draws[:1], share) is None  # nothing depends on one of them in the first draw
