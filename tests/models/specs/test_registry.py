"""The registry of strategies, the seam that everything goes through, and the signature of the reference."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.mesh import adopt_mesh, build_mesh
from meshwright.errors import ConfigError, LayoutError, ModelError, PlanError
from meshwright.layout import AXES, Layout
from meshwright.models.families.nemotron_h import NemotronHParallelizationStrategy
from meshwright.models.specs import registry as home
from meshwright.models.specs.derived import DefaultParallelizationStrategy
from meshwright.models.specs.registry import (
    get_parallelization_strategy,
    register_parallel_strategy,
    registered_strategies,
    spec_of,
)
from meshwright.models.specs.strategy import ParallelizationStrategy
from meshwright.plan.given.spec import ParallelSpec
from tests.harness import run_ranks
from tests.tiny import PLAIN_SPEC, Plain, batches, make, summed_loss, tiny_model, whole

FP32 = MixedPrecisionPolicy()


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    held = registered_strategies()
    yield
    home._REGISTRY.clear()
    home._REGISTRY.update(held)


class OfPlain(ParallelizationStrategy):
    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        return PLAIN_SPEC


class Finer(Plain):
    pass


# -- the registry ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_families_of_meshwright_are_there_without_an_import() -> None:
    script = (
        "import sys; from meshwright.models.specs.registry import registered_strategies as found;"
        "names = {name: type(item).__name__ for name, item in found().items()};"
        "assert names == {'NemotronHForCausalLM': 'NemotronHParallelizationStrategy',"
        " 'WanTransformer3DModel': 'WanParallelizationStrategy',"
        " 'DiffusionGemmaForBlockDiffusion': 'DiffusionGemmaParallelizationStrategy'}, names;"
        "assert not {'transformers', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    for first in (
        "models.families.wan", "models.families.nemotron_h", "models.specs.derived", "distributed.parallelizer",
        "models.diffusion_gemma.model",
    ):  # fmt: skip
        subprocess.run([sys.executable, "-c", f"import meshwright.{first}; {script}"], check=True)


def test_selection_by_class_name_and_by_that_of_the_nearest_parent() -> None:
    assert isinstance(get_parallelization_strategy(Plain()), DefaultParallelizationStrategy)
    register_parallel_strategy("Plain")(OfPlain)
    assert isinstance(get_parallelization_strategy(Plain()), OfPlain)
    assert isinstance(get_parallelization_strategy(Finer()), OfPlain)

    @register_parallel_strategy(name="Finer")
    class OfFiner(OfPlain):
        pass

    assert isinstance(get_parallelization_strategy(Finer()), OfFiner)
    assert isinstance(get_parallelization_strategy(Plain()), OfPlain)
    assert not isinstance(get_parallelization_strategy(Plain()), OfFiner)
    assert spec_of(Plain()) is PLAIN_SPEC

    nemotron = tiny_model("nemotron_h", meta=True)
    assert isinstance(get_parallelization_strategy(nemotron), NemotronHParallelizationStrategy)
    assert isinstance(get_parallelization_strategy(tiny_model(meta=True)), DefaultParallelizationStrategy)


def test_ways_to_register() -> None:
    @register_parallel_strategy
    class ThisStrategy(OfPlain):
        pass

    @register_parallel_strategy
    class ThatParallelizationStrategy(OfPlain):
        pass

    @register_parallel_strategy
    class Those(OfPlain):
        pass

    register_parallel_strategy("One", "Two", name="Three")(OfPlain)
    found = registered_strategies()
    assert {type(found[name]) for name in ("One", "Two", "Three")} == {OfPlain}
    kinds = {"This": ThisStrategy, "That": ThatParallelizationStrategy, "Those": Those}
    assert {name: type(found[name]) for name in kinds} == kinds


def test_a_name_has_one_strategy_and_the_error_names_both() -> None:
    class Other(OfPlain):
        pass

    register_parallel_strategy("Plain", "Finer")(OfPlain)
    before = registered_strategies()
    register_parallel_strategy("Plain", "Finer")(OfPlain)  # again
    assert registered_strategies() == before
    with pytest.raises(ConfigError) as error:
        register_parallel_strategy("Plain", "New", "Finer")(Other)
    assert len(error.value.problems) == 2
    assert all("test_registry.OfPlain" in line and "<locals>.Other" in line for line in error.value.problems)
    assert registered_strategies() == before  # nothing of it was taken
    with pytest.raises(ConfigError, match=r"meshwright\.models\.families\.wan\.WanParallelizationStrategy already"):
        register_parallel_strategy("WanTransformer3DModel")(Other)


def test_a_reloaded_module_replaces_its_strategy() -> None:
    def cell() -> type[ParallelizationStrategy]:
        @register_parallel_strategy("Plain")
        class Mine(OfPlain):
            pass

        return Mine

    first, second = cell(), cell()
    assert first is not second
    assert type(get_parallelization_strategy(Plain())) is second


@pytest.mark.parametrize("names", [(), ("",), ("a.b",), (1,), ("Plain", None)], ids=str)
def test_what_is_no_name_of_a_class_is_refused(names: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="takes names of model classes"):
        register_parallel_strategy(*names)


def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(TypeError, match="is no subclass of ParallelizationStrategy"):
        register_parallel_strategy("Plain")(Plain)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"defines neither spec\(\) nor parallelize\(\)"):
        register_parallel_strategy("Plain")(ParallelizationStrategy)
    with pytest.raises(TypeError, match="names no model class"):
        register_parallel_strategy(type("Strategy", (OfPlain,), {}))
    assert "Plain" not in registered_strategies()


def test_a_strategy_without_a_spec_says_what_it_lacks() -> None:
    class Alone(ParallelizationStrategy):
        def parallelize(self, model: Any, *_: Any, **__: Any) -> Any:
            return model

    with pytest.raises(ModelError, match=r"Alone, the strategy of Plain, has no spec, only parallelize\(\)"):
        Alone().spec(Plain())


# -- carried out -----------------------------------------------------------------------------------------------------------


def check_gradients(model: nn.Module, rank: int, ranks: int) -> None:
    """Of the mean over data ranks, each with a batch of its own, against one process."""
    alone, _ = make("plain")
    every = batches(ranks)
    summed_loss(model, every[rank]).backward()
    for batch in every:
        (summed_loss(alone, batch) / ranks).backward()
    for (name, found), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(found.grad), expected.grad, rtol=1e-5, atol=1e-6, msg=name)


MESHES = [
    (("dp_replicate", "dp_shard_cp", "tp"), (2, 2, 1), {}),
    (("dp_shard_cp",), (4,), {}),
    (("tp", "shards", "replicas"), (1, 2, 2), {"dp_shard_cp_mesh_name": "shards", "dp_replicate_mesh_name": "replicas"}),
    (AXES, (1, 2, 2, 1, 1), {}),
]


@pytest.mark.parametrize(("names", "sizes", "keywords"), MESHES, ids=lambda value: str(value))
def test_the_reference_signature(names: tuple[str, ...], sizes: tuple[int, ...], keywords: dict[str, str]) -> None:
    def on_rank(rank: int) -> None:
        register_parallel_strategy("Plain")(OfPlain)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model, _ = make("plain")
        found = get_parallelization_strategy(model).parallelize(
            model, mesh, FP32, CPUOffloadPolicy(pin_memory=False), activation_checkpointing=True, **keywords
        )
        assert found is model
        check_gradients(model, rank, 4)

    run_ranks(on_rank, 4)


def test_a_mesh_of_other_order_keeps_its_neighbours() -> None:
    def on_rank(rank: int) -> list[list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard_cp"))
        found = adopt_mesh(mesh)
        assert found.layout == Layout(dp_shard=2, tp=2)
        five = build_mesh(Layout(dp_shard=2, tp=2), "cpu")
        assert adopt_mesh(five.root).root is five.root
        assert found["dp"].size() == adopt_mesh(five.root)["dp"].size() == 2
        return [found["dp_shard"].mesh.tolist(), found["tp"].mesh.tolist()]

    assert run_ranks(on_rank, 4) == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]


def test_what_the_reference_signature_refuses() -> None:
    def on_rank(rank: int) -> None:
        register_parallel_strategy("Plain")(OfPlain)
        model, _ = make("plain")
        found = get_parallelization_strategy(model)
        with pytest.raises(LayoutError, match=r"'stages': 2.*legal here are 'dp_replicate', 'dp_shard_cp', 'tp'"):
            found.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("stages",)))
        mesh = build_mesh(Layout(tp=2), "cpu").root
        with pytest.raises(PlanError, match="sequence_parallel=True: the spec of plain does not say which modules need"):
            found.parallelize(model, mesh, sequence_parallel=True, tp_shard_plan={"head": "colwise_rep"})
        with pytest.raises(PlanError, match="tp_plan pattern 'nowhere' matches no parameter"):
            found.parallelize(model, mesh, tp_shard_plan={"nowhere": "colwise"})
        gemma = tiny_model("gemma3n_text", meta=True)
        with pytest.raises(PlanError, match="sequence_parallel=True: each layer adds an embedding of the whole sequence"):
            get_parallelization_strategy(gemma).parallelize(gemma, mesh, sequence_parallel=True)
        assert not any(isinstance(module, dist.fsdp.FSDPModule) for module in model.modules())

    run_ranks(on_rank, 2)


def test_the_manager_takes_the_strategy_of_the_model_and_its_steps() -> None:
    def on_rank(rank: int) -> None:
        done: list[str] = []

        @register_parallel_strategy("Plain")
        class Watched(OfPlain):
            def carry_out(self, model: nn.Module, plan: Any, mesh: Any) -> nn.Module:
                done.append(plan.family)
                return super().carry_out(model, plan, mesh)

        model, _ = make("plain")
        manager = FSDP2Manager(mp_policy=FP32)
        check_gradients(manager.parallelize(model), rank, 2)
        assert done == ["plain"]
        assert manager.plan is not None
        manager.parallelize(make("plain")[0], ParallelSpec("other", layers=("blocks.*",)))
        assert done == ["plain", "other"]

    run_ranks(on_rank, 2)
