"""Megatron-FSDP, NVIDIA's ZeRO, as an alternative engine, with the names and arguments that are known from nvFSDP.

The library was published as nvFSDP and is now `megatron-fsdp`. Every argument of NeMo AutoModel is passed to it, or is refused
by name. The reasons for refusal were found in version 0.6.1, by reading it and by running it over gloo with its CUDA streams
replaced:

- `overlap_grad_reduce=False`: with `no_shard` and `optim`, gradients are reduced twice (`no_shard`: multiplied by the number of
  ranks; `optim`: wrong). With the other strategies the library sets it to true.
- `overlap_param_gather=False` leaves weights as they were before the optimizer step. With `optim_grads_params` the library sets
  it to true.
- `disable_bucketing` changes nothing: no bucket size is set that it could remove.
- Tensor parallel: a weight that is sliced along its inputs (`RowwiseParallel`) gets a wrong local shape, and the library's
  check of it fails.
- The library's `fully_shard` gives all parameters the optimizer's defaults, and makes one step with zero gradients on them:
  AdamW decays the weights, and its next step counts as the second. Here groups keep their settings, and the optimizer begins
  without steps.
"""

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from meshwright.distributed import _torch_compat
from meshwright.errors import Problems, UnsupportedError
from meshwright.nemo.megatron_fsdp_checks import (
    STRATEGIES,
    SWITCHES,
    argument_problems,
    axis_sizes,
    machine_problems,
    model_problems,
    parameter_groups,
    precision,
    unit_classes,
)

__all__ = ["HAVE_MEGATRON_FSDP", "HAVE_NVFSDP", "megatron_fsdp_strategy_parallelize", "nvfsdp_strategy_parallelize"]

HAVE_NVFSDP = HAVE_MEGATRON_FSDP = find_spec("megatron_fsdp") is not None
"""Whether the library can be imported. It is imported on first use only, because that takes seconds."""


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    nvfsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: dict[str, Any] | None = None,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_mesh_name: str = "dp",
    cp_mesh_name: str | None = "cp",
    tp_mesh_name: str = "tp",
) -> tuple[nn.Module, Optimizer | None]:
    """Shard a model, and its optimizer, with Megatron-FSDP. Needs NVIDIA GPUs and `pip install 'meshwright[megatron]'`.

    Args:
        model: the model, materialized with the same values on every rank, or on the meta device (see
            ``init_nvfsdp_with_meta_device``). It is wrapped; the wrapper's ``module`` is the model itself.
        device_mesh: a mesh with the three axes named below, of size 1 if they are not used. Together they must span the mesh.
        optimizer: optimizer of the model's parameters, without state. It holds their shards afterwards, in the same groups.
        nvfsdp_unit_modules: class names, or dotted paths of classes, whose instances are gathered as a unit. ``None``: the
            layers that the model declares.
        tp_shard_plan: legal is ``None``; :class:`~meshwright.nemo.fsdp2_manager.FSDP2Manager` supports tensor parallel.
        data_parallel_sharding_strategy: what is sharded: ``no_shard``, ``optim``, ``optim_grads`` or ``optim_grads_params``.
        init_nvfsdp_with_meta_device: materialize the model's meta parameters unit by unit, by each module's own
            ``reset_parameters()``. Every rank generates its own values, so the seeds of all ranks must be equal.
        grad_reduce_in_fp32: reduce gradients in fp32; with ``preserve_fp32_weights`` they are accumulated in fp32, too.
        preserve_fp32_weights: the optimizer updates an fp32 copy of each shard.
        overlap_grad_reduce: legal is true.
        overlap_param_gather: legal is true; with ``no_shard`` nothing is gathered, and both values are legal.
        check_for_nan_in_grad: raise ``ValueError`` for a NaN or infinite gradient, before it is reduced. This waits for the GPU
            at each parameter.
        average_in_collective: let NCCL average, instead of dividing gradients first and then adding them.
        disable_bucketing: legal is false.
        calculate_per_token_loss: add gradients over the data ranks instead of averaging them.
        keep_fp8_transpose_cache_when_using_custom_fsdp: for models with layers of TransformerEngine.
        nccl_ub: register buffers with NCCL; needs Megatron Core's or Apex's allocator. This includes double buffers.
        fsdp_double_buffer: use two persistent buffers for all-gathers and reductions; needs units of one size.
        dp_mesh_name: name of the axis of data ranks.
        cp_mesh_name: name of the axis of ranks that share a sequence. Parameters are sharded over it, too; splitting the
            sequences is left to the caller. ``None``: the mesh has no such axis.
        tp_mesh_name: name of the axis of tensor parallel, which the library needs; of size 1.

    Returns:
        The wrapped model, and the optimizer (``None`` if none was given).

    Raises:
        UnsupportedError: everything that is missing or not supported, in one report, before anything was changed.
    """
    arguments = dict(locals())
    _torch_compat.check()
    problems = Problems([*machine_problems(device_mesh, HAVE_NVFSDP), *argument_problems(arguments, model)])
    names = {"dp_mesh_name": dp_mesh_name, "cp_mesh_name": cp_mesh_name, "tp_mesh_name": tp_mesh_name}
    axes = {argument: name for argument, name in names.items() if name is not None}
    sizes, misfits = axis_sizes(device_mesh, axes)
    problems += misfits
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        problems.add("fsdp.already", "the model has FSDP units already")
    problems += model_problems(model, init_nvfsdp_with_meta_device)
    same_size = "nccl_ub" if nccl_ub else "fsdp_double_buffer" if fsdp_double_buffer else None
    units, misfits = unit_classes(model, nvfsdp_unit_modules, same_size)
    problems += misfits
    if tp_shard_plan is not None or sizes.get(tp_mesh_name, 1) > 1:
        problems.add(
            "megatron.layout",
            f"tp_shard_plan and {tp_mesh_name}={sizes.get(tp_mesh_name, 1)}: megatron-fsdp cannot hold weights that are sliced "
            "along their inputs; legal are None and 1",
        )
    groups, misfits = parameter_groups(model, optimizer)
    problems += misfits
    if problems:
        raise UnsupportedError(problems)
    library = importlib.import_module("megatron_fsdp")
    if problems := _library_problems(library):
        raise UnsupportedError(problems)

    shard_mesh, shard_name = device_mesh[dp_mesh_name], dp_mesh_name
    if cp_mesh_name is not None and sizes[cp_mesh_name] > 1:
        shard_name = f"{dp_mesh_name}_{cp_mesh_name}"
        shard_mesh = _torch_compat.flatten_mesh(device_mesh[dp_mesh_name, cp_mesh_name], shard_name)
    mesh = _torch_compat.concatenate_meshes([shard_mesh, device_mesh[tp_mesh_name]])
    wrapped = library.fully_shard_model(
        model,
        **{theirs: arguments[ours] for ours, theirs in SWITCHES.items()},
        mixed_precision_policy=library.MixedPrecisionPolicy(**precision(preserve_fp32_weights, grad_reduce_in_fp32)),
        device_mesh=mesh,
        dp_shard_dim=shard_name,
        tp_dim=tp_mesh_name,
        expt_device_mesh=mesh,  # without expert parallel, experts have the same groups as everything else
        fsdp_unit_modules=units,
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    if optimizer is not None:
        _rebind(optimizer, groups, wrapped, library)
    return wrapped, optimizer


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    megatron_fsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: dict[str, Any] | None = None,
    zero_dp_strategy: int | str = 3,
    init_fsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_shard_dim: str = "dp",
    tp_dim: str = "tp",
) -> tuple[nn.Module, Optimizer | None]:
    """:func:`nvfsdp_strategy_parallelize` under its later name and arguments. Errors use the earlier names.

    Args:
        model: as there; so are all other arguments without a note.
        device_mesh: a mesh with the two axes named below. Together they must span the mesh.
        optimizer: as there.
        megatron_fsdp_unit_modules: there ``nvfsdp_unit_modules``.
        tp_shard_plan: as there.
        zero_dp_strategy: 0 to 3, or the names there of what is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also
            parameters.
        init_fsdp_with_meta_device: there ``init_nvfsdp_with_meta_device``.
        grad_reduce_in_fp32: as there.
        preserve_fp32_weights: as there.
        overlap_grad_reduce: as there.
        overlap_param_gather: as there.
        check_for_nan_in_grad: as there.
        average_in_collective: as there.
        disable_bucketing: as there.
        calculate_per_token_loss: as there.
        keep_fp8_transpose_cache: there ``keep_fp8_transpose_cache_when_using_custom_fsdp``.
        nccl_ub: as there.
        fsdp_double_buffer: as there.
        dp_shard_dim: there ``dp_mesh_name``.
        tp_dim: there ``tp_mesh_name``.

    Raises:
        UnsupportedError: as there.
    """
    arguments: list[Any] = list(locals().values())  # in the order of the other function, which has `cp_mesh_name` besides
    numbered = {str(number): name for number, name in enumerate(STRATEGIES)}
    arguments[5] = numbered.get(str(zero_dp_strategy), str(zero_dp_strategy))
    arguments[-1:] = [None, tp_dim]
    return nvfsdp_strategy_parallelize(*arguments)


def _library_problems(library: ModuleType) -> Problems:
    """Return the arguments that this release of the library does not accept."""
    try:
        release = f"megatron-fsdp {version('megatron-fsdp')}"
    except PackageNotFoundError:
        release = "megatron-fsdp"
    meshes = {"device_mesh", "dp_shard_dim", "tp_dim", "expt_device_mesh"}
    needed = {
        "fully_shard_model": meshes | {*SWITCHES.values(), "mixed_precision_policy", "fsdp_unit_modules", "device"},
        "MixedPrecisionPolicy": {*precision(False, False)},
        "fully_shard_optimizer": set(),
    }
    problems = Problems()
    for name, arguments in needed.items():
        if not hasattr(library, name):
            problems.add("megatron.library", f"{release} has no {name}; the tests ran with 0.6.1")
            continue
        for missing in sorted(arguments - inspect.signature(getattr(library, name)).parameters.keys()):
            problems.add("megatron.library", f"{release}: {name} takes no {missing}; the tests ran with 0.6.1")
    return problems


def _rebind(optimizer: Optimizer, names: list[list[str]], wrapped: nn.Module, library: ModuleType) -> None:
    """Put the shards of the parameters into the groups of an optimizer, and let the library control it."""
    shards = dict(wrapped.module.named_parameters())  # type: ignore[union-attr]
    rates = []
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        rest = {key: value for key, value in group.items() if key != "params"}
        rates.append(rest["lr"])
        group.clear()
        group["params"] = [shards[name] for name in group_names]  # first: the library expects it as the first key
        group.update(rest)
        # The library makes a step on zero gradients to allocate the state. At this learning rate it changes no weight.
        group["lr"] = torch.zeros_like(rest["lr"]) if isinstance(rest["lr"], torch.Tensor) else 0.0
    library.fully_shard_optimizer(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.state.clear()  # it counted that step
