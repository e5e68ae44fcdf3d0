"""What the four pages that Meshwright started from say of NeMo AutoModel, on two processes; and the example of a loop."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from meshwright.distributed import _torch_compat, parallelizer
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.errors import UnsupportedError
from meshwright.models.diffusion_gemma.fsdp import fully_shard_diffusion_gemma
from meshwright.moe.fsdp_mixin import MoEFSDPSyncMixin, _iter_fsdp_modules
from tests.harness import run_ranks
from tests.nemo.test_behaviour import compare, same_gradients
from tests.nemo.test_diffusion_gemma import DiffusionGemmaForBlockDiffusion
from tests.tiny import Plain, batches, make, summed_loss

EXAMPLE = Path(__file__).parents[2] / "examples" / "from_automodel" / "train.py"
FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
MLP = {"model.layers.*.mlp.up_proj": ColwiseParallel(), "model.layers.*.mlp.gate_proj": ColwiseParallel(),
       "model.layers.*.mlp.down_proj": RowwiseParallel()}  # fmt: skip


def test_the_page_on_diffusion_gemma() -> None:
    """Experts are parameters of their whole shape, sharded by rows, and plain tensors in their forward."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = DiffusionGemmaForBlockDiffusion()
        seen: list[Any] = []
        for layer in model.model.layers.values():
            experts = layer.moe.experts
            experts.register_forward_pre_hook(lambda module, _: seen.append(module.weight), prepend=False)
            fully_shard_diffusion_gemma(layer, mesh, FP32, None, reshard_after_forward=True)
            assert isinstance(experts.weight, DTensor)
            assert experts.weight.shape == (8, 8)
            assert experts.weight.to_local().shape == (4, 8)
            assert experts.weight.placements == (Shard(0),)
            assert isinstance(experts, FSDPModule)
            assert experts in list(_iter_fsdp_modules(layer))
        fully_shard_diffusion_gemma(model, mesh, FP32)
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long))
        assert not any(_torch_compat.is_unsharded(layer) for layer in model.model.layers.values())

    run_ranks(on_rank, 2)


def test_the_page_on_the_mixin() -> None:
    """From the beginning of an accumulation nothing is reduced nor resharded; the last backward does both."""

    class Mixed(MoEFSDPSyncMixin, Plain):
        pass

    def made() -> Mixed:
        torch.manual_seed(0)
        return Mixed()

    def on_rank(rank: int) -> None:
        model, alone = FSDP2Manager(mp_policy=FP32).parallelize(made()), made()
        data = batches(6)
        model.prepare_for_grad_accumulation(pp_enabled=False)
        for index, batch in enumerate(data[rank::2]):
            if index == 2:
                model.prepare_for_final_backward(pp_enabled=False)
            summed_loss(model, batch).backward()
            units = [_torch_compat.is_unsharded(unit) for unit in _iter_fsdp_modules(model)]
            assert units == [index < 2] * 5
        (sum(summed_loss(alone, batch) for batch in data) / 2).backward()
        same_gradients(model, alone)

    run_ranks(on_rank, 2)


def given_by_a_function() -> dict[str, Any]:
    return MLP


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "plan", [None, MLP, f"{__name__}.MLP", f"{__name__}.given_by_a_function"], ids=["none", "dict", "path", "function"]
)
@pytest.mark.parametrize("offload", [None, OffloadPolicy(), CPUOffloadPolicy()], ids=["none", "no", "cpu"])
def test_the_page_on_the_parallelizer(plan: Any, offload: OffloadPolicy | None) -> None:
    """All arguments of `fsdp2_strategy_parallelize`, for a model on the meta device, which gets its values afterwards."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"))
        model, alone = make("llama", meta=True)[0], make("llama")[0]
        parallelizer.validate_tp_mesh(model, mesh["tp"])
        found = parallelizer.fsdp2_strategy_parallelize(
            model,
            device_mesh=mesh,
            mp_policy=FP32,
            offload_policy=offload,
            sequence_parallel=plan is None,
            activation_checkpointing=True,
            tp_shard_plan=plan,
            dp_replicate_mesh_name="dp_replicate",
            dp_shard_cp_mesh_name="dp_shard_cp",
            tp_mesh_name="tp",
        )
        found.to_empty(device="cpu")
        for name, buffer in found.named_buffers():
            buffer.copy_(alone.get_buffer(name))
        set_model_state_dict(found, alone.state_dict(), options=StateDictOptions(full_state_dict=True))
        compare(found, alone, 0, 1)
        with parallelizer.unshard_fsdp2_model(found), torch.no_grad():
            ids = batches(1)[0]["input_ids"]
            torch.testing.assert_close(found.eval()(ids).logits, alone.eval()(ids).logits, rtol=1e-4, atol=1e-5)
        assert not any(_torch_compat.is_unsharded(unit) for unit in found.modules() if isinstance(unit, FSDPModule))

    run_ranks(on_rank, 2)


def test_the_rest_of_that_page() -> None:
    assert parallelizer.import_class_from_path("torch.optim.AdamW") is torch.optim.AdamW
    assert parallelizer.import_classes_from_paths(["torch.optim.AdamW", "torch.nn.Linear"]) == [torch.optim.AdamW, nn.Linear]
    assert isinstance(parallelizer.translate_to_torch_parallel_style("colwise"), ColwiseParallel)
    assert parallelizer.HAVE_NVFSDP in (True, False)

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
        with pytest.raises(UnsupportedError, match="megatron-fsdp needs an NVIDIA GPU"):
            parallelizer.nvfsdp_strategy_parallelize(make("llama")[0], mesh)

    if not torch.cuda.is_available():
        run_ranks(on_rank, 2)


@pytest.mark.thorough
@pytest.mark.command
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    differences = re.findall(r"^(.+): gradients differ by (\S+) from one process$", found.stdout, re.MULTILINE)
    assert len(differences) == 7, found.stdout
    assert all(float(difference) < 1e-5 for _, difference in differences)


def test_both_blocks_of_imports_of_the_example_name_the_same() -> None:
    text = EXAMPLE.read_text()
    theirs = re.findall(r"^# (.*)$", text[: text.index("import copy")], re.MULTILINE)
    ours = text[text.index("from meshwright.") : text.index("import copy")].strip().splitlines()
    assert [line.replace("nemo_automodel.components.", "meshwright.") for line in theirs] == ours
