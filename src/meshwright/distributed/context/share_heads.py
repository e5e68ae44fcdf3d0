"""A mixer computes some of its heads for all tokens, on a rank that has some tokens of each sequence.

The plan says which linear layers open and close a mixer (:mod:`meshwright.plan.axes.context.mixers`). A call goes so:

1. The openings run with the rank's tokens, and what they put out is exchanged for the features of the rank's heads, for all
   tokens in the order of the sequence. One all-to-all brings those of all openings.
2. The mixer's own code runs. It sees a hidden state of the whole sequence, in which nothing is stored: its openings return what
   came, its parameters are slices, and its numbers are those of the rank's heads.
   A linear layer in it that mixes all features has the columns of the rank's, and what it puts out is summed over the ranks.
3. What enters its last module is exchanged back for the rank's tokens.

The gradient of a slice is that of the whole parameter, with zeros beside it. The sum over `cp` adds them up.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.distributed.context.sequence_moves import exchange_for_heads, exchange_for_positions, gather_positions
from meshwright.distributed.context.take_before import refuse_parts
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.tensor.mixer_numbers import numbers_of_rank
from meshwright.distributed.tensor.moves import enter, leave
from meshwright.plan.axes.context.sharing import positions_of
from meshwright.plan.given.hidden_argument import value_of, with_argument
from meshwright.plan.given.sequence.mixer_shares import MixerShare, blocks_of
from meshwright.plan.result.context.heads_action import ShareHeads

__all__ = ["share_heads"]

Forward = Callable[..., Any]


class _ReachedError(Exception):
    """Ends a call of a mixer that runs up to its last opening alone."""


def share_heads(model: nn.Module, action: ShareHeads, mesh: ParallelMesh) -> None:
    """Replace the forward of a mixer, on its instance, by one that computes the heads of this rank."""
    mixer, group = model.get_submodule(action.module), mesh[action.axis].get_group()
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    numbers = numbers_of_rank(mixer, action.row.values)
    # A compiled layer breaks its graph here: what is exchanged in which order is no tensor.
    mixer.forward = torch.compiler.disable(_Mixer(mixer, mixer.forward, action, group, ranks, rank, numbers))


@dataclass(frozen=True, eq=False)
class _Mixer:
    """What one mixer does on a rank."""

    mixer: nn.Module
    inner: Forward
    action: ShareHeads
    group: dist.ProcessGroup
    ranks: int
    rank: int
    numbers: Sequence[tuple[nn.Module, Mapping[str, Any]]]

    @property
    def share(self) -> MixerShare:
        return self.action.row

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        share = self.share
        hidden: torch.Tensor = value_of(share.hidden, args, kwargs, share.module)
        refuse_parts(self.mixer, hidden, args, kwargs)
        rows, tokens, width = hidden.shape
        pieces = [positions_of(tokens * self.ranks, self.ranks, self.action.balance, rank) for rank in range(self.ranks)]
        own = self._opened(hidden, args, kwargs)
        names = [name for name, _ in share.openings]
        came = dict(zip(names, self._heads([own[name] for name in names], pieces), strict=True))
        whole = hidden.new_zeros(()).expand(rows, tokens * self.ranks, width)
        args, kwargs = with_argument(share.hidden, args, kwargs, lambda _: whole, share.module)
        if share.positions:
            args, kwargs = with_argument(share.positions, args, kwargs, lambda own: self._all(own, pieces), share.module)
        with ExitStack() as stack:
            stack.enter_context(_forwards(self.mixer, self._forwards(came, own, pieces)))
            stack.enter_context(self._of_rank())
            # Only in training are there kernels that compute all of a mixer at once, its last matrix included.
            stack.enter_context(_values([(self.mixer, {"training": False})]))
            return self.inner(*args, **kwargs)

    def _opened(self, hidden: torch.Tensor, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
        """Return what the openings put out for this rank's tokens."""
        share = self.share
        names = [*(name for name, _ in share.openings), *share.after]
        found: dict[str, torch.Tensor] = {}
        for name, path in zip(names, share.paths, strict=True):
            if path:
                value = hidden
                for step in path:
                    value = self.mixer.get_submodule(step)(value)
                found[name] = value
        lacking = {name for name in names if name not in found}
        if not lacking:
            return found

        def recorded(name: str, forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                found[name] = forward(*args, **kwargs)
                if lacking <= found.keys():
                    raise _ReachedError
                return found[name]

            return run

        watched = {name: recorded(name, self.mixer.get_submodule(name).forward) for name in lacking}
        try:
            with _forwards(self.mixer, watched):
                self.inner(*args, **kwargs)
        except _ReachedError:
            pass
        return found

    def _all(self, positions: torch.Tensor, pieces: Sequence[tuple[range, ...]]) -> torch.Tensor:
        """Return the ``position_ids`` of all tokens [rows, tokens], for those of this rank's."""
        return gather_positions(positions[:, None, :, None], pieces, self.group)[:, 0, :, 0].contiguous()

    def _heads(self, outputs: Sequence[torch.Tensor], pieces: Sequence[tuple[range, ...]]) -> list[torch.Tensor]:
        """Exchange the features of all heads of this rank's tokens [rows, tokens, features] for those of its heads."""
        blocks = []
        for output, (_, divided) in zip(outputs, self.share.openings, strict=True):
            for part, (size, copies) in zip(output.split([size for size, _ in divided], -1), divided, strict=True):
                block = part.unflatten(-1, (self.ranks // copies, size * copies // self.ranks))
                blocks.append(block if copies == 1 else _copied(block, copies))
        widths = [block.shape[-1] for block in blocks]
        came = exchange_for_heads(torch.cat(blocks, -1).transpose(1, 2), pieces, self.group).squeeze(1)
        counts = [len(divided) for _, divided in self.share.openings]
        ends = list(accumulate(counts))
        each = [sum(widths[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        parts = zip(came.split(each, -1), outputs, strict=True)
        return [part.contiguous().to(output.dtype) for part, output in parts]

    def _tokens(self, tensors: Sequence[torch.Tensor], pieces: Sequence[tuple[range, ...]]) -> list[torch.Tensor]:
        """Exchange the features of this rank's heads [rows, positions, features] for all features of its tokens."""
        by_rank = exchange_for_positions(torch.cat(list(tensors), -1).unsqueeze(1), pieces, self.group)
        # by_rank: [rows, ranks, tokens, features of a rank]
        parts = by_rank.split([tensor.shape[-1] for tensor in tensors], -1)
        return [part.transpose(1, 2).flatten(2).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]

    def _forwards(
        self, came: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], pieces: Sequence[tuple[range, ...]]
    ) -> dict[str, Forward]:
        """Return what linear layers, and the last module, do while the mixer's own code runs."""
        share = self.share
        forwards: dict[str, Forward] = {}
        for path in share.paths:  # what runs before an opening has run
            forwards |= dict.fromkeys(path[:-1], _first_argument)
        forwards |= dict.fromkeys((name for name, *_ in share.shifts), _first_argument)
        forwards |= {name: _returning(value) for name, value in came.items()}
        forwards |= {name: _returning(own[name]) for name in share.after}
        forwards |= {name: self._summing(self.mixer.get_submodule(name)) for name, _ in share.summed}
        closing = self.mixer.get_submodule(share.closing).forward

        def close(*args: Any, **kwargs: Any) -> Any:
            leaves, form = tree_flatten((args, kwargs))
            places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
            for place, leaf in zip(places, self._tokens([leaves[place] for place in places], pieces), strict=True):
                leaves[place] = leaf
            args, kwargs = tree_unflatten(leaves, form)
            return closing(*args, **kwargs)

        return {**forwards, share.closing: close}

    def _summing(self, linear: nn.Module) -> Forward:
        """Return a linear layer of the features of all ranks. Forward and backward each add up what the ranks have."""

        def run(own: torch.Tensor) -> torch.Tensor:
            bias: Any = linear.bias
            part = nn.functional.linear(own, linear.weight, None if bias is None else bias / self.ranks)  # type: ignore[arg-type]
            return enter(leave(part, self.group), self.group)

        return run

    @contextmanager
    def _of_rank(self) -> Iterator[None]:
        """Inside, parameters and buffers are this rank's slices, and numbers are those of its heads."""
        changes: list[tuple[dict[str, Any], str, Any]] = []
        for name, dim, pieces in self.share.slices:
            place, _, own = name.rpartition(".")
            module = self.mixer.get_submodule(place)
            held: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
            parts = [held[own].narrow(dim, some.start, len(some)) for some in blocks_of(pieces, self.ranks, self.rank)]
            changes.append((held, own, parts[0] if len(parts) == 1 else torch.cat(parts, dim)))
        before = [(held, own, held[own]) for held, own, _ in changes]
        try:
            for held, own, value in changes:
                held[own] = value
            with _values(self.numbers):
                yield
        finally:
            for held, own, value in before:
                held[own] = value


def _copied(blocks: torch.Tensor, copies: int) -> torch.Tensor:
    """Repeat each block [rows, tokens, blocks, features] for some ranks, whose gradients are added up."""
    return blocks.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)


def _first_argument(value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return value


def _returning(value: torch.Tensor) -> Forward:
    return lambda *_, **__: value


@contextmanager
def _forwards(mixer: nn.Module, forwards: Mapping[str, Forward]) -> Iterator[None]:
    """Inside, modules of a mixer have other forwards."""
    with _values([(mixer.get_submodule(name), {"forward": forward}) for name, forward in forwards.items()]):
        yield


@contextmanager
def _values(changes: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> Iterator[None]:
    """Inside, modules have other values of attributes."""
    before = [(vars(module), {name: vars(module)[name] for name in own if name in vars(module)}) for module, own in changes]
    try:
        for module, own in changes:
            vars(module).update(own)
        yield
    finally:
        for (_, own), (held, old) in zip(changes, before, strict=True):
            for name in own:
                del held[name]
            held.update(old)
