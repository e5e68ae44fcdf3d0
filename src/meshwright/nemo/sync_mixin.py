"""The sync mixin, over :class:`~meshwright.distributed.data.grad_sync.GradSync`.

A training loop of the user's tells a model where an accumulation begins and which microbatch is the last::

    class MyModel(MoEFSDPSyncMixin, nn.Module):
        fsdp_sync_policies = {"**.experts": "reduce_each"}     # optional: experts reduce in every microbatch

    model.prepare_for_grad_accumulation()
    for index, batch in enumerate(batches):
        if index == len(batches) - 1:
            model.prepare_for_final_backward()
        loss(model, batch).backward()

Under pipeline parallel, a schedule runs all microbatches. There, calls with ``pp_enabled=True`` only say whether the next
``schedule.step()`` is the last of its optimizer step, and set no unit. The schedule's backwards are run by
:func:`patched_backward_maybe_with_nosync`, which :func:`patch_stage` attaches to a stage.

Units are found from FSDP state, whatever their names; the model itself need not be a unit. Each model has a GradSync of its
own.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshwright.distributed import _torch_compat
from meshwright.distributed.class_names import class_name
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.pipeline.stage import scale_gradients, stage_backward
from meshwright.errors import PlanError
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.names import match_names

__all__ = [
    "MoEFSDPSyncMixin",
    "_configure_fsdp_module",
    "_disable_fsdp_for_moe_module",
    "_iter_fsdp_modules",
    "_run_post_backward_for_moe_module",
    "_run_post_backward_hooks",
    "patch_stage",
    "patched_backward_maybe_with_nosync",
]


class MoEFSDPSyncMixin:
    """Tells the FSDP units of a module when to reduce and to reshard. Without units it does nothing.

    Attributes:
        fsdp_sync_policies: pattern of unit names to policy (:class:`~meshwright.plan.given.closed_choices.SyncPolicy`). A later
            entry wins over an earlier one; units that match no pattern defer.
    """

    fsdp_sync_policies: ClassVar[Mapping[str, str]] = {}

    def prepare_for_grad_accumulation(self, pp_enabled: bool = False) -> None:
        """Call this before the first microbatch: the units follow their policies for microbatches that are not the last.

        Args:
            pp_enabled: only record that more calls of ``schedule.step()`` follow the next one in the same optimizer step.
        """
        sync = _sync_of(self)
        if sync is None:
            return
        if pp_enabled:
            sync.ends_step = False
        else:
            sync.begin_step()
            sync.begin_microbatch(last=False)

    def prepare_for_final_backward(self, pp_enabled: bool = False) -> None:
        """Call this before the last microbatch, or before its backward: all units reduce and reshard in it.

        Args:
            pp_enabled: only record that the next ``schedule.step()`` is the last of its optimizer step.
        """
        sync = _sync_of(self)
        if sync is None:
            return
        sync.ends_step = True
        if not pp_enabled:
            sync.begin_microbatch(last=True)
            sync.finish_after_backward()


def _sync_of(module: Any) -> GradSync | None:
    """Return the GradSync of a module, which is stored in the module; ``None`` without units.

    It is created again if the units of the module have changed.
    """
    units = fsdp_units(module)
    sync: GradSync | None = module.__dict__.get("_meshwright_sync")
    if sync is None or sync.units() != list(units.values()):
        sync = GradSync(module, _policies(module, list(units))) if units else None
        module.__dict__["_meshwright_sync"] = sync
    return sync


def _policies(module: Any, names: list[str]) -> dict[str, SyncPolicy]:
    policies: dict[str, SyncPolicy] = {}
    for pattern, policy in getattr(module, "fsdp_sync_policies", {}).items():
        matched = match_names(pattern, names)
        if not matched:
            raise PlanError(
                "fsdp.policies",
                f"fsdp_sync_policies pattern {pattern!r} of {class_name(module)} matches no FSDP unit; units are "
                + ", ".join(map(repr, names)),
            )
        policies.update(dict.fromkeys(matched, SyncPolicy(policy)))
    return policies


def _iter_fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield every unit in a module, with the module itself if it is one, parents first."""
    yield from fsdp_units(module).values()


def _configure_fsdp_module(
    fsdp_module: FSDPModule, is_last_backward: bool, reshard_after_backward: bool, requires_gradient_sync: bool
) -> None:
    """Set one unit, but not the units inside it. ``is_last_backward`` is one flag for all units of a root."""
    fsdp_module.set_is_last_backward(is_last_backward)
    fsdp_module.set_reshard_after_backward(reshard_after_backward, recurse=False)
    fsdp_module.set_requires_gradient_sync(requires_gradient_sync, recurse=False)


def _disable_fsdp_for_moe_module(module: nn.Module) -> None:
    """Make no unit reduce or reshard in backward."""
    for unit in _iter_fsdp_modules(module):
        _configure_fsdp_module(unit, False, False, False)


def _run_post_backward_hooks(fsdp_module: FSDPModule) -> Callable[[], None]:
    """Reduce one unit now, as its flags say; return a function that ends its root's backward, to be called after all units."""
    _torch_compat.post_backward(fsdp_module)
    return lambda: _torch_compat.end_backward(fsdp_module)


def _run_post_backward_for_moe_module(module: nn.Module) -> None:
    """Reduce and reshard every unit now. This ends an optimizer step whose backwards did not run FSDP's own hooks.

    Units that never ran, or that no gradient came through, are only resharded.
    """
    sync = _sync_of(module)
    if sync is not None:
        sync.end_backward(last=True)


def patched_backward_maybe_with_nosync(
    self: Any, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
    """Run a pipeline stage's backward of one microbatch; see :func:`~meshwright.distributed.pipeline.stage.stage_backward`."""
    sync = None if isinstance(self.submod, DistributedDataParallel) else _sync_of(self.submod)
    return stage_backward(self, sync, backward_type, bwd_kwargs, last_backward)


def patch_stage(stage: Any) -> Any:
    """Make a stage of ``torch.distributed.pipelining`` reduce by the policies of its module; return the stage.

    Args:
        stage: the stage, changed in place; its class is not changed. With several schedules in an optimizer step, scale the
            loss and set the schedule's ``scale_grads=False``: otherwise torch scales the sum of the first schedule again after
            the second.
    """
    stage.backward_maybe_with_nosync = types.MethodType(patched_backward_maybe_with_nosync, stage)
    if hasattr(stage, "perform_reduce_grad") and _sync_of(stage.submod) is not None:
        stage.perform_reduce_grad = types.MethodType(scale_gradients, stage)
    return stage
