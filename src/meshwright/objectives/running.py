"""A call of an objective: what the functions that are given to it know, and what the model gave."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.distributed.mesh import ParallelMesh
from meshwright.models.objective import Batch
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["OF_LOGITS", "Running", "Seen", "call_of", "running"]

OF_LOGITS = frozenset({"log_probs", "log_probs_of", "entropy", "logits", "top_k"})
"""What is given to an objective that needs the output head."""


@dataclass
class Seen:
    """Values that were gathered.

    Attributes:
        numbers: how many.
        width: bytes of one.
        reduced: whether they got a gradient.
    """

    numbers: int
    width: int
    reduced: bool = False


@dataclass
class Running:
    """A call of an objective.

    Attributes:
        plan: the plan of the model; ``None``: it is not parallelized.
        mesh: the mesh of its layout.
        wanted: the values of tokens that one forward computes.
        asked: names of the functions that were called, and how often.
        gathered: the values of this rank that were gathered, in order.
        trains: whether gradients are computed; an evaluation gathers nothing, so that it does not depend on the data ranks.
        kept: what the model gave for a batch: name to tensor.
        tell: is called with it when the call ends; ``None``: nobody asks.
    """

    plan: ShardingPlan | None = None
    mesh: ParallelMesh | None = None
    wanted: frozenset[str] = frozenset()
    asked: Counter[str] = field(default_factory=Counter)
    gathered: "list[Seen]" = field(default_factory=list)
    trains: bool = True
    kept: list[tuple[nn.Module, Batch, dict[str, torch.Tensor]]] = field(default_factory=list)
    tell: Callable[[Batch, dict[str, torch.Tensor]], None] | None = None

    def of(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Return what is kept of a model and a batch."""
        for known, other, values in self.kept:
            if known is model and other is batch:
                return values
        self.kept.append((model, batch, {}))
        return self.kept[-1][2]

    def size(self, axis: str) -> int:
        """Return the size of an axis."""
        return 1 if self.mesh is None else self.mesh[axis].size()


_RUNNING: ContextVar[Running | None] = ContextVar("running", default=None)


@contextmanager
def running(call: Running) -> Iterator[Running]:
    """Inside, an objective is called."""
    token = _RUNNING.set(call)
    try:
        yield call
    finally:
        if call.tell is not None:
            for _, batch, values in call.kept:
                call.tell(batch, values)
        call.kept.clear()
        _RUNNING.reset(token)


def call_of(name: str) -> Running:
    call = _RUNNING.get()
    call = Running() if call is None else call
    call.asked[name] += 1
    return call
