"""`meshwright plan --search`."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.plan.cost.hardware import Hardware
    from meshwright.search.answer import Answer
    from meshwright.train.config import RunConfig

__all__ = ["refuse_options", "search_layouts", "sizes_of"]


def sizes_of(text: str | None) -> list[int]:
    """Return the numbers of ranks that an option lists, such as ``8,16,64``; none if it is not given.

    Raises:
        ConfigError: something in it is no positive whole number.
    """
    if text is None:
        return []
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError("cli.exclusive", f"--world-size={text}: legal are positive whole numbers, such as 8 or 8,16,64")
    return sorted({int(part) for part in parts})


def refuse_options(
    *, search: bool, gpu: str | None, sizes: Sequence[int], only: Mapping[str, object], chosen: Sequence[str]
) -> None:
    """Refuse options that do not go together.

    Args:
        search: whether --search was given.
        gpu: value of --gpu.
        sizes: numbers of ranks.
        only: options that are for --search alone, with their values; ``None``: not given.
        chosen: ways to print a plan that were given.

    Raises:
        ConfigError: what is wrong.
    """
    if given := [name for name, value in only.items() if value is not None and not search]:
        raise ConfigError("cli.exclusive", f"{given[0]}: is for searches; add --search")
    if search and gpu is None:
        raise ConfigError("cli.exclusive", "--search: needs a device; add --gpu h100 (or another one)")
    if isinstance(price := only.get("--price"), float) and not math.isfinite(price):
        raise ConfigError("cli.exclusive", f"--price={price}: legal are numbers from 0 on, such as 2.5")
    if search and (others := [name for name in chosen if name != "--json"]):
        raise ConfigError("cli.exclusive", f"--search: {others[0]} shows one plan; leave one of them out")
    if len(sizes) > 1 and not search:
        text = ",".join(map(str, sizes))
        raise ConfigError("cli.exclusive", f"--world-size={text}: several numbers are for searches; add --search, or give one")


def search_layouts(
    run: "RunConfig",
    sizes: Sequence[int],
    hardware: "Hardware",
    *,
    config: Path,
    overrides: Sequence[str],
    free: str | None,
    load: float,
    price: float | None,
    tried: int | None,
    as_json: bool,
) -> "list[Answer]":
    """Search the layouts of a run, print the best few for each number of ranks, and return the answers.

    Args:
        run: the configuration.
        sizes: numbers of ranks.
        hardware: the devices.
        config: the file of the configuration.
        overrides: those that were given.
        free: names of what may change although the configuration sets it, with commas.
        load: tokens of the experts of the fullest rank, over an even share.
        price: of a device for an hour.
        tried: number of the best layouts that are measured here; ``None``: none.
        as_json: whether to print JSON.
    """
    from meshwright.search.answer import base_of, search
    from meshwright.search.measure import Trial, measure, trial_of
    from meshwright.search.search_tables import show_answer, show_scaling, show_trials
    from meshwright.terminal import console
    from meshwright.trace.kept_traces import TraceStore
    from meshwright.train.proofs.records import Source

    if tried is not None and len(sizes) != 1:
        raise ConfigError("cli.exclusive", "--try: measures on this machine; give one number of ranks")
    setup = base_of(run)
    store, source = TraceStore(setup), Source(str(config), tuple(overrides))
    names = [] if free is None else [name.strip() for name in free.split(",")]
    answers = [
        search(setup, size, hardware, free=names, source=source, load=load, store=store, say=_say(as_json)) for size in sizes
    ]
    trials: list[Trial] = []
    if tried is not None and answers[0].options:
        command = [sys.executable, "-m", "meshwright", "train", str(config), "--nproc", str(sizes[0]), *overrides]
        trials = measure(answers[0].options[:tried], lambda option: trial_of(option, command))
    if as_json:
        content = {"answers": [answer.to_dict(price) for answer in answers]}
        content |= (
            {"trials": [{**vars(trial), "option": trial.option.to_dict(price)} for trial in trials]}
            if tried is not None
            else {}
        )
        typer.echo(json.dumps(content, indent=1))
        return answers
    page = console()
    command_line = shlex.join(["meshwright", "train", str(config), *overrides])
    for answer in answers:
        page.print(show_answer(answer, command_line, price), highlight=False, soft_wrap=True)
    if len(answers) > 1:
        page.print(show_scaling(answers, price), highlight=False, soft_wrap=True)
    if trials:
        page.print(show_trials(trials, command_line), highlight=False, soft_wrap=True)
    return answers


def _say(as_json: bool) -> Callable[[str], None]:
    """Return what tells a person who waits at a terminal how far the search is."""
    quiet = as_json or not sys.stderr.isatty()
    return (lambda line: None) if quiet else lambda line: typer.echo(line, err=True)
