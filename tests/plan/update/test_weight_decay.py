"""Which parameters are decayed: a column of the plan, and the exceptions of the user."""

import json

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from maintain.tiny import TINY_MODELS
from meshwright.audit.one_process.decay import to_be_decayed
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.model_config import ModelConfig
from meshwright.models.specs.registry import spec_of
from meshwright.models.weights.build import build_on_meta, pretrained_config
from meshwright.plan.given.inspection import model_sizes
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan


def planned(family: str, **options: object) -> tuple[nn.Module, ShardingPlan]:
    source = ModelConfig(config={"model_type": family, **TINY_MODELS[family].config})
    model = build_on_meta(source, pretrained_config(source))
    return model, resolve(spec_of(model), model, Layout(), ParallelOptions(**options), world_size=2)


def undecayed(plan: ShardingPlan) -> set[str]:
    return {row.name for row in plan.parameters if not row.decayed}


@pytest.mark.parametrize("family", TINY_MODELS)
def test_the_plan_and_the_words_of_the_configuration_agree(family: str) -> None:
    model, plan = planned(family)
    experts = model_sizes(spec_of(model), model).experts or 0
    decayed = [row.name for row in plan.parameters if row.decayed]
    assert sorted(decayed) == sorted(to_be_decayed(model, experts, ()))
    for row in plan.parameters:
        assert not (row.decayed and (len(row.shape) < 2 or row.name.endswith("bias") or "norm" in row.name)), row.name


def test_a_bias_of_each_expert_is_a_vector() -> None:
    _, plan = planned("gpt_oss")
    rows = {row.name: row for row in plan.parameters}
    for own, dimensions in (("gate_up_proj", 3), ("down_proj", 3), ("gate_up_proj_bias", 2), ("down_proj_bias", 2)):
        row = rows[f"model.layers.0.mlp.experts.{own}"]
        assert len(row.shape) == dimensions
        assert row.decayed is (dimensions == 3)
    assert rows["model.layers.0.mlp.router.weight"].decayed


class PerHeadNorm(nn.LayerNorm):
    """A vector for each head, as Cohere has it."""


def test_norms_of_several_heads_and_frozen_matrices_are_not_decayed() -> None:
    model = nn.ModuleDict({"norm": PerHeadNorm((4, 8)), "up": nn.Linear(8, 8), "down": nn.Linear(8, 8)})
    plan = resolve(ParallelSpec("plain", layers=()), model, Layout(), ParallelOptions(freeze=("down.*",)), world_size=2)
    assert {row.name for row in plan.parameters if row.decayed} == {"up.weight"}


def test_patterns_except_matrices_also_by_the_other_name_of_a_tied_one() -> None:
    _, plain = planned("qwen2")
    _, plan = planned("qwen2", no_decay=("lm_head.weight", "model.layers.*.mlp.*.weight"))
    names = {f"model.layers.{index}.mlp.{own}_proj.weight" for index in range(2) for own in ("gate", "up", "down")}
    assert undecayed(plan) - undecayed(plain) == {"model.embed_tokens.weight", *names}
    with pytest.raises(PlanError, match=r"no_decay pattern 'model\.norms\.\*' matches no parameter; there are, for example"):
        planned("qwen2", no_decay=("model.norms.*",))


def test_json_keeps_it_and_an_older_plan_says_what_was_decayed_then() -> None:
    _, plan = planned("gpt_oss", no_decay=("lm_head.weight",), freeze=("model.embed_tokens.weight",))
    assert ShardingPlan.from_json(plan.to_json()) == plan
    content = json.loads(plan.to_json())
    del content["options"]["no_decay"]
    for row in content["parameters"]:
        del row["decayed"]
    older = ShardingPlan.from_json(json.dumps(content))
    assert older.parameter("model.layers.0.mlp.experts.down_proj_bias").decayed
    assert not older.parameter("model.embed_tokens.weight").decayed
    assert {"parameter model.layers.0.mlp.experts.down_proj_bias: decayed True -> False"} <= {str(d) for d in older.diff(plan)}


class NormalizedLinear(nn.Module):
    """A matrix, of a layer whose name has "norm" in it: cosines, as in some routers."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, features))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.normalize(hidden, dim=-1), nn.functional.normalize(self.weight, dim=-1))


class NormedRouter(nn.Module):
    """Divides by a root of mean squares, as a norm does, and multiplies with a matrix."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden * hidden.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()) @ self.weight


def _root_mean_square(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)


class PerHeadScale(nn.Module):
    """A norm without the word in its name, whose statistic is in a function outside of it."""

    def __init__(self, heads: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, features))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * _root_mean_square(hidden.float())).to(hidden.dtype)


class Mixing(nn.Module):
    """Scales its input by a matrix without a statistic: no norm."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, features))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


def test_what_a_parameter_is_decides_and_not_the_name_of_its_class() -> None:
    modules = {"linear": NormalizedLinear(8, 4), "router": NormedRouter(8), "scale": PerHeadScale(4, 8), "mixing": Mixing(8)}
    modules |= {"norm": PerHeadNorm((4, 8)), "cohere": CohereLayerNorm((4, 8)), "unbiased": nn.LayerNorm((4, 8), bias=False)}
    model = nn.ModuleDict(modules)
    plan = resolve(ParallelSpec("plain", layers=()), model, Layout(), ParallelOptions(), world_size=2)
    rules = {row.name: row.decay_rule for row in plan.parameters}
    matrices = ["linear.weight", "router.weight", "mixing.weight"]
    norms = ["scale.weight", "norm.weight", "cohere.weight", "unbiased.weight"]
    assert rules == {**dict.fromkeys(matrices, "matrix"), **dict.fromkeys(norms, "norm"), "norm.bias": "bias"}
    assert {row.name for row in plan.parameters if row.decayed} == set(matrices) == set(to_be_decayed(model, 0, ()))


def test_a_pattern_of_the_user_wins_and_two_that_disagree_are_refused() -> None:
    model = nn.ModuleDict({"up": nn.Linear(8, 8), "scale": PerHeadScale(4, 8)})

    def rules(**options: object) -> dict[str, tuple[str, bool]]:
        spec = ParallelSpec("plain", layers=())
        plan = resolve(spec, model, Layout(), ParallelOptions(**options), world_size=2)  # type: ignore[arg-type]
        return {row.name: (row.decay_rule, row.decayed) for row in plan.parameters}

    found = rules(decay=("scale.*", "up.bias"), no_decay=("up.weight",))
    assert found == {"up.weight": ("no_decay", False), "up.bias": ("decay", True), "scale.weight": ("decay", True)}
    with pytest.raises(PlanError, match=r"'up\.weight' is claimed twice: by decay and by no_decay"):
        rules(decay=("up.*",), no_decay=("up.weight",))
