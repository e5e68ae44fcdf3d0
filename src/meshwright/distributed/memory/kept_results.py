"""Selective recomputation: which results of a layer's operators are kept, and the pair of modes that keeps and returns them.

How ``selective`` works. During the forward of a layer, the dispatch mode :class:`_Keep` sees each operator below autograd, and
stores the *results* that :class:`Choice` selects. During the recomputation, the dispatch mode :class:`_Replay` returns a
stored result instead of running the operator. Results are matched by their order, so both modes must select the same calls. The
choice counts matrix products, so there is one for each run of a layer: each microbatch, each use of a shared layer and each
recomputation begins to count at zero. A recomputation that runs within a forward (because the layer itself computes a gradient)
is not counted. Code that runs in the forward only, such as a hook that adds up statistics, has to be hidden from both modes
(:func:`unwatched`).

torch has such a pair of modes (``create_selective_checkpoint_contexts``). Compiled layers use it, because the compiler reads
the choice from it. Eager layers do not, because of four cases that show only when a layer runs:

- A layer overwrites a result that was kept, as some routers and experts with a bias do. torch raises
  (``_VersionWrapper.get_val``), or returns the new values (``allow_cache_entry_mutation``). Here such a result is recomputed.
- A collective of torch.distributed writes into a result that was kept, without raising its version. With torch's modes,
  gradients are then wrong, and nothing says so.
- Backward runs twice, or the layer computes a gradient in its forward. torch (``_CachedTorchDispatchMode``) returns each result
  only once, and then raises.
- Operators run in the forward only. torch finds results by the number of the call among all calls of an operator, so it returns
  those of other calls.

The results of two kinds of operators are never kept. An operator that draws random numbers must run again, or all later ones
would draw other numbers. An operator that writes into its inputs must run again, or they would not be written.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshwright.distributed import _torch_compat
from meshwright.errors import UnsupportedError

__all__ = ["ROUTES", "Choice", "Operators", "dropout_argument", "selective_contexts", "unwatched"]

Operators = frozenset[torch._ops.OpOverload]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

PRODUCTS = frozenset({"mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"})
"""Matrix products; the result of every second one is kept. ``bmm`` is not here: in attention without a fused kernel, the size
of its result is the square of the sequence length."""

ATTENTION = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward", "_flash_attn_", "_varlen_attn")
"""Prefixes of the names of attention kernels, in any library. The result of flex attention, a higher-order operator, is kept
too."""

ROUTING = frozenset({"topk", "sort"})
"""Operators that choose experts. Their results are kept, so that the recomputation routes each token to the same experts."""

ROUTES = frozenset({torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.sort.stable})
"""The overloads of :data:`ROUTING`, whose results a module that routes tokens keeps in every mode."""

COMMUNICATION = frozenset({"_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Namespaces of collectives that return their result."""


class _Role(Enum):
    KEPT = auto()
    KEPT_BY_TURNS = auto()
    COPIED = auto()
    """Kept as a copy, because models overwrite the result. For small results only."""
    RECOMPUTED = auto()


class Choice:
    """Selects the results that one run of a layer keeps. It is asked about each operator, in the order of the calls.

    Args:
        kept: the operators to select; empty: the default choice.
    """

    def __init__(self, kept: Operators) -> None:
        self.kept = kept
        self.products = 0

    def __call__(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the result of this call is kept."""
        role = _role(operator, self.kept)
        if role is _Role.KEPT_BY_TURNS:
            self.products += 1
            return self.products % 2 == 1
        return role is not _Role.RECOMPUTED and not _drops_out(operator, args, kwargs)


@dataclass
class _Run:
    """One run of a layer: the stored results in order, each with its operator. An overwritten result is ``None``."""

    kept: Operators
    results: list[tuple[Any, Any]] = field(default_factory=list)
    replaying: bool = False

    @property
    def legal(self) -> str:
        """The modes that work for a layer for which this one fails, in words."""
        return "none" if self.kept == ROUTES else "none, full, submodule"


@dataclass(frozen=True)
class _Stored:
    """A stored tensor, which shares memory with the tensor of the layer. Its version tells whether the layer overwrote it."""

    tensor: torch.Tensor
    version: int

    @property
    def intact(self) -> bool:
        return self.tensor._version == self.version


_UNWATCHED: ContextVar[bool] = ContextVar("unwatched", default=False)


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, the dispatch modes ignore operators: they store no result, return none, and count nothing.

    Use it for code that runs in the forward of a layer and not in its recomputation, such as a hook that adds up statistics. No
    output of the layer may depend on it.
    """
    token = _UNWATCHED.set(True)
    try:
        yield
    finally:
        _UNWATCHED.reset(token)


class _Watching(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of a layer run compiled. Their operators are then invisible in forward and recomputation alike."""
        return True


class _Keep(_Watching):
    """The mode around the forward of a layer, which stores results."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run, self.choice = run, Choice(run.kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.run.replaying and not _UNWATCHED.get() and self.choice(func, args, kwargs):
            self.run.results.append((func, tree_map_only(torch.Tensor, functools.partial(_hold, func), result)))
        if func.namespace == "c10d":  # these collectives write into their arguments without raising their versions
            self._forget({_torch_compat.memory_of(item) for item in tree_iter(args) if isinstance(item, torch.Tensor)})
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._forget(set())

    def _forget(self, written: set[int]) -> None:
        """Drop the stored results that were overwritten, and those that lie in the memory given."""

        def lost(kept: _Stored) -> bool:
            return not kept.intact or (bool(written) and _torch_compat.memory_of(kept.tensor) in written)

        for position, (operator, result) in enumerate(self.run.results):
            if any(lost(item) for item in tree_iter(result) if isinstance(item, _Stored)):
                self.run.results[position] = (operator, None)


class _Replay(_Watching):
    """The mode around the recomputation, which returns stored results and runs all other operators.

    It may be entered again, for a second backward.
    """

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __enter__(self) -> Any:
        self.choice, self.position, self.run.replaying = Choice(self.run.kept), 0, True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.run.replaying = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _UNWATCHED.get() and self.choice(func, args, kwargs):
            operator, result = self.run.results[self.position] if self.position < len(self.run.results) else (None, None)
            if operator is not func:
                raise UnsupportedError(
                    "checkpointing.differs",
                    f"activation_checkpointing: the recomputation of a layer runs {func} where its forward ran {operator}, so "
                    f"the layer's code depends on more than its inputs; legal modes for this layer: {self.run.legal}",
                )
            self.position += 1
            # Code behind the layer may have overwritten it, too.
            if result is not None and all(item.intact for item in tree_iter(result) if isinstance(item, _Stored)):
                return tree_map_only(_Stored, lambda kept: _handed_out(func, kept.tensor), result)
        return func(*args, **kwargs)


def _hold(operator: Any, tensor: torch.Tensor) -> _Stored:
    kept = _handed_out(operator, tensor)
    return _Stored(kept, kept._version)


def _handed_out(operator: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if _role(operator, frozenset()) is _Role.COPIED else _torch_compat.alias(tensor)


def selective_contexts(kept: Operators) -> Contexts:
    """The pair of modes for one run. Each run asks, because a layer that is to be compiled may run eagerly after all."""
    if torch.compiler.is_compiling():
        return _compiled_contexts(kept)
    run = _Run(kept)
    return _Keep(run), _Replay(run)


def _compiled_contexts(kept: Operators) -> Contexts:
    choices = {False: Choice(kept), True: Choice(kept)}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = choices[context.is_recompute](operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@functools.lru_cache(maxsize=4096)
def _role(operator: Any, kept: Operators) -> _Role:
    space, _, name = operator.name().rpartition("::")
    name = name.partition(".")[0]
    schema = _torch_compat.operator_schema(operator)
    if (schema is not None and schema.is_mutable) or (kept and operator not in kept):
        return _Role.RECOMPUTED
    if name in ROUTING:
        return _Role.COPIED
    if kept or name == "flex_attention" or name.startswith(ATTENTION):
        return _Role.KEPT
    if name in PRODUCTS:
        return _Role.KEPT_BY_TURNS
    # A kept result of a collective was waited for already, so `wait_tensor` costs nothing in the recomputation.
    return _Role.KEPT if space in COMMUNICATION and name != "wait_tensor" else _Role.RECOMPUTED


def _drops_out(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an attention kernel applies dropout, and so draws random numbers."""
    place, default = dropout_argument(operator)
    return place is not None and bool(kwargs.get("dropout_p", args[place] if place < len(args) else default))


@functools.lru_cache(maxsize=4096)
def dropout_argument(operator: Any) -> tuple[int | None, float]:
    """Position and default of an operator's argument ``dropout_p``; the position is ``None`` without such an argument."""
    schema = _torch_compat.operator_schema(operator)
    arguments = () if schema is None else schema.arguments
    dropouts = [(place, item.default_value or 0.0) for place, item in enumerate(arguments) if item.name == "dropout_p"]
    return dropouts[0] if dropouts else (None, 0.0)
