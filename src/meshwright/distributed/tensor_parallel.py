"""Tensor parallel: each rank of `tp` holds a slice of a layer's matrices and computes with it.

Weights become DTensors on the `tp` axis, so that FSDP, checkpoints and loading know what each rank holds. Activations stay
plain tensors: a module's forward is replaced on its instance by one that computes with the local slice, between the two moves
(:class:`~meshwright.plan.sharding_plan.Move`) that its row of the plan names.
"""

import copy
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from meshwright.distributed import _torch_compat, moves
from meshwright.errors import LayoutError
from meshwright.plan.sharding_plan import Move, ParameterRow, ShardingPlan, TensorParallelRow

__all__ = ["apply_tensor_parallel", "local_parameters"]

SEQUENCE = 1
"""Dimension of the sequence in a hidden state of [batch, sequence, features]."""


def apply_tensor_parallel(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """Slice the weights of a plan over `tp`, and let their modules compute with the slices.

    Args:
        model: on the meta device, or with the same values on every rank; changed in place.
        plan: says the placement of every parameter, and the style of every module.
        mesh: the `tp` axis.
    """
    rows = {name: row for row in plan.parameters for name in (row.name, *row.aliases)}
    sliced: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            placement = _placement(rows[f"{prefix}.{own}" if prefix else own])
            if placement is None:
                continue
            if id(parameter) not in sliced:  # a tied one is sliced once
                whole = parameter.data
                value = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                sliced[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[own] = sliced[id(parameter)]
    for row in plan.tensor_parallel:
        module = model.get_submodule(row.module)
        if row.style == "region" and row.parts:
            _see_own_heads(module, *row.parts)
        module.forward = _forward(module, row, mesh)


def _placement(row: ParameterRow) -> Placement | None:
    """Of a parameter on `tp`, as the plan says it."""
    text = dict(row.placements).get("tp")
    if text is None:
        return None
    dim, *pieces = map(int, text[text.index("(") + 1 : -1].split(","))
    return _torch_compat.strided_shard(dim, pieces[0]) if pieces else Shard(dim)


def _see_own_heads(module: nn.Module, heads: int, kv_heads: int) -> None:
    """Let an attention that reads head counts instead of shapes see those of this rank.

    On the module alone: its config is shared by the whole model, so the module gets one of its own.
    """
    own = {
        "num_attention_heads": heads,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_key_value_groups": heads // kv_heads,
    }
    for name, value in own.items():
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, value)
    if (config := getattr(module, "config", None)) is not None:
        config = copy.copy(config)
        config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
        module.config = config


# -- one module: in, compute with slices, out ----------------------------------------------------------------------------------

Forward = Callable[..., Any]


def _forward(module: nn.Module, row: TensorParallelRow, mesh: DeviceMesh) -> Forward:
    """What a module does under tensor parallel."""
    group = mesh.get_group()
    compute = _COMPUTE.get(row.style, _plain)(module, row, group)
    enters, leaves = _entry(row, group), _exit(module, row, mesh)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(module, row.sums, group) as parameters:
            bias = parameters.get("bias") if row.style in _ROWWISE else None
            if bias is not None:  # added once, not by each rank
                late = row.exit is not Move.NONE
                module._parameters["bias"] = None if late or dist.get_rank(group) else bias
            args, kwargs = enters(args, kwargs)
            output = leaves(compute(*args, **kwargs))
        if bias is None:
            return output
        if late:
            return output + bias
        return output if dist.get_rank(group) == 0 else output + 0 * bias  # its gradient is due on all ranks

    return forward


@contextmanager
def local_parameters(
    module: nn.Module, sums: Container[str] = (), group: dist.ProcessGroup | None = None
) -> Iterator[dict[str, Any]]:
    """Inside, a module's own parameters are this rank's slices; those of ``sums`` add their gradients up over a group."""
    stored = dict(module._parameters)
    local: dict[str, Any] = {}
    for name, parameter in stored.items():
        value = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name in sums and value is not None:
            assert group is not None
            local[name] = moves.enter(value, group)
        else:
            local[name] = value
    try:
        module._parameters.update(local)
        yield local
    finally:
        module._parameters.update(stored)


def _entry(row: TensorParallelRow, group: dist.ProcessGroup) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    if row.entry is Move.ENTER:

        def enter(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return moves.enter(value, group) if floating else value

        return lambda args, kwargs: (tuple(map(enter, args)), {name: enter(value) for name, value in kwargs.items()})
    if row.entry is Move.NONE:
        return lambda args, kwargs: (args, kwargs)
    move: dict[Move, Callable[[torch.Tensor], torch.Tensor]] = {
        Move.SPLIT_FEATURES: lambda x: moves.split(x, -1, group),
        Move.GATHER_SEQUENCE: lambda x: moves.to_parts(x, SEQUENCE, group),
        Move.GATHER_SEQUENCE_WHOLE: lambda x: _whole_sequence(x, group),
        Move.SPLIT_SEQUENCE: lambda x: moves.split(_divisible(x, group), SEQUENCE, group),
    }
    moved = move[row.entry]

    def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of the hidden state: the first argument, or the one called so."""
        if args:
            return (moved(args[0]), *args[1:]), kwargs
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, name: moved(kwargs[name])}

    return first


def _whole_sequence(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return moves.gather(part, SEQUENCE, part.shape[SEQUENCE] * dist.get_world_size(group), group)


def _divisible(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    length, ranks = hidden.shape[SEQUENCE], dist.get_world_size(group)
    if length % ranks:
        raise LayoutError(
            f"sequence_parallel=True: a sequence of {length} tokens cannot be shared by tp={ranks} ranks; pad it to a multiple "
            f"of {ranks}, whose labels do not count"
        )
    return hidden


def _exit(module: nn.Module, row: TensorParallelRow, mesh: DeviceMesh) -> Callable[[Any], Any]:
    if row.exit is Move.NONE:
        return lambda output: output
    group = mesh.get_group()
    size = _features(module, row)
    move: dict[Move, Callable[[torch.Tensor], torch.Tensor]] = {
        Move.LEAVE: lambda y: moves.leave(y, group),
        Move.GATHER_FEATURES: lambda y: moves.gather(y, -1, size, group),
        Move.EXCHANGE_FEATURES: lambda y: moves.exchange(y, row.parts, group),
        Move.VOCABULARY: lambda y: _sharded_vocabulary(y, size, mesh),
        Move.GATHER_SEQUENCE_WHOLE: lambda y: _whole_sequence(y, group),
        Move.COUNT_ONCE: lambda y: moves.count_once(y, group),
        Move.SCATTER_SEQUENCE: lambda y: moves.to_slices(y, SEQUENCE, group),
        Move.SPLIT_SEQUENCE: lambda y: moves.split(y, SEQUENCE, group),
    }
    moved = move[row.exit]
    if row.exit is Move.COUNT_ONCE:
        return lambda output: (moved(output[0]), *output[1:]) if isinstance(output, tuple) else output
    # Attentions return their weights too, and experts may return their routing; those are not used, or whole.
    return lambda output: (moved(output[0]), *output[1:]) if isinstance(output, tuple) else moved(output)


def _features(module: nn.Module, row: TensorParallelRow) -> int:
    """Width of a whole output."""
    weight = getattr(module, "base_layer", module)._parameters.get("weight")  # of an adapter: what it adapts
    if weight is None:
        return 0
    return weight.shape[1 if row.style == "embedding_colwise" else 0]


def _sharded_vocabulary(logits: torch.Tensor, words: int, mesh: DeviceMesh) -> DTensor:
    shape = torch.Size((*logits.shape[:-1], words))
    stride = tuple(shape[index + 1 :].numel() for index in range(len(shape)))
    return DTensor.from_local(logits, mesh, [Shard(len(shape) - 1)], run_check=False, shape=shape, stride=stride)


# -- styles that compute otherwise ---------------------------------------------------------------------------------------------

_ROWWISE = {"rowwise", "rowwise_split_input", "rowwise_rep", "whole_on_parts"}


def _plain(module: nn.Module, row: TensorParallelRow, group: dist.ProcessGroup) -> Forward:
    """The module's own forward."""
    return module.forward


def _embedding_rowwise(module: nn.Module, row: TensorParallelRow, group: dist.ProcessGroup) -> Forward:
    """Each rank looks up the ids of its slice of the vocabulary; the others give zeros."""
    inner, padding = module.forward, getattr(module, "padding_idx", None)
    weight = module._parameters["weight"]
    assert weight is not None
    words = weight.shape[0]
    width = moves.slice_width(words, group)
    begin = dist.get_rank(group) * width
    rows = min(width, words - begin)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        foreign = (ids < begin) | (ids >= begin + rows)
        if padding is not None:  # its row gets no gradient, on the rank that has it
            module.padding_idx = padding - begin if begin <= padding < begin + rows else None  # type: ignore[assignment]
        try:
            found = inner((ids - begin).masked_fill(foreign, 0))
        finally:
            if padding is not None:
                module.padding_idx = padding
        return found.masked_fill(foreign.unsqueeze(-1), 0)

    return forward


def _grouped_colwise(module: nn.Module, row: TensorParallelRow, group: dist.ProcessGroup) -> Forward:
    """Several ranks share a head of keys or values: each holds all heads, and computes its one."""
    inner, (heads,) = module.forward, row.parts
    head = dist.get_rank(group) * heads // dist.get_world_size(group)

    def forward(hidden: torch.Tensor) -> Any:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = parameter.chunk(heads)[head]  # type: ignore[assignment]
        return inner(hidden)

    return forward


_COMPUTE: dict[str, Callable[[nn.Module, TensorParallelRow, dist.ProcessGroup], Forward]] = {
    "embedding_rowwise": _embedding_rowwise,
    "grouped_colwise": _grouped_colwise,
}
