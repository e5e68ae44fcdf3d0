"""Kills and signals at random moments: ``python -m tests.cli.soak 30``. Each run that comes to its end has the same losses.

A life is a run that is killed or asked to end again and again, and started again each time, until it is done. Odd lives save in
the background.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from meshwright.train.config import RunConfig, load_config
from tests.cli.conftest import Command, all_gone
from tests.train.runs import losses, write_config, write_corpus

RUN = ("--nproc", 2, "training.steps=40", "training.eval_every=9", "checkpoint.every=3", "schedule.kind=constant")
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
HOW = ("kill the launcher", "kill a worker", *(f"{number.name} to the launcher" for number in ASKED))


def soak(folder: Path, disturbances: int, seed: int = 0) -> Counter[str]:
    """Disturb runs until there were so many disturbances, and let the last one end.

    Returns:
        How often each kind of disturbance ended a run how.

    Raises:
        AssertionError: another loss, a checkpoint that is damaged, an error without words, or processes that stay.
    """
    draw, corpus = random.Random(seed), write_corpus(folder / "corpus.jsonl")
    whole = _life(folder / "undisturbed", corpus, 0)
    begun = time.monotonic()
    assert Command(folder, "train", *whole[1]).end(300).code == 0
    seconds, expected = time.monotonic() - begun, losses(whole[0])
    found: Counter[str] = Counter()
    number = 0
    while found.total() < disturbances:
        config, arguments = _life(folder / f"life-{number}", corpus, number)
        while found.total() < disturbances:
            how = draw.choice(HOW)
            command = Command(folder, "train", *arguments)
            time.sleep(draw.uniform(0.05, 0.6) * seconds)
            _disturb(command.process, how, draw)
            outcome = command.end(120)
            all_gone(outcome)
            assert "Traceback" not in outcome.error, outcome.error
            assert "is damaged" not in outcome.out, outcome.out
            if outcome.code == 0:
                break  # it was done before
            found[f"{how}: exit code {outcome.code}"] += 1
        assert Command(folder, "train", *arguments).end(300).code == 0
        assert losses(config) == expected, (number, losses(config), expected)
        number += 1
    found["lives"] = number
    return found


def _life(directory: Path, corpus: Path, number: int) -> tuple[RunConfig, tuple[object, ...]]:
    directory.mkdir()
    path = write_config(directory, corpus)
    return load_config(path), (path, *RUN, f"checkpoint.asynchronous={bool(number % 2)}")


def _disturb(process: int, how: str, draw: random.Random) -> None:
    """A process that has ended, and is not waited for yet, takes every signal."""
    if how == "kill a worker":
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        if children:
            os.kill(int(draw.choice(children)), signal.SIGKILL)
    else:
        name = how.split()[0]
        os.kill(process, signal.SIGKILL if name == "kill" else signal.Signals[name])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="meshwright-soak-") as place:
        os.environ["XDG_CACHE_HOME"] = place
        for what, times in sorted(soak(Path(place), int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])).items()):
            print(f"{times:4d}  {what}")
