"""How the attentions of a model of transformers are called: read from one forward on meta tensors.

Context parallel replaces the function between an attention's projections and its output. So it must know what the model asks of
that function: heads, widths of keys and values, and the mask. No config declares this. So the model is called once with tensors
that have shapes and no values. A function and a mask of ours are registered for this call, and the function records how it is
called. The mask is not a tensor but the rule (query, key) -> bool that transformers would build one from. It is evaluated at
sampled positions, because a window may be larger than any sequence of a test.

What mixes tokens outside of this function would be wrong on a part of a sequence: a convolution, a scan, a softmax over tokens.
Such operators are found by the length of the sequence, a prime that no parameter has as a size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.errors import Problems, Refusal
from meshwright.models import _transformers_compat as compat
from meshwright.models.reading.tracing import (
    RULE,
    TokenDimension,
    call_on_meta,
    first_that_runs,
    hooked,
    meta_tensors,
    prime_length,
)
from meshwright.plan.given.attentions import AttentionFacts, Attentions, unknown_argument
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_attentions"]

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary embedding that change with the largest position of a forward. Ranks that share a sequence differ in it."""
_MOVES = ("cat", "constant_pad", "convolution", "flip", "index", "roll", "select", "slice")
"""How the names of operators begin that move tokens, or carry a state from token to token."""


def trace_attentions(model: "PreTrainedModel", experts: Sequence[ExpertsRule] = ()) -> Attentions:
    """Return the attentions of a model, and what else of it mixes tokens.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        experts: its mixtures. They are not called, because what they do depends on values.
    """
    problems = _unfit_rotary(model)
    if problems:
        return Attentions((), tuple(problems))
    # A mask of ones, because without one documents are looked for, which needs values.
    found, why = first_that_runs(partial(_traced, model, experts), ("cpu", "meta"))
    return found or Attentions((), (Refusal("model.values", f"its forward cannot be traced without values ({why})"),))


def _traced(model: "PreTrainedModel", experts: Sequence[ExpertsRule], mask_device: str) -> Attentions:
    trace = _Trace({id(module): name for name, module in model.named_modules()}, prime_length(model))
    with trace.watching(model):
        call_on_meta(model, experts, trace.attend, meta_tensors(model), trace.positions, mask_device)
    return Attentions(tuple(trace.rows.values()), tuple(dict.fromkeys(trace.problems)), compat.attention_of(model))


def _unfit_rotary(model: nn.Module) -> list[Refusal]:
    kinds = {kind: name for name, module in model.named_modules() for kind in _rope_types(module) if kind in _LENGTH_DEPENDENT}
    return [
        Refusal(
            "cp.positions",
            f"the rotary embedding {name!r} ({kind}) changes with the largest position of a forward, and ranks that share a "
            "sequence differ in it",
        )
        for kind, name in kinds.items()
    ]


def _rope_types(module: nn.Module) -> Iterator[str]:
    kinds = getattr(module, "rope_type", None)
    yield from (kind for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]) if isinstance(kind, str))


class _Trace(TorchDispatchMode):
    """Records calls of the attention function, and operators outside of it that mix tokens."""

    def __init__(self, names: dict[int, str], length: int) -> None:
        super().__init__()
        self.names, self.length, self.tokens = names, length, TokenDimension(length)
        self.positions = torch.zeros((1, length), dtype=torch.long, device="meta")
        self.rows: dict[str, AttentionFacts] = {}
        self.problems = Problems()
        self._stack: list[str] = [""]
        self._own_positions = WeakIdKeyDictionary()
        self._kinds: dict[Any, tuple[str, bool, int | None]] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles = []

        def enter(module: nn.Module, *_: Any) -> None:
            self._stack.append(self.names.get(id(module), ""))

        def leave(*_: Any) -> None:
            self._stack.pop()

        for module in model.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        with hooked(handles), self:
            yield

    # -- the attention function --------------------------------------------------------------------------------------------

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Record one call: query [B, heads, S, key size], key and value [B, key/value heads, S, size]."""
        name = self.names.get(id(module), type(module).__name__)
        problem, causal, window = self._mask(module, attention_mask)
        if not problem and (query.shape[2] != self.length or key.shape[2] != self.length):
            problem = Refusal("cp.attention", f"has {query.shape[2]} queries and {key.shape[2]} keys for {self.length} tokens")
        if not problem and kwargs.get("position_ids") is not self.positions:
            problem = Refusal(
                "cp.positions", "does not get the position_ids of the batch, which say where its tokens are in the sequence"
            )
        if not problem and (unknown := unknown_argument(kwargs)):
            problem = Refusal(
                "cp.argument", f"calls its attention function with {unknown!r}, which context parallel does not know"
            )
        if not problem and name in self.rows:
            problem = Refusal("cp.twice", "runs twice in a forward")
        self.rows[name] = AttentionFacts(
            name, query.shape[1], key.shape[1], key.shape[3], value.shape[3], causal, window,
            sinks=isinstance(kwargs.get("s_aux"), torch.Tensor), dropout=float(dropout or 0.0), problem=problem,
        )  # fmt: skip
        batch, heads, tokens, _ = query.shape
        return query.new_empty((batch, tokens, heads, value.shape[3])), None

    def _mask(self, module: nn.Module, mask: Any) -> tuple[str, bool, int | None]:
        """Return why the mask is none that can be shared (empty: it can), whether it is causal, and its window."""
        rule = getattr(mask, RULE, None)
        if mask is not None and rule is None:
            return Refusal("cp.mask", "changes its mask before it attends"), True, None
        if rule is None:
            return Refusal("cp.mask", "has no mask that transformers makes"), True, None
        if rule not in self._kinds:
            try:
                self._kinds[rule] = _kind_of(rule)
            except Exception as error:  # a rule of the model's own, which may read anything
                self._kinds[rule] = (Refusal("cp.mask", f"has a mask of its own ({type(error).__name__})"), True, None)
        return self._kinds[rule]

    # -- the rest ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor) and item.is_meta]
        results = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        if name == "arange" and self.tokens.has(results[0]):
            self._own_positions[results[0]] = True
        elif any(tensor in self._own_positions for tensor in tensors):
            if any(tensor.is_floating_point() for tensor in tensors):
                self._report(
                    "cp.positions", "computes with positions of its own, and not with the position_ids of the batch", function
                )
            for tensor in results:
                self._own_positions[tensor] = True
        elif any(map(self.tokens.has, tensors)) and self.tokens.mixed(name, tensors, args, results):
            code = "cp.state" if name.startswith(_MOVES) else "cp.mixes_tokens"
            self._report(code, "mixes tokens outside of an attention", function)
        return result

    def _report(self, code: str, what: str, function: Any) -> None:
        self.problems.add(code, f"{self._stack[-1] or 'the model'!r} {what} ({function})")


def _kind_of(rule: Callable[..., Any]) -> tuple[str, bool, int | None]:
    """Return what a rule (batch, head, query, key) -> bool is: a problem (empty: none), whether it is causal, and its window.

    The window is found by bisection, and the description that results is compared with the rule at many pairs.
    """

    def allowed(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.long)
        result = rule(zero, zero, queries, keys)
        result = result if isinstance(result, torch.Tensor) else torch.tensor(bool(result))
        return result.expand(torch.broadcast_shapes(queries.shape, keys.shape))

    far = torch.tensor(2**22)

    def sees(distance: int) -> bool:
        return bool(allowed(far, far - distance))

    causal = not bool(allowed(far, far + 1))
    window = None
    low, high = 0, 2**21
    if not sees(low):
        return Refusal("cp.mask", "has a mask under which a token does not see itself"), causal, None
    if not sees(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sees(middle) else (low, middle)
        window = high
    if window is not None and not causal:
        return Refusal("cp.mask", "has a window to both sides"), causal, window
    generator = torch.Generator().manual_seed(0)
    queries = torch.cat([torch.randint(0, 2**21, (4096,), generator=generator), torch.arange(256).repeat(8)])
    near = torch.randint(-64, 2 * (window or 4096), (len(queries),), generator=generator)
    for keys in ((queries - near).clamp(min=0), torch.randint(0, 2**21, (len(queries),), generator=generator)):
        expected = torch.ones_like(queries, dtype=torch.bool)
        if causal:
            expected &= keys <= queries
        if window is not None:
            expected &= queries - keys < window
        if not torch.equal(allowed(queries, keys).bool(), expected):
            return Refusal("cp.mask", "has a mask that is neither causal nor a window"), causal, window
    return "", causal, window
