"""Which parameters are decayed: a column of the plan, and the exceptions of the user."""

import json

import pytest
from torch import nn

from meshwright.audit.decay import to_be_decayed
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.build import build_on_meta, pretrained_config
from meshwright.models.config import ModelConfig
from meshwright.models.families import TINY_MODELS
from meshwright.models.registry import spec_of
from meshwright.plan.inspection import model_sizes
from meshwright.plan.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.sharding_plan import ShardingPlan
from meshwright.plan.spec import ParallelSpec


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
