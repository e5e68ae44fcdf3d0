"""A simulated accelerator: a device of torch on the CPU, whose streams, waits and memory follow the rules of a GPU.

torch loads this package by itself (entry point ``torch.backends``) in every process where it is on the path. It then has a
device, by default called ``sim``, the module ``torch.sim`` and the backend ``simccl`` of process groups.

Design
------
An operator runs at once, in the host's order, by the CPU's kernel on the same bytes. So values never depend on the order of
streams, and equal the CPU's. Only the *order* is simulated, by vector clocks:

- A **slot** is a number of who acts: the host (0), the default stream of each device, and each stream that is made.
- An **epoch** is the number of an operator on its slot. A *launch* begins one.
- A **clock** is a list of epochs, by slot: all that is known to have ended. Every stream has one, and so has the host. What is
  launched comes after all that the host knows; an event is a copy of its stream's clock, and whoever waits for the event joins
  this copy into its own; a host that waits for a stream joins that stream's clock.
- An **access** is bytes of an allocation that an epoch reads or writes. Two accesses of the same bytes, of which one writes,
  are a race, unless the later one's stream has the epoch of the earlier one on its clock.
- Memory is given back to the stream on which it was allocated, which may use it again at once. Where another stream's access
  may still run, a **tombstone** is left. It is a race when that stream touches memory allocated after it, before its clock has
  the epoch of the tombstone. `record_stream` prevents tombstones.
- What the host may see only after it has waited is **pending** on an epoch: a copy into pinned memory, which holds poison until
  then; a copy out of pinned memory, which the host must not have changed by then; and the end of a collective.

A **host wait** is whatever stops the host until a stream has caught up: reading a value, sizes that depend on values, copies
from and to memory that is not pinned, and synchronizing. Each is reported with its stack. A host wait orders much, and so hides
races, as it does on a device. Waiting for an event is none if the host knows already that it has passed; and it is **behind**
if more was launched on its stream since, so that the device has work meanwhile.

An **order** is a place in the program where one stream is made to wait for another. A test can have some ignored, and see
whether that is reported (`ignore_orders`).

A test may give everything a duration (`timeline`). Clocks then have a time beside their epochs: a launch begins when all that
its stream comes after has ended, and a collective when all ranks are ready for it and its group has ended what was called
before, on whichever stream, as NCCL does; a batch of transfers runs both ways at once. So the clocks become a timeline, from
which the seconds of collectives that no operator hides can be read (`exposed`). Groups do not share the bandwidth of a link.

`counts` counts launches (a call for many tensors is one, and a fused step of an optimizer), collectives, copies and reports.

Not simulated: fragmentation of memory, memory that `record_stream` keeps from being used for a
while, graphs, and kernels' own faults.

Files: ``clocks.h`` (all of the above), ``device.h`` (memory, streams, random numbers), ``fallback.h`` (operators),
``collectives.cpp``; and this one, which names the device and keeps the reports.
"""

import atexit
import itertools
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

FOREIGN = ("/torch/", "<frozen", "<string>", "/transformers/", "/contextlib.py", "/threading.py", "/typing_extensions.py")
"""Files whose frames say little about where in the program something happens."""
STACK = 200
"""Frames that a report keeps."""
WAITS = ("wait", "behind")
"""Kinds of reports that are no faults."""


@dataclass(frozen=True)
class Settings:
    """All that the environment says.

    Attributes:
        name: of the device.
        devices: their number.
        log: a file that each report is appended to, as a line of JSON; ``%r`` is the rank.
        mixing_raises: whether an operator that gets tensors of two devices raises; otherwise that is a report alone.
    """

    name: str
    devices: int
    log: str
    mixing_raises: bool

    @classmethod
    def read(cls) -> "Settings":
        given = os.environ
        return cls(
            name=given.get("ACCELERATOR_NAME", "sim"),
            devices=int(given.get("ACCELERATOR_DEVICES", "2")),
            log=given.get("ACCELERATOR_LOG", ""),
            mixing_raises=given.get("ACCELERATOR_MIXING", "raise") == "raise",
        )


class Report(NamedTuple):
    """What was found.

    Attributes:
        kind: ``race``, ``reuse`` (of pinned memory), ``mixed`` (devices), ``order`` (of collectives), ``wait`` (of the host) or
            ``behind``.
        text: for a wait, what waits; otherwise a sentence that names both places.
        place: innermost frame outside torch, and innermost frame.
        stack: frames of the host, innermost first.
    """

    kind: str
    text: str
    place: str
    stack: tuple[str, ...]


class Span(NamedTuple):
    """When an operator or a collective ran, in seconds of the timeline; a collective has the axis that the test gave it."""

    slot: int
    name: str
    begin: float
    end: float
    collective: bool
    axis: str = ""


def exposed(spans: Iterable[Span], name: str = "", axis: str = "") -> float:
    """Return the seconds in which collectives of this name and axis (by default any) run, and no operator."""
    marks = sorted(
        (time, change, span.collective, span.collective and span.name.startswith(name) and axis in ("", span.axis))
        for span in spans
        if span.end > span.begin
        for time, change in ((span.begin, 1), (span.end, -1))
    )
    seconds, operators, collectives = 0.0, 0, 0
    for (time, change, collective, counts), (following, *_) in itertools.pairwise(marks):
        operators += 0 if collective else change
        collectives += change if counts else 0
        seconds += following - time if collectives and not operators else 0.0
    return seconds


class Reports:
    """All reports of this process, in the order of the host."""

    def __init__(self, native: Any, log: str) -> None:
        self._native, self._log, self._all = native, log, []

    def add(self, kind: str, text: str) -> None:
        frame, stack = sys._getframe().f_back, []  # none on a thread of autograd
        while frame is not None and len(stack) < STACK:
            stack.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        report = Report(kind, text, self._native.place(), tuple(stack))
        self._all.append(report)
        if self._log:
            with open(self._log.replace("%r", os.environ.get("RANK", "0")), "a") as file:
                file.write(json.dumps(report._asdict()) + "\n")

    def take(self, *kinds: str) -> list[Report]:
        """Return the reports of these kinds, by default all but waits, and forget all reports."""
        found = [report for report in self._all if (report.kind in kinds if kinds else report.kind not in WAITS)]
        self._all.clear()
        return found


def _device_module(settings: Settings, native: Any) -> types.ModuleType:
    """The module ``torch.<name>``: what torch and FSDP ask of ``torch.cuda``, and what tests ask of the simulation."""
    name = settings.name
    module = types.ModuleType(f"torch.{name}")
    module.__path__ = []  # torch imports `torch.<name>.<part>` in places
    accelerator = torch.accelerator

    def index(device: Any = None) -> int:
        if device is None:
            return accelerator.current_device_index()
        if isinstance(device, int):
            return device
        device = torch.device(device)
        return accelerator.current_device_index() if device.index is None else device.index

    # FSDP makes streams and events of the module's classes; torch's own return torch.Stream from `current_stream`.
    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
            if "stream_id" in kwargs:
                return super().__new__(cls, priority=priority, **kwargs)
            return super().__new__(cls, torch.device(name, index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
            return super().__new__(cls, name, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    class device:
        def __init__(self, device: Any) -> None:
            self.index = index(device)

        def __enter__(self) -> None:
            self.before = accelerator.current_device_index()
            accelerator.set_device_index(self.index)

        def __exit__(self, *_: object) -> None:
            accelerator.set_device_index(self.before)

    class stream:
        def __init__(self, stream: torch.Stream | None) -> None:
            self.stream = stream

        def __enter__(self) -> torch.Stream | None:
            if self.stream is not None:
                self.before = accelerator.current_stream(self.stream.device)
                accelerator.set_stream(self.stream)
            return self.stream

        def __exit__(self, *_: object) -> None:
            if self.stream is not None:
                accelerator.set_stream(self.before)

    def current_stream(device: Any = None) -> torch.Stream:
        return accelerator.current_stream(torch.device(name, index(device)))

    def default_stream(device: Any = None) -> torch.Stream:
        like = current_stream(device)
        return Stream(stream_id=0, device_index=like.device_index, device_type=like.device_type)

    def every(function: Any) -> list[Any]:
        return [function(number) for number in range(settings.devices)]

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        native.generator(index(device)).set_state(state.cpu())

    @contextmanager
    def timeline(
        operators: Callable[[str, float, float], float],
        collectives: Callable[[str, int, float], float],
        launch: float = 0.0,
        axis: Callable[[], str] = str,
    ) -> Iterator[list[Span]]:
        """Give durations to what runs inside. The list is filled at the end, after a synchronization.

        Args:
            operators: seconds of an operator by its name, flops (of products and attention) and bytes.
            collectives: seconds by name, number of ranks, and bytes of its inputs or outputs, whichever are more. All ranks
                must give the same.
            launch: seconds of the host for each.
            axis: names the axis of a collective, from where it is asked for.
        """
        spans: list[Span] = []
        accelerator.synchronize()
        native.start_timeline(operators, lambda *given: (collectives(*given), axis()), launch)
        try:
            yield spans
        finally:
            accelerator.synchronize()
            spans.extend(Span(*span) for span in native.stop_timeline())

    reports = Reports(native, settings.log)
    module.__dict__.update(
        # devices
        device=device,
        set_device=lambda device: accelerator.set_device_index(index(device)),
        current_device=accelerator.current_device_index,
        device_count=lambda: settings.devices,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        get_device_name=lambda device=None: name,
        get_device_capability=lambda device=None: (9, 0),
        get_device_properties=lambda device=None: types.SimpleNamespace(
            name=name, total_memory=native.total_bytes, multi_processor_count=1, major=9, minor=0, L2_cache_size=0
        ),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
        is_bf16_supported=lambda *_: True,
        # streams
        Stream=Stream,
        Event=Event,
        stream=stream,
        current_stream=current_stream,
        default_stream=default_stream,
        set_stream=accelerator.set_stream,
        synchronize=lambda device=None: accelerator.synchronize(torch.device(name, index(device))),
        # random numbers
        manual_seed=lambda seed: native.generator(index()).manual_seed(int(seed)),
        manual_seed_all=lambda seed: every(lambda number: native.generator(number).manual_seed(int(seed))),
        initial_seed=lambda: native.generator(index()).initial_seed(),
        seed=lambda: native.generator(index()).seed(),
        get_rng_state=lambda device=None: native.generator(index(device)).get_state(),
        set_rng_state=set_rng_state,
        get_rng_state_all=lambda: every(lambda number: native.generator(number).get_state()),
        set_rng_state_all=lambda states: [set_rng_state(state, number) for number, state in enumerate(states)],
        # memory: nothing is cached, so what is reserved is what is allocated
        empty_cache=lambda: None,
        memory_allocated=lambda device=None: native.memory(index(device))[0],
        memory_reserved=lambda device=None: native.memory(index(device))[0],
        max_memory_allocated=lambda device=None: native.memory(index(device))[1],
        max_memory_reserved=lambda device=None: native.memory(index(device))[1],
        reset_peak_memory_stats=lambda device=None: native.reset_peak(index(device)),
        watch_peak=lambda watched, device=None: native.watch_peak(index(device), watched),
        at_peak=lambda device=None: native.at_peak(index(device)),  # what was alive then: bytes, and who allocated them
        memory_stats=lambda device=None: accelerator.memory_stats(torch.device(name, index(device))),
        mem_get_info=lambda device=None: (native.total_bytes - native.memory(index(device))[0], native.total_bytes),
        # what is simulated
        reports=reports,
        counts=native.counts,
        reset_counts=native.reset_counts,
        orders=native.orders,
        ignore_orders=native.ignore_orders,
        timeline=timeline,
        exposed=exposed,
    )
    native.start(settings.devices, settings.mixing_raises, __file__, FOREIGN, reports.add)
    return module


_registered: list[str] = []


def register() -> None:
    """Entry point of ``torch.backends``; torch may call it again."""
    if _registered:
        return
    settings = Settings.read()
    _registered.append(settings.name)
    torch.utils.rename_privateuse1_backend(settings.name)
    from simulated_accelerator import _native

    module = _device_module(settings, _native)
    torch._register_device_module(settings.name, module)
    sys.modules[f"torch.{settings.name}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    _keep_ties()
    _register_collectives(f"{settings.name}ccl", settings.name, _native)
    # Memory is freed and collectives end after Python's modules have gone.
    atexit.register(_native.stop_reports)


def _keep_ties() -> None:
    """Make ``Module.to`` keep tied parameters tied, as it does on a GPU.

    torch changes the data of a parameter that stays on a GPU or the CPU, or moves between them. For a device of this kind it
    makes a new parameter for each place where a module has one, which would untie them.
    """
    apply = torch.nn.Module._apply

    def apply_tied(self: torch.nn.Module, function: Any, *args: Any, **options: Any) -> torch.nn.Module:
        places: dict[torch.nn.Parameter, list[tuple[torch.nn.Module, str]]] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((module, name))
        outcome = apply(self, function, *args, **options)
        for (owner, own_name), *others in places.values():
            for module, name in others:
                module._parameters[name] = owner._parameters[own_name]
        return outcome

    torch.nn.Module._apply = apply_tied


def _register_collectives(backend: str, device: str, native: Any) -> None:
    import torch.distributed as dist

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        store = dist.PrefixStore(backend, store)
        if rank == 0:
            handle, path = tempfile.mkstemp(prefix="simulated-accelerator-")
            os.truncate(handle, native.Ledger.bytes(size))
            os.close(handle)
            store.set("ledger", path)
        path = store.get("ledger").decode()
        ledger = native.Ledger(path, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # returns when all ranks are here, so have opened the ledger
        if rank == 0:
            os.unlink(path)
        return native.backend(gloo, backend, ledger, timeout)

    dist.Backend.register_backend(backend, make, devices=[device])
