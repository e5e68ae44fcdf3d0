"""A module that needs a few tokens before each token, on a rank that has some tokens of each sequence.

A short convolution needs the tokens under its kernel, a shift by one token the one before. So a rank gets the tokens before
each piece of its own, and the module's own code computes the piece with them. What it puts out for them is left out: another
rank has it. A piece at the beginning of the sequence has none before, as in one process. The ranks gather the last tokens of
all pieces; in backward their gradients go back and are added up (reduce-scatter).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.distributed.context.sequence_moves import tokens_before
from meshwright.distributed.mesh import ParallelMesh
from meshwright.errors import UnsupportedError
from meshwright.plan.axes.context.sharing import positions_of
from meshwright.plan.given.hidden_argument import value_of, with_argument
from meshwright.plan.result.context.before_action import TakeTokensBefore

__all__ = ["refuse_parts", "take_tokens_before"]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Of each piece of a rank's tokens: those before, and the piece, [rows, tokens, features]."""

_OF_TOKENS = re.compile("mask|seq_idx|cu_seq")
"""Names of arguments by which families are told which tokens are padding, or where documents begin."""


def refuse_parts(module: nn.Module, hidden: torch.Tensor, args: Any, kwargs: Any) -> None:
    """Refuse an argument that would say something of a part of each sequence.

    Args:
        module: a module that mixes tokens, for the message.
        hidden: its hidden state [rows, tokens, features].
        args: its positional arguments.
        kwargs: its others.

    Raises:
        UnsupportedError: a mask or the like.
    """
    leaves, _ = tree_flatten((args, kwargs))
    masks = [item for item in leaves if isinstance(item, torch.Tensor) and item.dtype is torch.bool]
    named = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and _OF_TOKENS.search(name)]
    if named or any(mask.shape[:2] == hidden.shape[:2] for mask in masks):
        raise UnsupportedError(
            "cp.argument",
            f"{type(module).__name__}: under context parallel a mixer takes no {' and no '.join(named) or 'mask'}, "
            "which would be of a part of each sequence; leave it out, and give documents rows of their own",
        )


def take_tokens_before(model: nn.Module, action: TakeTokensBefore, mesh: ParallelMesh) -> None:
    """Replace the forward of a module, on its instance, by one that gets the tokens before those of this rank."""
    module, group = model.get_submodule(action.module), mesh[action.axis].get_group()
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    # A compiled layer breaks its graph here: what is exchanged in which order is no tensor.
    module.forward = torch.compiler.disable(_Before(module, module.forward, action, group, ranks, rank))


@dataclass(frozen=True, eq=False)
class _Before:
    """What one module does on a rank."""

    module: nn.Module
    inner: Callable[..., Any]
    action: TakeTokensBefore
    group: dist.ProcessGroup
    ranks: int
    rank: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        action = self.action
        hidden: torch.Tensor = value_of(action.hidden, args, kwargs, action.module)
        refuse_parts(self.module, hidden, args, kwargs)
        tokens = hidden.shape[1] * self.ranks
        pieces = [positions_of(tokens, self.ranks, action.balance, rank) for rank in range(self.ranks)]
        before = tokens_before(hidden, action.tokens, pieces, self.rank, self.group)
        own = list(zip(before, hidden.split([len(piece) for piece in pieces[self.rank]], 1), strict=True))
        # Pieces run one after another in one call, if each later one brings all tokens that its first one needs.
        together = all(first.shape[1] == action.tokens for first, _ in own[1:])
        runs = [own] if together else [[pair] for pair in own]
        results = [self._run(pairs, args, kwargs) for pairs in runs]
        form = results[0][1]
        return tree_unflatten([_joined(leaves) for leaves in zip(*(leaves for leaves, _ in results), strict=True)], form)

    def _run(self, pairs: Pairs, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """Return what the module puts out for pieces, each after the tokens before it: as a list, with its form."""
        # Also none before are put in front: in backward all ranks must take part.
        longer = torch.cat([tensor for pair in pairs for tensor in pair], 1)
        args, kwargs = with_argument(self.action.hidden, args, kwargs, lambda _: longer, self.action.module)
        leaves, form = tree_flatten(self.inner(*args, **kwargs))
        sizes = [tensor.shape[1] for pair in pairs for tensor in pair]
        return [torch.cat(leaf.split(sizes, 1)[1::2], 1) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form


def _joined(pieces: Sequence[Any]) -> Any:
    return torch.cat(list(pieces), 1) if isinstance(pieces[0], torch.Tensor) else pieces[0]
