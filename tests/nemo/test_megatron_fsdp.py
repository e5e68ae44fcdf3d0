"""nvfsdp_strategy_parallelize: its arguments, what it refuses, and what reaches the library. The run itself needs a GPU."""

import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.distributed import parallelizer
from meshwright.distributed.data.fsdp_units import shard_unit
from meshwright.errors import UnsupportedError
from meshwright.nemo import megatron_fsdp
from meshwright.nemo.megatron_fsdp import (
    HAVE_NVFSDP,
    _library_problems,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
)
from meshwright.nemo.megatron_fsdp_checks import (
    STRATEGIES,
    SWITCHES,
    argument_problems,
    model_problems,
    parameter_groups,
    precision,
    unit_classes,
)
from tests.harness import run_ranks
from tests.tiny import make, tiny_model

REFERENCE = {
    "optimizer": None,
    "nvfsdp_unit_modules": None,
    "tp_shard_plan": None,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "init_nvfsdp_with_meta_device": False,
    "grad_reduce_in_fp32": False,
    "preserve_fp32_weights": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "check_for_nan_in_grad": True,
    "average_in_collective": False,
    "disable_bucketing": False,
    "calculate_per_token_loss": False,
    "keep_fp8_transpose_cache_when_using_custom_fsdp": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "dp_mesh_name": "dp",
    "cp_mesh_name": "cp",
    "tp_mesh_name": "tp",
}
"""Arguments and defaults of the reference's page, in its order."""

needs_library = pytest.mark.skipif(not HAVE_NVFSDP, reason="megatron-fsdp is not installed (the extra [megatron])")


def test_arguments_are_those_of_the_reference() -> None:
    found = inspect.signature(parallelizer.nvfsdp_strategy_parallelize).parameters
    assert list(found) == ["model", "device_mesh", *REFERENCE]
    assert {name: found[name].default for name in REFERENCE} == REFERENCE


@pytest.mark.thorough
def test_the_library_is_looked_for_and_not_imported() -> None:
    assert (find_spec("megatron_fsdp") is not None) == parallelizer.HAVE_NVFSDP
    script = "import sys, meshwright.distributed.parallelizer; assert 'megatron_fsdp' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"data_parallel_sharding_strategy": "params"}, "data_parallel_sharding_strategy='params': legal are no_shard, optim"),
    ({"overlap_grad_reduce": False}, "overlap_grad_reduce=False: "),
    ({"overlap_param_gather": False}, "overlap_param_gather=False: "),
    ({"disable_bucketing": True}, "disable_bucketing=True: "),
    (
        {"average_in_collective": True, "calculate_per_token_loss": True},
        "average_in_collective=True and calculate_per_token_loss=True exclude",
    ),
    ({"keep_fp8_transpose_cache_when_using_custom_fsdp": True}, "keep_fp8_transpose_cache_when_using_custom_fsdp=True: "),
    ({"nccl_ub": True}, "nccl_ub=True: needs the NCCL allocator"),
    ({"fsdp_double_buffer": True, "data_parallel_sharding_strategy": "optim"}, "fsdp_double_buffer=True: optim gathers"),
    ({"init_nvfsdp_with_meta_device": True}, "init_nvfsdp_with_meta_device=True: no parameter is on the meta device"),
    (
        {"init_nvfsdp_with_meta_device": True, "data_parallel_sharding_strategy": "no_shard"},
        "init_nvfsdp_with_meta_device=True: not supported with no_shard",
    ),
    ({"tp_shard_plan": {}}, "tp_shard_plan and tp=1: "),
    ({"tp_mesh_name": "cp", "cp_mesh_name": "tp"}, "tp_shard_plan and cp=2: "),
    ({"cp_mesh_name": "tp"}, "dp_mesh_name, cp_mesh_name, tp_mesh_name: dp, tp, tp must be different axes"),
    ({"dp_mesh_name": "data"}, "dp_mesh_name='data': device_mesh has no such axis; it has dp, cp, tp"),
    ({"nvfsdp_unit_modules": ["Block"]}, "nvfsdp_unit_modules: no module has the class 'Block'"),
    ({"nvfsdp_unit_modules": []}, "nvfsdp_unit_modules=[]: "),
    (
        {"nvfsdp_unit_modules": ["LlamaDecoderLayer", "LlamaMLP"]},
        "nvfsdp_unit_modules: 'model.layers.0.mlp' (LlamaMLP) lies in",
    ),
    (
        {"fsdp_double_buffer": True, "nvfsdp_unit_modules": ["LlamaMLP", "LlamaAttention"]},
        "fsdp_double_buffer=True: needs units of one size",
    ),
)


def test_what_cannot_be_done_is_refused_by_name_before_anything_changes() -> None:
    def on_rank(rank: int) -> list[tuple[str, ...]]:
        mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
        model, _ = make("llama")
        optimizer = torch.optim.AdamW(model.parameters())
        before = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
        found = []
        for settings, _ in ({}, ""), *REFUSED:
            with pytest.raises(UnsupportedError) as error:
                parallelizer.nvfsdp_strategy_parallelize(model, mesh, optimizer, **settings)
            found.append(error.value.problems)
        after = dict(model.named_parameters())
        assert all(id(after[name]) == key and after[name].equal(value) for name, (key, value) in before.items())
        assert not optimizer.state
        with pytest.raises((KeyError, RuntimeError)):
            _ = mesh["dp_cp"]
        return found

    plain, *refused = run_ranks(on_rank, 2)[0]
    here = "no CUDA device here: " if not torch.cuda.is_available() else "device_mesh: is of 'cpu'"
    assert [problem.startswith(here) for problem in plain if "not installed" not in problem] == [True]
    for problems, (settings, text) in zip(refused, REFUSED, strict=True):
        assert any(problem.startswith(text) for problem in problems), (settings, problems)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_fsdp, "HAVE_NVFSDP", False)

    def on_rank(rank: int) -> tuple[str, ...]:
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
        with pytest.raises(UnsupportedError) as error:
            parallelizer.nvfsdp_strategy_parallelize(make("llama")[0], mesh)
        return error.value.problems

    assert "megatron-fsdp is not installed: pip install 'meshwright[megatron]'" in run_ranks(on_rank, 1)[0]


def test_axes_that_leave_ranks_out_and_models_that_are_sharded_are_refused() -> None:
    def on_rank(rank: int) -> tuple[str, ...]:
        mesh = init_device_mesh("cpu", (2, 1, 1, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))
        model, _ = make("llama")
        policies = torch.distributed.fsdp.MixedPrecisionPolicy(), torch.distributed.fsdp.OffloadPolicy()
        shard_unit([model], mesh["pp"], *policies, True)
        with pytest.raises(UnsupportedError) as error:
            parallelizer.nvfsdp_strategy_parallelize(model, mesh)
        return error.value.problems

    problems = run_ranks(on_rank, 2)[0]
    assert "device_mesh: dp=1 x cp=1 x tp=1 are 1 of its 2 ranks; legal are axes that span it all" in problems
    assert "the model has FSDP units already" in problems


def test_the_later_name_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(megatron_fsdp, "nvfsdp_strategy_parallelize", lambda *arguments: given.append(arguments))
    names = inspect.signature(nvfsdp_strategy_parallelize).parameters
    defaults = {name: item.default for name, item in names.items() if item.default is not item.empty}
    megatron_fsdp_strategy_parallelize("model", "mesh")  # type: ignore[arg-type]
    expected = {"model": "model", "device_mesh": "mesh", **defaults, "cp_mesh_name": None}
    assert dict(zip(names, given[-1], strict=True)) == expected
    others = {
        "megatron_fsdp_unit_modules": "nvfsdp_unit_modules",
        "init_fsdp_with_meta_device": "init_nvfsdp_with_meta_device",
        "keep_fp8_transpose_cache": "keep_fp8_transpose_cache_when_using_custom_fsdp",
        "dp_shard_dim": "dp_mesh_name",
        "tp_dim": "tp_mesh_name",
    }
    for name in list(inspect.signature(megatron_fsdp_strategy_parallelize).parameters)[2:]:
        mark = 2 if name == "zero_dp_strategy" else object()
        megatron_fsdp_strategy_parallelize("model", "mesh", **{name: mark})  # type: ignore[arg-type]
        found = dict(zip(names, given[-1], strict=True))
        if name == "zero_dp_strategy":
            assert found["data_parallel_sharding_strategy"] == "optim_grads"
        else:
            assert found[others.get(name, name)] is mark


def test_a_mesh_without_an_axis_for_parts_of_sequences() -> None:
    def on_rank(rank: int) -> tuple[str, ...]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        with pytest.raises(UnsupportedError) as error:
            parallelizer.megatron_fsdp_strategy_parallelize(make("llama")[0], mesh, zero_dp_strategy=7)
        return error.value.problems

    problems = run_ranks(on_rank, 2)[0]
    assert "data_parallel_sharding_strategy='7': legal are no_shard, optim, optim_grads, optim_grads_params" in problems
    assert not any("device_mesh has no such axis" in problem or "ranks;" in problem for problem in problems)


# -- what reaches the library ------------------------------------------------------------------------------------------------


@needs_library
def test_the_installed_library_takes_what_is_passed() -> None:
    import megatron_fsdp as library

    assert _library_problems(library) == []


def test_every_argument_of_the_reference_is_a_switch_of_the_library_or_has_code_of_its_own() -> None:
    own = {"optimizer", "nvfsdp_unit_modules", "tp_shard_plan", "dp_mesh_name", "cp_mesh_name", "tp_mesh_name"}
    assert SWITCHES.keys() | own | {"grad_reduce_in_fp32", "preserve_fp32_weights"} == REFERENCE.keys()
    assert {ours: theirs for ours, theirs in SWITCHES.items() if ours != theirs} == {
        "data_parallel_sharding_strategy": "zero_dp_strategy",
        "init_nvfsdp_with_meta_device": "init_model_with_meta_device",
        "check_for_nan_in_grad": "report_nan_in_param_grad",
        "keep_fp8_transpose_cache_when_using_custom_fsdp": "keep_fp8_transpose_cache",
    }


def test_dtypes_of_weights_and_gradients() -> None:
    def dtypes(preserve_fp32_weights: bool = False, grad_reduce_in_fp32: bool = False) -> list[Any]:
        return list(precision(preserve_fp32_weights, grad_reduce_in_fp32).values())

    fp32 = torch.float32
    assert dtypes() == [None, None, None]
    assert dtypes(preserve_fp32_weights=True) == [fp32, None, None]
    assert dtypes(grad_reduce_in_fp32=True) == [None, None, fp32]
    assert dtypes(grad_reduce_in_fp32=True, preserve_fp32_weights=True) == [fp32, fp32, fp32]


def test_a_release_that_moved_an_argument_is_refused_by_name() -> None:
    def fully_shard_model(module: Any, device_mesh: Any, dp_shard_dim: Any, tp_dim: Any, **others: Any) -> None: ...

    problems = _library_problems(SimpleNamespace(fully_shard_model=fully_shard_model))  # type: ignore[arg-type]
    assert any("fully_shard_model takes no report_nan_in_param_grad" in problem for problem in problems)
    assert not any("takes no device_mesh" in problem for problem in problems)
    assert any("has no MixedPrecisionPolicy" in problem for problem in problems)
    assert any("has no fully_shard_optimizer" in problem for problem in problems)


def test_no_shard_gathers_nothing_so_that_overlap_of_it_is_free() -> None:
    model, _ = make("llama", meta=True)
    for strategy in STRATEGIES:
        given = REFERENCE | {"data_parallel_sharding_strategy": strategy, "overlap_param_gather": False}
        assert bool(argument_problems(given, model)) == (strategy != "no_shard")


# -- models, units, optimizers -----------------------------------------------------------------------------------------------


def test_units_are_the_declared_layers_or_classes_by_name_or_path() -> None:
    model = tiny_model(meta=True)
    layer = type(model.model.layers[0])
    path = f"{layer.__module__}.{layer.__qualname__}"
    for names in (None, ["LlamaDecoderLayer"], [path]):
        assert unit_classes(model, names) == ([layer], [])
    parts = [type(model.model.layers[0].self_attn), type(model.model.layers[0].mlp)]
    assert unit_classes(model, ["LlamaAttention", "LlamaMLP"]) == (parts, [])
    plain, _ = make("plain", meta=True)
    assert unit_classes(plain, None) == ([nn.Sequential], [])
    none, problems = unit_classes(nn.Linear(2, 2), None)
    assert none == []
    assert problems[0].startswith("nvfsdp_unit_modules=None: Linear: has no layers")
    assert len(problems) == 1


def test_models_that_cannot_be_materialised_say_which_module() -> None:
    plain, _ = make("plain", meta=True)
    assert model_problems(plain, True) == []
    assert model_problems(plain, False)[0].startswith("init_nvfsdp_with_meta_device=False: 'embed.weight' is on the meta")
    llama = tiny_model(meta=True, tie_word_embeddings=True)
    norm, buffer, tied = model_problems(llama, True)
    assert "(LlamaRMSNorm) has no reset_parameters()" in norm
    assert "nothing would fill the buffer 'model.rotary_emb.inv_freq'" in buffer
    assert "model.embed_tokens.weight and lm_head.weight are one parameter" in tied
    double = tiny_model().double()
    assert "is float64; legal for a trained one are float32, bfloat16, float16" in model_problems(double, False)[0]
    assert model_problems(double.requires_grad_(False), False) == []


def test_optimizers_that_cannot_be_taken_over_are_refused() -> None:
    model, other = make("plain")[0], nn.Linear(2, 2)

    def found(optimizer: torch.optim.Optimizer) -> str:
        return "; ".join(parameter_groups(model, optimizer)[1])

    names = [name for name, _ in model.named_parameters()]
    groups = [{"params": [value]} for value in model.parameters()]
    assert parameter_groups(model, torch.optim.AdamW(groups)) == ([[name] for name in names], [])
    assert "2 of its parameters are not the model's" in found(torch.optim.SGD([*model.parameters(), *other.parameters()]))
    assert "LBFGS" in found(torch.optim.LBFGS(model.parameters()))
    used = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    used.step()
    assert "has made steps already" in found(used)


@pytest.mark.gpu
@needs_library
def test_gradients_and_steps_are_those_of_the_plain_model() -> None:
    """World size 1: what is sharded is whole, and every buffer, hook and collective is there."""
    command = [sys.executable, "-m", "tests.nemo.megatron_run"]
    subprocess.run(command, check=True, timeout=900, cwd=Path(__file__).parents[2])
