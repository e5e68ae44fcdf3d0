"""Where a causal language model of transformers can be cut into pipeline stages: read from one forward without values.

What crosses a cut is what the last layer before it returns (:mod:`~meshwright.distributed.pipeline.cut`). Whether this is all,
is read from one forward on the meta device. Every tensor carries what it was computed from: a layer, or what runs before all
layers. A layer that reads anything of another layer besides its hidden state cannot be separated from it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.distributed.pipeline.cut import crossing_of, cut_model
from meshwright.errors import Problems, Refusal
from meshwright.models.reading.tracing import (
    call_on_meta,
    first_that_runs,
    hooked,
    meta_positions,
    meta_tensors,
    no_attention,
    prime_length,
)
from meshwright.plan.axes.pipeline.stage_plan import cut_of
from meshwright.plan.given.cut_points import LayerFacts, LeadingFacts, StageFacts
from meshwright.plan.given.hidden_argument import hidden_argument
from meshwright.plan.given.names import holder_of, inside
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_stages"]

_BEFORE = -1
"""Where a tensor comes from if parameters outside of the layers were used for it before the first layer."""


# -- reading -----------------------------------------------------------------------------------------------------------------


def trace_stages(model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule] = ()) -> StageFacts:
    """Return where a model can be cut.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        layers: names of its layers.
        experts: its mixtures. They are not called, because what they do depends on values.
    """
    if model.config.get_text_config() is not model.config:
        return StageFacts(
            problems=(
                Refusal("pp.towers", "it has parts beside its language model, whose stages would not run what is around it"),
            )
        )
    found, why = first_that_runs(partial(_traced, model, layers, experts))
    if found is None:
        return StageFacts(problems=(Refusal("model.values", f"its forward cannot be traced without values ({why})"),))
    if found.problems or len(found.layers) < 2:
        return found
    return replace(found, problems=_problems_of_parts(model, found, experts))


def _problems_of_parts(model: "PreTrainedModel", facts: StageFacts, experts: Sequence[ExpertsRule]) -> tuple[str, ...]:
    """Return why a model that is cut in two does not run: it may read a module of a layer that is not there."""
    middle, shared = len(facts.layers) // 2, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for begin, end in ((0, middle), (middle, len(facts.layers))):
        part = copy.deepcopy(model, dict(shared))
        cut_model(part, cut_of(facts, begin, end))
        positions = meta_positions(prime_length(model), rows=2)  # one row would not show what is added up over rows
        if begin:
            dtype = next(model.parameters()).dtype
            crossing_of(part).received = torch.empty((*positions.shape, facts.hidden), dtype=dtype, device="meta")
        run = partial(call_on_meta, part, experts, no_attention, meta_tensors(part), positions)
        _, why = first_that_runs(run)
        if not why and all(tensor.is_meta for tensor in shared.values()):
            _, why = first_that_runs(partial(lambda model, _: model.apply(model._init_weights), part), (None,))
        if why:
            return (Refusal("pp.halves", f"cut in two, it does not run, or cannot be initialised ({why})"),)
    return ()


def _traced(
    model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule], mask_device: str | None
) -> StageFacts:
    tensors = meta_tensors(model)
    trace = _Trace(model, layers, tensors)
    positions = meta_positions(prime_length(model))
    with trace.watching(model):
        call_on_meta(model, experts, trace.attend, tensors, positions, mask_device)
    return trace.facts()


class _Trace(TorchDispatchMode):
    """Follows what each tensor was computed from, and records how layers are called."""

    def __init__(self, model: nn.Module, layers: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.expected = set(layers)
        self.parameters = {name for name, _ in model.named_parameters()}
        self.all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self.first_names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self.of_tensor = WeakIdKeyDictionary()
        for name in self.parameters:
            self.of_tensor[tensors[name]] = name
        self.origins = WeakIdKeyDictionary()
        self.layers: list[LayerFacts] = []
        self.leading: dict[str, LeadingFacts] = {}
        self.calls: list[tuple[str, bool]] = []
        self.used: dict[str, set[str]] = {}
        self.problems = Problems()
        self.hidden: torch.Tensor | None = None
        self.running: int | None = None
        self._stack: list[str] = [""]
        self._handles: list[Any] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        for name, module in model.named_modules():
            if name in self.expected:
                self._handles.append(module.register_forward_pre_hook(self._enter_layer(name), with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._leave_layer(name), with_kwargs=True))
            elif name:
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
        with hooked(self._handles), self:
            yield

    def facts(self) -> StageFacts:
        """Return what was read."""
        missing = self.expected - {layer.name for layer in self.layers}
        if missing:
            self.problems.add("pp.unused", f"its layers {', '.join(sorted(missing)[:3])} do not run")
        body = _around(self.model, [layer.name for layer in self.layers])
        for name, sides in self.used.items():
            owner = holder_of(name)
            if owner in ("", body) or inside(body, owner):
                self.problems.add(
                    "pp.outside", f"{owner or 'the model'!r} uses its parameter {name!r} itself, outside of its layers"
                )
            if "between" in sides:
                self.problems.add("pp.outside", f"parameter {name!r} is used between layers, or by layers that do not have it")
        with_parameters = set(self.calls_with_parameters())
        leading = tuple(facts for name, facts in self.leading.items() if name in with_parameters)
        trailing = tuple(name for name, after in self.calls if after and name in with_parameters)
        opaque = [name for name, after in self.calls if not after and name in with_parameters and name not in self.leading]
        self.problems += [
            Refusal("pp.ends", f"module {name!r} runs before the first layer and returns no tensor") for name in opaque
        ]
        tied = {name for name, sides in self.used.items() if {"first", "last"} <= sides}
        for name in (facts.name for facts in leading):
            own = {self.first_names[parameter] for parameter in self.all_names if inside(parameter, name)}
            if own & tied and (len(own) > 1 or not all(inside(parameter, name) for parameter in own)):
                self.problems.add(
                    "pp.ends", f"module {name!r} has a matrix that runs after the last layer too, and other parameters"
                )
        both = {facts.name for facts in leading} & set(trailing)
        self.problems += [
            Refusal("pp.ends", f"module {name!r} runs before the first layer and after the last") for name in sorted(both)
        ]
        idle = sorted(
            name
            for name in self.parameters
            if name not in self.used and not any(inside(name, layer) for layer in self.expected)
        )
        if idle:
            self.problems.add("pp.unused", f"parameter {idle[0]!r} is used by no stage ({len(idle)} such parameters)")
        used = {name: tuple(side for side in ("first", "last") if side in sides) for name, sides in self.used.items()}
        return StageFacts(
            tuple(self.layers),
            leading,
            tuple(dict.fromkeys(trailing)),
            body,
            used,
            0 if self.hidden is None else self.hidden.shape[-1],
            tuple(dict.fromkeys(self.problems)),
        )

    def calls_with_parameters(self) -> Iterator[str]:
        """Yield the names of the outermost modules outside of layers that ran and have parameters."""
        called = dict.fromkeys(name for name, _ in self.calls)
        own = [name for name in called if any(inside(parameter, name) for parameter in self.all_names)]
        yield from (name for name in own if not any(other != name and inside(name, other) for other in own))

    # -- modules -----------------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self.names[id(module)])

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._stack.pop()
        if self.running is not None or any(inside(layer, name) for layer in self.expected):
            return
        self.calls.append((name, bool(self.layers)))
        if not self.layers:
            given, made = _first_tensor((args, kwargs)), _first_tensor(output)
            if given is not None and made is not None and made.ndim:
                self.leading[name] = LeadingFacts(name, made.shape[-1], made.ndim == given.ndim + 1)

    def _enter_layer(self, name: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if any(layer.name == name for layer in self.layers):
                self.problems.add("pp.twice", f"layer {name!r} runs twice in a forward")
            place, argument = hidden_argument(module)
            value = kwargs.get(argument, args[place] if place < len(args) else None)
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                self.problems.add("pp.hidden_state", f"layer {name!r} does not get its hidden state as {argument!r}")
            elif self.hidden is not None and value is not self.hidden:
                self.problems.add("pp.reads_more", f"the input of layer {name!r} is not the output of {self.layers[-1].name!r}")
            if isinstance(value, torch.Tensor):
                fresh = _fresh(value)
                args = tuple(fresh if item is value else item for item in args)
                kwargs = {key: fresh if item is value else item for key, item in kwargs.items()}
            self.layers.append(LayerFacts(name, (place, argument)))
            self.running = len(self.layers) - 1
            self._stack.append(name)
            for item in tree_leaves((args, kwargs)):  # also what no operator reads here, such as indices
                if isinstance(item, torch.Tensor) and (origins := self.origins.get(item)):
                    self._report(min(origins))
            return args, kwargs

        return enter

    def _leave_layer(self, name: str) -> Callable[..., Any]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            index, self.running = self.running, None
            self._stack.pop()
            assert index is not None
            several = isinstance(output, tuple)
            value = output[0] if several and output else output
            if not isinstance(value, torch.Tensor):
                self.problems.add(
                    "pp.hidden_state", f"layer {name!r} returns {type(output).__name__}, and no hidden state first"
                )
                return None
            self.layers[index] = LayerFacts(name, self.layers[index].argument, len(output) if several else 0)
            self.hidden = _fresh(value)
            return (self.hidden, *output[1:]) if several else self.hidden

        return leave

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Stand in for the attention function; read all that it would read."""
        key.sum()
        batch, heads, tokens, _ = query.shape
        return value.new_empty((batch, tokens, heads, value.shape[3])) + query.sum(), None

    # -- operators ---------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        origins: set[int] = set()
        for tensor in tensors:
            origins |= self.origins.get(tensor, set())
            if (parameter := self.of_tensor.get(tensor)) is not None:
                self._use(parameter)
                if self.running is None and not self.layers:
                    origins.add(_BEFORE)
        foreign = origins - {self.running if self.running is not None else _BEFORE}
        if self.running is None and self.layers:
            foreign |= origins
        if foreign:
            self._report(min(foreign))
        if self.running is not None and (origins or any(tensor in self.of_tensor for tensor in tensors)):
            origins = {self.running}
        for item in tree_leaves(result):
            if isinstance(item, torch.Tensor) and origins:
                self.origins[item] = origins
        return result

    def _use(self, parameter: str) -> None:
        if self.running is not None:
            if not inside(parameter, self.layers[self.running].name):
                self.used.setdefault(parameter, set()).add("between")
        else:
            after = len(self.layers) == len(self.expected)
            self.used.setdefault(parameter, set()).add("last" if after else "between" if self.layers else "first")

    def _report(self, origin: int) -> None:
        reader = (
            f"layer {self.layers[self.running].name!r}" if self.running is not None else f"{self._stack[-1] or 'the model'!r}"
        )
        source = "what runs before the first layer" if origin == _BEFORE else f"layer {self.layers[origin].name!r}"
        self.problems.add("pp.reads_more", f"{reader} reads more than its hidden state of {source}")


def _first_tensor(values: Any) -> torch.Tensor | None:
    return next((item for item in tree_leaves(values) if isinstance(item, torch.Tensor)), None)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape that comes from nowhere."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _around(model: nn.Module, layers: Sequence[str]) -> str:
    """Return the innermost module around some modules that is called with tokens."""
    parts = [holder_of(name).split(".") for name in layers]
    shared = list(takewhile(lambda items: len(set(items)) == 1, zip(*parts, strict=False)))
    name = ".".join(items[0] for items in shared)
    while name and "input_ids" not in signature(model.get_submodule(name).forward).parameters:
        name = holder_of(name)
    return name
