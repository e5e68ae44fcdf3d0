"""Sharding a DiffusionGemma by hand, layer by layer or as a whole.

A run does not use this: its plan has units for experts in any family, and for both stacks. A whole model of transformers is
sharded by its strategy, which resolves such a plan. Layers that are sharded one by one become units. A layer that shares its
parameters with a layer that is already sharded becomes its twin.
"""

import weakref
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.distributed import _torch_compat
from meshwright.distributed.class_names import class_name
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.data.twin_units import shard_as_twin
from meshwright.errors import UnsupportedError
from meshwright.models.diffusion_gemma.shared_stack import EXPERTS, DiffusionGemmaParallelizationStrategy
from meshwright.models.specs.derived import is_transformers
from meshwright.models.specs.registry import get_parallelization_strategy, register_parallel_strategy
from meshwright.models.specs.strategy import Request, requested

__all__ = [
    "_fully_shard_once",
    "_has_fsdp_state",
    "fully_shard_diffusion_gemma",
    "register_diffusion_gemma_parallel_strategy",
]

_FIRST = WeakTensorKeyDictionary()
"""Parameter, before it was sharded here, to a weak reference to the module that was sharded, and the parameter's name in it."""


def _has_fsdp_state(module: nn.Module) -> bool:
    """Return whether a module is an FSDP unit."""
    return _torch_compat.fsdp_state(module) is not None


def _fully_shard_once(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None = None,
    **fsdp_kwargs: Any,
) -> nn.Module:
    """Make a module an FSDP unit unless it is one, and return it."""
    if not _has_fsdp_state(module):
        fully_shard(module, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy or OffloadPolicy(), **fsdp_kwargs)
        _torch_compat.forget_runs_without_gradient(module)  # such as the first one of the decoder
    return module


def fully_shard_diffusion_gemma(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None = None,
    **fsdp_kwargs: Any,
) -> nn.Module:
    """Make the experts of a layer a unit, then the rest of the layer; any other module becomes one unit. Idempotent.

    In transformers' own model, a layer of the encoder and the decoder's layer with the same number have the same parameters.
    The second of them to be sharded becomes the twin of the first, so that both add to one gradient. The whole model, if none
    of its layers was sharded before, is sharded by its plan: with twin units, or with one unit for both layers if their
    gradients are small.

    Args:
        module: a layer with ``experts`` (transformers) or ``moe.experts`` (NeMo AutoModel), or another module.
        mesh: the mesh to shard over: 1-D (shard), or 2-D (replicate, shard).
        mp_policy: dtypes of all units.
        offload_policy: where the shards of the units are stored.
        fsdp_kwargs: arguments of torch's ``fully_shard`` for all units; for a whole model of transformers, only
            ``reshard_after_forward``.

    Returns:
        The same module.

    Raises:
        UnsupportedError: a layer shares only some of its parameters; or a whole model gets other ``fsdp_kwargs``.
    """
    registered = get_parallelization_strategy(module)
    strategy = registered if isinstance(registered, DiffusionGemmaParallelizationStrategy) else None
    if strategy is not None and is_transformers(module) and not fsdp_units(module):
        return _by_plan(module, strategy, mesh, mp_policy, offload_policy, fsdp_kwargs)

    def shard(chosen: nn.Module) -> None:
        inside = dict(chosen.named_modules())
        for experts in EXPERTS:
            if experts in inside:
                _fully_shard_once(inside[experts], mesh, mp_policy, offload_policy, **fsdp_kwargs)
        _fully_shard_once(chosen, mesh, mp_policy, offload_policy, **fsdp_kwargs)

    originals = {name: parameter for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)}
    if (first := _sharded_before(module, originals)) is not None:
        shard_as_twin(first, module, shard)
    else:
        shard(module)
        for name, parameter in originals.items():
            _FIRST.setdefault(parameter, (weakref.ref(module), name))
        if class_name(module) in _IN_NEED_OF_A_ROOT and originals:
            _torch_compat.before_first_run(module, lambda: _check_root(module))
    if strategy is not None:
        dtype = mp_policy.output_dtype
        strategy.ready(module, None if dtype is None else str(dtype).removeprefix("torch."))
        _READY.update(module.modules())
    return module


_IN_NEED_OF_A_ROOT = ("DiffusionGemmaEncoderTextLayer",)
"""Layers whose output may get no gradient, while the keys and values that they write to the cache do. FSDP would then read
memory that is freed, unless the root was prepared for it."""

_READY: WeakSet[nn.Module] = WeakSet()
"""The modules of roots that were prepared."""


def _check_root(layer: nn.Module) -> None:
    if layer not in _READY:
        raise UnsupportedError(
            "fsdp.whole_model",
            f"{class_name(layer)}: fully_shard_diffusion_gemma sharded this layer, but not the root; call it for the whole "
            "model, too",
        )


def _sharded_before(module: nn.Module, originals: dict[str, nn.Parameter]) -> nn.Module | None:
    """Return the module that had the same parameters under the same names before it was sharded; ``None`` if there is none.

    Raises:
        UnsupportedError: the module shares only some of its parameters with a sharded one.
    """
    known = {name: _FIRST[parameter] for name, parameter in originals.items() if parameter in _FIRST}
    firsts = {id(first()): first() for first, _ in known.values()}
    if not known:
        return None
    if len(firsts) > 1 or known.keys() != originals.keys() or any(name != own for name, (_, own) in known.items()):
        raise UnsupportedError(
            "fsdp.whole_model",
            f"{class_name(module)}: shares {next(iter(known))!r} with a module that is sharded already, but not all of its "
            "parameters under the same names; shard the whole model at once",
        )
    return next(iter(firsts.values()))


def _by_plan(
    model: nn.Module,
    strategy: DiffusionGemmaParallelizationStrategy,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    fsdp_kwargs: dict[str, Any],
) -> nn.Module:
    if unknown := sorted(fsdp_kwargs.keys() - {"reshard_after_forward"}):
        raise UnsupportedError(
            "fsdp.whole_model",
            f"{', '.join(unknown)}: for a whole model only reshard_after_forward is legal; the others are for single layers",
        )
    if mesh.mesh_dim_names is None:
        mesh = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=("dp_replicate", "dp_shard_cp")[-mesh.ndim :])
    *replicas, shards = mesh.mesh_dim_names or ()
    names = {"dp_shard_cp_mesh_name": shards, **({"dp_replicate_mesh_name": replicas[0]} if replicas else {})}
    with requested(Request(options=fsdp_kwargs)):
        return strategy.parallelize(model, mesh, mp_policy, offload_policy, **names)  # type: ignore[arg-type]


def register_diffusion_gemma_parallel_strategy() -> None:
    """Register DiffusionGemma's strategy for its model class. It is registered already, and a second time changes nothing."""
    register_parallel_strategy("DiffusionGemmaForBlockDiffusion")(DiffusionGemmaParallelizationStrategy)
