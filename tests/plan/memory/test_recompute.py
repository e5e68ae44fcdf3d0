"""Which layer recomputes what: decided in the plan, shown by it, refused by it."""

import json

import pytest
from rich.console import Console
from torch import nn

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec, UnitRule
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.explain import explain
from tests.tiny import make, tiny_model

NONE, FULL, SUBMODULE, SELECTIVE = ActivationCheckpointing


def plan_of(spec: ParallelSpec | None = None, **options) -> ShardingPlan:
    model, derived = make("plain", meta=True)
    return resolve(spec or derived, model, Layout(), ParallelOptions(**options), world_size=2)


def modes(plan: ShardingPlan) -> dict[str, ActivationCheckpointing]:
    return {unit.name: unit.activation_checkpointing for unit in plan.units}


def problems(**options) -> list[str]:
    with pytest.raises(PlanError) as error:
        plan_of(**options)
    return list(error.value.problems)


@pytest.mark.parametrize("mode", ActivationCheckpointing)
def test_layers_have_the_mode_and_other_units_have_none(mode: ActivationCheckpointing) -> None:
    spec = ParallelSpec("plain", layers=("blocks.*",), units=(UnitRule("head"), UnitRule("blocks.1.0")))
    found = modes(plan_of(spec, activation_checkpointing=mode))
    assert {name for name, given in found.items() if given is mode} >= {f"blocks.{index}" for index in range(4)}
    assert [found[name] for name in ("", "head", "blocks.1.0")] == [NONE, NONE, NONE]


def test_a_later_pattern_wins() -> None:
    layers = {"blocks.*": "selective", "blocks.0": "none", "blocks.3": "full"}
    found = modes(plan_of(activation_checkpointing="submodule", activation_checkpointing_layers=layers))
    assert list(found.values()) == [NONE, NONE, SELECTIVE, SELECTIVE, FULL]
    found = modes(plan_of(activation_checkpointing="full", activation_checkpointing_layers={"blocks.2": "submodule"}))
    assert list(found.values()) == [NONE, FULL, FULL, SUBMODULE, FULL]
    layers = {"blocks.0": "none", "blocks.*": "selective"}
    assert list(modes(plan_of(activation_checkpointing_layers=layers)).values()) == [NONE, *[SELECTIVE] * 4]


def test_json_explain_and_difference_show_it() -> None:
    plan = plan_of(activation_checkpointing="full", activation_checkpointing_layers={"blocks.0": "selective"},
                   activation_checkpointing_save=["aten.mm.default"])  # fmt: skip
    content = json.loads(plan.to_json())
    assert [unit["activation_checkpointing"] for unit in content["units"]] == ["none", "selective", "full", "full", "full"]
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan
    assert all(isinstance(mode, ActivationCheckpointing) for mode in modes(again).values())
    lines = [str(item) for item in plan_of(activation_checkpointing="full").diff(plan)]
    assert any(line.startswith("unit blocks.0: activation_checkpointing") and "selective" in line for line in lines)
    assert any(line.startswith("options: activation_checkpointing_save () -> ('aten.mm.default',)") for line in lines)

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(explain(plan))
    rows = {line.split()[0]: line.split() for line in console.export_text().splitlines() if line.strip().startswith("blocks")}
    assert "selective" in rows["blocks.0"]
    assert "full" in rows["blocks.*"]


def test_what_is_refused() -> None:
    assert problems(activation_checkpointing_layers={"layers.*": "full", "blocks.9": "none"}) == [
        "activation_checkpointing_layers pattern 'layers.*' matches no layer; layers are blocks.* (blocks.0 to blocks.3)",
        "activation_checkpointing_layers pattern 'blocks.9' matches no layer; layers are blocks.* (blocks.0 to blocks.3)",
    ]
    (line,) = problems(activation_checkpointing="full", activation_checkpointing_save=["aten.mm.default"])
    assert line.startswith("activation_checkpointing_save=['aten.mm.default']: only selective layers keep results")
    with pytest.raises(PlanError) as error:
        ParallelOptions(activation_checkpointing="some", activation_checkpointing_layers={"a": "all", "b": "full"})
    assert list(error.value.problems) == [
        "activation_checkpointing='some': legal are none, full, submodule, selective",
        "activation_checkpointing_layers['a']='all': legal are none, full, submodule, selective",
    ]


def test_a_layer_without_submodules_cannot_recompute_them() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]))
    spec = ParallelSpec("bare", layers=("0.*",))
    with pytest.raises(PlanError) as error:
        resolve(spec, model, Layout(), ParallelOptions(activation_checkpointing="submodule"), world_size=2)
    assert list(error.value.problems) == [
        "activation_checkpointing=submodule: layer '0.0' has no submodules; legal for it are none, full, selective"
    ]


def test_selective_layers_with_slices_are_not_compiled() -> None:
    model = tiny_model("llama", meta=True)
    options = ParallelOptions(activation_checkpointing=SELECTIVE, compile=True)
    with pytest.raises(PlanError, match=r"selective with compile=True and tp=2.*legal for it are none, full, submodule"):
        resolve(spec_of(model), model, Layout(tp=2), options, world_size=2)
