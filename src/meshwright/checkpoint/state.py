"""The tensors of a checkpoint by name: parameters, buffers, optimizer state and random number generators.

Names do not depend on the layout: ``model.NAME``, ``optimizer.NAME.KEY``, ``rng.RANK.KIND``. Values may be DTensors. DCP writes
each element once, and each rank reads the elements that it needs.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from meshwright.checkpoint import storage
from meshwright.device import rng_state, set_rng_state
from meshwright.distributed.memory.nf4 import dequantize, is_packed
from meshwright.distributed.update.quantized import is_quantized, on_host, take

__all__ = [
    "initialize_optimizer",
    "model_tensors",
    "optimizer_tensors",
    "read_model",
    "rng_tensors",
    "set_rng",
    "take_moments",
    "without_absent",
]


def model_tensors(model: nn.Module, *, trained: bool = False) -> dict[str, torch.Tensor]:
    """Return the parameters, each tied one once, and the buffers that are in the state dict.

    Args:
        model: the model.
        trained: only the parameters that are trained: those of an adapter.
    """
    if trained:
        return {f"model.{name}": parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors: dict[str, torch.Tensor] = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    persistent = model.state_dict().keys()
    tensors.update((f"model.{name}", buffer) for name, buffer in model.named_buffers() if name in persistent)
    return tensors


def read_model(checkpoint: Path, model: nn.Module, *, trained: bool = False) -> None:
    """Read a whole model in this process alone. A matrix that was trained from 4 bits becomes numbers again.

    Args:
        checkpoint: directory of the checkpoint.
        model: a model with values, whose matrices have no 4 bits.
        trained: only the parameters that are trained.
    """
    tensors, stored = model_tensors(model, trained=trained), storage.contents(checkpoint)
    packed = {
        name: torch.empty(stored[name][0], dtype=torch.uint8)
        for name, tensor in tensors.items()
        if not is_packed(tensor) and stored.get(name, ((), ""))[1] == "uint8"
    }
    storage.read(checkpoint, tensors | packed, alone=True)
    for name, tensor in packed.items():
        tensors[name].copy_(dequantize(tensor, tensors[name].dtype))


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer state of every trained parameter, under the parameter's name.

    What is in blocks of few bits is returned as numbers on the host; :func:`take_moments` is their way back.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"optimizer.{names[parameter]}.{key}": on_host(parameter, value) if is_quantized(value) else value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def take_moments(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Round the moments of :func:`optimizer_tensors` that a checkpoint was read into to blocks of few bits."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and is_quantized(value):
                take(value, tensors[f"optimizer.{names[parameter]}.{key}"])


def without_absent(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], stored: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Forget the state of each parameter that a checkpoint has no state of, and return the tensors without it.

    The state of another optimizer is not forgotten, so that it is missed.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    with_state = {key.rpartition(".")[0] for key in stored if key.startswith("optimizer.")}
    absent = [parameter for parameter in optimizer.state if f"optimizer.{names[parameter]}" not in with_state]
    for parameter in absent:
        del optimizer.state[parameter]
    gone = tuple(f"optimizer.{names[parameter]}." for parameter in absent)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)} if gone else tensors


def initialize_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has never stepped its initial state of every trained parameter: zeros, as for variants of Adam.

    So a checkpoint has the state of every trained parameter, also of one that has had no gradient yet. And a new optimizer of
    the same kind has all the tensors that a checkpoint is read into. The function takes one step with zero gradients and a zero
    learning rate, which changes no parameter. A parameter that has a state keeps it.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    stepped = [
        own for group in optimizer.param_groups for own in group["params"] if own.requires_grad and own not in optimizer.state
    ]
    if not stepped:
        return
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in stepped:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in stepped:
        for value in optimizer.state[parameter].values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def rng_tensors(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of this rank's random number generators (dropout uses them)."""
    return {f"rng.{rank}.{one.type}": rng_state(one) for one in dict.fromkeys((torch.device("cpu"), device))}


def set_rng(tensors: dict[str, torch.Tensor], rank: int, device: torch.device) -> None:
    """Restore the states of this rank's generators that :func:`rng_tensors` returned."""
    for one in dict.fromkeys((torch.device("cpu"), device)):
        set_rng_state(tensors[f"rng.{rank}.{one.type}"], one)
