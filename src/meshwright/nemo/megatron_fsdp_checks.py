"""What Megatron-FSDP supports: arguments, models, units and optimizers are checked before the library is called."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.distributed.class_names import class_name
from meshwright.errors import ModelError, PlanError, Problems, Refusal
from meshwright.nemo.functions import get_lm_ac_layers
from meshwright.plan.axes.tensor.given_styles import import_object
from meshwright.plan.given.names import inside
from meshwright.plan.given.parameter_storage import names_of_parameters

__all__ = [
    "STRATEGIES",
    "SWITCHES",
    "argument_problems",
    "axis_sizes",
    "machine_problems",
    "model_problems",
    "parameter_groups",
    "precision",
    "unit_classes",
]

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What is sharded. The page of NeMo AutoModel also names `params` and `grads_params`, which no version of the library has had.
"""

SWITCHES = {
    "data_parallel_sharding_strategy": "zero_dp_strategy",
    "init_nvfsdp_with_meta_device": "init_model_with_meta_device",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "check_for_nan_in_grad": "report_nan_in_param_grad",
    "average_in_collective": "average_in_collective",
    "disable_bucketing": "disable_bucketing",
    "calculate_per_token_loss": "calculate_per_token_loss",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "keep_fp8_transpose_cache",
    "nccl_ub": "nccl_ub",
    "fsdp_double_buffer": "fsdp_double_buffer",
}
"""The arguments of NeMo AutoModel that the library has too, to its names for them."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients for which the library has buffers."""


def precision(preserve_fp32_weights: bool, grad_reduce_in_fp32: bool) -> dict[str, torch.dtype | None]:
    """Return the fields of the library's precision policy. ``None``: the dtype of the parameter."""
    weights, reduced = (torch.float32 if chosen else None for chosen in (preserve_fp32_weights, grad_reduce_in_fp32))
    # An fp32 buffer of gradients needs fp32 weights: the library assigns it to them without a cast.
    return {"main_params_dtype": weights, "main_grads_dtype": weights and reduced, "grad_comm_dtype": reduced}


def argument_problems(arguments: Mapping[str, Any], model: nn.Module) -> Problems:
    """Return the values of arguments that the library does not support for a model. The head of ``megatron_fsdp`` says why."""
    given = SimpleNamespace(**arguments)
    strategy = given.data_parallel_sharding_strategy
    has_engine = any(type(module).__module__.partition(".")[0] == "transformer_engine" for module in model.modules())
    has_allocator = _importable("megatron.core.nccl_allocator") or _importable("apex.contrib.nccl_allocator")
    in_place = strategy in ("no_shard", "optim")
    refused = {
        f"data_parallel_sharding_strategy={strategy!r}: legal are {', '.join(STRATEGIES)}": strategy not in STRATEGIES,
        "overlap_grad_reduce=False: megatron-fsdp then reduces twice, or overlaps anyway; legal is True": (
            not given.overlap_grad_reduce
        ),
        "overlap_param_gather=False: megatron-fsdp then uses the weights from before the optimizer step, or overlaps anyway; "
        "legal is True, or data_parallel_sharding_strategy='no_shard'": (
            not given.overlap_param_gather and strategy != "no_shard"
        ),
        "average_in_collective=True and calculate_per_token_loss=True exclude each other; set one to False": (
            given.average_in_collective and given.calculate_per_token_loss
        ),
        "disable_bucketing=True: megatron-fsdp has one bucket a unit with both values; legal is False": given.disable_bucketing,
        "keep_fp8_transpose_cache_when_using_custom_fsdp=True: the model has no layers of TransformerEngine, so there is no "
        "such cache; legal is False": given.keep_fp8_transpose_cache_when_using_custom_fsdp and not has_engine,
        "nccl_ub=True: needs the NCCL allocator of megatron-core or apex, not installed; legal is False": (
            given.nccl_ub and not has_allocator
        ),
    } | {
        f"{name}=True: {strategy} gathers and scatters in place, so there is nothing to buffer; legal is False": (
            getattr(given, name) and in_place
        )
        for name in ("nccl_ub", "fsdp_double_buffer")
    }
    problems = Problems(Refusal("megatron.argument", text) for text, wrong in refused.items() if wrong)
    if given.init_nvfsdp_with_meta_device and strategy == "no_shard":
        problems.add(
            "megatron.meta_device",
            "init_nvfsdp_with_meta_device=True: not supported with no_shard; use False, or another strategy",
        )
    return problems


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def model_problems(model: nn.Module, from_meta: bool) -> Problems:
    """Return problems of parameters that the library cannot hold and, if it is to materialize the model, of modules.

    A module is a problem if it cannot give values to its own parameters, a buffer if nothing would fill it, and a parameter if
    it is tied.
    """
    named = dict(model.named_parameters())
    problems = Problems(
        Refusal(
            "megatron.dtype",
            f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}; legal for a trained one are float32, "
            "bfloat16, float16",
        )
        for name, parameter in named.items()
        if parameter.requires_grad and parameter.dtype not in DTYPES
    )
    on_meta = [name for name, parameter in named.items() if parameter.is_meta]
    if not from_meta:
        if on_meta:
            problems.add(
                "megatron.meta_device",
                f"init_nvfsdp_with_meta_device=False: {on_meta[0]!r} is on the meta device, and {len(on_meta) - 1} others; "
                "legal is True, or a model that was materialised",
            )
        return problems
    if not on_meta:
        problems.add(
            "megatron.meta_device", "init_nvfsdp_with_meta_device=True: no parameter is on the meta device; legal is False"
        )
    silent, owned = [], set()
    for name, module in model.named_modules():
        if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            continue
        owned |= {id(buffer) for buffer in module.buffers(recurse=False)}
        if not (hasattr(module, "reset_parameters") or hasattr(module, "_reset_parameters")):
            silent.append(f"{name or '(root)'} ({class_name(module)})")
    if silent:
        problems.add(
            "megatron.meta_device",
            f"init_nvfsdp_with_meta_device=True: {silent[0]} has no reset_parameters(), nor have {len(silent) - 1} others; "
            "materialise the model, and pass False",
        )
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in owned]
    if lost:
        problems.add(
            "megatron.meta_device",
            f"init_nvfsdp_with_meta_device=True: nothing would fill the buffer {lost[0]!r}; materialise the model",
        )
    tied = names_of_parameters(model)
    shared = next((names for names in tied.values() if len(names) > 1 and named[names[0]].is_meta), None)
    if shared:
        problems.add(
            "megatron.meta_device",
            f"init_nvfsdp_with_meta_device=True: {' and '.join(shared)} are one parameter, and would become two",
        )
    return problems


def unit_classes(
    model: nn.Module, names: Sequence[str] | None, same_size: str | None = None
) -> tuple[list[type[nn.Module]], Problems]:
    """Return the classes of the units, and what is wrong with them.

    Args:
        model: the model, which has instances of them.
        names: class names, or dotted paths of classes; ``None``: the classes of the layers that the model declares.
        same_size: the argument that needs units of one size; ``None``: no argument does.
    """
    problems = Problems()
    modules = dict(model.named_modules())
    kinds: dict[type[nn.Module], None] = {}
    if names is None:
        try:
            kinds = dict.fromkeys(type(layer) for layer in get_lm_ac_layers(model))
        except (ModelError, PlanError) as error:
            problems.add(
                "megatron.units", f"nvfsdp_unit_modules=None: {'; '.join(error.problems)}; or name the classes of the units"
            )
    else:
        if not names:
            problems.add("megatron.units", "nvfsdp_unit_modules=[]: legal are class names of the model, or None")
        known: dict[type[nn.Module], None] = dict.fromkeys(type(module) for module in modules.values())
        for name in names:
            base = _class_at(name) if "." in name else None
            matched = [kind for kind in known if base and issubclass(kind, base)]
            matched = matched or [kind for kind in known if kind.__name__ == name]
            if not matched:
                some = sorted({kind.__name__ for kind in known})
                problems.add(
                    "megatron.units", f"nvfsdp_unit_modules: no module has the class {name!r}; legal are {', '.join(some)}"
                )
            kinds.update(dict.fromkeys(matched))
    units = [name for name, module in modules.items() if isinstance(module, tuple(kinds))]
    nested = next((name for name in units if any(inside(name, other) for other in units)), None)
    if nested is not None:
        around = next(other for other in units if inside(nested, other))
        problems.add(
            "megatron.units",
            f"nvfsdp_unit_modules: {nested!r} ({class_name(modules[nested])}) lies in {around or '(root)'!r} "
            f"({class_name(modules[around])}), which is gathered as one; name one of the two",
        )
    sizes = {name: sorted((str(p.dtype), p.numel()) for p in modules[name].parameters()) for name in units}
    other = next((name for name in units if sizes[name] != sizes[units[0]]), None)
    if same_size and other is not None:
        problems.add(
            "megatron.units",
            f"{same_size}=True: needs units of one size, and {units[0]!r} and {other!r} differ; legal is False, or other units",
        )
    return list(kinds), problems


def _class_at(path: str) -> type[nn.Module] | None:
    """Return the class of modules at a dotted path; ``None``: there is none."""
    try:
        kind = import_object(path.replace(":", "."))
    except (ImportError, AttributeError, TypeError, ValueError):  # the last two: no dotted path at all
        return None
    return kind if isinstance(kind, type) and issubclass(kind, nn.Module) else None


def parameter_groups(model: nn.Module, optimizer: Optimizer | None) -> tuple[list[list[str]], Problems]:
    """Return the names of the parameters of each group, and why the optimizer cannot be used."""
    if optimizer is None:
        return [], Problems()
    problems = Problems()
    names = {key: alike[0] for key, alike in names_of_parameters(model).items()}
    groups = [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]
    if strangers := sum(not name for group in groups for name in group):
        problems.add("megatron.optimizer", f"optimizer: {strangers} of its parameters are not the model's")
    if not all(groups):
        problems.add("megatron.optimizer", "optimizer: has a group without parameters")
    if optimizer.state:
        problems.add(
            "megatron.optimizer", "optimizer: has made steps already; pass one without state, and load the state afterwards"
        )
    if not all("lr" in group for group in optimizer.param_groups):
        problems.add(
            "megatron.optimizer",
            f"optimizer: {type(optimizer).__name__} has no lr, which megatron-fsdp's first step needs to be 0",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.add("megatron.optimizer", "optimizer: LBFGS calls the loss itself, and megatron-fsdp steps without it")
    return groups, problems


def machine_problems(mesh: DeviceMesh, installed: bool) -> Problems:
    """Return why the library cannot run here, on a mesh."""
    problems = Problems()
    if not installed:
        problems.add("megatron.library", "megatron-fsdp is not installed: pip install 'meshwright[megatron]'")
    if not torch.cuda.is_available():
        problems.add(
            "megatron.layout",
            "no CUDA device here: megatron-fsdp needs an NVIDIA GPU; fsdp2_strategy_parallelize runs anywhere",
        )
    elif mesh.device_type != "cuda":
        problems.add("megatron.layout", f"device_mesh: is of {mesh.device_type!r}; legal is 'cuda'")
    return problems


def axis_sizes(mesh: DeviceMesh, axes: dict[str, str]) -> tuple[dict[str, int], Problems]:
    """Return the sizes of axes, and problems with them.

    Together the axes must be the whole mesh, because gradients would not be reduced over any other axis.
    """
    sizes, problems, names = {}, Problems(), list(axes.values())
    for argument, name in axes.items():
        try:
            sizes[name] = mesh[name].size()
        except (KeyError, RuntimeError):
            known = ", ".join(mesh.mesh_dim_names or ())
            problems.add(
                "megatron.layout",
                f"{argument}={name!r}: device_mesh has no such axis; it has {known or 'no names'}; its size may be 1",
            )
    if len(sizes) == len(names):
        total = prod(sizes.values())
        if total != mesh.size():
            shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
            problems.add(
                "megatron.layout",
                f"device_mesh: {shown} are {total} of its {mesh.size()} ranks; legal are axes that span it all",
            )
    elif len(set(names)) < len(names):
        problems.add("megatron.layout", f"{', '.join(axes)}: {', '.join(names)} must be different axes")
    return sizes, problems
