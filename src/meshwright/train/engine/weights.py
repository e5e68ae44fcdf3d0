"""The weights of a parallelized model, one layer after another, under the names of its files."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.distributed.memory.nf4 import dequantize, is_packed
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.slices import whole_tensor
from meshwright.models._transformers_compat import names_in_files
from meshwright.models.added_modules import without_added
from meshwright.plan.given.names import within
from meshwright.plan.result.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["Adapters", "weights_of"]

Adapters = Literal["merged", "apart"]


def weights_of(
    model: "nn.Module", described: "PreTrainedModel", plan: ShardingPlan, mesh: ParallelMesh, adapters: Adapters
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole weights by their names in files. Collective over all ranks, which get the same in the same order.

    What an objective added to the model is in no file of its own, and is left out.

    Args:
        model: the parallelized model, or the stages of this rank.
        described: the whole model on the meta device, with its adapters.
        plan: its plan.
        mesh: the mesh of its layout.
        adapters: ``merged``: all weights, with adapters added to them; ``apart``: adapters alone, as in files of peft.
    """
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if adapters == "apart":
        from meshwright.models.adapters.adapter_files import file_entries

        for entry in file_entries(described):
            whole = _whole(held, [entry.name], plan, mesh, described)[entry.name]
            yield entry.key, entry.to_files(whole).clone()
        return
    with without_added(described):
        kept = described.state_dict(keep_vars=True)
    firsts = {id(tensor): name for name, tensor in reversed(kept.items())}
    names = [name for name, tensor in kept.items() if firsts[id(tensor)] == name]  # a tied one by its first name
    layers = [layer for layer in plan.layers if not any(within(layer, [other]) for other in plan.layers if other != layer)]
    for layer in layers:
        yield from _unit(held, layer, [name for name in names if within(name, [layer])], plan, mesh, described)
    yield from _unit(held, "", [name for name in names if not within(name, layers)], plan, mesh, described)


def _unit(
    held: Mapping[str, torch.Tensor],
    unit: str,
    names: Sequence[str],
    plan: ShardingPlan,
    mesh: ParallelMesh,
    described: "PreTrainedModel",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a layer, or of what is in none."""
    from meshwright.models.adapters.adapt import merge
    from meshwright.models.adapters.adapter_files import wrappers
    from meshwright.models.adapters.expert_adapters import adapted_experts

    wholes = _whole(held, names, plan, mesh, described)
    if next(wrappers(described), None) or next(adapted_experts(described), None):
        part = copy.deepcopy(described.get_submodule(unit))
        prefix = f"{unit}." if unit else ""
        for name, tensor in wholes.items():
            parent, _, own = name.removeprefix(prefix).rpartition(".")
            module = part.get_submodule(parent)
            (module._parameters if own in module._parameters else module._buffers)[own] = (
                torch.nn.Parameter(tensor, requires_grad=False) if own in module._parameters else tensor
            )
        merge(part)
        wholes = {f"{prefix}{name}": tensor for name, tensor in part.state_dict().items() if not tensor.is_meta}
    yield from names_in_files(described, wholes).items()


@torch.no_grad()
def _whole(
    held: Mapping[str, torch.Tensor],
    names: Sequence[str],
    plan: ShardingPlan,
    mesh: ParallelMesh,
    described: "PreTrainedModel",
) -> dict[str, torch.Tensor]:
    """Return whole tensors by name; those of other stages come from their ranks."""
    found: dict[str, torch.Tensor] = {}
    ranks = mesh["pp"].size()
    has = [name in held for name in names]
    if ranks > 1:
        every: list[list[bool]] = [[] for _ in range(ranks)]
        dist.all_gather_object(every, has, group=mesh["pp"].get_group())
    else:
        every = [has]
    device = next(iter(held.values())).device
    meta = described.state_dict(keep_vars=True)
    for index, name in enumerate(names):
        owner = next(rank for rank, own in enumerate(every) if own[index])
        if owner == mesh.rank("pp"):
            whole = held[name].detach()
            whole = whole_tensor(whole) if isinstance(whole, DTensor) else whole
            whole = dequantize(whole, meta[name].dtype) if is_packed(whole) else whole
        else:
            whole = torch.empty(meta[name].shape, dtype=meta[name].dtype, device=device)
        if ranks > 1:
            dist.broadcast(whole := whole.contiguous(), group=mesh["pp"].get_group(), group_src=owner)
        found[name] = whole
    return found
