"""Random initialization that does not depend on the layout.

Torch's own way (meta model, shard, ``to_empty``, ``init.normal_`` under one seed) fills the shard of each rank from the same
random stream, so on a CPU mesh all ranks hold identical shards. Here every module is initialized whole, from a random stream of
its own that depends only on the seed and on the name of the module, and each rank keeps its slice. So on the same kind of
device, the values are the same in one process and on every layout.

Peak memory on a rank: its shards and one whole unit (a layer, or everything outside the layers).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.device import CPU, fork_rng, seed_generators
from meshwright.distributed.class_names import class_name
from meshwright.distributed.memory.nf4 import is_packed, quantize, unpacked_like
from meshwright.distributed.slices import slice_like
from meshwright.errors import ModelError
from meshwright.models import _transformers_compat as compat
from meshwright.models.weights.constructor_values import constructors
from meshwright.models.weights.packed import Packs
from meshwright.plan.given.names import holder_of

__all__ = ["derive_seed", "initialize", "initialize_buffers", "keep_slice", "whole_parameters"]


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on all parts, and is the same on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def initialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Materialize a meta model of transformers, and compute its buffers. Parameters and persistent buffers are read later.

    Raises:
        ModelError: names the buffers that the model leaves without a value.
    """
    _to_empty(model, device)
    _poison(model.buffers())
    names = {module: name for name, module in model.named_modules()}
    for parameter in model.parameters():
        compat.initialized_flag(parameter)  # so that it is not initialized
    with torch.no_grad(), compat.without_torch_init():
        for module, owner in _in_order(model, model, names, set()):
            if hasattr(owner, "_init_weights") and any(True for _ in module.buffers(recurse=False)):
                compat.initialize_module(owner, module)
    read = model.state_dict().keys()
    _settle(model, {name: buffer for name, buffer in model.named_buffers() if name not in read}, 0)


def initialize(model: nn.Module, device: torch.device, seed: int, units: tuple[str, ...] = (), part: str = "") -> None:
    """Materialize a meta model, or a part of it, and give every parameter and buffer its initial value.

    Args:
        model: a model of transformers, or one whose modules with parameters have ``reset_parameters``. Its parameters may be
            DTensors already.
        device: the device of the shards.
        seed: the seed of the run.
        units: names of modules that are initialized one by one, to bound memory (the layers).
        part: name of the part; its values are those that it has in the whole model.

    Raises:
        ModelError: names the parameters and buffers that the model leaves without a value.
    """
    root = model.get_submodule(part)
    _to_empty(root, device)
    _poison((*root.parameters(), *root.buffers()))
    names = {module: name for name, module in model.named_modules()}
    inner = set(units)
    with torch.no_grad(), fork_rng(device):
        for name in (*sorted(units, key=lambda name: -name.count(".")), part):  # inside out
            unit = model.get_submodule(name)
            with whole_parameters(unit, skip={model.get_submodule(other) for other in inner - {name}}):
                done: set[int] = set()
                for module, owner in _in_order(unit, _owner(model, name), names, inner - {name}):
                    seed_generators(derive_seed(seed, names[module]), device)
                    _initialize_module(module, owner, done)
    with torch.no_grad(), fork_rng(device):
        _settle(model, {**dict(root.named_parameters(part)), **dict(root.named_buffers(part))}, seed)


def _to_empty(model: nn.Module, device: torch.device) -> None:
    """Call ``model.to_empty``, and tie the tied parameters again: it gives every name a tensor of its own."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, name), *others in places.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def _in_order(
    module: nn.Module, owner: nn.Module, names: dict[nn.Module, str], skip: set[str]
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield modules, each with the model whose rules initialize it, children first: a parent may change a child's parameter."""
    owner = module if hasattr(module, "_init_weights") else owner
    for child in module.children():
        if names[child] not in skip:
            yield from _in_order(child, owner, names, skip)
    yield module, owner


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the innermost model of transformers around a module."""
    owner, path = model, model
    for part in name.split(".") if name else ():
        path = getattr(path, part)
        owner = path if hasattr(path, "_init_weights") else owner
    return owner


def _initialize_module(module: nn.Module, owner: nn.Module, done: set[int]) -> None:
    """Initialize one module. A tied parameter keeps the value that its first module gave it.

    Args:
        module: the module.
        owner: the model whose rules initialize it.
        done: ids of the parameters of the modules before this one; those of this module are added.
    """
    own = list(module.parameters(recurse=False))
    tied = [parameter for parameter in own if id(parameter) in done]
    if hasattr(owner, "_init_weights"):
        with compat.without_torch_init():
            for parameter in tied:
                compat.initialized_flag(parameter)
            compat.initialize_module(owner, module)
    elif own and not tied:
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ModelError(
                "model.initial_values",
                f"{class_name(module)} holds parameters but has no reset_parameters() to initialise them",
            )
        reset()
    done.update(id(parameter) for parameter in own)


class whole_parameters:  # noqa: N801  # used as a function
    """Inside this context, the DTensor parameters of a module are whole plain tensors; at the end each rank keeps its slice."""

    def __init__(self, root: nn.Module, skip: set[nn.Module]) -> None:
        self.places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.wholes: dict[int, nn.Parameter] = {}
        self.collect(root, skip)

    def collect(self, module: nn.Module, skip: set[nn.Module]) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter.data, DTensor) or is_packed(parameter):
                self.places.append((module, name, parameter))
        for child in module.children():
            if child not in skip:
                self.collect(child, skip)

    def __enter__(self) -> "whole_parameters":
        for module, name, sharded in self.places:
            if id(sharded) not in self.wholes:  # a tied parameter stays one tensor
                dtype, shape = sharded.dtype, sharded.shape
                if isinstance(module, Packs) and is_packed(sharded):
                    dtype, shape = module.unpacked_dtype, unpacked_like(sharded, dtype).shape
                whole_tensor = torch.full(shape, float("nan"), dtype=dtype, device=sharded.device)
                self.wholes[id(sharded)] = nn.Parameter(whole_tensor, requires_grad=False)
            module._parameters[name] = self.wholes[id(sharded)]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for module, name, sharded in self.places:
            module._parameters[name] = sharded
            whole_parameter = self.wholes.pop(id(sharded), None)
            if whole_parameter is not None and kind is None:
                keep_slice(sharded, whole_parameter.data)


def keep_slice(stored: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor, which every rank has, into a parameter, of which each rank stores its slice, maybe in 4 bits."""
    if is_packed(stored):
        whole = quantize(whole)
    if isinstance(stored, DTensor):
        whole, stored = slice_like(stored, whole), stored.to_local()
    stored.copy_(whole)


def _poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill all tensors with NaN (or the lowest integer), so that tensors without an initial value are found."""
    with torch.no_grad():
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.dtype == torch.bool:
                continue
            low = float("nan") if local.is_floating_point() else torch.iinfo(local.dtype).min
            local.fill_(low)


def _settle(model: nn.Module, tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    """Give the tensors that no rule of the model has written the values of their constructors.

    Raises:
        ModelError: names those that have none.
    """
    left = _unwritten(tensors)
    holders = sorted({holder_of(name) for name in left})
    for holder, construct in (constructors(model, holders) if left else {}).items():
        with fork_rng(torch.device(CPU)):
            seed_generators(derive_seed(seed, holder), torch.device(CPU))
            made = construct()
        values = {**made._parameters, **made._buffers}
        for name in left:
            value = values.get(name.rpartition(".")[2]) if holder_of(name) == holder else None
            if value is not None and value.shape == tensors[name].shape:
                keep_slice(tensors[name], value.detach().to(tensors[name].device, tensors[name].dtype))
    if left := _unwritten({name: tensors[name] for name in left}):
        raise ModelError(
            "model.initial_values",
            f"{class_name(model)} leaves without an initial value: {', '.join(left)}; its _init_weights (or "
            "reset_parameters) has to set them",
        )


def _unwritten(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that nothing has written since they were filled."""
    left = []
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() == 0 or local.dtype == torch.bool:
            continue
        if local.is_floating_point():
            if bool(local.isnan().any()):
                left.append(name)
        elif bool((local == torch.iinfo(local.dtype).min).all()):
            left.append(name)
    return left
