"""The tensors of a checkpoint by name: parameters, buffers, optimizer state and random number generators.

Names do not depend on the layout: ``model.NAME``, ``optimizer.NAME.KEY``, ``rng.RANK.KIND``. Values may be DTensors; DCP
writes each element once and reads what each rank needs.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["initialize_optimizer", "model_tensors", "optimizer_tensors", "rng_tensors", "set_rng"]


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each tied one once, and the buffers that belong to the state dict."""
    found: dict[str, torch.Tensor] = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    persistent = model.state_dict().keys()
    found.update((f"model.{name}", buffer) for name, buffer in model.named_buffers() if name in persistent)
    return found


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of every trained parameter, under the parameter's name."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"optimizer.{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def initialize_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that never stepped allocate its state, so that a checkpoint can be read into it.

    One step with zero gradients and a zero learning rate changes no parameter; the state it leaves is overwritten.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def rng_tensors(rank: int) -> dict[str, torch.Tensor]:
    """The state of this rank's generators (dropout draws from them)."""
    found = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return found


def set_rng(tensors: dict[str, torch.Tensor], rank: int) -> None:
    """Put this rank's generators back to where :func:`rng_tensors` found them."""
    torch.set_rng_state(tensors[f"rng.{rank}.cpu"].cpu())
    if f"rng.{rank}.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[f"rng.{rank}.cuda"].cpu())


def shape_and_dtype(tensor: torch.Tensor) -> dict[str, Any]:
    """Global shape and dtype, as plain values."""
    shape = tensor.shape if not isinstance(tensor, DTensor) else tensor.size()
    return {"shape": list(shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
