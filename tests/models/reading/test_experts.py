"""What is known of routers, against what those of the installed transformers do."""

import importlib
import inspect
import pkgutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.models
from torch import nn

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models import _transformers_compat as compat
from meshwright.models.reading.experts import _BIASES, _SCORES, _SET_BY_CONFIG, _scores, experts_of
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.spec import ExpertsRule, Scores
from meshwright.plan.resolver import resolve
from tests.tiny import SPARSE, make, tiny_model

WIDTH, EXPERTS, K = 8, 6, 3

CONFIG: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), K),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale", "output_multiplier"), 2.5),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise", "moe_router_logit_softcapping"), 0.0),
    "hidden_size": WIDTH, "norm_topk_prob": True, "topk_method": "greedy", "use_expert_bias": True, "moe_norm_min": 1e-9,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
"""What the routers read of a config, whatever each calls it."""


def routers() -> list[tuple[str, str]]:
    """The classes of the table that this transformers has, each with its module."""
    table = {*(kind for kinds in _SCORES.values() for kind in kinds), *_SET_BY_CONFIG} - compat.TURNED_ROUTERS
    found = []
    for package in pkgutil.iter_modules(transformers.models.__path__):
        path = f"transformers.models.{package.name}.modeling_{package.name}"
        spec = importlib.util.find_spec(path) if package.ispkg else None
        if spec is not None and spec.origin is not None:
            with open(spec.origin, encoding="utf-8") as file:
                text = file.read()
            found += [(path, kind) for kind in table if f"class {kind}(" in text]
    return sorted(found)


def built(path: str, kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    router = getattr(importlib.import_module(path), kind)(SimpleNamespace(**{**CONFIG, **changes}))
    for parameter in router.parameters():
        if (
            parameter.shape[-1] == WIDTH and parameter.ndim == 2
        ):  # some are empty, some zeros: a constructor's work is half of it
            nn.init.normal_(parameter)
    return router.eval()


def check(router: nn.Module, kind: Scores) -> None:
    """The weights that a router gives a token are in the ratio of the probabilities that its scores are said to stand for."""
    hidden = torch.randn(10, WIDTH)
    if type(router).__name__ == "AfmoeTokenChoiceRouter":
        hidden = hidden[None]
    wants_bias = any(name in inspect.signature(router.forward).parameters for name in _BIASES)
    scores, weights, index, *_ = router(hidden, *[torch.zeros(EXPERTS)] * wants_bias)
    scores, weights, index = (item.reshape(10, -1) for item in (scores, weights, index))
    assert scores.shape == (10, EXPERTS)
    shares = {Scores.SOFTMAX: scores.softmax(-1), Scores.SIGMOID: scores.sigmoid(), Scores.PROBABILITIES: scores}
    ratios = {name: weights / share.gather(1, index) for name, share in shares.items()}
    alike = {name for name, ratio in ratios.items() if torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-4)}
    assert alike == {kind}


@pytest.mark.parametrize(("path", "kind"), routers(), ids=lambda item: item if "." not in item else "")
def test_scores_are_what_the_router_makes_weights_of(path: str, kind: str) -> None:
    if kind == "PhimoeTopKRouter":
        pytest.skip("its choices are softmaxes of one behind the other, each over what is near its largest logit")
    if kind not in _SET_BY_CONFIG:
        router = built(path, kind)
        check(router, _scores(router))
        return
    for choice, kind_ in (("sigmoid", Scores.SIGMOID), ("softmax", Scores.SOFTMAX), ("sqrtsoftplus", Scores.UNKNOWN)):
        if choice != ("softmax" if _SET_BY_CONFIG[kind] == "score_fn" else "sqrtsoftplus"):
            router = built(path, kind, scoring_func=choice, expert_selection_fn=choice)
            assert _scores(router) is kind_
            if kind_ is not Scores.UNKNOWN:
                check(router, kind_)


def test_every_family_of_the_matrix_is_known() -> None:
    for family in sorted(SPARSE):
        for rule in make(family, meta=True)[1].experts:
            assert rule.router is not None, (family, rule)
            assert rule.scores is not Scores.UNKNOWN, (family, rule)
            assert (rule.bias is not None) == (family in ("deepseek_v3", "nemotron_h")), (family, rule)


def test_a_router_that_is_not_known_is_not_guessed() -> None:
    model = tiny_model("deepseek_v3", meta=True)
    router = type(model.get_submodule("model.layers.1.mlp.gate"))

    class Other(router):  # type: ignore[misc, valid-type]
        """With a forward of its own: anything may be in it."""

        def forward(self, hidden_states: torch.Tensor) -> Any:
            return super().forward(hidden_states)

    class Same(router):  # type: ignore[misc, valid-type]
        """As FSDP makes them."""

    gates = [module for module in model.modules() if isinstance(module, router)]
    for gate in gates:
        gate.__class__ = Same
    assert [rule.scores for rule in experts_of(model)] == [Scores.SIGMOID]
    for gate in gates:
        gate.__class__ = Other
    (rule,) = experts_of(model)
    assert (rule.scores, rule.bias) == (Scores.UNKNOWN, None)


def test_a_bias_may_be_the_blocks() -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    base = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model("minimax_m2", **base, num_key_value_heads=2, head_dim=8, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    spec = spec_of(model)
    assert spec.experts == (
        ExpertsRule("model.layers.*.mlp.experts", "model.layers.*.mlp.gate", Scores.SIGMOID, "e_score_correction_bias"),
    )
    row = resolve(spec, model, Layout(), world_size=1).experts[1]
    assert (row.scores, row.bias) == ("sigmoid", "model.layers.1.mlp.e_score_correction_bias")
    assert model.get_buffer(row.bias).shape == (4,)


def test_a_bias_that_there_is_not_is_refused() -> None:
    model = tiny_model("mixtral", meta=True)
    spec = spec_of(model)
    wrong = replace(spec, experts=tuple(replace(rule, bias=_BIASES[0]) for rule in spec.experts))
    with pytest.raises(
        PlanError, match=r"bias 'e_score_correction_bias' is a buffer neither of the router 'model\.layers\.0\.mlp\.gate'"
    ):
        resolve(wrong, model, Layout(), world_size=1)


def test_layers_that_route_in_different_ways_have_rules_of_their_own() -> None:
    """The first layers of DeepSeek-V4 look the experts of a token up."""
    config = transformers.AutoConfig.for_model("deepseek_v4", num_hidden_layers=5)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    hashed, chosen = ([rule for rule in experts_of(model) if (rule.router is None) == lacks] for lacks in (True, False))
    assert {(rule.scores, rule.bias) for rule in chosen} == {(Scores.UNKNOWN, "e_score_correction_bias")}
    assert {(rule.scores, rule.bias) for rule in hashed} == {(Scores.UNKNOWN, None)}
    assert len(hashed) + len(chosen) == 5
