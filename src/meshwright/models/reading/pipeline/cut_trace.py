"""Where a causal language model of transformers can be cut into pipeline stages: read from one forward without values.

What crosses a cut is what the last layer before it returns, and what its call gives a later layer of what was made before
(:mod:`~meshwright.distributed.pipeline.crossing`). This is read from one forward on the meta device. Every tensor carries what
it was computed from: layers, or what runs before all layers. A layer that reads anything else of another layer, or a tensor
that cannot be sent, cannot be separated from it.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from inspect import signature
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.distributed.pipeline.crossing import tensors_of_call
from meshwright.errors import Problems, Refusal
from meshwright.models.reading.model_code import place_now
from meshwright.models.reading.pipeline.carried_tensors import CarriedTensors
from meshwright.models.reading.repeated_layers import RepeatedLayers
from meshwright.models.reading.tracing import (
    Attention,
    Inputs,
    Labels,
    Operator,
    Tracer,
    meta_positions,
    prime_length,
    tensors_in,
    traced,
)
from meshwright.plan.given.cut_points import ROWS, LayerFacts, LeadingFacts, StageFacts
from meshwright.plan.given.hidden_argument import first_of, hidden_argument, with_first
from meshwright.plan.given.names import holder_of, inside, within
from meshwright.plan.given.parameter_storage import names_of_parameters
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["StageTracer", "stage_positions", "stages_of_all", "trace_stages"]

_BEFORE = -1
"""Where a tensor comes from if parameters outside of the layers were used for it before the first layer."""


def trace_stages(model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule] = ()) -> StageFacts:
    """Return where a model can be cut, as far as one forward shows it; more is tried by :mod:`.halves`.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        layers: names of its layers.
        experts: its mixtures. They are not called, because what they do depends on values.
    """
    positions = stage_positions(model)
    found, why = traced(model, experts, partial(StageTracer, model, layers), positions=positions)
    if found is not None and len(found.layers) < len(layers):  # those of an image tower, or that read images, do not run
        running = list(dict.fromkeys(layer.name for layer in found.layers))
        found, why = traced(model, experts, partial(StageTracer, model, running), positions=positions)
    if found is None:
        return StageFacts(problems=(Refusal("model.values", f"its forward cannot be traced without values ({why})"),))
    return found.facts()


def stages_of_all(found: StageFacts, _: RepeatedLayers) -> StageFacts | None:
    """Return what was found if it holds for all layers: all are called, and no layer reads more than its hidden state."""
    return None if found.problems or found.uncut or found.carried else found


def stage_positions(model: nn.Module) -> torch.Tensor:
    """Return positions of which neither the rows nor the tokens divide a size: otherwise features would look like them."""
    return meta_positions(length := prime_length(model), rows=prime_length(model, above=length))


class StageTracer(Tracer):
    """Follows what each tensor was computed from, and records how layers are called."""

    def __init__(self, model: nn.Module, layers: Sequence[str], inputs: Inputs) -> None:
        super().__init__(inputs)
        self.model, self.expected = model, set(layers)
        tied = names_of_parameters(model).values()
        self.first_names = {name: names[0] for names in tied for name in names}
        self.all_names = {names[0]: names for names in tied}
        self.parameters = Labels({inputs.tensors[names[0]]: names[0] for names in tied})
        self.carried = CarriedTensors(tuple(inputs.positions.shape))
        self.users: dict[str, list[int]] = {}
        self.origins = Labels()
        self.layers: list[LayerFacts] = []
        self.leading: dict[str, LeadingFacts] = {}
        self.calls: list[tuple[str, bool]] = []
        self.used: dict[str, set[str]] = {}
        self.problems = Problems()
        self.hidden: torch.Tensor | None = None
        self.running: int | None = None
        self.in_layers: set[str] = set()
        self.ran: set[str] = set()
        self.reported: set[tuple[str, str]] = set()
        self.uncut: dict[int, str] = {}
        self.takes_tokens: set[str] = set()

    def facts(self) -> StageFacts:
        """Return what was read."""
        if len(self.layers) > 1 and len(self.uncut) == len(self.layers) - 1:
            for why in dict.fromkeys(self.uncut.values()):
                self.problems.add("pp.reads_more", why)
        sizes = () if self.hidden is None else self.carried.sizes_of(self.hidden)
        if self.hidden is not None and ROWS not in sizes:
            shape = tuple(self.hidden.shape)
            self.problems.add(
                "pp.hidden_state",
                f"the hidden state of {self.inputs.positions.shape[0]} rows of {self.inputs.positions.shape[1]} tokens has the "
                f"shape {shape}, and no dimension for the rows and one for the tokens",
            )
        body = _around([layer.name for layer in self.layers], self.takes_tokens)
        blank = tuple(name for name, sides in self.used.items() if sides == {"first"} and holder_of(name) == body)
        for name, sides in self.used.items():
            owner = holder_of(name)
            if (owner in ("", body) or inside(body, owner)) and name not in blank:
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
        ends = [*(facts.name for facts in leading), *trailing]
        for name in sorted(tied):
            if not within(holder_of(name), ends):
                self.problems.add(
                    "pp.ends", f"{name!r} runs before the first layer and after the last, and is in no module there"
                )
        both = {facts.name for facts in leading} & set(trailing)
        self.problems += [
            Refusal("pp.ends", f"module {name!r} runs before the first layer and after the last") for name in sorted(both)
        ]
        firsts = sorted(set(self.first_names.values()))
        unused = [name for name in firsts if name not in self.used and not within(name, self.expected)]
        at_the_end = {name for name in unused if within(name, trailing)}  # the last stage alone has these modules
        idle = self._idle([name for name in unused if name not in at_the_end])
        idle = (*idle, *(name for name in unused if name not in at_the_end and not within(name, idle)))
        self.used |= {name: {"last" if name in at_the_end else "first"} for name in unused}
        used = {name: tuple(side for side in ("first", "last") if side in sides) for name, sides in self.used.items()}
        return StageFacts(
            tuple(self.layers),
            leading,
            tuple(dict.fromkeys(trailing)),
            body,
            used,
            sizes,
            tuple(dict.fromkeys(self.problems)),
            tuple(name for name, after in dict.fromkeys(self.calls) if after and self._plain(name)),
            idle,
            dict(sorted(self.uncut.items())),
            self.carried.facts(),
            blank,
        )

    def _idle(self, unused: Collection[str]) -> tuple[str, ...]:
        """Return the outermost modules that do not run and have parameters, all of which nobody uses."""
        found: list[str] = []
        for name, module in self.model.named_modules():
            own = {self.first_names[f"{name}.{parameter}"] for parameter, _ in module.named_parameters()} if name else set()
            if own and name not in self.ran and own <= {*unused} and not within(name, found):
                found.append(name)
        return tuple(found)

    def _plain(self, name: str) -> bool:
        """Return whether a module has no parameters, and does not run in a layer."""
        return name not in self.in_layers and not any(inside(parameter, name) for parameter in self.first_names)

    def calls_with_parameters(self) -> Iterator[str]:
        """Yield the names of the outermost modules outside of layers that ran and have parameters."""
        called = dict.fromkeys(name for name, _ in self.calls)
        own = [name for name in called if any(inside(parameter, name) for parameter in self.first_names)]
        yield from (name for name in own if not any(other != name and inside(name, other) for other in own))

    # -- modules -----------------------------------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Note how a layer is called, and give it a hidden state that comes from nowhere."""
        self.ran.add(name)
        if "input_ids" in (given := signature(module.forward).parameters):
            place = [*given].index("input_ids")
            if kwargs.get("input_ids", args[place] if place < len(args) else None) is not None:
                self.takes_tokens.add(name)
        if name not in self.expected:
            if self.running is not None:
                self.in_layers.add(name)
            return None
        if any(layer.name == name for layer in self.layers):
            self.problems.add("pp.twice", f"layer {name!r} runs twice in a forward")
        place, argument = hidden_argument(module)
        value = kwargs.get(argument, args[place] if place < len(args) else None)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            self.problems.add("pp.hidden_state", f"layer {name!r} does not get its hidden state as {argument!r}")
        elif self.hidden is not None and not _is_whole(value, self.hidden):
            self.problems.add("pp.reads_more", f"the input of layer {name!r} is not the output of {self.layers[-1].name!r}")
        if isinstance(value, torch.Tensor):
            own = _fresh(value)
            self.carried.enter(len(self.layers), tensors_of_call(args, kwargs), value, self.origins)
            args = tuple(own if item is value else item for item in args)
            kwargs = {key: own if item is value else item for key, item in kwargs.items()}
        self.running = len(self.layers)
        self.layers.append(LayerFacts(name, (place, argument)))
        return args, kwargs

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Note what a module outside of the layers did, or what a layer returns."""
        if name in self.expected:
            return self._leave_layer(name, output)
        if self.running is not None or any(inside(layer, name) for layer in self.expected):
            return None
        self.calls.append((name, bool(self.layers)))
        given, made = tensors_in((args, kwargs)), tensors_in(output)
        if not self.layers and given and made and made[0].ndim:
            self.leading[name] = LeadingFacts(name, made[0].shape[-1], not given[0].is_floating_point())
        elif not self.layers and isinstance(output, torch.Tensor) and (sizes := self.carried.sizes_of(output)):
            self.leading[name] = LeadingFacts(name, output.shape[-1], False, sizes)
        return None

    def _leave_layer(self, name: str, output: Any) -> Any:
        index, self.running = self.running, None
        assert index is not None
        several = isinstance(output, tuple | list)
        value = first_of(output)
        if not isinstance(value, torch.Tensor):
            self.problems.add("pp.hidden_state", f"layer {name!r} returns {type(output).__name__}, and no hidden state first")
            return None
        self.layers[index] = LayerFacts(name, self.layers[index].argument, len(output) if several else 0)
        self.hidden = _fresh(value)
        self.origins.put([self.hidden], {index})
        return with_first(output, self.hidden)

    # -- operators ---------------------------------------------------------------------------------------------------------

    def attention(self, call: Attention) -> None:
        """An attention reads queries, keys and values, and whatever else it is given."""
        for tensors in ([call.key], [call.value], [call.value, call.query], tensors_in((call.mask, call.options))):
            self._computed(tensors, [call.output], call.module)

    def operator(self, operator: Operator) -> None:
        """Carry on what results were computed from, and report what should not be read here."""
        if operator.function._schema.is_mutable and self.running is None and 0 < len(self.layers) < len(self.expected):
            changed = [
                tensor for tensor in operator.results if self.hidden is not None and _storage(tensor) == _storage(self.hidden)
            ]
            if changed:
                last = self.layers[-1].name
                self.problems.add("pp.reads_more", f"the output of layer {last!r} is changed after it{place_now()}")
        self._computed(operator.tensors, operator.results, operator.module)

    def _computed(self, tensors: list[torch.Tensor], results: list[torch.Tensor], module: str) -> None:
        if self.running is not None:
            tensors = [tensor for tensor in tensors if not self._carry(tensor)]
        origins: set[int] = set().union(*self.origins.among(tensors))
        parameters = self.parameters.among(tensors)
        for parameter in parameters:
            self._use(parameter)
        if parameters and self.running is None and not self.layers:
            origins.add(_BEFORE)
        # Between layers, what is computed may be for the call of one of them: then it is carried.
        foreign = origins - {self.running} if self.running is not None else set()
        if self.running is None and len(self.layers) == len(self.expected):
            foreign = origins - {len(self.layers) - 1}
        if foreign:
            self._report(min(foreign), module)
        if self.running is not None and (origins or parameters):
            origins = {self.running}
        if origins:
            self.origins.put(results, origins)

    def _carry(self, tensor: torch.Tensor) -> bool:
        """Return whether the call of the running layer gives it a tensor of others, which can cross cuts."""
        assert self.running is not None
        if (made := self.carried.read(tensor)) is None:
            return False
        for index in range(min(made) + 1, max(made) + 1):  # neither side has all that it is computed from
            reader = self.layers[self.running].name
            self._uncut(index, f"layer {reader!r} reads what is computed of several layers together{place_now()}")
        return True

    def _uncut(self, index: int, why: str) -> None:
        if index > 0:
            self.uncut.setdefault(index, why)

    def _use(self, parameter: str) -> None:
        if self.running is not None:
            layer = self.layers[self.running].name
            if any(inside(name, layer) for name in self.all_names[parameter]):
                users = self.users.setdefault(parameter, [self.running])
                for index in range(users[0] + 1, self.running + 1):
                    self._uncut(index, f"layers {self.layers[users[0]].name!r} and {layer!r} share {parameter!r}{place_now()}")
            else:
                self.used.setdefault(parameter, set()).add("between")
        else:
            after = len(self.layers) == len(self.expected)
            self.used.setdefault(parameter, set()).add("last" if after else "between" if self.layers else "first")

    def _report(self, origin: int, module: str) -> None:
        reader = f"{module or 'the model'!r}" if self.running is None else f"layer {self.layers[self.running].name!r}"
        source = "what runs before the first layer" if origin == _BEFORE else f"layer {self.layers[origin].name!r}"
        if (reader, source) not in self.reported:
            self.reported.add((reader, source))
            why = f"{reader} reads more than its hidden state of {source}{place_now()}"
            if self.running is not None and origin != _BEFORE:
                for index in range(origin + 1, self.running + 1):
                    self._uncut(index, why)
            else:
                self.problems.add("pp.reads_more", why)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape that comes from nowhere."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _is_whole(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    """Return whether a tensor is another one, or a slice that has all of it: what is done to it twice is then done once."""
    if tensor is of:
        return True
    alike = (tensor.shape, tensor.stride(), tensor.dtype) == (of.shape, of.stride(), of.dtype)
    return alike and tensor.storage_offset() == of.storage_offset() and _storage(tensor) == _storage(of)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _around(layers: Sequence[str], takes_tokens: Collection[str]) -> str:
    """Return the innermost module around some layers among those that are called with tokens; the root if there is none."""
    parts = [holder_of(name).split(".") for name in layers]
    shared = list(takewhile(lambda items: len(set(items)) == 1, zip(*parts, strict=False)))
    name = ".".join(items[0] for items in shared)
    while name and name not in takes_tokens:
        name = holder_of(name)
    return name
