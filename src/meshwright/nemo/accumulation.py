"""``model.no_sync()``: backwards that keep their gradients on this rank, for a loop that accumulates.

    for index, batch in enumerate(batches):
        with nullcontext() if index == len(batches) - 1 else model.no_sync():
            loss(model, batch).backward()

FSDP2 has no such method; FSDP1 and DDP have it, and loops are written so.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from meshwright.distributed.fsdp import fsdp_units
from meshwright.distributed.grad_sync import GradSync
from meshwright.plan.options import SyncPolicy
from meshwright.plan.sharding_plan import ShardingPlan

__all__ = ["give_no_sync"]


def give_no_sync(model: nn.Module, plan: ShardingPlan | None = None) -> nn.Module:
    """Give a model a context manager ``no_sync()``, unless it has one; returns the model.

    Inside, units reshard as always and reduce nothing. The next backward outside reduces what was kept, also of units and
    parameters that only backwards inside used. Without units there is nothing to sync.

    Args:
        model: with its units.
        plan: that they were made by; ``None``: unknown, so ranks tell each other which parameters they used.
    """
    if hasattr(model, "no_sync"):
        return model
    sync: GradSync | None = None
    under_way = False  # an optimizer step, whose last backward is still to come

    def end() -> None:
        nonlocal under_way
        under_way = False

    @contextmanager
    def no_sync() -> Iterator[None]:
        nonlocal sync, under_way
        if sync is None and fsdp_units(model):
            sync = GradSync(model, default=SyncPolicy.RESHARD_EACH, exchange_use=plan is None or plan.flags_of_use)
        if sync is None:
            yield
            return
        if not under_way:
            sync.begin_step()
            under_way = True
        sync.begin_microbatch(last=False)
        try:
            yield
        finally:
            sync.begin_microbatch(last=True)
            sync.finish_after_backward(end)

    model.no_sync = no_sync  # type: ignore[assignment]
    return model
