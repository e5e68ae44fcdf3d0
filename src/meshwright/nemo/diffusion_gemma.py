"""Sharding a DiffusionGemma by hand, layer by layer.

A run does not come this way: the plan has units for experts in any family, and for both stacks. These are for a loop of one's
own, over layers that are not tied to others. The tied stacks of transformers' model need
:func:`~meshwright.nemo.parallelizer.fsdp2_strategy_parallelize`, which makes twins of them.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.distributed import _torch_compat
from meshwright.models.diffusion_gemma.strategy import DiffusionGemmaParallelizationStrategy
from meshwright.models.registry import register_parallel_strategy

__all__ = [
    "_fully_shard_once",
    "_has_fsdp_state",
    "fully_shard_diffusion_gemma",
    "register_diffusion_gemma_parallel_strategy",
]


def _has_fsdp_state(module: nn.Module) -> bool:
    """Whether a module is an FSDP unit."""
    return _torch_compat.fsdp_state(module) is not None


def _fully_shard_once(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None = None,
    **fsdp_kwargs: Any,
) -> nn.Module:
    """Make a module an FSDP unit unless it is one; returns it."""
    if not _has_fsdp_state(module):
        fully_shard(module, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy or OffloadPolicy(), **fsdp_kwargs)
    return module


def fully_shard_diffusion_gemma(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None = None,
    **fsdp_kwargs: Any,
) -> nn.Module:
    """Make the experts of a layer a unit, then the rest of the layer; any other module is one unit. Idempotent.

    Args:
        module: a layer with ``experts`` (transformers) or ``moe.experts`` (NeMo AutoModel), or another module.
        mesh: 1-D, to shard over.
        mp_policy: dtypes of both units.
        offload_policy: where their shards live.
        fsdp_kwargs: for torch's ``fully_shard``, of both units.

    Returns:
        The same module.
    """
    for holder in (module, getattr(module, "moe", None)):
        experts = getattr(holder, "experts", None)
        if isinstance(experts, nn.Module):
            _fully_shard_once(experts, mesh, mp_policy, offload_policy, **fsdp_kwargs)
    return _fully_shard_once(module, mesh, mp_policy, offload_policy, **fsdp_kwargs)


def register_diffusion_gemma_parallel_strategy() -> None:
    """Have DiffusionGemma's strategy chosen for its model class. It is already, whoever asks; to do it again is no harm."""
    register_parallel_strategy("DiffusionGemmaForBlockDiffusion")(DiffusionGemmaParallelizationStrategy)
