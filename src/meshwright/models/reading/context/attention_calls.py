"""How the attentions of a model of transformers are called: read from one forward on meta tensors.

Context parallel replaces the function between an attention's projections and its output. So it must know what the model asks of
that function: heads, widths of keys and values, and the mask. No config declares this. So the model is called once with tensors
that have shapes and no values. A function and a mask of ours are registered for this call, and the function records how it is
called. The mask is not a tensor but the rule (query, key) -> bool that transformers would build one from. It is evaluated at
sampled positions, because a window may be larger than any sequence of a test.

What mixes tokens outside of this function would be wrong on a part of a sequence: a convolution, a scan, a softmax over tokens.
Such operators are found by the length of the sequence, a prime that no parameter has as a size.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.distributed.context.count_positions import calling_place
from meshwright.distributed.context.sequences import are_same_entries
from meshwright.errors import Problems, Refusal
from meshwright.models import _transformers_compat as compat
from meshwright.models.reading.context.mixer_calls import linear_layers
from meshwright.models.reading.token_dimension import TokenDimension
from meshwright.models.reading.tracing import RULE, Attention, Inputs, Labels, Operator, Tracer, traced
from meshwright.plan.given.attentions import AttentionFacts, Attentions, unknown_argument
from meshwright.plan.given.names import holder_of, within
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PRODUCTS", "AttentionTracer", "problem_at", "trace_uncached"]

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary embedding that change with the largest position of a forward. Ranks that share a sequence differ in it."""
_MIXES = "mixes tokens outside of an attention"
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
"""Operators whose results are features of tokens, and no positions any more."""
_MOVES = ("cat", "constant_pad", "convolution", "flip", "index", "roll", "select", "slice")
"""How the names of operators begin that move tokens, or carry a state from token to token."""


def trace_uncached(model: "PreTrainedModel", experts: Sequence[ExpertsRule] = ()) -> Attentions:
    """Return the attentions of a model, and what else of it mixes tokens.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        experts: its mixtures. They are not called, because what they do depends on values.
    """
    problems = _unfit_rotary(model)
    if problems:
        return Attentions((), tuple(problems))
    # A mask of ones, because without one documents are looked for, which needs values.
    found, why = traced(model, experts, AttentionTracer, ("cpu", "meta"))
    if found is None:
        return Attentions((), (Refusal("model.values", f"its forward cannot be traced without values ({why})"),))
    states, problems = _in_mixers(model, found)
    problems += [
        Refusal("cp.positions", f"{module!r} counts positions itself ({file}:{line}), inside of a layer that carries a state")
        for module, (file, line) in found.counted
        if within(module, [name for name, _ in states])
    ]
    unique = tuple(dict.fromkeys(problems))
    return Attentions(found.attentions(), unique, compat.attention_of(model), states, tuple(found.counted))


def _in_mixers(model: nn.Module, found: "AttentionTracer") -> tuple[tuple[tuple[str, str], ...], Problems]:
    """Return what mixes tokens inside of mixers, one problem for each, and all problems of other modules.

    A mixer is the innermost module around it that has linear layers at both borders, if no attention is in it.
    """
    states: dict[str, Refusal] = {}
    problems = Problems(found.problems)
    for module, problem in found.mixing:
        name = module
        while name and len(linear_layers(model.get_submodule(name))) < 2:
            name = holder_of(name)
        if not name or any(within(row, (name,)) for row in found.rows):
            problems.append(problem)
        else:
            states.setdefault(name, problem)
    return tuple(states.items()), problems


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


class AttentionTracer(Tracer):
    """Records calls of the attention function, and operators outside of it that mix tokens."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.tokens = TokenDimension(inputs.positions.shape[1])
        self.rows: dict[str, AttentionFacts] = {}
        self.problems = Problems()
        self.mixing: list[tuple[str, Refusal]] = []
        self.counted: dict[tuple[str, tuple[str, int]], None] = {}
        self._own_positions = Labels()
        self._refused = frozenset[tuple[str, Any]]()
        self._reduced = Labels()
        self.runs: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._kinds: dict[Any, tuple[str, bool, int | None]] = {}

    def attention(self, call: Attention) -> None:
        """Record one call."""
        query, key, options = call.query, call.key, dict(call.options)
        dropout = options.pop("dropout", 0.0)
        problem, causal, window = self._mask(call.mask)
        if not problem and (query.shape[2] != self.tokens.length or key.shape[2] != self.tokens.length):
            problem = Refusal(
                "cp.attention", f"has {query.shape[2]} queries and {key.shape[2]} keys for {self.tokens.length} tokens"
            )
        given = options.get("position_ids")
        if not problem and isinstance(given, torch.Tensor) and not are_same_entries(given, self.inputs.positions):
            problem = Refusal(
                "cp.positions",
                "gets other position_ids than those of the batch, which say where its tokens are in the sequence",
            )
        if not problem and (unknown := unknown_argument(options)):
            problem = Refusal(
                "cp.argument", f"calls its attention function with {unknown!r}, which context parallel does not know"
            )
        facts = AttentionFacts(
            call.module, query.shape[1], key.shape[1], key.shape[3], call.value.shape[3], causal, window,
            sinks=isinstance(options.get("s_aux"), torch.Tensor), dropout=float(dropout or 0.0), carried=given is None,
            problem=problem,
        )  # fmt: skip
        known = self.rows.setdefault(call.module, facts)
        if known != facts and not known.problem:
            self.rows[call.module] = replace(
                facts, problem=problem or Refusal("cp.twice", "runs twice in a forward, with masks or heads of two kinds")
            )
        self._calls[call.module] += 1

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count how often a module runs."""
        self.runs[name] += 1

    def attentions(self) -> tuple[AttentionFacts, ...]:
        """Return what was recorded of each attention, with the number of its calls in a run."""
        return tuple(self._counted(facts) for facts in self.rows.values())

    def _counted(self, facts: AttentionFacts) -> AttentionFacts:
        calls, rest = divmod(self._calls[facts.module], max(1, self.runs[facts.module]))
        if rest and not facts.problem:
            return replace(facts, problem=Refusal("cp.twice", "attends in some of its runs more often than in others"))
        return replace(facts, calls=max(1, calls))

    def _mask(self, mask: Any) -> tuple[str, bool, int | None]:
        """Return why the mask is none that can be shared (empty: it can), whether it is causal, and its window."""
        rule = getattr(mask, RULE, None)
        if mask is not None and rule is None:
            return Refusal("cp.mask", "changes its mask before it attends"), True, None
        if rule is None:
            return Refusal("cp.mask", "has no mask that transformers makes"), True, None
        return self._kind(rule)

    def _kind(self, rule: Callable[..., Any]) -> tuple[str, bool, int | None]:
        """Return why a rule is of no mask that can be shared (empty: it is), whether it is causal, and its window."""
        if rule not in self._kinds:
            try:
                self._kinds[rule] = _kind_of(rule)
            except Exception as error:  # a rule of the model's own, which may read anything
                self._kinds[rule] = (Refusal("cp.mask", f"has a mask of its own ({type(error).__name__})"), True, None)
        return self._kinds[rule]

    def operator(self, operator: Operator) -> None:
        """Record what mixes tokens, or computes with positions that the model makes itself."""
        tensors, results = operator.on_meta, operator.results
        if operator.name == "arange" and self.tokens.has(results[0]):
            place = calling_place() if self._counts_tokens(operator) else None
            self._own_positions.put(results, frozenset([(operator.module, place)]))
            return
        counted = frozenset[tuple[str, Any]]().union(*self._own_positions.among(tensors))
        if counted and operator.name not in PRODUCTS:
            self._own_positions.put(results, counted)
            if not any(tensor.is_floating_point() for tensor in (*tensors, *results)):
                return  # a mask, which is made anew
            self._computed_with(counted, operator)
        if self._reduces(operator):
            return
        if self.tokens.mixed(operator):
            code = "cp.state" if operator.name.startswith(_MOVES) else "cp.mixes_tokens"
            self.mixing.append((operator.module, problem_at(code, _MIXES, operator)))

    def _reduces(self, operator: Operator) -> bool:
        """Return whether an operator makes a whole number of all tokens, such as their largest position, or computes with one.

        It is a problem where tokens, or numbers of floating point, are computed with it. Code that asks for its value cannot be
        traced.
        """
        tensors, results = operator.on_meta, operator.results
        alone = not any(tensor.is_floating_point() or self.tokens.has(tensor) for tensor in results)
        if alone and self.tokens.mixed(operator):
            self._reduced.put(results, (operator.module, problem_at("cp.mixes_tokens", _MIXES, operator)))
            return True
        known = self._reduced.among(tensors)
        if known and alone:
            self._reduced.put(results, known[0])
        elif known:
            self.mixing.extend(known)
        return bool(known)

    def _counts_tokens(self, operator: Operator) -> bool:
        """Return whether an arange counts each token once, from a number that the length does not decide."""
        start, step = operator.operands.get("start", 0), operator.operands.get("step", 1)
        return operator.results[0].numel() == self.tokens.length and step == 1 and 0 <= start < self.tokens.length

    def _computed_with(self, counted: "frozenset[tuple[str, Any]]", operator: Operator) -> None:
        """Record that something is computed with positions that the model counts."""
        own = [tensor for tensor in (*operator.on_meta, *operator.results) if tensor in self._own_positions]
        if any(place is None for _, place in counted):
            what = "computes with positions of its own that are not those of the tokens, one after another"
        elif any(self.tokens.dimensions(tensor) > 1 for tensor in own):
            what = "computes with distances between positions of its own"
        else:
            self.counted.update(dict.fromkeys(sorted(counted)))
            return
        if not self._refused & counted:  # once, not in all that follows
            self.problems.append(problem_at("cp.positions", what, operator))
        self._refused |= counted


def problem_at(code: str, what: str, operator: Operator) -> Refusal:
    file, line = calling_place()
    return Refusal(code, f"{operator.module or 'the model'!r} {what} ({operator.function}, {file}:{line})")


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
