"""Megatron-FSDP against the plain model, on one GPU: run by `test_megatron_fsdp.py` in a process of its own."""

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from meshwright.distributed.process_group import process_group
from meshwright.nemo.megatron_fsdp import STRATEGIES, nvfsdp_strategy_parallelize
from tests.tiny import batches, make, summed_loss

SETTINGS: tuple[dict[str, Any], ...] = (
    *({"data_parallel_sharding_strategy": strategy} for strategy in STRATEGIES),
    {"calculate_per_token_loss": True},
    {"average_in_collective": True},
    {"check_for_nan_in_grad": False},
    {"fsdp_double_buffer": True},
    {"preserve_fp32_weights": True},
    {"grad_reduce_in_fp32": True},
    {"data_parallel_sharding_strategy": "no_shard", "overlap_param_gather": False},
)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Two groups whose settings differ, from each other and from the defaults."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
        {"lr": 2e-2, "params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, eps=1e-3)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """On one rank, the shard is all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(device: torch.device) -> None:
    """Gradients, and parameters after optimizer steps, are those of the plain model under every setting."""
    mesh = init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    data = [{key: value.to(device) for key, value in batch.items()} for batch in batches(3)]
    for family, some in (("llama", SETTINGS), ("mixtral", SETTINGS[3:4])):
        for settings in some:
            alone, model = (_model(family).to(device) for _ in range(2))
            reference = adamw(alone)
            wrapped, optimizer = nvfsdp_strategy_parallelize(model, mesh, adamw(model), **settings)
            assert optimizer is not None
            assert not optimizer.state
            for step, batch in enumerate(data):
                for one, its in ((wrapped, optimizer), (alone, reference)):
                    its.zero_grad()
                    summed_loss(one, batch).backward()
                _compare(f"{family} {settings} gradient, step {step}", wrapped.module, alone, 1e-5, gradient=True)
                optimizer.step()
                reference.step()
                _compare(f"{family} {settings} weight, step {step}", wrapped.module, alone, 1e-5)
    _low_precision(mesh, data)
    _materialised(mesh, data)
    _not_a_number(mesh, data)


def _model(family: str) -> Any:
    model = make(family)[0]
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products are for bf16 alone on some GPUs
    return model


def _compare(what: str, ours: Any, theirs: nn.Module, bound: float, gradient: bool = False) -> None:
    found = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        one, other = (found[name].grad, parameter.grad) if gradient else (found[name], parameter)
        assert one is not None, (what, name)
        error = (local(one.detach()).view(other.shape) - other.detach()).abs().max() / other.detach().abs().max()
        assert error <= bound, (what, name, float(error))


def _low_precision(mesh: Any, data: list[dict[str, torch.Tensor]]) -> None:
    """Weights and gradients of the optimizer in fp32, those of the model in bf16; and the loss falls."""
    model = make("llama")[0].to(mesh.device_type, torch.bfloat16)
    settings = {"preserve_fp32_weights": True, "grad_reduce_in_fp32": True}
    wrapped, optimizer = nvfsdp_strategy_parallelize(model, mesh, torch.optim.AdamW(model.parameters(), lr=1e-2), **settings)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = summed_loss(wrapped, data[0])
        loss.backward()
        assert {parameter.grad.dtype for parameter in wrapped.module.parameters()} == {torch.float32}
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0], losses


def _materialised(mesh: Any, data: list[dict[str, torch.Tensor]]) -> None:
    model = make("plain", meta=True)[0]
    settings = {"nvfsdp_unit_modules": ["Sequential"], "init_nvfsdp_with_meta_device": True}
    wrapped, optimizer = nvfsdp_strategy_parallelize(model, mesh, **settings)
    assert optimizer is None
    loss = summed_loss(wrapped, data[0])
    loss.backward()
    assert math.isfinite(float(loss))
    assert all(local(parameter.grad).isfinite().all() for parameter in wrapped.module.parameters())


def _not_a_number(mesh: Any, data: list[dict[str, torch.Tensor]]) -> None:
    model = make("llama")[0].to(mesh.device_type)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(math.nan)
    wrapped, _ = nvfsdp_strategy_parallelize(model, mesh)
    with pytest.raises(ValueError, match="NaN"):
        summed_loss(wrapped, data[0]).backward()


def main() -> None:
    """On the GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with process_group(timedelta(seconds=120), "cuda") as device:
        check(device)
    print("ok")


if __name__ == "__main__":
    main()
