"""Activation checkpointing: a layer recomputes activations in backward instead of keeping them.

``full`` and ``selective`` are one checkpoint around the forward of a layer. ``submodule`` is one checkpoint around each part of
it. All are torch's non-reentrant checkpoints (``use_reentrant=False``): autograd's graph is the same as without a checkpoint,
and a tensor that a node saved is recomputed when the node asks for it. The random number generators are set back for the
recomputation, so dropout gives the same masks.

Every mode keeps the choice of experts. For a module that routes tokens, ``full`` and ``submodule`` act like a ``selective``
that keeps the operators that choose experts only. The reason: gradients belong to the experts that forward used. If a product
rounded differently in the recomputation, a token could go to another expert, and with expert parallel the numbers of tokens
that ranks exchange would change.
"""

import difflib
import functools
from collections.abc import Iterable
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.distributed import _torch_compat
from meshwright.distributed.context.carried import taken_along, takes_along
from meshwright.distributed.memory.kept_results import ROUTES, Operators, dropout_argument, selective_contexts
from meshwright.distributed.mesh import ParallelMesh
from meshwright.errors import PlanError, Problems
from meshwright.plan.result.program import Recompute

__all__ = ["checkpoint_forward", "find_operators", "is_checkpointed", "recompute"]

_CHECKPOINTED: WeakSet[nn.Module] = WeakSet()
"""Modules whose forward :func:`checkpoint_forward` replaced."""


def recompute(model: nn.Module, action: Recompute, mesh: ParallelMesh | None = None) -> None:
    """Make a module recompute its activations in backward, as an action says. In evaluation mode nothing changes."""
    kept = find_operators(action.operators) if action.selective else None
    if action.routing and kept != frozenset():  # an empty set is the choice of `selective`, which keeps the routing
        kept = (kept or frozenset()) | ROUTES
    checkpoint_forward(model.get_submodule(action.module), kept)


def checkpoint_forward(module: nn.Module, kept: Operators | None = None) -> None:
    """Recompute a module's activations in backward instead of keeping them.

    It replaces ``forward`` of this instance. So parameter names do not change, and FSDP's hooks run outside of the checkpoint:
    in backward a unit is unsharded once, for the recomputation and the backward together. Idempotent.

    Args:
        module: changed in place.
        kept: operators whose results are kept; empty: the choice of ``selective``; ``None``: no result is kept.
    """
    if is_checkpointed(module):
        return
    inner = module.forward
    along = takes_along(module)
    options: dict[str, Any] = {} if kept is None else {"context_fn": functools.partial(selective_contexts, kept)}

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        # Tensors among the keyword arguments are passed by position: autograd then saves them, and detects that they are
        # overwritten.
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        others = {name: value for name, value in kwargs.items() if name not in names}

        def run(*values: Any) -> Any:
            return inner(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)), **others)

        run = taken_along(run) if along else run
        return checkpoint(run, *args, *(kwargs[name] for name in names), use_reentrant=False, **options)

    module.forward = forward
    _CHECKPOINTED.add(module)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether :func:`checkpoint_forward` replaced the forward of a module."""
    return module in _CHECKPOINTED


def find_operators(names: Iterable[str]) -> Operators:
    """Look up the operators whose results selective checkpointing is to keep.

    Args:
        names: ``namespace.operator.overload``, as in ``aten.mm.default``.

    Raises:
        PlanError: for all names that are no operators or whose results cannot be kept, each with similar legal names.
    """
    operators, problems = [], Problems()
    for name in names:
        operator = _operator(name)
        problem = "is no operator" if operator is None else _unkeepable(operator)
        if operator is None or problem:
            hint = f"; did you mean {' or '.join(near)}?" if (near := _near(name)) else ", such as aten.mm.default"
            problems.add(
                "checkpointing.operators",
                f"activation_checkpointing_save={name!r}: {problem}; legal are namespace.operator.overload{hint}",
            )
        else:
            operators.append(operator)
    if problems:
        raise PlanError(problems)
    return frozenset(operators)


def _operator(name: str) -> torch._ops.OpOverload | None:
    try:
        operator = attrgetter(name)(torch.ops)
    except AttributeError:
        return None
    return operator if isinstance(operator, torch._ops.OpOverload) else None


def _near(name: str) -> list[str]:
    """Up to three legal operators that may have been meant: overloads of that name, otherwise similar names."""

    def legal(others: Iterable[str]) -> list[str]:
        return [other for other in others if (operator := _operator(other)) and not _unkeepable(operator)][:3]

    known = _torch_compat.operator_names()
    overloads = [other for other in known if other.split(".")[1] in name.split(".")]
    overloads.sort(key=lambda other: (not other.endswith(".default"), other))
    return legal(overloads) or legal(difflib.get_close_matches(name, known, 12))


def _unkeepable(operator: torch._ops.OpOverload) -> str:
    """The reason why results of an operator cannot be kept; empty if they can."""
    if _torch_compat.operator_schema(operator).is_mutable:
        return "writes into its inputs, which a recomputation has to do again"
    if torch.Tag.nondeterministic_seeded in operator.tags and dropout_argument(operator)[0] is None:
        return "draws random numbers, which a recomputation has to draw again"
    if _torch_compat.is_decomposed(operator):
        return "is decomposed into other operators before it runs, so it has no result to keep"
    return ""
