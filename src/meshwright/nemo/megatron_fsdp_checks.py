"""What Megatron-FSDP supports: models, units and optimizers are checked before the library is called."""

from collections.abc import Iterable, Sequence

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

__all__ = ["axis_sizes", "machine_problems", "model_problems", "parameter_groups", "unit_classes"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients for which the library has buffers."""


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
            matched = [kind for kind in known if issubclass(kind, _resolved(name))] if "." in name else []
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


def _resolved(path: str) -> type:
    """Return the class at a dotted path; if there is none, a class that has no modules."""
    try:
        kind = import_object(path.replace(":", "."))
    except (ImportError, AttributeError, TypeError, ValueError):  # the last two: no dotted path at all
        kind = None
    return kind if isinstance(kind, type) and issubclass(kind, nn.Module) else _NoModule


class _NoModule:
    """No module is of this class."""


def parameter_groups(model: nn.Module, optimizer: Optimizer | None) -> tuple[list[list[str]], Problems]:
    """Return the names of the parameters of each group, and why the optimizer cannot be used."""
    if optimizer is None:
        return [], Problems()
    problems = Problems()
    names = {key: alike[0] for key, alike in names_of_parameters(model).items()}
    groups = [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]
    if strangers := sum(not name for name in _flat(groups)):
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


def _flat(groups: Iterable[Iterable[str]]) -> list[str]:
    return [name for group in groups for name in group]


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
        total = 1
        for size in sizes.values():
            total *= size
        if total != mesh.size():
            shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
            problems.add(
                "megatron.layout",
                f"device_mesh: {shown} are {total} of its {mesh.size()} ranks; legal are axes that span it all",
            )
    elif len(set(names)) < len(names):
        problems.add("megatron.layout", f"{', '.join(axes)}: {', '.join(names)} must be different axes")
    return sizes, problems
