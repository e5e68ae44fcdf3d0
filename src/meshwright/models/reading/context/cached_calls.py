"""How attentions that compute themselves use a cache: read from a forward in which it has more keys than there are queries.

An attention that does not call the function of transformers, or changes its mask before, cannot be replaced. But if its model
can generate, it computes with fewer queries than keys. So the model is called with a cache that returns keys and values of
another length, a second prime (:mod:`meshwright.distributed.context.cache_door`). Then every operator shows by the sizes of its
tensors whether it mixes the tokens of a rank, which must not be, or the keys of the whole sequence, which each rank has. Each
softmax over keys must have been given the mask.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.distributed.context.cache_door import CACHE, make_door
from meshwright.distributed.context.count_positions import calling_place
from meshwright.errors import Refusal
from meshwright.models import _transformers_compat as compat
from meshwright.models.reading.context.attention_calls import PRODUCTS, AttentionTracer, problem_at
from meshwright.models.reading.module_runs import count_runs
from meshwright.models.reading.token_dimension import TokenDimension
from meshwright.models.reading.tracing import Attention, Inputs, Labels, Operator, prime_length, traced
from meshwright.plan.given.attentions import AttentionFacts, Attentions
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_cached"]

KERNELS = ("eager", "sdpa")
"""Kernels whose masks are tensors."""
_TAKES = ("slice", "select", "index", "narrow", "gather", "index_select", "unbind", "split", "chunk")
_TRIANGLES = ("tril", "triu")
_SOFTMAX = ("_softmax", "_safe_softmax", "_scaled_dot_product")


def trace_cached(model: "PreTrainedModel", experts: Sequence[ExpertsRule]) -> Attentions | str:
    """Return the attentions of a model whose keys and values pass a cache, or why they cannot be shared so.

    Args:
        model: a causal language model, on any device. It is not changed.
        experts: its mixtures, which are not called.
    """
    kernel = compat.attention_of(model)
    if kernel not in KERNELS:
        return f"attn_implementation={kernel!r} makes no mask for fewer queries than keys; legal are {' and '.join(KERNELS)}"
    if CACHE not in signature(_of_transformers(model).forward).parameters:
        return f"its forward takes no {CACHE}"
    if not compat.masks_have_offsets():
        return "this release of transformers makes masks for as many queries as keys"
    whole = prime_length(model, prime_length(model))
    found, why = traced(model, experts, partial(CachedTracer, whole, kernel), (None, "cpu"))
    if found is None:
        return f"with a cache its forward cannot be traced without values ({why})"
    problems = [*found.problems, *(problem for _, problem in found.mixing)]
    if problems:
        return str(problems[0])
    if not found.rows:
        return f"its attentions use no cache ({CACHE})"
    runs = {name: count for name, (count, _) in count_runs(model, experts).items()}
    if other := next((name for name, count in runs.items() if found.runs[name] != count), ""):
        return f"with a cache {other!r} runs {found.runs[other]} times in a forward, and {runs[other]} times without"
    return Attentions(found.attentions(), (), kernel, counted=tuple(found.counted))


def _of_transformers(model: nn.Module) -> nn.Module:
    """Return a model, or the one inside a ``PeftModel``, which passes all arguments on."""
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


class CachedTracer(AttentionTracer):
    """Follows a forward whose keys have another length than its queries.

    Args:
        whole: the length of keys.
        kernel: what the model computes with.
        inputs: what it is called with.
    """

    def __init__(self, whole: int, kernel: str, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.keys, self.kernel = TokenDimension(whole), kernel
        self.running: list[str] = [""]
        self._masked, self._brought = Labels(), Labels()
        self._rule: tuple[bool, int | None] = (True, None)

    def arguments(self) -> dict[str, Any]:
        """Return the cache."""
        return {CACHE: make_door(self._bring, self.keys.length)}

    def functions(self, model: nn.Module, attend: Any) -> AbstractContextManager[Any]:
        """Inside, masks carry their rule; all else is what the model computes with."""
        return compat.mask_function(self.kernel, self._make_mask)

    def attention(self, call: Attention) -> None:
        """No function stands for the model's own."""

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note which module runs."""
        super().enter(name, module, args, kwargs)
        self.running.append(name)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note whose keys reach the logits with a gradient."""
        self.running.pop()
        if self.running != [""]:
            return
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or self.tokens.dimensions(logits) != 1 or self.keys.has(logits):
            self.problems.append(Refusal("cp.attention", "with a cache its logits are not those of its tokens"))
            return
        reached = frozenset[str]().union(*self._brought.among([logits]))
        self.rows = {name: replace(row, trained=name in reached) for name, row in self.rows.items()}

    def _make_mask(self, batch_size: int, q_length: int, kv_length: int, **options: Any) -> torch.Tensor:
        """Stand in for a mask of transformers: of no values, in the dtype of the kernel."""
        problem, *self._rule = self._kind(options["mask_function"])  # type: ignore[assignment]
        if problem:  # it is computed as it is written; so it may be any rule of the places of a query and a key alone
            self._rule = (True, None)
            shapes = (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, q_length, 1), (1, 1, 1, kv_length)
            options["mask_function"](*(torch.empty(shape, dtype=torch.long, device="meta") for shape in shapes))
        dtype = torch.bool if self.kernel == "sdpa" else options.get("dtype", torch.float32)
        mark = torch.empty((batch_size, 1, q_length, kv_length), device="meta", dtype=dtype)
        self._masked.put([mark])
        return mark

    def _bring(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        """Stand in for the keys and values of all ranks."""
        name = self.running[-1]
        heads = {tensor.shape[1] if tensor.ndim == 4 else 1 for tensor in own}
        if any(tensor.ndim not in (3, 4) or tensor.shape[-2] != self.tokens.length for tensor in own) or len(heads) > 1:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in own)
            self.problems.append(Refusal("cp.attention", f"{name!r} puts tensors {shapes} into its cache"))
        sizes = [tensor.shape[-1] for tensor in own]
        count, causal, window = max(heads), *self._rule
        facts = AttentionFacts(name, count, count, sizes[0], sum(sizes[1:]), causal, window, cached=True)
        if self.rows.setdefault(name, facts) != facts:
            self.problems.append(Refusal("cp.twice", f"{name!r} puts keys of two kinds into its cache"))
        self._calls[name] += 1
        brought = [
            torch.empty((*tensor.shape[:-2], self.keys.length, tensor.shape[-1]), dtype=tensor.dtype, device="meta")
            for tensor in own
        ]
        self._brought.put(brought, frozenset([name]))
        return brought

    def operator(self, operator: Operator) -> None:
        """Record what mixes the tokens of a rank, takes some of them by their number, or attends without the mask."""
        tensors, results, name = operator.on_meta, operator.results, operator.name
        if name not in PRODUCTS and name not in ("empty", "new_empty") and self._masked.among(tensors):
            self._masked.put(results)
        floats = [tensor for tensor in results if tensor.is_floating_point()]
        if brought := self._brought.among(tensor for tensor in tensors if tensor.is_floating_point()):
            self._brought.put(floats, frozenset[str]().union(*brought))
        if name in ("native_dropout", "bernoulli_") and any(map(self.keys.has, results)):
            given = float(operator.operands.get("p") or 0.0)
            self._note(dropout=given if name == "native_dropout" else 1 - given)  # the second is given what is kept
        if any(self.tokens.has(tensor) and self.keys.has(tensor) for tensor in floats) and name in ("bmm", "baddbmm"):
            rows = self.inputs.positions.numel() * self.keys.length
            self._note(heads=max(1, prod(floats[0].shape) // rows))
        if name.startswith(_SOFTMAX) and any(map(self.keys.has, tensors)):
            if operator.operands.get("is_causal") or not self._masked.among(tensors):
                self._report("cp.mask", "attends to the keys of its cache without the mask", operator)
            if name.startswith("_scaled_dot_product"):
                return
        if not any(map(self.tokens.has, tensors)) and any(map(self.tokens.has, results)) and name.startswith(_TAKES):
            end = operator.operands.get("end")
            if name == "slice" and end == self.keys.length and operator.operands["start"] == end - self.tokens.length:
                self.counted[operator.module, calling_place()] = None  # the rows of its queries, of as many as there are keys
                return
            if any(tensor.dtype is torch.int64 for tensor in results):
                self._own_positions.put(results, frozenset([(operator.module, None)]))
                return
            self._report("cp.state", "takes as many entries as it has tokens, from the first on", operator)
        if name.startswith(_TRIANGLES) and any(map(self.tokens.has, tensors)):
            self._report("cp.mask", "makes a mask of its own", operator)
        super().operator(operator)

    def _report(self, code: str, what: str, operator: Operator) -> None:
        self.problems.append(problem_at(code, what, operator))

    def _note(self, **values: Any) -> None:
        """Note something of the attention that runs."""
        around = [name for name in self.rows if name == self.running[-1] or self.running[-1].startswith(f"{name}.")]
        if around:
            row = self.rows[around[-1]]
            self.rows[around[-1]] = replace(row, **{key: max(value, getattr(row, key)) for key, value in values.items()})
