"""Where users of NeMo AutoModel put code of their own: a function that makes units, and the steps of the manager."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.parallelizer import (
    DefaultParallelizationStrategy,
    apply_fsdp2_sharding_recursively,
    fsdp2_strategy_parallelize,
    register_parallel_strategy,
)
from meshwright.errors import LayoutError, PlanError, UnsupportedError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import Plain, batches, make, summed_loss, whole

FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
NAMES = ("dp_replicate", "dp_shard_cp", "tp")


def recording(calls: list[tuple[str, dict[str, Any]]], module: nn.Module, **arguments: Any) -> nn.Module:
    calls.append((type(module).__name__, arguments))
    return fully_shard(module, **arguments)


def same_gradients(model: nn.Module, alone: nn.Module, rank: int, ranks: int) -> None:
    data = batches(ranks)
    summed_loss(model, data[rank]).backward()
    (sum(summed_loss(alone, batch) for batch in data) / ranks).backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("family", ["plain", "mixtral"])
def test_a_function_of_the_user_makes_each_unit_and_the_root_last(family: str, shape: tuple[int, ...]) -> None:
    if family == "plain" and shape[2] > 1:
        pytest.skip("a plain module declares no styles")

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
        model, _ = make(family)
        calls: list[tuple[str, dict[str, Any]]] = []
        strategy = DefaultParallelizationStrategy()
        made = strategy.parallelize(model, mesh, FP32, fully_shard_fn=partial(recording, calls))
        assert made is model
        units = [name for name, _ in reversed(list(fsdp_units(model).items()))]
        assert len(calls) == len(units)
        assert units[-1] == ""
        assert calls[-1][0] == type(model).__name__.removeprefix("FSDP")
        for _, arguments in calls:
            assert arguments.keys() == {"mesh", "mp_policy", "offload_policy", "reshard_after_forward"}
            assert arguments["mp_policy"].param_dtype is torch.float32
            assert isinstance(arguments["mesh"], DeviceMesh)
        assert calls[-1][1]["reshard_after_forward"] is False
        tp = shape[2]
        same_gradients(model, make(family)[0], rank // tp, 2 // tp)

    run_ranks(on_rank, 2)


def test_the_plan_says_what_it_cannot_know() -> None:
    model = Plain()
    plan = resolve(spec_of(model), model, Layout(), ParallelOptions(sharded_by="mine:shard"), world_size=2)
    (remark,) = [text for text in plan.remarks if "mine:shard" in text]
    assert remark.startswith("sharded by the user's function mine:shard")
    assert "cannot know which units, placements" in remark
    assert type(plan).from_json(plan.to_json()) == plan
    tied, _ = make("plain")
    tied.blocks[1][0], tied.blocks[3][0] = (first := nn.Linear(16, 32)), nn.Linear(16, 32)
    tied.blocks[3][0].weight, tied.blocks[3][0].bias = first.weight, first.bias
    with pytest.raises(PlanError, match=r"fully_shard_fn: 'blocks.1.0' and 'blocks.3.0' hold the same parameters"):
        resolve(spec_of(tied), tied, Layout(), ParallelOptions(sharded_by="mine:shard"), world_size=2)


def test_units_that_the_function_does_not_make_are_its_own_affair_and_another_module_is_an_error() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=NAMES)

        def root_alone(module: nn.Module, **arguments: Any) -> None:
            if isinstance(module, Plain):
                fully_shard(module, **arguments)

        model = Plain()
        DefaultParallelizationStrategy().parallelize(
            model, mesh, FP32, fully_shard_fn=root_alone, enable_fsdp2_prefetch=True, fsdp2_forward_prefetch_depth=2
        )
        assert list(fsdp_units(model)) == [""]
        with pytest.raises(PlanError, match=r"fully_shard_fn: .*<lambda> returned another module for 'blocks"):
            DefaultParallelizationStrategy().parallelize(
                Plain(), mesh, FP32, fully_shard_fn=lambda module, **_: nn.Linear(2, 2)
            )
        with pytest.raises(PlanError, match=r"fully_shard_fn: .*<lambda> returned another module for 'Sequential'"):
            apply_fsdp2_sharding_recursively(
                Plain(), mesh["dp_shard_cp"], FP32, fully_shard_fn=lambda module, **_: nn.Linear(2, 2)
            )

    run_ranks(on_rank, 2)


def test_a_function_that_makes_no_unit_at_all_is_an_error_unless_there_is_one_rank_to_shard_over() -> None:
    def on_rank(rank: int) -> None:
        for shape in ((1, 2, 1), (2, 1, 1)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
            with pytest.raises(PlanError, match=r"fully_shard_fn: .*<lambda> made no FSDP unit, .* 2 ranks would train apart"):
                DefaultParallelizationStrategy().parallelize(Plain(), mesh, FP32, fully_shard_fn=lambda module, **_: None)

        def layers_alone(module: nn.Module, **arguments: Any) -> None:
            if not isinstance(module, Plain):
                fully_shard(module, **arguments)

        model = DefaultParallelizationStrategy().parallelize(Plain(), mesh, FP32, fully_shard_fn=layers_alone)
        assert "" not in fsdp_units(model)

    run_ranks(on_rank, 2)

    def alone(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=NAMES)
        model = DefaultParallelizationStrategy().parallelize(Plain(), mesh, FP32, fully_shard_fn=lambda module, **_: None)
        assert not fsdp_units(model)

    run_ranks(alone, 1)


def test_what_cannot_be_called_as_a_function_that_makes_units_is_refused_before_anything_is_changed() -> None:
    call = r"called as fn\(module, mesh=, mp_policy=, offload_policy=, reshard_after_forward=\)"
    ways: list[Any] = [
        lambda function: apply_fsdp2_sharding_recursively(Plain(), None, None, fully_shard_fn=function),
        lambda function: DefaultParallelizationStrategy().parallelize(Plain(), None, fully_shard_fn=function),
    ]
    for way in ways:
        with pytest.raises(PlanError, match=f"fully_shard_fn='x': legal are None and a function that is {call}"):
            way("x")
        with pytest.raises(PlanError, match=f"<lambda> is {call}, which fails: got an unexpected keyword argument 'mp_policy'"):
            way(lambda module, mesh: None)
        with pytest.raises(PlanError, match=f"<lambda> is {call}, which fails: missing a required argument: 'extra'"):
            way(partial(lambda module, extra, **_: None))


def test_keywords_of_the_reference_work_or_are_refused_by_name() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=NAMES)
        model = Plain()
        fsdp2_strategy_parallelize(
            model, mesh, FP32, enable_fsdp2_prefetch=True, fsdp2_forward_prefetch_depth=2, fsdp2_backward_prefetch_depth=1,
            reshard_after_forward=True, enable_compile=False,
        )  # fmt: skip
        first = model.blocks[0]._get_fsdp_state()
        assert len(first._states_to_forward_prefetch) == 2
        assert len(model.blocks[2]._get_fsdp_state()._states_to_backward_prefetch) == 1
        assert model.blocks[-1]._get_fsdp_state()._fsdp_param_group._reshard_after_forward
        same_gradients(model, Plain_like(model), rank, 2)
        for name in ("enable_async_tensor_parallel", "enable_compile"):
            with pytest.raises(UnsupportedError, match=f"{name}=True: not supported here; the legal value is False"):
                fsdp2_strategy_parallelize(Plain(), mesh, FP32, **{name: True})
        with pytest.raises(TypeError, match="no_such_keyword"):
            fsdp2_strategy_parallelize(Plain(), mesh, FP32, no_such_keyword=1)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"fsdp2_backward_prefetch_depth": 3}, "fsdp2_backward_prefetch_depth=3: has no effect .* legal with it is 2"),
        ({"fsdp2_forward_prefetch_depth": 0}, "fsdp2_forward_prefetch_depth=0: has no effect .* legal with it is 1"),
        (
            {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": -1},
            "forward_prefetch_depth=-1: legal are 0 and",
        ),
        ({"enable_fsdp2_prefetch": True, "fsdp2_backward_prefetch_depth": -2}, "backward_prefetch_depth=-2: legal are 0 and"),
    ],
)
def test_depths_without_effect_are_refused(chosen: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        apply_fsdp2_sharding_recursively(Plain(), None, FP32, **chosen)

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=NAMES)
        with pytest.raises(PlanError, match=problem):
            fsdp2_strategy_parallelize(Plain(), mesh, FP32, **{"enable_fsdp2_prefetch": False, **chosen})
        # The defaults of the reference, which its loops pass on.
        depths = {"fsdp2_backward_prefetch_depth": 2, "fsdp2_forward_prefetch_depth": 1}
        fsdp2_strategy_parallelize(Plain(), mesh, FP32, enable_fsdp2_prefetch=False, **depths)
        apply_fsdp2_sharding_recursively(Plain(), mesh["dp_shard_cp"], FP32, enable_fsdp2_prefetch=False, **depths)

    run_ranks(on_rank, 1)


def test_the_recursion_refuses_a_prefetch_without_effect() -> None:
    with pytest.raises(PlanError, match="enable_fsdp2_prefetch=True: has no effect with both depths 0; legal are a depth of 1"):
        apply_fsdp2_sharding_recursively(Plain(), None, FP32, None, True, 0, 0)
    with pytest.raises(PlanError, match="enable_fsdp2_prefetch=True: has no effect with reshard_after_forward=False; legal"):
        apply_fsdp2_sharding_recursively(Plain(), None, FP32, None, True, reshard_after_forward=False)


def Plain_like(model: nn.Module) -> nn.Module:
    """A plain module with the values of a sharded one."""
    alone = Plain()
    alone.load_state_dict({name: whole(tensor.detach()) for name, tensor in model.state_dict().items()})
    return alone


def test_the_recursion_takes_a_function_and_prefetches() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model, calls = Plain(), []
        shard = partial(recording, calls)
        apply_fsdp2_sharding_recursively(model, mesh, FP32, None, True, 1, 2, fully_shard_fn=shard)
        assert [arguments["reshard_after_forward"] for _, arguments in calls] == [True, True, True, False]
        assert all(isinstance(block, FSDPModule) for block in model.blocks)
        states = [block._get_fsdp_state() for block in model.blocks]
        assert [len(state._states_to_forward_prefetch) for state in states] == [2, 2, 1, 0]
        assert [len(state._states_to_backward_prefetch) for state in states] == [0, 1, 1, 1]
        shard(model, mesh=mesh, mp_policy=FP32, reshard_after_forward=False)
        same_gradients(model, Plain_like(model), rank, 2)

    run_ranks(on_rank, 2)


# -- the manager -------------------------------------------------------------------------------------------------------------

STEPS: list[str] = []


class Manager(FSDP2Manager):
    """Overrides each step that the reference documents."""

    def _setup_distributed(self) -> None:
        STEPS.append("setup")
        super()._setup_distributed()

    def _get_device_mesh(self) -> DeviceMesh:
        STEPS.append("device mesh")
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        return init_device_mesh("cpu", (1, 2, 2, 1, 1), mesh_dim_names=names)

    def _get_moe_mesh(self) -> DeviceMesh | None:
        STEPS.append("moe mesh")
        return super()._get_moe_mesh()


class OwnExperts(FSDP2Manager):
    def _get_moe_mesh(self) -> DeviceMesh | None:
        return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "ep_shard", "ep"))


class OwnSetup(FSDP2Manager):
    """Sets the mesh itself, in the style of the reference."""

    def _setup_distributed(self) -> "OwnSetup":
        self.device_mesh = self._get_device_mesh()
        return self


class OwnMesh(FSDP2Manager):
    def _setup_distributed(self) -> None:
        self.device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard_cp", "tp"))


class NoMesh(FSDP2Manager):
    def _setup_distributed(self) -> None:
        pass


def test_a_setup_without_the_one_of_the_base_class_shards_too_or_is_an_error() -> None:
    def on_rank(rank: int) -> None:
        for manager in (OwnSetup(mp_policy=FP32), OwnMesh(mp_policy=FP32)):
            assert manager.mesh is not None
            assert (manager.world_size, manager.dp_size, manager.dp_shard_size, manager.ep_shard_size) == (2, 2, 2, 2)
            assert (manager.dp_replicate_size, manager.tp_size, manager.cp_size, manager.pp_size) == (1, 1, 1, 1)
            model = manager.parallelize(Plain())
            assert "" in fsdp_units(model)
            same_gradients(model, Plain_like(model), rank, 2)
        with pytest.raises(LayoutError, match="tp_size=2: device_mesh has 1"):
            OwnMesh(tp_size=2)
        with pytest.raises(LayoutError, match="world_size=4: there are 2 processes"):
            OwnMesh(world_size=4)
        with pytest.raises(LayoutError, match=r"NoMesh: there are 2 processes and no mesh; _setup_distributed\(\) has to set"):
            NoMesh()

    run_ranks(on_rank, 2)


class SetsItsMeshes(FSDP2Manager):
    """Sets meshes in the steps that should return them."""

    names: tuple[str, ...] = ("tp", "dp_shard_cp", "mine")

    def _get_device_mesh(self) -> Any:
        self.device_mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=self.names)

    def _get_moe_mesh(self) -> Any:
        self.moe_mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "ep_shard", "ep"))


class OtherAxes(SetsItsMeshes):
    names = ("pp", "dp", "tp")


class ReturnsNoMesh(FSDP2Manager):
    def _get_device_mesh(self) -> Any:
        return None


class ReturnsSizes(FSDP2Manager):
    def _get_moe_mesh(self) -> Any:
        return (1, 2)


def test_a_step_may_set_its_mesh_and_what_is_no_mesh_is_refused_by_the_name_of_the_step() -> None:
    def on_rank(rank: int) -> None:
        manager = SetsItsMeshes(mp_policy=FP32)
        assert manager.device_mesh is not None
        assert manager.device_mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert (manager.dp_shard_size, manager.ep_size, manager.ep_shard_size) == (2, 2, 1)
        with pytest.raises(LayoutError, match=r"ReturnsNoMesh._get_device_mesh\(\): returned None; legal is a DeviceMesh"):
            ReturnsNoMesh()
        with pytest.raises(LayoutError, match=r"ReturnsSizes._get_moe_mesh\(\): returned \(1, 2\); legal are a Dev"):
            ReturnsSizes()
        legal = "legal here are 'dp_replicate', 'dp_shard_cp', 'tp' in any order and axes of size 1, or the five axes pp, dp_"
        with pytest.raises(LayoutError, match=legal):
            OtherAxes()

    run_ranks(on_rank, 2)


def test_each_step_of_the_manager_may_be_overridden() -> None:
    def on_rank(rank: int) -> None:
        STEPS.clear()
        manager = Manager(mp_policy=FP32)
        assert STEPS == ["setup", "device mesh", "moe mesh"]
        assert (manager.dp_replicate_size, manager.dp_shard_size) == (2, 2)
        model = Plain()
        alone = Plain()
        alone.load_state_dict(model.state_dict())
        manager.parallelize(model)
        assert manager.plan is not None
        assert manager.plan.layout.size("dp_replicate") == 2
        with pytest.raises(LayoutError, match="tp_size=2: device_mesh has 1"):
            Manager(tp_size=2)
        experts = OwnExperts(mp_policy=FP32)
        assert (experts.ep_size, experts.ep_shard_size) == (2, 2)

    run_ranks(on_rank, 4)


@register_parallel_strategy(name="OfTheUser")
class OfTheUserStrategy(DefaultParallelizationStrategy):
    """Binds a function to a strategy, as the reference does."""

    def parallelize(self, model: nn.Module, device_mesh: Any, *args: Any, **kwargs: Any) -> nn.Module:
        return super().parallelize(model, device_mesh, *args, **kwargs, fully_shard_fn=partial(recording, []))


class OfTheUser(Plain):
    pass


def test_a_strategy_with_a_function_in_the_manager() -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(mp_policy=FP32)
        torch.manual_seed(0)
        model = OfTheUser()
        alone = Plain()
        alone.load_state_dict(model.state_dict())
        manager.parallelize(model)
        assert manager.plan is not None
        assert manager.plan.options.sharded_by == f"{__name__}:recording"
        data = batches(4)
        with model.no_sync():
            summed_loss(model, data[2 * rank]).backward()
        summed_loss(model, data[2 * rank + 1]).backward()
        (sum(summed_loss(alone, batch) for batch in data) / 2).backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=2e-6, msg=name)

    run_ranks(on_rank, 2)
