"""Which parameters Muon takes by itself, what each is, and how it is held, for every family."""

import pytest

from maintain.tiny import TINY_MODELS
from meshwright.layout import Layout
from meshwright.models.model_config import ModelConfig
from meshwright.models.specs.registry import spec_of
from meshwright.models.weights.build import build_on_meta, pretrained_config
from meshwright.plan.draft import Draft
from meshwright.plan.given.inspection import inspect_model
from meshwright.plan.given.names import within
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import _PASSES
from meshwright.plan.update.matrices import Apart, Cut, Form, Held
from meshwright.plan.update.muon_choice import forms_of, held_of, indices_of_rank, muon_problem, takes


def drafted(family: str, layout: Layout) -> Draft:
    source = ModelConfig(config={"model_type": family, **TINY_MODELS[family].config})
    model = build_on_meta(source, pretrained_config(source))
    spec = spec_of(model)
    draft = Draft(spec, inspect_model(spec, model), layout, ParallelOptions())
    for group in _PASSES:
        for name, find in group:
            draft = draft.extended(name, find(draft))
    draft.refuse()
    return draft


@pytest.mark.parametrize("family", TINY_MODELS)
def test_muon_takes_the_matrices_inside_of_layers(family: str) -> None:
    draft = drafted(family, Layout(dp_shard=2))
    taken = {parameter.name for parameter in draft.parameters if takes(draft, parameter)}
    assert taken
    in_layers = {own.name for own in draft.parameters if within(own.name, draft.layers)}
    others = ("norm", "mlp.gate.", "mixer.gate.", "conv1d", "bias", ".router.", "_table")
    matrices = {own for own in in_layers if len(draft.model.parameter_of[own].shape) > 1}
    assert taken == {name for name in matrices if not any(word in name for word in others)}


def test_what_muon_cannot_update_is_said() -> None:
    draft = drafted("gpt_oss", Layout(dp_shard=2))
    facts = draft.model.parameter_of
    assert "shape" in muon_problem(draft, facts["model.layers.0.mlp.experts.gate_up_proj_bias"])
    assert "shape" in muon_problem(draft, facts["model.norm.weight"])
    assert muon_problem(draft, facts["lm_head.weight"]) == ""  # who asks for it gets it


def test_what_each_weight_is() -> None:
    def forms(family: str, **options: bool) -> dict[str, Form]:
        draft = drafted(family, Layout(dp_shard=2))
        return forms_of(draft, [own.name for own in draft.parameters if takes(draft, own)], **options)

    phi, gpt, oss = forms("phi3"), forms("gpt2"), forms("gpt_oss")
    assert phi["model.layers.1.self_attn.qkv_proj.weight"] == Form(apart=Apart((32, 16, 16)))
    assert phi["model.layers.1.self_attn.o_proj.weight"] == Form()
    assert gpt["transformer.h.0.attn.c_attn.weight"] == Form(True, Apart((32, 32, 32)))
    assert gpt["transformer.h.0.mlp.c_proj.weight"] == Form(True)
    assert oss["model.layers.0.mlp.experts.gate_up_proj"].apart == Apart((1, 1), 64)
    assert oss["model.layers.0.mlp.experts.gate_up_proj"].transposed
    by_head = forms("llama", by_head=True)
    assert by_head["model.layers.0.self_attn.k_proj.weight"] == Form(apart=Apart((16,), heads=(2,)))
    assert by_head["model.layers.0.mlp.up_proj.weight"] == Form()


def test_how_it_is_held_is_read_from_the_row() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2)
    rows = {row.name: row for row in drafted("llama", layout).rows}
    axes = (("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))
    q, o = (rows[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qo")
    assert held_of(q, layout, Form()) == Held((32, 32), axes, (Cut("tp", 0), Cut("dp_shard", 0)))
    assert held_of(o, layout, Form()) == Held((32, 32), axes, (Cut("dp_shard", 0), Cut("tp", 1)))
    packed = {row.name: row for row in drafted("phi3", layout).rows}["model.layers.0.mlp.gate_up_proj.weight"]
    assert held_of(packed, layout, Form()) == Held((96, 32), axes, (Cut("tp", 0, 2), Cut("dp_shard", 1)))
    layout = Layout(dp_shard=4, ep=2)
    experts = {row.name: row for row in drafted("mixtral", layout).rows}["model.layers.0.mlp.experts.down_proj"]
    held = held_of(experts, layout, Form())
    assert held.axes == (("ep_shard", 2), ("ep", 2))
    assert held.cuts == (Cut("ep", 0), Cut("ep_shard", 0))
    assert indices_of_rank(layout, 3) | {"pp": 0} == indices_of_rank(layout, 3)
    assert {name: indices_of_rank(layout, 3)[name] for name in ("ep", "ep_shard", "dp_shard")} == {
        "ep": 1,
        "ep_shard": 1,
        "dp_shard": 3,
    }
    assert indices_of_rank(Layout(dp_shard=2, cp=2), 3)["dp_shard_cp"] == 3
