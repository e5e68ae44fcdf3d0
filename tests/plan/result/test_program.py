"""The program of a plan: what is done to a model, decided before there is one."""

import functools
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.distributed.conductor import PERFORMERS
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.tensor.move_kinds import Bias
from meshwright.plan.given.inspection import Inspection, ModuleFacts, ParameterFacts, inspect_model
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec, TwinStacks
from meshwright.plan.resolver import resolve
from meshwright.plan.result.program import (
    ACTIONS,
    Action,
    Assign,
    Compile,
    Compute,
    Engine,
    Freeze,
    PartTwins,
    Recompute,
    Slice,
    Wrap,
)
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.tiny import make, tiny_model


def planned(family: str, layout: Layout, **options: object) -> ShardingPlan:
    model = tiny_model(family, meta=True)
    return resolve(spec_of(model), model, layout, ParallelOptions(**options))


def of(plan: ShardingPlan, kind: type[Action]) -> dict[str, Action]:
    return {action.module: action for action in plan.program if isinstance(action, kind)}


def test_every_kind_of_action_has_one_performer() -> None:
    assert set(PERFORMERS) == set(ACTIONS.values())


def test_a_plan_needs_facts_and_no_model() -> None:
    """Two layers of one matrix, written by hand."""
    modules = {
        "": ModuleFacts("", "Stack", children={"layers": "layers"}),
        "layers": ModuleFacts("layers", "ModuleList", container=True),
    }
    parameters = []
    for index in range(2):
        name = f"layers.{index}"
        modules[name] = ModuleFacts(name, "Linear", parameters={"weight": (6, 4)})
        parameters.append(ParameterFacts(f"{name}.weight", (), (6, 4), "float32", True))
    plan = resolve(ParallelSpec("mine", ("layers.*",)), Inspection(modules, tuple(parameters)), Layout(), world_size=2)
    assert [row.local_shape for row in plan.parameters] == [(3, 4), (3, 4)]
    freeze, *wraps = plan.program
    assert freeze == Freeze()
    assert [action.unit for action in wraps] == ["layers.1", "layers.0", ""]
    assert all(isinstance(action, Wrap) and action.axes == ("dp_shard",) for action in wraps)


def test_actions_come_in_the_order_of_the_conductor() -> None:
    plan = planned(
        "mixtral",
        Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2),
        activation_checkpointing="full",
        freeze=("lm_head.weight",),
        prefetch_forward=1,
        compile=True,
    )
    kinds = [type(action).__name__ for action in plan.program]
    expected = ["Slice", "Compute", "Slice", "Assign", "Dispatch", "Compile", "Recompute", "Freeze", "Wrap", "Prefetch"]
    position = 0
    for kind in expected:
        position = kinds.index(kind, position)
    last = planned("mixtral", Layout(dp_shard=4), activation_checkpointing="full", compile=True).program[-1]
    assert isinstance(last, Compile)  # without slices compilation is the last
    wraps = [action for action in plan.program if isinstance(action, Wrap)]
    assert wraps[-1].unit == ""
    assert {action.axes for action in wraps if action.experts} == {("dp_replicate", "ep_shard")}
    assert {action.axes for action in wraps if not action.experts} == {("dp_replicate", "dp_shard")}


def test_what_was_decided_on_the_way_is_in_the_program() -> None:
    plan = planned("gpt_oss", Layout(dp_shard=1, tp=2), activation_checkpointing="submodule")
    rows = of(plan, Compute)
    late = [row for row in rows.values() if row.bias is Bias.LATE]
    assert {row.module.rpartition(".")[2] for row in late} == {"o_proj"}
    routed = {name for name, action in of(plan, Recompute).items() if action.routing}
    assert routed == {f"model.layers.{index}.mlp" for index in range(len(plan.layers))}
    whole = planned("llama", Layout(dp_replicate=2, dp_shard=1))
    assert {action.engine for action in whole.program if isinstance(action, Wrap)} == {Engine.REPLICATE}
    mean = planned("mixtral", Layout(dp_shard=4, ep=2), gradient_reduction="mean")
    assert {action.divisor for action in mean.program if isinstance(action, Wrap)} == {None, 4.0}


def test_an_attention_with_a_head_of_keys_for_several_ranks_is_told_its_heads() -> None:
    model = tiny_model("llama", meta=True, num_key_value_heads=1)
    plan = resolve(spec_of(model), model, Layout(dp_shard=1, tp=2))
    (heads,) = {action.values for action in plan.program if isinstance(action, Assign)}
    assert ("config.num_key_value_heads", 1) in heads
    assert all(action.own == ("config",) for action in plan.program if isinstance(action, Assign))


def test_a_program_is_written_and_read() -> None:
    plan = planned("mixtral", Layout(dp_shard=2, tp=2, ep=2), activation_checkpointing="full", compile=True)
    again = ShardingPlan.from_json(plan.to_json())
    assert again.program == plan.program
    kernels = [action.kernel for action in again.program if isinstance(action, Compute)]
    assert kernels
    assert all(type(kernel).__name__ == "Kernel" for kernel in kernels)


def test_a_difference_that_no_row_shows_names_the_action() -> None:
    plan = planned("llama", Layout(dp_shard=2))
    freeze, action, *others = plan.program
    assert isinstance(action, Wrap)
    other = replace(plan, program=(freeze, replace(action, divisor=2.0), *others))
    assert len(plan.diff(other)) == 2
    assert plan.diff(replace(plan, program=())) == []  # an earlier version wrote no program
    assert all("divisor" in str(line) and "model.layers" in str(line) for line in plan.diff(other))


def test_a_plan_without_a_program_is_refused() -> None:
    from meshwright.distributed.conductor import _check_belongs

    class Mesh:
        layout = Layout(dp_shard=2).resolve(2)

    model = tiny_model("llama", meta=True)
    plan = replace(resolve(spec_of(model), model, Layout(dp_shard=2)), program=())
    with pytest.raises(PlanError, match="has no program"):
        _check_belongs(model, plan, Mesh())  # type: ignore[arg-type]


class Second(nn.Module):
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class Other(nn.Module):
    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return x


class Anything(nn.Module):
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return args[0]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Second(), (1, "hidden_states")),
        (Other(), (0, "x")),
        (Anything(), (0, "hidden_states")),
        (nn.Linear(1, 1), (0, "input")),
    ],
)
def test_the_hidden_state_is_found_by_its_name_or_place(module: nn.Module, expected: tuple[int, str]) -> None:
    assert inspect_model(ParallelSpec("one", ()), module).modules[""].hidden == expected


def test_frozen_parameters_and_compiled_layers_are_named() -> None:
    model, spec = make("plain", meta=True)
    plan = resolve(spec, model, Layout(dp_shard=2), ParallelOptions(freeze=("head.*",), compile=True))
    (frozen,) = [action for action in plan.program if isinstance(action, Freeze)]
    assert frozen.parameters == tuple(row.name for row in plan.parameters if row.name.startswith("head."))
    assert list(of(plan, Compile)) == list(plan.layers)
    assert not any(isinstance(action, Slice) for action in plan.program)


class KeywordOnly(nn.Module):
    def forward(self, positions: torch.Tensor, *, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_a_hidden_state_that_is_given_by_its_name_alone() -> None:
    assert inspect_model(ParallelSpec("one", ()), KeywordOnly()).modules[""].hidden == (1, "hidden_states")


def test_a_scripted_module_is_planned() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)]), "act": torch.jit.script(nn.Softmax(-1))})
    assert resolve(ParallelSpec("mine", ("layers.*",)), model, Layout(), world_size=2).layers == ("layers.0",)


def test_an_inspection_keeps_no_module() -> None:
    model = nn.Linear(4, 4)
    model.forward = functools.partial(model.forward)
    there = weakref.ref(model)
    inspect_model(ParallelSpec("one", ()), model)
    del model
    gc.collect()
    assert there() is None


class Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), act, nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def test_a_statistic_that_layers_share_is_seen_in_each_of_them() -> None:
    softmax = nn.Softmax(-1)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": Mlp(softmax)}) for _ in range(3)])})
    styles = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    spec = ParallelSpec("mine", ("layers.*",), tp_styles=styles)
    plan = resolve(spec, model, Layout(dp_shard=1, tp=2))
    assert [row.tp_style for row in plan.parameters] == [None] * 12
    assert not any(isinstance(action, Slice) for action in plan.program)


@pytest.mark.parametrize("order", [("enc", "dec"), ("dec", "enc")])
def test_twins_are_found_in_whatever_order_the_model_has_them(order: tuple[str, str]) -> None:
    stack = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
    model = nn.ModuleDict({name: nn.ModuleDict({"layers": nn.ModuleList(list(stack))}) for name in order})
    for name in order[1:]:  # modules of their own, with the same parameters
        layers = [nn.Linear(4, 4) for _ in stack]
        for layer, shared in zip(layers, stack, strict=True):
            layer.weight, layer.bias = shared.weight, shared.bias
        model[name] = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    spec = ParallelSpec("mine", ("enc.layers.*", "dec.layers.*"), twins=(TwinStacks("enc.layers.*", "dec.layers.*"),))
    plan = resolve(spec, model, Layout(dp_shard=2), ParallelOptions(twin_units=True))
    (parted,) = [action for action in plan.program if isinstance(action, PartTwins)]
    expected = [(f"enc.layers.{index}.{own}", f"dec.layers.{index}.{own}") for index in range(2) for own in ("weight", "bias")]
    assert sorted(parted.parameters) == sorted(expected)
