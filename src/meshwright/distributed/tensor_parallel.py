"""Tensor parallel: each rank of `tp` holds a slice of a layer's matrices and computes with it.

Weights become DTensors on the `tp` axis, so that FSDP, checkpoints and loading know what each rank holds. Activations stay
plain tensors: a module's forward is replaced on its instance by one that computes with the local slice and moves what has to be
moved. Between the modules of a layer every rank holds either the whole hidden state, the same on all ranks ("whole"), or its
own slice of the last dimension ("split").

| style                            | input | weight           | output | forward    | backward                            |
|----------------------------------|-------|------------------|--------|------------|-------------------------------------|
| `colwise`                        | whole | rows (outputs)   | split  |            | all-reduce                          |
| `colwise_gather_output`          | whole | rows             | whole  | all-gather | all-reduce                          |
| `packed_colwise`                 | whole | rows, fused      | split  |            | all-reduce                          |
| `rowwise`                        | split | columns (inputs) | whole  | all-reduce |                                     |
| `rowwise_split_input`            | whole | columns          | whole  | all-reduce | all-gather                          |
| `embedding_rowwise`              | ids   | vocabulary       | whole  | all-reduce |                                     |
| `embedding_colwise`              | ids   | hidden           | whole  | all-gather |                                     |
| `replicated_with_grad_allreduce` | split | whole            | split  |            | all-reduce, of the weight's gradient |
| `moe_tp_experts`                 | whole | as its weights   | whole  | all-reduce | all-reduce                          |

The two conjugate pairs (identity forward with all-reduce backward, and the reverse) are f and g of Megatron-LM (Shoeybi et al.
2019, arXiv 1909.08053, section 3). A gradient that flows back into a whole tensor is the same on all ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from meshwright.distributed import _torch_compat
from meshwright.plan.sharding_plan import ParameterRow, ShardingPlan

__all__ = ["apply_tensor_parallel"]


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
        module.forward = _STYLES[row.style](module, mesh)


def _placement(row: ParameterRow) -> Placement | None:
    """Of a parameter on `tp`, as the plan says it."""
    text = dict(row.placements).get("tp")
    if text is None:
        return None
    dim, *pieces = map(int, text[text.index("(") + 1 : -1].split(","))
    return _torch_compat.strided_shard(dim, pieces[0]) if pieces else Shard(dim)


# -- what moves between ranks ------------------------------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    """Into a region where every rank computes a part (f): backward adds the parts of the gradient."""

    @staticmethod
    def forward(context: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, context.group), None


class _Leave(torch.autograd.Function):
    """Out of such a region (g): forward adds the parts."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(part, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """Join the slices of the last dimension; backward keeps this rank's slice, for the gradient is the same on all ranks."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        context.size, context.group = size, group
        return _joined(part, size, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _slice_of(gradient, context.group), None, None


class _Split(torch.autograd.Function):
    """Keep this rank's slice of the last dimension; backward joins the slices of the gradient."""

    @staticmethod
    def forward(context: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.size, context.group = whole.shape[-1], group
        return _slice_of(whole, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _joined(gradient, context.size, context.group), None


def _summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _width(size: int, group: dist.ProcessGroup) -> int:
    """Of the widest slice, which all ranks but the last ones have."""
    return -(-size // dist.get_world_size(group))


def _slice_of(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    width, size = _width(tensor.shape[-1], group), tensor.shape[-1]
    begin = min(dist.get_rank(group) * width, size)
    return tensor[..., begin : min(begin + width, size)].contiguous()


def _joined(part: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    width, ranks = _width(size, group), dist.get_world_size(group)
    padded = nn.functional.pad(part, (0, width - part.shape[-1])) if part.shape[-1] < width else part
    parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, padded.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[..., :size].contiguous()  # no view: FSDP hooks the outputs of its units


# -- styles ------------------------------------------------------------------------------------------------------------------

Forward = Callable[..., Any]


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


@contextmanager
def _local_parameters(module: nn.Module, **others: torch.Tensor | None) -> Iterator[None]:
    """Inside, a module's own parameters are this rank's slices, or what ``others`` says by name."""
    stored = dict(module._parameters)
    try:
        for name, parameter in stored.items():
            if name in others:
                module._parameters[name] = others[name]  # type: ignore[assignment]
            elif isinstance(parameter, DTensor):
                module._parameters[name] = parameter.to_local()
        yield
    finally:
        module._parameters.update(stored)


def _colwise(module: nn.Module, mesh: DeviceMesh) -> Forward:
    inner, group = module.forward, mesh.get_group()

    def forward(hidden: torch.Tensor) -> Any:
        with _local_parameters(module):
            return inner(_Enter.apply(hidden, group))

    return forward


def _colwise_gather_output(module: nn.Module, mesh: DeviceMesh) -> Forward:
    sliced, group, size = _colwise(module, mesh), mesh.get_group(), _weight(module).shape[0]
    return lambda hidden: _Gather.apply(sliced(hidden), size, group)


def _rowwise(module: nn.Module, mesh: DeviceMesh) -> Forward:
    inner, group = module.forward, mesh.get_group()

    def forward(hidden: torch.Tensor) -> Any:
        bias = module._parameters.get("bias")
        with _local_parameters(module, **({} if bias is None else {"bias": None})):
            output = _Leave.apply(inner(hidden), group)
        return output if bias is None else output + bias  # added once, after the sum

    return forward


def _rowwise_split_input(module: nn.Module, mesh: DeviceMesh) -> Forward:
    sliced, group = _rowwise(module, mesh), mesh.get_group()
    return lambda hidden: sliced(_Split.apply(hidden, group))


def _embedding_rowwise(module: nn.Module, mesh: DeviceMesh) -> Forward:
    """Each rank looks up the ids of its slice of the vocabulary; the others give zeros."""
    inner, group, padding = module.forward, mesh.get_group(), getattr(module, "padding_idx", None)
    words = _weight(module).shape[0]
    width = _width(words, group)
    begin = dist.get_rank(group) * width
    rows = min(width, words - begin)

    def forward(ids: torch.Tensor) -> Any:
        with _local_parameters(module):
            foreign = (ids < begin) | (ids >= begin + rows)
            if padding is not None:  # its row gets no gradient, on the rank that has it
                module.padding_idx = padding - begin if begin <= padding < begin + rows else None  # type: ignore[assignment]
            try:
                found = inner((ids - begin).masked_fill(foreign, 0))
            finally:
                if padding is not None:
                    module.padding_idx = padding
        return _Leave.apply(found.masked_fill(foreign.unsqueeze(-1), 0), group)

    return forward


def _embedding_colwise(module: nn.Module, mesh: DeviceMesh) -> Forward:
    inner, group, size = module.forward, mesh.get_group(), _weight(module).shape[1]

    def forward(ids: torch.Tensor) -> Any:
        with _local_parameters(module):
            return _Gather.apply(inner(ids), size, group)

    return forward


def _replicated_with_grad_allreduce(module: nn.Module, mesh: DeviceMesh) -> Forward:
    """A norm of queries or keys: every rank applies the whole weight to its own heads."""
    inner, group = module.forward, mesh.get_group()

    def forward(*args: Any, **kwargs: Any) -> Any:
        entered = {name: _Enter.apply(p, group) for name, p in module._parameters.items() if p is not None}
        with _local_parameters(module, **entered):
            return inner(*args, **kwargs)

    return forward


def _moe_tp_experts(module: nn.Module, mesh: DeviceMesh) -> Forward:
    """Every rank has a slice of every expert: hidden state and routing weights enter, the sum of the parts leaves."""
    inner, group = module.forward, mesh.get_group()

    def enter(value: Any) -> Any:
        return _Enter.apply(value, group) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _local_parameters(module):
            output = inner(*map(enter, args), **{name: enter(value) for name, value in kwargs.items()})
        return _Leave.apply(output, group)

    return forward


_STYLES: dict[str, Callable[[nn.Module, DeviceMesh], Forward]] = {
    "colwise": _colwise,
    "packed_colwise": _colwise,
    "colwise_gather_output": _colwise_gather_output,
    "colwise_rep": _colwise_gather_output,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_split_input,
    "rowwise_rep": _rowwise_split_input,
    "embedding_rowwise": _embedding_rowwise,
    "embedding_colwise": _embedding_colwise,
    "replicated_with_grad_allreduce": _replicated_with_grad_allreduce,
    "moe_tp_experts": _moe_tp_experts,
}
