"""A pipeline stage, made of a model in place: the layers of other stages become modules that pass the hidden state on.

Names, numbers and types of layers stay, and the model's own forward computes masks and rotary embeddings for each stage. So
specs, plans, checkpoints and files hold unchanged.

What crosses a cut is what the last layer before it returns, and what later layers read beside it
(:mod:`~meshwright.distributed.pipeline.crossing`). Whatever the model does before its first layer (embeddings,
multipliers, learned positions) is the first stage's: on a later stage, what was received replaces what the forward made of
zeros. Whatever it does after its last layer (norm, head, soft caps) is the last stage's: other stages call only the module
around the layers, and take the hidden state where their last layer returns it.
"""

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.distributed.pipeline.crossing import Crossing, receives
from meshwright.errors import PlanError
from meshwright.plan.given.cut_points import sized
from meshwright.plan.given.hidden_argument import HIDDEN, Argument, value_of
from meshwright.plan.given.names import inside, within
from meshwright.plan.result.cut_action import Cut

__all__ = ["crossing_of", "cut_model", "cut_of_model", "runs"]

_CROSSING, _CUT = "_meshwright_crossing", "_meshwright_cut"


class _Named(nn.Module):
    """Stands for a module that does not run here, with its plain attributes, such as the type of a layer.

    Modules in it that have buffers are there too, with tensors without values: a model may fill those of all its layers.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool | None):
                setattr(self, name, value)
        for name, buffer in module.named_buffers(recurse=False):
            vars(self)[name] = torch.empty_like(buffer, device="meta")
        for name, child in module.named_children():
            if any(True for _ in child.buffers()):
                self.add_module(name, _Named(child))


class _Passage(_Named):
    """Stands for a layer of another stage. Before the stage's layers it returns what was received; after them, its input."""

    def __init__(
        self, layer: nn.Module, crossing: Crossing, argument: Argument, returned: int, index: int, *, before: bool
    ) -> None:
        super().__init__(layer)
        vars(self)["_facts"] = (crossing, argument, returned, index, before)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a hidden state in the form in which the layer would."""
        crossing, argument, returned, index, before = vars(self)["_facts"]
        hidden = value_of(argument, args, kwargs, "of another stage")
        if before:
            hidden = crossing.hidden
        else:
            crossing.sent = hidden
            crossing.note(index, args, kwargs)
        return (hidden, *[None] * (returned - 1)) if returned else hidden


class _Empty(nn.Module):
    """Stands for a module before the first layer, on later stages: zeros of the right shape, which no layer reads."""

    def __init__(self, crossing: Crossing, features: int, lookup: bool, sizes: tuple[int, ...]) -> None:
        super().__init__()
        vars(self)["_facts"] = (crossing, _zeros(crossing, features, lookup, sizes))

    @property
    def weight(self) -> torch.Tensor | None:
        """A tensor on the device of the stage, for models that ask an embedding for its device."""
        crossing: Crossing = vars(self)["_facts"][0]
        return crossing.received

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return zeros [..., features] for [...] (an embedding) or [..., width]."""
        zeros: torch.Tensor = vars(self)["_facts"][1](*args, **kwargs)
        return zeros


def _zeros(crossing: Crossing, features: int, lookup: bool, sizes: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if sizes and crossing.received is not None:
            return crossing.received.new_zeros(sized(sizes, *crossing.received.shape[:2]))
        given = next((item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)), None)
        if given is None:
            raise PlanError(
                "pp.stage_call",
                "a module before the first layer is called without a tensor; a later stage cannot do without it",
            )
        assert crossing.received is not None
        return crossing.received.new_zeros((*(given.shape if lookup else given.shape[:-1]), features))

    return forward


class _Same(nn.Module):
    """Stands for a module after the last layer, on earlier stages: it returns its input.

    A model may ask it for the dtype of a parameter, or give that a first value: it has tensors without values.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module.named_parameters(recurse=False):
            vars(self)[name] = torch.empty_like(parameter, device="meta")

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the input."""
        given: torch.Tensor = value_of((0, HIDDEN), args, kwargs, "of another stage")
        return given


def cut_model(model: nn.Module, action: Cut, mesh: object = None) -> None:
    """Make a stage of a model, in place.

    Args:
        model: the whole model, on the meta device: what belongs to other stages is dropped.
        action: where it is cut.
        mesh: not used.

    Raises:
        PlanError: the action is that of the plan of the whole model.
    """
    if action.end - action.begin == len(action.order):
        raise PlanError(
            "pp.stages",
            "the plan is that of a whole model with stages; parallelize each stage with its part of the plan "
            "(meshwright.distributed.pipeline.stage_parts.make_parts)",
        )
    crossing = Crossing(action)
    first, last = action.begin == 0, action.end == len(action.order)
    for index, (name, position, argument, returned) in enumerate(action.order):
        if not action.begin <= index < action.end:
            layer, before = model.get_submodule(name), index < action.begin
            _replace(model, name, _Passage(layer, crossing, (position, argument), returned, index, before=before))
        elif given := crossing.given(index):
            receives(model.get_submodule(name), crossing, given)
    for name in action.idle if not first else ():
        holder, _, own = name.rpartition(".")
        around = model.get_submodule(holder)
        if own in around._parameters:  # a model may give it a first value
            unused = around._parameters.pop(own)
            vars(around)[own] = None if unused is None else torch.empty_like(unused, device="meta")
        else:
            _replace(model, name, _Named(around.get_submodule(own)))
    held = action.held if first or last else ()
    for name in action.blank if not first else ():
        holder, _, own = name.rpartition(".")
        around = model.get_submodule(holder)
        parameter = around._parameters.pop(own)
        assert parameter is not None
        vars(around)[own] = torch.empty_like(parameter, device="meta")
        crossing.blank(around, own, tuple(parameter.shape))
    for name, features, lookup, sizes in action.leading if not first else ():
        _replace(model, name, _with_held(model, name, _Empty(crossing, features, lookup, sizes), held))
    for name in action.trailing if not last else ():
        _replace(model, name, _with_held(model, name, _Same(model.get_submodule(name)), held))
    if not last:
        _call_body(model, action.body, crossing)
    vars(model)[_CROSSING], vars(model)[_CUT] = crossing, action


def runs(model: nn.Module, name: str) -> bool:
    """Return whether a module of a model, which may be a stage, computes what it does in the whole model.

    Before its first layer, a later stage computes with zeros.
    """
    cut: Cut | None = vars(model).get(_CUT)
    if cut is None:
        return True
    if isinstance(model.get_submodule(name), _Named | _Empty | _Same):
        return False
    if cut.end < len(cut.order) and (within(name, cut.after) or _is_plain_norm(model.get_submodule(name))):
        return False  # what follows the layers runs on this stage too, and what it returns is not used
    own = [layer for layer, *_ in cut.order[cut.begin : cut.end]]
    return cut.begin == 0 or within(name, [*own, *cut.trailing])


def _is_plain_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.parameters())


def crossing_of(model: nn.Module) -> Crossing:
    """Return what enters and leaves a stage, for a model that was cut."""
    crossing: Crossing = vars(model)[_CROSSING]
    return crossing


def cut_of_model(model: nn.Module) -> Cut | None:
    """Return the action that cut a model; ``None``: it is whole."""
    found: Cut | None = vars(model).get(_CUT)
    return found


def _call_body(model: nn.Module, body: str, crossing: Crossing) -> None:
    """Let the model call only the module around its layers, and return the hidden state that leaves the stage."""
    inner = model.get_submodule(body) if body else model.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        inner(*args, **kwargs)
        return crossing.leave()

    model.forward = forward


def _with_held(model: nn.Module, name: str, stand_in: nn.Module, held: Collection[str]) -> nn.Module:
    """Return what stands for a module, with those of its parameters that the stage holds, under their names.

    The modules around them are of their classes, by which a model gives first values.
    """
    own = [parameter for parameter in held if inside(parameter, name)]
    if not own:
        return stand_in
    alone = _alone(model.get_submodule(name), [parameter[len(name) + 1 :] for parameter in own])
    vars(alone)["forward"] = stand_in.forward
    return alone


def _alone(module: nn.Module, kept: Collection[str]) -> nn.Module:
    """Return a module of the same class with some of its parameters alone, which are initialized and loaded as in it.

    In place of its others, it has tensors without values.
    """
    alone = copy.copy(module)
    parameters = {name: value for name, value in module._parameters.items() if name in kept or value is None}
    others = {name: value for name, value in module._parameters.items() if name not in parameters}
    vars(alone).update({name: torch.empty_like(value, device="meta") for name, value in others.items() if value is not None})
    children = {part: [name.partition(".")[2] for name in kept if inside(name, part)] for part in module._modules}
    vars(alone).update(
        _parameters=parameters,
        _buffers=dict(module._buffers),
        _modules={part: _alone(module.get_submodule(part), names) for part, names in children.items() if names},
    )
    return alone


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    holder, _, own = name.rpartition(".")
    model.get_submodule(holder).add_module(own, module)
