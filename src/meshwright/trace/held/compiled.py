"""What compiled layers keep less than others for their backward, as torch's compiler decides it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.distributed._torch_compat.fake import FakeTensorMode, without_propagation
from meshwright.distributed.update.flagged import local
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.names import nearest
from meshwright.plan.result.program import Compile
from meshwright.trace.kernels import opaque_kernels
from meshwright.trace.live import Kind
from meshwright.trace.step import AFTER_LOSS, BEFORE_LOSS, FORWARD, LOSS, StepTrace, prepared_step, traced
from meshwright.train.start.setup import RunSetup

__all__ = ["as_compiled", "spared_by_compiler"]

LOGGER = logging.getLogger(__name__)


def spared_by_compiler(setup: RunSetup, layers: Sequence[str], *, device: bool, load: float) -> dict[str, int]:
    """Return how many bytes of a microbatch layers keep less if they are compiled.

    Recomputed layers keep their inputs, compiled or not. A layer of which no graph can be made here is taken to keep as much as
    without the compiler.

    Args:
        setup: a run without a pipeline, whose plan compiles layers. Its model is on the meta device, and is used up.
        layers: names of the layers that are asked for.
        device: see :func:`~meshwright.trace.step.trace_step`.
        load: see there.

    Raises:
        UnsupportedError: what the model computes depends on values.
    """
    plan = setup.plan
    whole = {name for name in layers if plan.unit(name).activation_checkpointing is ActivationCheckpointing.NONE}
    actions = [action for action in plan.program if isinstance(action, Compile)]
    modules = {action.module: nearest(f"{action.module}.", whole) for action in actions}
    modules = {name: layer for name, layer in modules.items() if layer}
    uncompiled = replace(plan, program=tuple(action for action in plan.program if not isinstance(action, Compile)))
    setup = replace(setup, plan=uncompiled)
    return traced(setup, partial(_spared, modules), device=device, load=load) if modules else {}


def as_compiled(step: StepTrace, layers: Sequence[str], spared: Mapping[str, int]) -> StepTrace:
    """Return the trace of a step if its layers keep less.

    A layer that is in forward or in backward holds what it holds without the compiler, which no graph says.

    Args:
        step: the trace.
        layers: its layers.
        spared: the bytes that each keeps less of a microbatch.
    """

    def less(moment: str, held: Mapping[Kind, int], *own: str) -> dict[Kind, int]:
        whole = [name for name in _kept_whole(moment, layers) if not own or name in own]
        kept = held.get(Kind.ACTIVATIONS, 0) - sum(spared.get(name, 0) for name in whole)
        return {**held, Kind.ACTIVATIONS: max(0, kept)}

    return replace(
        step,
        moments={moment: less(moment, held) for moment, held in step.moments.items()},
        noted={moment: less(moment, held) for moment, held in step.noted.items()},
        of_layers={
            moment: {name: less(moment, held, name) for name, held in found.items()} for moment, found in step.of_layers.items()
        },
    )


def _kept_whole(moment: str, layers: Sequence[str]) -> Sequence[str]:
    """Return the layers that keep all that their backward needs in a moment, and do nothing else."""
    if moment in (BEFORE_LOSS, LOSS, AFTER_LOSS):
        return layers
    if moment == FORWARD:
        return layers[:-1]
    return layers[: layers.index(moment)] if moment in layers else ()


class _EnoughError(BaseException):
    """All modules were seen: the rest of the step need not run."""


def _spared(modules: Mapping[str, str], setup: RunSetup, tensors: FakeTensorMode) -> dict[str, int]:
    """Return the bytes by layer, if these modules of the layers are compiled."""
    found: dict[str, int] = {}

    def called(name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(found) == len(modules):
            raise _EnoughError
        if name in found or not torch.is_grad_enabled():  # as in the pass of a reference
            return forward(*args, **kwargs)
        with _kept(module) as kept:
            result = forward(*args, **kwargs)
        found[name] = 0
        try:
            found[name] = max(0, sum(kept.values()) - _kept_by_compiler(module, forward, args, kwargs))
        except Exception as error:  # whatever the tracer of the compiler raises
            LOGGER.info("%s: the compiler's graph of it is not known (%s: %s)", name, type(error).__name__, error)
        return result

    step, spared = prepared_step(setup, "cpu", tensors), dict.fromkeys(modules.values(), 0)
    with suppress(_EnoughError), tensors, without_propagation(), ExitStack() as stack:
        for name in modules:
            stack.enter_context(_forward_of(setup.model.get_submodule(name), partial(called, name)))
        step()
    for name, size in found.items():
        spared[modules[name]] += size
    return spared


@contextmanager
def _forward_of(module: nn.Module, called: Callable[..., Any]) -> Iterator[None]:
    """Inside, a function is called in place of the forward of a module, with the module and its forward before the inputs."""
    before = vars(module).get("forward")
    vars(module)["forward"] = partial(called, module, module.forward)
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before


@contextmanager
def _kept(module: nn.Module) -> Iterator[dict[int, int]]:
    """Inside, the bytes of all storages that autograd keeps are noted, without those of the parameters of a module."""
    alive: list[torch.Tensor] = []
    there = {local(value).untyped_storage()._cdata for value in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in there:
            alive.append(tensor)
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def _kept_by_compiler(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> int:
    """Return the bytes that a compiled module keeps."""
    from meshwright.distributed._torch_compat.joint_graph import kept_by_compiler  # takes a second to import

    parameters = dict(module.named_parameters(prefix="module"))
    around = _Around(module, forward)
    values, form = tree_flatten((args, kwargs))
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]

    def run(given: Sequence[torch.Tensor], *tensors: torch.Tensor) -> Any:
        filled = list(values)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        inputs, named = tree_unflatten(filled, form)
        result = torch.func.functional_call(around, dict(zip(parameters, given, strict=True)), inputs, named)
        return [item for item in tree_flatten(result)[0] if isinstance(item, torch.Tensor)]

    own, tensors = (
        [value.detach().requires_grad_(value.requires_grad) for value in some]
        for some in (parameters.values(), (values[place] for place in places))
    )
    with opaque_kernels():
        return kept_by_compiler(run, own, *tensors)


class _Around(nn.Module):
    """Calls the forward of a module, and no hook of it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)
