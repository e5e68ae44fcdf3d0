"""Modules that an objective adds to a model, such as a head or a temperature.

They stand in the model under one name, so their parameters are parameters of the model: rows of its plan, sharded, clipped,
updated and saved like all others. The model itself never calls them. The objective does, with what the model returned, so they
are on the last stage of a pipeline, each is an FSDP unit of its own, and traces do not see them.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.distributed.class_names import class_name
from meshwright.errors import Problems
from meshwright.models.weights.initial_values import derive_seed, initialize
from meshwright.plan.given.attentions import Attentions
from meshwright.plan.given.cut_points import Carried, RankSlices, StageFacts
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.given.sliceable_pairs import Pairs
from meshwright.plan.given.spec import ParallelSpec, UnitRule
from meshwright.plan.given.traces import HeadFacts, RegionFacts, Traces
from meshwright.plan.update.matrices import Apart

__all__ = ["ADDED", "add_modules", "added_modules", "initialize_added", "module_problems", "without_added"]

ADDED = "objective"
"""Name of the modules in the model: the parameter ``weight`` of a module ``head`` is ``objective.head.weight``."""


def added_modules(model: nn.Module) -> nn.ModuleDict | None:
    """Return the modules that an objective added to a model; ``None``: it added none, or they are on another stage."""
    found = model._modules.get(ADDED)
    return found if isinstance(found, nn.ModuleDict) else None


def module_problems(modules: Any) -> Problems:
    """Return why modules cannot be added to a model.

    Args:
        modules: what an objective returned; legal is a mapping of names to modules.
    """
    problems, wrong = Problems(), "objective.modules"
    if not isinstance(modules, Mapping):
        problems.add(wrong, f"modules returned {type(modules).__name__}; legal is a mapping of names to modules of torch")
        return problems
    for name, module in modules.items():
        if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict, name):
            problems.add(wrong, f"modules: {name!r} is no name of a module; legal are names such as 'head'")
        if not isinstance(module, nn.Module):
            problems.add(wrong, f"modules[{name!r}]: is {type(module).__name__}; legal is a module of torch")
            continue
        problems += _problems_inside(name, module)
    return problems


def _problems_inside(name: str, module: nn.Module) -> Problems:
    problems = Problems()
    for own, part in module.named_modules(prefix=name):
        holds = any(True for _ in part.parameters(recurse=False))
        if holds and not callable(getattr(part, "reset_parameters", None)):
            problems.add("objective.modules", f"{own}: {class_name(part)} has parameters; it needs reset_parameters(self)")
    for own, _ in module.named_buffers(prefix=name):
        problems.add(
            "objective.modules", f"{own}: is a buffer; legal are parameters, and what is computed when the module is called"
        )
    return problems


def add_modules(
    spec: ParallelSpec, model: nn.Module, modules: Mapping[str, nn.Module], runs: Mapping[str, tuple[int, int]]
) -> ParallelSpec:
    """Add copies of modules to a model on the meta device, in place of those of another objective. Returns its new spec.

    Args:
        spec: the spec of the model alone.
        model: the model.
        modules: by name, on any device; without values afterwards. None of :func:`module_problems` is in them.
        runs: how often each is called for a batch, and how often of these with gradient.
    """
    model._modules.pop(ADDED, None)
    if not modules:
        return spec
    added = nn.ModuleDict(copy.deepcopy(dict(modules))).to("meta")
    if next(model.parameters()).dtype == torch.float64:  # an audit computes in it
        added.double()
    traces = None if spec.traces is None else spec.traces(_bare(model))
    model._modules[ADDED] = added
    names = [name for name, module in added.items() if any(True for _ in module.parameters())]
    rules = tuple(UnitRule(f"{ADDED}.{name}", reshard_after_forward=False, added=True) for name in names)
    found = {f"{ADDED}.{name}": runs.get(name, (1, 1)) for name in names}
    parameters = tuple(f"{ADDED}.{name}" for name, _ in added.named_parameters())
    known = None if traces is None else _WithAdded(traces, found, parameters)
    return replace(spec, units=(*spec.units, *rules), traces=None if known is None else lambda _: known)


def _bare(model: nn.Module) -> nn.Module:
    """Return the model alone: a shallow copy, with the same parts, that nothing is added to later."""
    bare = copy.copy(model)
    bare.__dict__["_modules"] = dict(model._modules)
    return bare


class _WithAdded(Traces):
    """What traces of a model find, with modules that run after all of it.

    Args:
        alone: what they find of the model alone.
        added: name of each module to the number of its runs for a batch, and of those with gradient.
        parameters: names of their parameters.
    """

    def __init__(self, alone: Traces, added: Mapping[str, tuple[int, int]], parameters: Sequence[str]) -> None:
        self.alone, self.added, self.parameters = alone, added, parameters

    @property
    def attentions(self) -> Attentions | None:
        return self.alone.attentions

    def mixers(self, ranks: int) -> Mapping[str, MixerShare]:
        """See :class:`Traces`."""
        return self.alone.mixers(ranks)

    def mixer_parameters(self, ranks: int) -> Mapping[str, tuple[str, ...]]:
        """See :class:`Traces`."""
        return self.alone.mixer_parameters(ranks)

    @property
    def head(self) -> HeadFacts | None:
        return self.alone.head

    @property
    def runs(self) -> Mapping[str, tuple[int, int]]:
        return {**self.alone.runs, **self.added}

    def stages(self, layers: Sequence[str]) -> StageFacts | None:
        """See :class:`Traces`. Added modules are after the last layer."""
        facts = self.alone.stages(layers)
        if facts is None or facts.problems:
            return facts
        used = {**facts.used, **dict.fromkeys(self.parameters, ("last",))}
        return replace(facts, trailing=(*facts.trailing, ADDED), used=used)

    def carried(self, layers: Sequence[str], slices: RankSlices) -> tuple[Carried, ...] | None:
        """See :class:`Traces`. Added modules are on the last stage, and nothing is carried from them."""
        return self.alone.carried(layers, slices)

    def halves_backward(self, layers: Sequence[str], trained: AbstractSet[str], first: str, last: str) -> bool:
        """See :class:`Traces`."""
        return self.alone.halves_backward(layers, trained, first, last)

    def regions(self, layers: Sequence[str]) -> RegionFacts | None:
        return self.alone.regions(layers)

    def pairs(self, layers: Sequence[str]) -> Pairs | None:
        return self.alone.pairs(layers)

    def choices(self, routers: Mapping[str, int]) -> Mapping[str, int]:
        """See :class:`Traces`."""
        return self.alone.choices(routers)

    def fused(self, layers: Sequence[str]) -> Mapping[str, Apart]:
        """See :class:`Traces`."""
        return self.alone.fused(layers)


@contextmanager
def without_added(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one that its files describe, without what an objective added. It is not called."""
    added = added_modules(model)
    if added is not None:
        del model._modules[ADDED]
    try:
        yield
    finally:
        if added is not None:
            model._modules[ADDED] = added


def initialize_added(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give the added modules of a model their first values by ``reset_parameters``, the same on every layout.

    Args:
        model: the model, which may be parallelized, or a stage of a pipeline.
        device: device of the shards.
        seed: seed of the run.

    Raises:
        ModelError: names the parameters that ``reset_parameters`` leaves without a value.
    """
    added = added_modules(model)
    if added is not None:
        initialize(added, device, derive_seed(seed, ADDED))
