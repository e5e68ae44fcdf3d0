"""GradSync: the state machine that decides when each FSDP unit unshards, reshards and reduces within an optimizer step.

Each unit has one of three policies (:class:`~meshwright.plan.given.closed_choices.SyncPolicy`). For microbatch ``i`` of ``n``:

| policy         | after forward            | after backward, ``i < n - 1``      | after the last backward |
|----------------|--------------------------|------------------------------------|-------------------------|
| `defer`        | stays unsharded          | stays unsharded, gradient kept     | reshard, reduce         |
| `reshard_each` | as the plan says         | reshard, gradient kept             | reshard, reduce         |
| `reduce_each`  | as the plan says         | reshard, reduce                    | reshard, reduce         |

"Gradient kept" means that FSDP2 accumulates the unsharded gradient, in the reduce dtype. Units are found by their FSDP state
and never by name. So a unit that the policies do not mention follows the default, and a unit that never ran does no harm.

A unit that ran reduces all its trainable parameters, so ranks and microbatches may use different parameters. A parameter that
no rank used in a step gets no gradient (:mod:`~meshwright.distributed.data.unused_parameters`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.distributed import _torch_compat
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.data.unused_parameters import FlagsOfUse
from meshwright.errors import PlanError, Refusal
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["GradSync"]

T = TypeVar("T")


_READERS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose operators take the weight in backward, also where only its gradient is computed."""


@dataclass
class _Unit:
    module: FSDPModule
    policy: SyncPolicy
    reshard_after_forward: bool
    reads: bool
    """Whether the half of backward for weights needs the gathered parameters."""


class GradSync:
    """Drives the units of a model through the microbatches of optimizer steps.

    Use it around the microbatches of each step::

        for index, batch in sync.microbatches(batches):
            loss(batch).backward()
        optimizer.step()

    Args:
        model: has FSDP units in it; it need not be one itself.
        policies: unit name to policy; units that are not named follow ``default``.
        default: policy of the other units.
        all_reduce_once: with ``reduce_each`` and replicas, all-reduce across replicas in the last microbatch only. In earlier
            microbatches gradients are reduce-scattered within each replica.
        exchange_use: whether ranks exchange which parameters they used, by one small all-reduce a step. ``False``: each
            microbatch is expected to use all trainable parameters. The check is weaker: each of them must get a gradient in
            some microbatch of the step.

    Attributes:
        ends_step: for pipelines: whether the last backward of the current schedule is the last of its optimizer step.

    Raises:
        PlanError: if a policy names a unit that is not there.
    """

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[str, SyncPolicy] | None = None,
        default: SyncPolicy = SyncPolicy.DEFER,
        *,
        all_reduce_once: bool = True,
        exchange_use: bool = True,
    ) -> None:
        policies = policies or {}
        units = fsdp_units(model)
        if unknown := policies.keys() - units.keys():
            known = ", ".join(repr(name) for name in units) or "none"
            raise PlanError(
                [Refusal("fsdp.policies", f"policies: {name!r} is no FSDP unit; units are {known}") for name in unknown]
            )
        for module in units.values():
            _torch_compat.supervise(module)
        self._model, self._use = model, FlagsOfUse(units, exchanged=exchange_use)
        self.all_reduce_once = all_reduce_once
        self.ends_step = True
        self._ending = False
        self._units = {
            name: _Unit(
                module,
                SyncPolicy(policies.get(name, default)),
                _torch_compat.reshards_after_forward(module, is_root=not name),
                any(isinstance(holder, _READERS) for holder in _torch_compat.holders(module)),
            )
            for name, module in units.items()
        }

    @classmethod
    def from_plan(cls, model: nn.Module, plan: ShardingPlan) -> "GradSync":
        """Make the machine for a model that :func:`~meshwright.distributed.conductor.parallelize` made from ``plan``."""
        policies = {unit.name: unit.sync for unit in plan.fsdp_units}
        if plan.options.sharded_by:  # a function of the user made the units
            units = fsdp_units(model)
            policies = {name: policy for name, policy in policies.items() if name in units}
        return cls(model, policies, all_reduce_once=plan.options.all_reduce_once, exchange_use=plan.flags_of_use)

    def microbatches(self, batches: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Yield (index, batch), with all units set for that microbatch. After the last one, reshard all units.

        If the loop ends early (an exception, a ``break``), the gradients that were not reduced yet are dropped.
        """
        iterator = enumerate(batches)
        current = next(iterator, None)
        try:
            while current is not None:
                following = next(iterator, None)
                # Not in begin_microbatch(), because a loop may call that between a forward and its backward.
                self._forget_runs()
                self.begin_microbatch(last=following is None)
                yield current
                current = following
        except BaseException:
            self.abandon()
            raise
        self.finish()

    def begin_step(self) -> None:
        """Begin an optimizer step, in a loop without :meth:`microbatches`. Events of a step that failed are forgotten."""
        self._use.abandon()

    def begin_microbatch(self, *, last: bool) -> None:
        """Set all units for the forward and backward of one microbatch.

        Args:
            last: whether it is the last microbatch of its optimizer step.
        """
        self._ending = False
        self._use.begin()
        for unit in self._units.values():
            defer = unit.policy is SyncPolicy.DEFER
            reduce = last or unit.policy is SyncPolicy.REDUCE_EACH
            if unit.reshard_after_forward:
                unit.module.set_reshard_after_forward(not defer, recurse=False)
            unit.module.set_reshard_after_backward(last or not defer, recurse=False)
            _torch_compat.keep_between_runs(unit.module, defer)
            unit.module.set_requires_gradient_sync(reduce, recurse=False)
            if reduce:
                unit.module.set_requires_all_reduce(last or not self.all_reduce_once, recurse=False)

    def finish_after_backward(self, then: Callable[[], None] = lambda: None) -> None:
        """Call :meth:`finish` at the end of the next backward, for a loop that does not say where its steps end.

        Args:
            then: is called after it.
        """

        def end() -> None:
            if self._ending:  # each of several roots may call
                self._ending = False
                self.finish()
                then()

        self._ending = True
        for unit in self._units.values():
            _torch_compat.after_backward(unit.module, end)

    def finish(self) -> None:
        """End an optimizer step: reduce and reshard the units that backward did not, such as one that got no gradient.

        Afterwards units reshard after forward as they did before the first step.

        Raises:
            UnsupportedError: the ranks ran different units, or a parameter was not used though ``exchange_use`` is ``False``.
                The gradients of the step are dropped.
        """
        try:
            self._reduce_rest()
            self._use.end(self._model)
        except BaseException:
            self.abandon()
            raise
        self._forget_runs()
        self._reshard_after_forward()
        self._reshard()

    def _reduce_rest(self) -> None:
        """Reduce the units that ran and got no backward, because the loss does not depend on their last run."""
        waiting = [unit.module for unit in self._units.values() if _torch_compat.waits_for_reduction(unit.module)]
        for module in waiting:
            _torch_compat.post_backward(module)
        for unit in self._units.values() if waiting else ():
            _torch_compat.end_backward(unit.module)  # only roots wait for reductions, and a root may have no parameters

    def abandon(self) -> None:
        """End an optimizer step that failed, at any point: drop unsharded gradients, and reshard all units."""
        self._use.abandon()
        for unit in self._units.values():
            _torch_compat.reset_iteration(unit.module)
        self._reshard()

    def _forget_runs(self) -> None:
        """Expect no backward of forwards that had none so far, such as that of a loss that was dropped."""
        for unit in self._units.values():
            _torch_compat.forget_runs(unit.module)

    def _reshard(self) -> None:
        for unit in self._units.values():
            _torch_compat.finish_prefetch(unit.module)  # drop what was prefetched and not used: the weights in it are old
            if _torch_compat.is_unsharded(unit.module):
                unit.module.reshard()

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """For evaluation, between steps: inside, units reshard after forward as the plan says. At its end all units reshard."""
        self._reshard_after_forward()
        try:
            yield
        finally:
            self._reshard()

    def _reshard_after_forward(self) -> None:
        for unit in self._units.values():
            if unit.reshard_after_forward:
                unit.module.set_reshard_after_forward(True, recurse=False)

    # -- pipelines: a schedule runs the forwards and backwards of several microbatches in its own order ---------------------

    def units(self) -> list[FSDPModule]:
        """All units, parents first."""
        return [unit.module for unit in self._units.values()]

    def begin_backward(self, *, last: bool, splits: bool) -> None:
        """Set every unit for one backward of a stage.

        Args:
            last: of the optimizer step.
            splits: whether it is one half of a split backward, for inputs or for weights. Then none is reduced before
                :meth:`end_backward`, because the half for inputs leaves the gradients of weights out. Units whose weights are
                read in the half for weights stay gathered between the two.
        """
        self.begin_microbatch(last=last)
        for unit in self._units.values():
            # end_backward() does what is due at the end of a backward, because other microbatches are under way.
            unit.module.set_is_last_backward(False)
            if splits:
                unit.module.set_requires_gradient_sync(False, recurse=False)
            if splits and unit.reads:
                unit.module.set_reshard_after_backward(False, recurse=False)
                if _torch_compat.is_set_up(unit.module):
                    unit.module.unshard()

    def end_backward(self, *, last: bool) -> None:
        """Reduce and reshard after a backward of the stage: what FSDP's hooks do at the end of an autograd backward.

        Call it after a full or a weight backward; after one for inputs only, gradients of weights are still missing.
        """
        self.begin_microbatch(last=last)
        for unit in self._units.values():
            _torch_compat.post_backward(unit.module)  # without reduction, it adds up in the dtype of reduction
        if last:
            for unit in self._units.values():
                unit.module.set_is_last_backward(True)
            for unit in self._units.values():
                _torch_compat.end_backward(unit.module)
            self.finish()
