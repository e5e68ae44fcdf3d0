"""A mixer computes some of its channels, or heads, for all tokens, with the slices that its rank of `tp` stores.

Its matrices have forwards of their own (:mod:`meshwright.distributed.tensor.slicing`). But its code also reads parameters of
modules in it that it does not call, such as the weight of a convolution. While it runs, these are the rank's parts.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.tensor.mixer_numbers import numbers_of_rank
from meshwright.distributed.tensor.moves import enter
from meshwright.plan.given.sequence.mixer_shares import blocks_of
from meshwright.plan.result.mixer_action import MixChannels

__all__ = ["mix_channels"]


def mix_channels(model: nn.Module, action: MixChannels, mesh: ParallelMesh) -> None:
    """Replace the forward of a mixer, on its instance, by one that computes the channels of this rank.

    Its own parameters are local slices already, and the gradients of those that it stores whole are summed: the plan lets it
    compute with slices (:class:`~meshwright.plan.result.program.Compute`) around this.
    """
    mixer, group = model.get_submodule(action.module), mesh[action.axis].get_group()
    inner, numbers = mixer.forward, numbers_of_rank(mixer, action.values)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(_parts(mixer, action, group))
            for module, values in numbers:
                stack.enter_context(_replaced(vars(module), values))
            # Only in training are there kernels that compute all of a mixer at once, its matrices included.
            stack.enter_context(_replaced(vars(mixer), {"training": False}))
            return inner(*args, **kwargs)

    mixer.forward = torch.compiler.disable(forward)  # a compiled layer breaks its graph here


@contextmanager
def _parts(mixer: nn.Module, action: MixChannels, group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, the mixer and the modules in it hold this rank's parts."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts: dict[str, torch.Tensor] = {}
    for name in action.stored:
        held, own = _place(mixer, name)
        parts[name] = held[own].to_local() if isinstance(held[own], DTensor) else held[own]
    for name, dim, pieces in action.used:
        held, own = _place(mixer, name)
        whole: torch.Tensor = held[own]
        if "." in name and whole.is_floating_point() and own in mixer.get_submodule(name.rpartition(".")[0])._parameters:
            whole = enter(whole, group)  # the mixer's own is entered already
        blocks = [whole.narrow(dim, some.start, len(some)) for some in blocks_of(pieces, ranks, rank)]
        parts[name] = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)
    with ExitStack() as stack:
        for name, part in parts.items():
            held, own = _place(mixer, name)
            stack.enter_context(_replaced(held, {own: part}))
        yield


def _place(mixer: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dict that holds a parameter or buffer of a mixer, and its name there."""
    place, _, own = name.rpartition(".")
    module = mixer.get_submodule(place)
    held: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
    return held, own


@contextmanager
def _replaced(held: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a dict has other values; at the end those that it had."""
    before = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        held.update(before)  # in their places: their order is that of parameters
        for name in values.keys() - before.keys():
            del held[name]
