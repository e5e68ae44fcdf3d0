"""``model.no_sync()``: backwards whose gradients stay on this rank, for a loop that accumulates.

    for index, batch in enumerate(batches):
        with nullcontext() if index == len(batches) - 1 else model.no_sync():
            loss(model, batch).backward()

FSDP2 has no such method. FSDP1 and DDP have it, and many loops use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["NoSync", "give_no_sync"]


class NoSync:
    """The method ``no_sync`` of a model.

    Inside its context, units reshard as usual and reduce nothing. The next backward outside reduces the gradients that were
    kept, also those of units and parameters that only backwards inside used. Contexts may be nested; only the outermost one
    counts. FSDP2 keeps these gradients itself, so ``zero_grad()`` does not drop them.

    Args:
        model: the model, with its units. Without units there is nothing to sync.
        exchange_use: see :class:`~meshwright.distributed.data.grad_sync.GradSync`.
    """

    def __init__(self, model: nn.Module, exchange_use: bool) -> None:
        self._model, self._exchange_use = model, exchange_use
        self._sync: GradSync | None = None
        self._under_way = False  # whether there is an optimizer step whose last backward is still to come
        self._depth = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Return a context in which a backward accumulates gradients and does not reduce them."""
        if self._sync is None and fsdp_units(self._model):
            self._sync = GradSync(self._model, default=SyncPolicy.RESHARD_EACH, exchange_use=self._exchange_use)
        if self._sync is None or self._depth:
            yield
            return
        if not self._under_way:
            self._sync.begin_step()
            self._under_way = True
        self._sync.begin_microbatch(last=False)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._sync.begin_microbatch(last=True)
            self._sync.finish_after_backward(self._end)

    def _end(self) -> None:
        self._under_way = False


def give_no_sync(model: nn.Module, plan: ShardingPlan | None = None) -> nn.Module:
    """Give a model a method ``no_sync()``, unless it has one; return the model.

    Args:
        model: the model, with its units.
        plan: the plan of the whole model; ``None``: unknown, so ranks exchange which parameters they used.
    """
    if not hasattr(model, "no_sync"):
        model.no_sync = NoSync(model, plan is None or plan.flags_of_use)  # type: ignore[assignment]
    return model
