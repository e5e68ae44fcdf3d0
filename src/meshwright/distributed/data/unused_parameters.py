"""Flags of use: at the end of an optimizer step, ranks exchange which parameters they used, and in which order units ran.

Why the flags. FSDP reduces a parameter on all ranks or on none, so a unit that ran reduces zeros for the parameters that this
rank did not use (:func:`~meshwright.distributed._torch_compat.supervise`). In one process, a parameter that nothing used has no
gradient, so the optimizer neither decays it nor moves it by its momentum. To do the same, each rank must know whether *any*
rank used a parameter. The flags are one small all-reduce on the CPU, and no kernel waits for it.

Why the order. Collectives are matched by their order alone. If one rank does not run a unit, the collectives of that unit on
the other ranks are matched with the next collectives of this rank. If their sizes are equal, two units are mixed silently; if
not, gloo aborts and NCCL hangs. So in the first microbatch of the first step, ranks agree on every event before it happens. In
later microbatches of the first step, they agree on events that are new. Thus the error names the unit before collectives are
mixed.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.distributed import _torch_compat
from meshwright.distributed._torch_compat import Event
from meshwright.errors import Refusal, UnsupportedError

__all__ = ["FlagsOfUse"]

_WORDS = {Event.FORWARD: "runs", Event.BACKWARD: "goes back through", Event.REDUCTION: "reduces"}


class FlagsOfUse:
    """Exchanges which parameters of a model's units the ranks used in a step.

    Args:
        units: name to unit.
        exchanged: whether ranks may use different parameters. ``False``: each microbatch is expected to use all trainable
            parameters. The check is weaker: each of them must get a gradient in some microbatch of the step. All ranks check
            this together in the first step, each rank alone in later steps.

    Attributes:
        groups: process groups. The maximum over one group after another is the maximum over all ranks with the same units.
    """

    def __init__(self, units: Mapping[str, FSDPModule], *, exchanged: bool = True) -> None:
        self._units = dict(units)
        self.groups = _groups(self._units.values())
        self._claimed = not exchanged
        self._first_step = True
        self._microbatches = 0  # begun in this step
        self._events: list[str] = []
        self._rehearsed: set[str] = set()
        self._words = {name: {event: f"{word} {name or '(root)'}" for event, word in _WORDS.items()} for name in self._units}

    @property
    def _exchanges(self) -> bool:
        return bool(self.groups) and (self._first_step or not self._claimed)

    def begin(self) -> None:
        """Begin a microbatch. If ranks exchange something in this step, record the events of each unit, in order."""
        self._microbatches += 1
        if self._exchanges and self._microbatches == 1:
            for name, unit in self._units.items():
                _torch_compat.tell_events(unit, lambda event, words=self._words[name]: self._note(words[event]))  # type: ignore[misc]

    def end(self, model: nn.Module) -> None:
        """End a step: remove the gradient of zeros from each parameter that no rank used.

        Args:
            model: the model that has the units, for its names.

        Raises:
            UnsupportedError: the ranks ran different units, or in another order; or a parameter was left out of a model whose
                spec says that all are used. The gradients of the step are dropped.
        """
        used: dict[nn.Parameter, tuple[bool, bool]] = {}
        for unit in self._units.values():
            for parameter, here, fresh in _torch_compat.take_use(unit):
                before, was_fresh = used.get(parameter, (False, False))
                used[parameter] = (before or here, was_fresh or fresh)  # twin units share a parameter
        try:
            left_out = self._left_out(used)
            if left_out and self._claimed and self.groups:
                names = {parameter: name for name, parameter in model.named_parameters()}
                raise UnsupportedError(
                    Refusal(
                        "fsdp.unused",
                        f"parameter {names.get(parameter, '?')!r}: got no gradient, but the spec says that each microbatch "
                        "uses all parameters; set ParallelSpec.uses_all_parameters=False, and the ranks exchange which they "
                        "use",
                    )
                    for parameter in left_out
                )
        except BaseException:
            left_out = [parameter for parameter, (_, fresh) in used.items() if fresh]
            raise
        finally:
            for parameter in left_out:
                parameter.grad = None
            self.abandon()
        self._first_step = False

    def abandon(self) -> None:
        """Forget the events of a step, which has ended or failed."""
        for unit in self._units.values():
            _torch_compat.tell_events(unit, None)
        self._events.clear()
        self._microbatches = 0

    def _left_out(self, used: Mapping[nn.Parameter, tuple[bool, bool]]) -> list[nn.Parameter]:
        """Parameters to report or to clear, among those whose gradient is new in this step.

        With flags of use: those that no rank used; their gradient is zeros. If the model claims to use all: those that at least
        one rank did not use (in later steps: this rank).
        """
        flags = [here for here, _ in used.values()]
        if self._exchanges:
            self._note("ends the step")
            missing = self._claimed  # then one rank that did not use it is enough
            flags = [bool(flag) is not missing for flag in self._agree([int(here is not missing) for here in flags])]
        return [parameter for (parameter, (_, fresh)), flag in zip(used.items(), flags, strict=True) if fresh and not flag]

    def _note(self, event: str) -> None:
        """Record an event. In the first step, agree on it with the other ranks first.

        After the first microbatch, ranks agree on new events only, so that a step of many microbatches does not take longer.
        """
        self._events.append(event)
        if self._first_step and (self._microbatches <= 1 or event not in self._rehearsed):
            self._rehearsed.add(event)
            with _torch_compat.unseen():  # in the first step only, so no plan counts it
                self._compare(self._maximum(_with_negative(zlib.crc32(event.encode()))))

    def _agree(self, flags: list[int]) -> list[int]:
        """Return the maximum of each flag over all ranks, and compare the order of events on all ranks.

        Raises:
            UnsupportedError: see :meth:`end`.
        """
        order = zlib.crc32("\n".join(self._events).encode())
        with _torch_compat.unseen() if self._claimed else nullcontext():  # in the first step only, so no plan counts it
            *flags, highest, lowest = self._maximum([*flags, *_with_negative(order)])
        self._compare([highest, lowest])
        return flags

    def _maximum(self, values: Sequence[int]) -> list[int]:
        """The maximum of each value over all ranks."""
        with _torch_compat.unseen():  # real values, even where a step is traced with fake tensors
            tensor = torch.tensor(values, dtype=torch.int64)
        for group in self.groups:
            with _torch_compat.unseen():
                tensor = tensor.to(_torch_compat.device_of_control(group))
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        with _torch_compat.unseen():
            return tensor.tolist()

    def _compare(self, extremes: Sequence[int]) -> None:
        """Raise on all ranks, unless the maximum and the minimum of a number are equal.

        Args:
            extremes: the maximum, and the negative of the minimum.
        """
        if extremes[0] == -extremes[1]:
            return
        events_of: dict[int, list[str]] = {dist.get_rank(): list(self._events)}
        for group in self.groups:
            parts: list[dict[int, list[str]]] = [{} for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(parts, events_of, group=group)
            events_of = {rank: events for part in parts for rank, events in part.items()}
        raise UnsupportedError(_difference(events_of))


def _groups(units: Iterable[FSDPModule]) -> list[dist.ProcessGroup]:
    """The process groups that units are sharded or replicated over, each once."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for unit in units:
        for group in _torch_compat.data_groups(unit):
            groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return list(groups.values())


def _with_negative(number: int) -> list[int]:
    """A number and its negative. The maxima of both over ranks give the maximum and the minimum of the number."""
    return [number, -number]


def _difference(events_of: Mapping[int, Sequence[str]]) -> Refusal:
    """The first event in which ranks differ, in words."""
    first, events = min(events_of.items())
    for rank, others in sorted(events_of.items()):
        for index in range(max(len(events), len(others))):
            ours, theirs = (list_[index] if index < len(list_) else "does nothing more" for list_ in (events, others))
            if ours != theirs:
                return Refusal(
                    "fsdp.order",
                    f"ranks do not run the same units: rank {first} {ours} where rank {rank} {theirs}. Collectives are matched "
                    "by their order, so all ranks must run all units in one order; run the unit everywhere, and multiply its "
                    "output by zero where it has nothing to do, or declare no unit there (ParallelSpec)",
                )
    return Refusal("fsdp.order", "ranks did not run the same units in the same order")
