"""What the ranks tell each other at the end of an optimizer step: which parameters they used, and in which order units ran.

FSDP reduces a parameter on all ranks or on none, so a unit that ran reduces zeros for parameters that this rank did not use
(:func:`~meshwright.distributed._torch_compat.supervise`). One process would give a parameter that nothing used no gradient: the
optimizer neither decays it nor moves it by its old momentum. Whether *no rank* used it, a rank learns from the flags of use:
one small all-reduce on the CPU, which no kernel waits for.

The same all-reduce tells whether units ran, and reduced, in the same order everywhere. Collectives are matched by their order
alone. Where one rank leaves a unit out, the others' collectives of that unit meet this rank's next ones: of the same size, they
mix two units without a word; of other sizes, gloo aborts and NCCL hangs. In the first step the ranks therefore agree on every
event before it happens, so that the unit is named before anything meets.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.distributed import _torch_compat
from meshwright.distributed._torch_compat import Event
from meshwright.errors import UnsupportedError

__all__ = ["FlagsOfUse"]

_WORDS = {Event.FORWARD: "runs", Event.BACKWARD: "goes back through", Event.REDUCTION: "reduces"}


class FlagsOfUse:
    """Exchanges, for the units of a model, what the ranks used in a step.

    Args:
        units: name to unit.
        exchanged: whether ranks may differ. ``False``: every rank uses every trainable parameter in each step, which is only
            checked.

    Attributes:
        groups: that the flags go through, one after another.
    """

    def __init__(self, units: Mapping[str, FSDPModule], *, exchanged: bool = True) -> None:
        self._units = dict(units)
        self.groups = _groups(self._units.values())
        self._exchanged = exchanged and bool(self.groups)
        self._checked = not exchanged and bool(self.groups)
        self._events: list[str] = []
        self._rehearses = True

    def begin(self) -> None:
        """From here on the order of events counts. Of a step that has begun: nothing."""
        if self._exchanged:
            for name, unit in self._units.items():
                _torch_compat.tell_events(unit, lambda event, name=name: self._note(f"{_WORDS[event]} {name or '(root)'}"))  # type: ignore[misc]

    def end(self, model: nn.Module) -> None:
        """At the end of a step: take the gradient of zeros from each parameter that no rank used.

        Args:
            model: that the units are of; for names.

        Raises:
            UnsupportedError: the ranks ran different units, or in another order; or a rank left out a parameter of a model
                whose spec says that all are used.
        """
        used: dict[nn.Parameter, tuple[bool, bool]] = {}
        for unit in self._units.values():
            for parameter, here, fresh in _torch_compat.take_use(unit):
                before, all_fresh = used.get(parameter, (False, True))
                used[parameter] = (before or here, all_fresh and fresh)  # twin units share a parameter
        if self._exchanged:
            self._note("ends the step")
            self._forget()
            self._rehearses = False
            flags = self._agree([int(here) for here, _ in used.values()])
        else:
            flags = [int(here) for here, _ in used.values()]
        left_out = [parameter for (parameter, (_, fresh)), flag in zip(used.items(), flags, strict=True) if fresh and not flag]
        if left_out and self._checked:
            names = {parameter: name for name, parameter in model.named_parameters()}
            raise UnsupportedError(
                f"parameter {names.get(parameter, '?')!r}: got no gradient on this rank, but the spec says that every "
                "microbatch uses all parameters; with ParallelSpec.uses_all_parameters=False the ranks exchange flags of use"
                for parameter in left_out
            )
        for parameter in left_out:
            parameter.grad = None

    def abandon(self) -> None:
        """Forget a step that failed."""
        self._forget()
        self._events.clear()

    def _forget(self) -> None:
        for unit in self._units.values():
            _torch_compat.tell_events(unit, None)

    def _note(self, event: str) -> None:
        self._events.append(event)
        if self._rehearses:
            with _torch_compat.unseen():  # of the first step only, so no plan has it
                self._compare(self._maximum(_with_negative(zlib.crc32(event.encode()))))

    def _agree(self, flags: list[int]) -> list[int]:
        """The flags of all ranks as one.

        Raises:
            UnsupportedError: see :meth:`end`.
        """
        order = zlib.crc32("\n".join(self._events).encode())
        *flags, highest, lowest = self._maximum([*flags, *_with_negative(order)])
        self._compare([highest, lowest])
        self._events.clear()
        return flags

    def _maximum(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all ranks."""
        with _torch_compat.unseen():  # these are values also where a step is only traced
            tensor = torch.tensor(values, dtype=torch.int64)
        for group in self.groups:
            with _torch_compat.unseen():
                tensor = tensor.to(_torch_compat.device_of_control(group))
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        with _torch_compat.unseen():
            return tensor.tolist()

    def _compare(self, extremes: Sequence[int]) -> None:
        """Raise on all ranks alike, unless the largest and the smallest of a number are one."""
        if extremes[0] == -extremes[1]:
            return
        told: dict[int, list[str]] = {dist.get_rank(): list(self._events)}
        for group in self.groups:
            parts: list[dict[int, list[str]]] = [{} for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(parts, told, group=group)
            told = {rank: events for part in parts for rank, events in part.items()}
        raise UnsupportedError(_difference(told))


def _groups(units: Iterable[FSDPModule]) -> list[dist.ProcessGroup]:
    """Those that lead from each rank to every other that holds the same units."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for unit in units:
        for group in _torch_compat.data_groups(unit):
            found.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return list(found.values())


def _with_negative(number: int) -> list[int]:
    """A number whose maximum and minimum one maximum finds."""
    return [number, -number]


def _difference(told: Mapping[int, Sequence[str]]) -> str:
    """Where ranks part first, by name."""
    first, events = min(told.items())
    for rank, others in sorted(told.items()):
        for index in range(max(len(events), len(others))):
            ours, theirs = (list_[index] if index < len(list_) else "does nothing more" for list_ in (events, others))
            if ours != theirs:
                return (
                    f"ranks do not run the same units: rank {first} {ours} where rank {rank} {theirs}. Collectives are matched "
                    "by their order, so all ranks must run all units in one order; run the unit everywhere, and multiply its "
                    "output by zero where it has nothing to do, or declare no unit there (ParallelSpec)"
                )
    return "ranks did not run the same units in the same order"
