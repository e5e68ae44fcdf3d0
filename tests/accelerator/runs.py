"""Trains tiny runs on the simulated accelerator and on the CPU, with the trainer that `meshwright train` uses."""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.data.store import TokenStore
from meshwright.device import is_accelerator, peak_memory
from meshwright.ranks.pool import Pool
from meshwright.train.config import RunConfig
from meshwright.train.parts import PARTS
from meshwright.train.start.prepare import load_run_tokenizer, prepare_run
from meshwright.train.start.resume import checkpoint_to_resume
from meshwright.train.start.setup import make_setup
from meshwright.train.start.teacher_setup import with_teacher
from meshwright.train.trainer import Trainer
from tests.accelerator.module import WAITS

FAULTS = ("race", "reuse", "mixed", "order")
SOURCE = "/meshwright/"
IN_STEP = {f"train/trainer.py {name}" for name in ("train_step", "_write_line", "read_finished_steps")}
WORKER = "ranks/forked.py _call"
"""What runs a job, in the main thread of a worker."""


class RankRun(NamedTuple):
    """What a run did on one rank.

    Attributes:
        faults: races, memory that is reused while in use, mixed devices, collectives in another order.
        waits: how often the host waited for the device inside the steps, by file and function of the innermost line of
            Meshwright, such as ``train/journal.py read``, or of the innermost line.
        behind: the same of waits while the device had work.
        peak: most bytes of tensors on the device in the loop; ``None`` on the CPU.
    """

    faults: list[str]
    waits: Counter[str]
    behind: Counter[str]
    peak: int | None


def trainer_on(device: torch.device, config: RunConfig, store: Path) -> Trainer:
    """Make the trainer of this rank, which is in a process group already."""
    setup = with_teacher(make_setup(config, dist.get_world_size(), load_run_tokenizer(config)))
    return Trainer(setup, TokenStore.open(store), device, checkpoint_to_resume(config), replace(PARTS))


def train_on_device(device: torch.device, config: RunConfig, store: Path, plant: Callable[[Trainer], None] | None) -> RankRun:
    """Train a run on this rank, which is in a process group already; ``plant`` may put a fault into its trainer."""
    simulated = torch.get_device_module(device) if is_accelerator(device) else None
    if simulated is not None:
        gc.collect()  # what an earlier run left
        simulated.reports.take()
    left = 0 if simulated is None else simulated.memory_allocated()
    trainer = trainer_on(device, config, store)
    at_start = [] if simulated is None else simulated.reports.take()  # without waits: threads read the files
    if simulated is not None:
        simulated.reset_peak_memory_stats()
    if plant is not None:
        plant(trainer)
    trainer.run()
    del trainer
    if simulated is None:
        return RankRun([], Counter(), Counter(), None)
    simulated.ignore_orders([])
    simulated.synchronize()
    found = [*at_start, *simulated.reports.take(*FAULTS, *WAITS)]
    waits, behind = (
        Counter(place_of(report.stack) for report in found if report.kind == kind and in_step(report.stack)) for kind in WAITS
    )
    faults = [f"{report.kind}: {report.text}" for report in found if report.kind not in WAITS]
    return RankRun(faults, waits, behind, (peak_memory(device) or 0) - left)


def in_step(stack: tuple[str, ...]) -> bool:
    """Whether a frame is of a step, or of reading how it went; not of evaluation, of saving or of the start.

    Autograd runs backward in a thread of its own for each accelerator, which knows nothing of what called it.
    """
    places = {place_of((frame,)) for frame in stack}
    return bool(places & IN_STEP) or WORKER not in places


def place_of(stack: tuple[str, ...]) -> str:
    """File and function of the innermost frame of Meshwright, or of the innermost one. Lines would change with every edit."""
    frame = next((frame for frame in stack if SOURCE in frame.partition(":")[0]), stack[0])
    path, _, rest = frame.partition(":")
    path = path.rpartition(SOURCE)[2] if SOURCE in path else path.rpartition("/")[2]
    return f"{path} {rest.partition(' ')[2]}"


def train_with(pool: Pool, config: RunConfig, plant: Callable[[Trainer], None] | None = None) -> list[RankRun]:
    """Prepare a run here, and train it on the ranks of a pool."""
    _, _, store = prepare_run(config, pool.world_size)
    return pool.run(train_on_device, config, store.directory, plant)


def ignore_orders(trainer: Trainer, names: list[str]) -> None:
    """A plant: some orders between streams are left out, in the clocks."""
    torch.get_device_module(trainer.device).ignore_orders(names)


_BEFORE: dict[str, int] = {}


def forget_orders(device: torch.device) -> None:
    """Let :func:`orders_of` know only orders that are set up from now on."""
    _BEFORE.update(torch.get_device_module(device).orders())


def orders_of(device: torch.device, text: str) -> list[str]:
    """Names of the orders between streams that were set up since :func:`forget_orders`, with a text in them."""
    orders = torch.get_device_module(device).orders()
    return [name for name, times in orders.items() if text in name and times > _BEFORE.get(name, 0)]
