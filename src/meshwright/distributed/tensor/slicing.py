"""Tensor parallel: each rank of `tp` holds a slice of a layer's matrices and computes with it.

Weights become DTensors on the `tp` axis, so FSDP, checkpoints and loading know what each rank holds. Activations stay plain
tensors. The forward of a module is replaced, on the instance, by one that computes with the local slices. It redistributes its
input and its output as the two moves (:class:`~meshwright.plan.axes.tensor.move_kinds.Move`) of its action say.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.tensor import moves
from meshwright.distributed.tensor.means import means_of_all_ranks
from meshwright.errors import LayoutError
from meshwright.plan.axes.tensor.move_kinds import Bias, Kernel, Move
from meshwright.plan.given.hidden_argument import first_of, value_of, with_argument, with_first
from meshwright.plan.result.program import Compute

__all__ = ["compute_with_slices", "local_parameters"]

SEQUENCE = 1
"""Dimension of the sequence in a hidden state of [batch, sequence, features]."""

Forward = Callable[..., Any]


def compute_with_slices(model: nn.Module, action: Compute, mesh: ParallelMesh) -> None:
    """Replace the forward of a module, on its instance, by one that computes with its slices."""
    module, axis = model.get_submodule(action.module), mesh[action.axis]
    group = axis.get_group()
    compute = _KERNELS[action.kernel](module, action, group)
    enters, leaves = _entry(action, group), _exit(action, axis)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(module, action.row.sums, group) as parameters:
            bias = None if action.bias is Bias.EACH else parameters["bias"]
            if bias is not None:
                without = None if isinstance(module, nn.Linear) else torch.zeros_like(bias)  # a Conv1D needs one
                own: dict[str, Any] = module._parameters
                own["bias"] = without if action.bias is Bias.LATE or dist.get_rank(group) else bias
            args, kwargs = enters(args, kwargs)
            rows = _rows(action, args, kwargs)
            output = compute(*args, **kwargs)
            if rows:
                output = with_first(output, first_of(output).unflatten(0, (rows, -1)))
            output = leaves(output)
            if rows:
                output = with_first(output, first_of(output).flatten(0, 1))
        if bias is None:
            return output
        if action.bias is Bias.LATE:
            return output + bias
        return output if dist.get_rank(group) == 0 else output + 0 * bias  # the bias must get a gradient on all ranks

    module.forward = forward


@contextmanager
def local_parameters(
    module: nn.Module, sums: Container[str] = (), group: dist.ProcessGroup | None = None
) -> Iterator[dict[str, Any]]:
    """Inside, the module's own parameters are this rank's slices. Gradients of those in ``sums`` are summed over the group."""
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


def _rows(action: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the rows of a batch that a module takes, if it returns them as one dimension with the positions; otherwise 0."""
    if not action.row.flat or action.argument is None or action.row.exit is Move.NONE:
        return 0
    hidden: torch.Tensor = value_of(action.argument, args, kwargs, action.module)
    return hidden.shape[0] if hidden.ndim > 2 else 0


def _entry(action: Compute, group: dist.ProcessGroup) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    if action.row.entry is Move.ENTER:

        def enter(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return moves.enter(value, group) if floating else value

        return lambda args, kwargs: (tuple(map(enter, args)), {name: enter(value) for name, value in kwargs.items()})
    if action.row.entry is Move.NONE:
        return lambda args, kwargs: (args, kwargs)
    if action.row.entry is Move.GATHER_TOKENS:

        def all_tokens(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.is_floating_point():
                return moves.to_parts(value, 0, group)
            return moves.gather(value, 0, value.shape[0] * dist.get_world_size(group), group)

        return lambda args, kwargs: (
            tuple(map(all_tokens, args)),
            {name: all_tokens(value) for name, value in kwargs.items()},
        )
    move: dict[Move, Callable[[torch.Tensor], torch.Tensor]] = {
        Move.SPLIT_FEATURES: lambda x: moves.split(x, -1, group),
        Move.GATHER_SEQUENCE: lambda x: moves.to_parts(x, _sequence(x, action), group),
        Move.GATHER_SEQUENCE_WHOLE: lambda x: _whole_sequence(x, action, group),
        Move.SPLIT_SEQUENCE: lambda x: moves.split(_divisible(x, group), SEQUENCE, group),
    }
    assert action.argument is not None
    moved, argument = move[action.row.entry], action.argument
    return lambda args, kwargs: with_argument(argument, args, kwargs, moved, action.module)


def _whole_sequence(part: torch.Tensor, action: Compute, group: dist.ProcessGroup) -> torch.Tensor:
    dim = _sequence(part, action)
    return moves.gather(part, dim, part.shape[dim] * dist.get_world_size(group), group)


def _sequence(hidden: torch.Tensor, action: Compute) -> int:
    """Return the dimension of the sequence.

    Where each token is computed alone, rows and positions may be one dimension: slices are joined by rank, and cut so again.
    """
    return 0 if action.row.flat and hidden.ndim == 2 else SEQUENCE


def _divisible(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    length, ranks = hidden.shape[SEQUENCE], dist.get_world_size(group)
    if length % ranks:
        raise LayoutError(
            "sp.length",
            f"sequence_parallel=True: a sequence of {length} tokens cannot be shared by tp={ranks} ranks; pad it to a multiple "
            f"of {ranks}, whose labels do not count",
        )
    return hidden


def _exit(action: Compute, mesh: DeviceMesh) -> Callable[[Any], Any]:
    if action.row.exit is Move.NONE:
        return lambda output: output
    group = mesh.get_group()
    move: dict[Move, Callable[[torch.Tensor], torch.Tensor]] = {
        Move.ENTER_LAST: lambda y: moves.enter_last(y, action.parts[0], group),
        Move.LEAVE: lambda y: moves.leave(y, group),
        Move.SUM: lambda y: moves.sum_both_ways(y, group),
        Move.GATHER_FEATURES: lambda y: moves.gather(y, -1, action.features, group),
        Move.EXCHANGE_FEATURES: lambda y: moves.exchange(y, action.parts, group),
        Move.VOCABULARY: lambda y: _sharded_vocabulary(y, action.features, mesh),
        Move.GATHER_SEQUENCE_WHOLE: lambda y: _whole_sequence(y, action, group),
        Move.COUNT_ONCE: lambda y: moves.count_once(y, group),
        Move.SCATTER_SEQUENCE: lambda y: moves.to_slices(y, _sequence(y, action), group),
        Move.SPLIT_SEQUENCE: lambda y: moves.split(y, _sequence(y, action), group),
    }
    moved = move[action.row.exit]
    if action.row.exit is Move.COUNT_ONCE:
        return lambda output: (moved(output[0]), *output[1:]) if isinstance(output, tuple) else output
    # Other elements (attention weights, the routing of experts) are left as they are: they are whole, or nobody uses them.
    return lambda output: with_first(output, moved(first_of(output)))


def _sharded_vocabulary(logits: torch.Tensor, words: int, mesh: DeviceMesh) -> DTensor:
    shape = torch.Size((*logits.shape[:-1], words))
    stride = tuple(shape[index + 1 :].numel() for index in range(len(shape)))
    return DTensor.from_local(logits, mesh, [Shard(len(shape) - 1)], run_check=False, shape=shape, stride=stride)


# -- kernels -------------------------------------------------------------------------------------------------------------------


def _own(module: nn.Module, action: Compute, group: dist.ProcessGroup) -> Forward:
    return module.forward


def _vocabulary_rows(module: nn.Module, action: Compute, group: dist.ProcessGroup) -> Forward:
    inner, padding = module.forward, action.padding
    weight = module._parameters["weight"]
    assert weight is not None
    words = weight.shape[0]
    width = moves.slice_width(words, group)
    begin = dist.get_rank(group) * width
    rows = min(width, words - begin)

    def forward(input: torch.Tensor) -> torch.Tensor:  # the name in the signature of nn.Embedding
        ids = input
        foreign = (ids < begin) | (ids >= begin + rows)
        if padding is not None:  # the row of the padding token gets no gradient; one rank has it
            module.padding_idx = padding - begin if begin <= padding < begin + rows else None  # type: ignore[assignment]
        try:
            embedded = inner((ids - begin).masked_fill(foreign, 0))
        finally:
            if padding is not None:
                module.padding_idx = padding  # type: ignore[assignment]
        return embedded.masked_fill(foreign.unsqueeze(-1), 0)

    return forward


def _one_head(module: nn.Module, action: Compute, group: dist.ProcessGroup) -> Forward:
    inner, (heads,) = module.forward, action.parts
    head = dist.get_rank(group) * heads // dist.get_world_size(group)

    def forward(*args: Any, **kwargs: Any) -> Any:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = parameter.chunk(heads)[head]  # type: ignore[assignment]
        return inner(*args, **kwargs)

    return forward


def _dora_rows(module: nn.Module, action: Compute, group: dist.ProcessGroup) -> Forward:
    """The magnitudes of DoRA (Liu et al. 2024, arXiv 2402.09353) as peft computes them, with slices of the matrices beside."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for beside in (*args, *kwargs.values()):
                if isinstance(beside, nn.Module):
                    stack.enter_context(local_parameters(beside))
            return inner(*args, **kwargs)

    return forward


def _dora_columns(module: nn.Module, action: Compute, group: dist.ProcessGroup) -> Forward:
    def norms(weight: torch.Tensor, lora_weight: torch.Tensor, scaling: float, **_: Any) -> torch.Tensor:
        """Norms of whole rows [out], of which each rank has some columns. Nothing flows back through them (section 4.3)."""
        whole = (weight + scaling * lora_weight).detach()
        squares = whole.to(torch.promote_types(whole.dtype, torch.float32)).square().sum(1)
        dist.all_reduce(squares, group=group)
        return squares.sqrt().to(weight.dtype)

    module.get_weight_norm = norms  # type: ignore[assignment]
    return _dora_rows(module, action, group)


def _means(module: nn.Module, action: Compute, group: dist.ProcessGroup) -> Forward:
    return means_of_all_ranks(module.forward, group)


_KERNELS: dict[Kernel, Callable[[nn.Module, Compute, dist.ProcessGroup], Forward]] = {
    Kernel.OWN: _own,
    Kernel.VOCABULARY_ROWS: _vocabulary_rows,
    Kernel.ONE_HEAD: _one_head,
    Kernel.DORA_ROWS: _dora_rows,
    Kernel.DORA_COLUMNS: _dora_columns,
    Kernel.MEANS: _means,
}
