"""Activation checkpointing: what a layer computes again in backward instead of keeping it.

``full`` and ``selective`` are one checkpoint around the layer's forward, ``submodule`` is one around each part of it. They are
torch's checkpoints, in the variant that keeps autograd's own graph (``use_reentrant=False``): backward runs as it does without,
and only what a node saved is computed anew when it is asked for. The state of the random number generators is restored for
that, so dropout draws the same masks.

How ``selective`` works. While the forward of a layer runs, a dispatch mode (:class:`_Keep`) sees its operators below autograd
and stores the *results* that :class:`_Choice` picks; in the recomputation another (:class:`_Replay`) hands them out instead of
running the operator. Results are told apart by their order, so both modes have to pick the same calls. Therefore a choice,
which counts matrix products, belongs to one run of one layer: every microbatch, every use of a shared layer and every
recomputation begins to count anew, and what a recomputation runs inside a forward (where the layer itself computes a gradient)
is not counted. What is done beside a layer, in its forward alone (a statistic), goes unseen (:func:`unwatched`).

torch has such a pair (``create_selective_checkpoint_contexts``), and compiled layers use it, because the compiler reads the
choice from it. It is not used otherwise, because in eager code it fails where a layer overwrites a result that was kept, as
some routers and every expert with a bias do (here such a result is recomputed instead), and where backward runs twice.

The choice of experts is kept in every mode: ``full`` and ``submodule`` recompute a module that routes tokens as ``selective``
would, if it were told to keep what :data:`ROUTING` names and nothing else. Gradients belong to the experts that forward used; a
product that rounds otherwise the second time could send a token elsewhere, and with expert parallel other numbers of tokens.

Two kinds of results are never kept, whoever asks for them: those of operators that draw random numbers (skipping one would
shift what all later ones draw), and those of operators that write into their inputs (skipping one would leave them unwritten).
"""

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.distributed import _torch_compat
from meshwright.distributed.mesh import ParallelMesh
from meshwright.errors import PlanError, UnsupportedError
from meshwright.plan.program import Recompute

__all__ = ["checkpoint_forward", "find_operators", "is_checkpointed", "recompute", "unwatched"]

Operators = frozenset[torch._ops.OpOverload]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

PRODUCTS = frozenset({"mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"})
"""Matrix products, of which every second one is kept. Not ``bmm``: in attention without a kernel of its own, its result has the
size of the sequence length squared."""

ATTENTION = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward", "_flash_attn_", "_varlen_attn")
"""How the names of attention kernels begin, in whatever library they are. Flex attention is no operator in this sense; it is
kept too."""

ROUTING = frozenset({"topk", "sort"})
"""What chooses experts. Kept, so that a product that rounds otherwise in the recomputation cannot route a token elsewhere."""

_ROUTES = frozenset({torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.sort.stable})
"""The operators of these names: what a module that routes tokens keeps, whatever else is recomputed."""

_CHECKPOINTED: WeakSet[nn.Module] = WeakSet()
"""Modules that :func:`checkpoint_forward` was applied to."""

COMMUNICATION = frozenset({"_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Namespaces of collectives that return their result."""


def recompute(model: nn.Module, action: Recompute, mesh: ParallelMesh | None = None) -> None:
    """Compute a module again in backward. Training mode only; evaluation runs as before."""
    kept = find_operators(action.operators) if action.selective else None
    if action.routing and kept != frozenset():  # the own choice of `selective` keeps the routing anyway
        kept = (kept or frozenset()) | _ROUTES
    checkpoint_forward(model.get_submodule(action.module), kept)


def checkpoint_forward(module: nn.Module, kept: Operators | None = None) -> None:
    """Recompute a module's activations in backward instead of keeping them.

    ``forward`` of this instance is replaced, so that parameter names stay as they are, and FSDP's hooks, which run around
    ``forward``, stay outside: backward gathers a unit once, also for the recomputation. Idempotent.

    Args:
        module: changed in place.
        kept: operators whose results are kept all the same; empty: the choice of ``selective``; ``None``: nothing is kept.
    """
    if is_checkpointed(module):
        return
    inner = module.forward
    options: dict[str, Any] = {} if kept is None else {"context_fn": functools.partial(_contexts, kept)}

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        # Tensors that come by name go the way of the others: autograd then holds them, and notices if they are overwritten.
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        others = {name: value for name, value in kwargs.items() if name not in names}

        def run(*values: Any) -> Any:
            return inner(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)), **others)

        return checkpoint(run, *args, *(kwargs[name] for name in names), use_reentrant=False, **options)

    module.forward = forward
    _CHECKPOINTED.add(module)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether :func:`checkpoint_forward` was applied to a module."""
    return module in _CHECKPOINTED


# -- selective ------------------------------------------------------------------------------------------------------------


class _Role(Enum):
    KEPT = auto()
    KEPT_BY_TURNS = auto()
    COPIED = auto()
    """Kept, and models overwrite it: what is kept is a copy. Only for small results."""
    RECOMPUTED = auto()


class _Choice:
    """Which results one run of a layer keeps; asked for each operator, in the order of their calls.

    Args:
        kept: these operators; empty: the default choice.
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
    """One run of a layer: the kept results in order, each with its operator; ``None`` for one that was overwritten."""

    kept: Operators
    results: list[tuple[Any, Any]] = field(default_factory=list)
    replaying: bool = False

    @property
    def legal(self) -> str:
        """The modes that ask less of a layer, in words."""
        return "is none" if self.kept == _ROUTES else "are none, full, submodule"


@dataclass(frozen=True)
class _Held:
    """A kept tensor. It shares memory with the one that the layer goes on with; its version tells whether that overwrote it."""

    tensor: torch.Tensor
    version: int

    @property
    def intact(self) -> bool:
        return self.tensor._version == self.version


_UNWATCHED: ContextVar[bool] = ContextVar("unwatched", default=False)


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, operators are none of the layer's: neither kept nor handed out, nor counted.

    For what hooks do in the forward of a layer and not in its recomputation, and that nothing of the layer is computed from.
    """
    token = _UNWATCHED.set(True)
    try:
        yield
    finally:
        _UNWATCHED.reset(token)


class _Watching(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Parts of a layer that are compiled stay so: their inside is not looked at, in forward and recomputation alike."""
        return True


class _Keep(_Watching):
    """Around the forward of a layer: keeps results."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run, self.choice = run, _Choice(run.kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.run.replaying and not _UNWATCHED.get() and self.choice(func, args, kwargs):
            self.run.results.append((func, tree_map_only(torch.Tensor, functools.partial(_hold, func), result)))
        if func.namespace == "c10d":  # collectives that write into their arguments, and do not change versions
            self._forget({_torch_compat.memory_of(item) for item in tree_iter(args) if isinstance(item, torch.Tensor)})
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._forget(set())

    def _forget(self, written: set[int]) -> None:
        """Drop the results that were overwritten, and those in memory that was written to."""

        def lost(held: _Held) -> bool:
            return not held.intact or (bool(written) and _torch_compat.memory_of(held.tensor) in written)

        for position, (operator, result) in enumerate(self.run.results):
            if any(lost(item) for item in tree_iter(result) if isinstance(item, _Held)):
                self.run.results[position] = (operator, None)


class _Replay(_Watching):
    """Around the recomputation: hands out the kept results, and runs the rest. May be entered again, for another backward."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __enter__(self) -> Any:
        self.choice, self.position, self.run.replaying = _Choice(self.run.kept), 0, True
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
                    f"activation_checkpointing: the recomputation of a layer runs {func} where its forward ran {operator}, so "
                    f"what it does depends on more than its inputs; legal for it {self.run.legal}"
                )
            self.position += 1
            # It may have been overwritten after the layer, too.
            if result is not None and all(item.intact for item in tree_iter(result) if isinstance(item, _Held)):
                return tree_map_only(_Held, lambda held: _handed_out(func, held.tensor), result)
        return func(*args, **kwargs)


def _hold(operator: Any, tensor: torch.Tensor) -> _Held:
    held = _handed_out(operator, tensor)
    return _Held(held, held._version)


def _handed_out(operator: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if _role(operator, frozenset()) is _Role.COPIED else _torch_compat.alias(tensor)


def _contexts(kept: Operators) -> Contexts:
    """Asked for by each run: a layer that was to be compiled runs as it is where something inside cannot be."""
    return _compiled_contexts(kept) if torch.compiler.is_compiling() else _selective_contexts(kept)


def _selective_contexts(kept: Operators) -> Contexts:
    run = _Run(kept)
    return _Keep(run), _Replay(run)


def _compiled_contexts(kept: Operators) -> Contexts:
    choices = {False: _Choice(kept), True: _Choice(kept)}

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
    # The result of a collective is there once it was waited for; the waiting itself costs nothing the second time.
    return _Role.KEPT if space in COMMUNICATION and name != "wait_tensor" else _Role.RECOMPUTED


def _drops_out(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an attention kernel draws random numbers."""
    place, default = _dropout_argument(operator)
    return place is not None and bool(kwargs.get("dropout_p", args[place] if place < len(args) else default))


@functools.lru_cache(maxsize=4096)
def _dropout_argument(operator: Any) -> tuple[int | None, float]:
    """Where an operator takes the probability of dropout, and its default."""
    schema = _torch_compat.operator_schema(operator)
    arguments = () if schema is None else schema.arguments
    found = [(place, item.default_value or 0.0) for place, item in enumerate(arguments) if item.name == "dropout_p"]
    return found[0] if found else (None, 0.0)


def find_operators(names: Iterable[str]) -> Operators:
    """The operators that selective checkpointing is to keep the results of, by their names.

    Args:
        names: ``namespace.operator.overload``, as in ``aten.mm.default``.

    Raises:
        PlanError: all names together that are no operators, or whose results cannot be kept, each with near ones that can.
    """
    found, problems = [], []
    for name in names:
        operator = _operator(name)
        problem = "is no operator" if operator is None else _unkeepable(operator)
        if operator is None or problem:
            hint = f"; did you mean {' or '.join(near)}?" if (near := _near(name)) else ", such as aten.mm.default"
            problems.append(f"activation_checkpointing_save={name!r}: {problem}; legal are namespace.operator.overload{hint}")
        else:
            found.append(operator)
    if problems:
        raise PlanError(problems)
    return frozenset(found)


def _operator(name: str) -> torch._ops.OpOverload | None:
    try:
        found = attrgetter(name)(torch.ops)
    except AttributeError:
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def _near(name: str) -> list[str]:
    """Up to three operators that could have been meant and can be kept: overloads of that name, otherwise similar names."""

    def legal(others: Iterable[str]) -> list[str]:
        return [other for other in others if (operator := _operator(other)) and not _unkeepable(operator)][:3]

    known = _torch_compat.operator_names()
    overloads = [other for other in known if other.split(".")[1] in name.split(".")]
    overloads.sort(key=lambda other: (not other.endswith(".default"), other))
    return legal(overloads) or legal(difflib.get_close_matches(name, known, 12))


def _unkeepable(operator: torch._ops.OpOverload) -> str:
    """Why the results of an operator cannot be kept; empty if they can."""
    if _torch_compat.operator_schema(operator).is_mutable:
        return "writes into its inputs, which a recomputation has to do again"
    if torch.Tag.nondeterministic_seeded in operator.tags and _dropout_argument(operator)[0] is None:
        return "draws random numbers, which a recomputation has to draw again"
    if _torch_compat.is_decomposed(operator):
        return "is taken apart into other operators before it runs, so there is nothing to keep"
    return ""
