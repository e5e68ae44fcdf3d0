"""Adapters of fused experts: for each expert a small matrix A beside each of its matrices, and a small matrix B.

They are parameters of the experts module: ``<weight>_lora_A`` [experts, rank, in] and ``<weight>_lora_B`` [experts, out, rank].
So experts are sliced and gathered as they were, and their adapters with them. The products of all experts are grouped, with A
and with B as with the weights, so the sum W + s B A is never stored.

peft has other shapes for the same numbers (``ParamWrapper``): A is [experts * rank, in], B is [out, rank * experts], where the
experts are the last index. It wraps the module once for each weight, the first weight innermost.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.distributed.memory.nf4 import dequantize, grouped_product, is_packed
from meshwright.errors import ConfigError
from meshwright.models import _transformers_compat as compat
from meshwright.models.model_config import AdapterConfig
from meshwright.models.weights.packed import Packs, subclass

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "AdaptedExperts",
    "adapt_experts",
    "adapted_experts",
    "bare_experts",
    "from_files",
    "merge_experts",
    "name_in_files",
    "targets_in_files",
    "to_files",
]

A, B = "_lora_A", "_lora_B"

ALIGNED = 8
"""Grouped kernels need strides of 16 bytes: the rank is padded with zeros to a multiple of this."""

IMPLEMENTATIONS = ("grouped_mm", "eager")


class AdaptedExperts(Packs):
    """Forward of experts of transformers that have adapters, or weights in 4 bits, or both.

    Attributes:
        adapter_scale: factor of the adapters; ``None``: there are none.
    """

    adapter_scale: float | None = None

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Compute each token with its experts.

        Args:
            hidden_states: [tokens, features].
            top_k_index: [tokens, k], the experts of each token.
            top_k_weights: [tokens, k], their weights.

        Returns:
            [tokens, features].
        """
        own: Any = self
        tokens, chosen = top_k_index.shape
        order = torch.argsort(top_k_index.flatten(), stable=True)
        experts = top_k_index.flatten()[order]
        gated = getattr(own, "has_gate", True)  # releases of transformers before these two attributes have no other experts
        up = "gate_up_proj" if gated else "up_proj"
        number = len(getattr(self, up))
        counts = experts.new_zeros(number).scatter_add_(0, experts, torch.ones_like(experts))
        rows = self._product(up, hidden_states[order // chosen], experts, counts)
        rows = own._apply_gate(rows) if gated else own.act_fn(rows)
        rows = self._product("down_proj", rows, experts, counts)
        if getattr(own, "has_post_expert_norm", False):
            rows = own.post_expert_norm(rows)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        rows = (rows * top_k_weights.flatten()[order].unsqueeze(-1))[back]
        return rows.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, rows: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return W x + b + s B A x of the expert of each row; the rows are sorted by expert."""
        own: Any = self
        weight = getattr(self, name)
        multiply = _one_by_one if own.config._experts_implementation == "eager" else _grouped
        known = rows.dtype == torch.bfloat16 or not torch.compiler.is_compiling()  # grouped products, to torch's compiler
        if is_packed(weight) and multiply is _grouped and known:
            result = grouped_product(rows, weight, counts.cumsum(0).to(torch.int32), own.is_transposed)
        else:
            weight = dequantize(weight, rows.dtype) if is_packed(weight) else weight
            result = multiply(rows, weight if own.is_transposed else weight.mT, counts)
        if own.has_bias:
            result = result + getattr(self, f"{name}_bias")[experts]
        if self.adapter_scale is None:
            return result
        a, b = getattr(self, name + A), getattr(self, name + B)
        if narrow := -a.shape[1] % ALIGNED:
            a, b = nn.functional.pad(a, (0, 0, 0, narrow)), nn.functional.pad(b, (0, narrow))
        delta = multiply(multiply(rows, a.mT, counts), b.mT, counts)
        return result + self.adapter_scale * delta.to(result.dtype)


def _grouped(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the product of each row with the matrix [in, out] of its expert."""
    return compat.grouped_mm(rows.to(weights.dtype), weights, counts.cumsum(0).to(torch.int32))


def _one_by_one(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    parts = rows.to(weights.dtype).split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def adapt_experts(model: "PreTrainedModel", config: AdapterConfig, names: list[str]) -> None:
    """Give experts of a model adapters, or let them take their weights in 4 bits, or both, in place.

    Args:
        model: the model, on the meta device.
        config: which adapter.
        names: names of the modules of experts.

    Raises:
        ConfigError: the model computes its experts in a way that has no adapters.
    """
    shared: dict[int, dict[str, nn.Parameter]] = {}
    for name in names if config.experts or config.base is not None else ():
        module: Any = model.get_submodule(name)
        chosen = module.config._experts_implementation
        if chosen not in IMPLEMENTATIONS:
            raise ConfigError(
                "adapter.experts",
                f"adapter: experts have neither adapters nor weights in 4 bits under "
                f"model.experts_implementation={chosen}; legal are {', '.join(IMPLEMENTATIONS)}",
            )
        module.__class__ = subclass(type(module), AdaptedExperts)  # type: ignore[arg-type]  # classes are hashable
        if config.base is not None:
            module.packed_weights, module.unpacked_dtype = tuple(_weights(module)), module.down_proj.dtype
        module.adapter_scale = config.scale if config.experts else None
        for own in _weights(module) if config.experts else ():
            weight = module.get_parameter(own)
            experts, *sizes = weight.shape
            out, into = reversed(sizes) if module.is_transposed else sizes
            small = {
                part: nn.Parameter(torch.empty(experts, *shape, dtype=weight.dtype, device=weight.device))
                for part, shape in ((A, (config.rank, into)), (B, (out, config.rank)))
            }
            for part, parameter in shared.setdefault(id(weight), small).items():  # one adapter of a matrix that modules share
                module.register_parameter(own + part, parameter)


def adapted_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the experts that have adapters, by name."""
    return (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, AdaptedExperts) and module.adapter_scale is not None
    )


def _weights(module: nn.Module) -> list[str]:
    """Return the names of the matrices of experts, in the order in which peft wraps them."""
    return [name for name in module._parameters if name in ("gate_up_proj", "up_proj", "down_proj")]


@contextmanager
def bare_experts(model: nn.Module) -> Iterator[None]:
    """Inside, the experts have no adapters. They are not called."""
    small = [(module, name) for _, module in adapted_experts(model) for name in module._parameters if name.endswith((A, B))]
    for module, name in small:  # FSDP still asks for it
        module.__dict__[name] = module._parameters.pop(name)
    try:
        yield
    finally:
        for module, name in small:
            module._parameters[name] = module.__dict__.pop(name)


def merge_experts(model: nn.Module) -> None:
    """Add the adapters to the weights, in fp32 and rounded once, and take them away. All tensors are whole."""
    merged = set()
    for _, module in list(adapted_experts(model)):
        for name in _weights(module):
            parameter = module.get_parameter(name)
            shared = id(parameter) in merged
            merged.add(id(parameter))
            weight, a, b = (module.get_parameter(name + part).data for part in ("", A, B))
            for expert in () if shared else range(len(weight)):  # one by one, to bound memory
                wide = torch.promote_types(weight.dtype, torch.float32)
                delta = module.adapter_scale * (b[expert].to(wide) @ a[expert].to(wide))
                weight[expert] = weight[expert].to(wide) + (delta.T if module.is_transposed else delta)
            for part in (A, B):
                del module._parameters[name + part]
        module.adapter_scale = None


def targets_in_files(model: nn.Module) -> list[str]:
    """Return the names of the matrices of experts that have an adapter, as peft's settings list them."""
    return [f"{name}.{own}" for name, module in adapted_experts(model) for own in _weights(module)]


def name_in_files(module: nn.Module, own: str) -> str:
    """Return the name of an adapter's parameter of a module of experts in peft's files, without the name of the module."""
    weights = _weights(module)
    weight, which = own[: -len(A)], own[-len(A) + 1 :]
    return "base_layer." * (len(weights) - 1 - weights.index(weight)) + f"{which}.weight"


def to_files(own: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return an adapter's parameter of experts in the shape of peft's files."""
    return tensor.flatten(0, 1) if own.endswith(A) else tensor.permute(1, 2, 0).flatten(1)


def from_files(own: str, experts: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return an adapter's parameter of experts from the shape of peft's files."""
    return tensor.unflatten(0, (experts, -1)) if own.endswith(A) else tensor.unflatten(1, (-1, experts)).permute(2, 0, 1)
