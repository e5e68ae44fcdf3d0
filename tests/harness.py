"""Runs a function on several gloo ranks, forked from this process, so that four ranks start in half a second; and refusals."""

import faulthandler
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # preloaded: FSDP's hooks import it on first use, which would cost every forked rank a second
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.distributed import _torch_compat
from meshwright.errors import MeshwrightError
from meshwright.ranks.forked import keep_inherited

TIMEOUT = timedelta(seconds=20)
"""Of every collective: a rank that failed makes its peers fail, not hang."""

PINNED = f"transformers=={version('transformers')}\n" in (Path(__file__).parents[1] / "constraints.txt").read_text()
"""Whether the transformers of :file:`constraints.txt` is installed."""
ROTATIONS = 1e-6 if PINNED else 1e-3
"""The share of a model's products that its rotary embeddings may be. Older releases multiply matrices for them."""

OF_PINNED = pytest.mark.skipif(
    not PINNED,
    reason="of the model types, and the code, of the transformers that constraints.txt pins",
)
"""A test that is skipped with other releases of transformers, which :mod:`maintain.versions` meets."""

LIMIT = 120
"""Seconds for all ranks of a call. One that is stuck writes before where each of its threads is."""


class RankError(AssertionError):
    """What failed on which ranks, with their tracebacks."""


@contextmanager
def refuses(kind: type[MeshwrightError], code: str) -> Iterator[pytest.ExceptionInfo[MeshwrightError]]:
    """Inside, an error of a kind is expected that has a problem with a code of :mod:`meshwright.error_codes`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert code in caught.value.codes, caught.value


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, group: bool = True, limit: int = LIMIT) -> list[Any]:
    """Call ``function(rank, *args)`` on ``world_size`` forked ranks and return their results by rank.

    ``group=False``: without a process group. ``limit``: seconds for all of them.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-test-") as folder:
        context = mp.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(function, rank, world_size, Path(folder), args, group, limit), daemon=False)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=limit)
        outcomes = []
        for rank, process in enumerate(ranks):
            if process.is_alive():
                process.kill()
            path = Path(folder, f"result-{rank}")
            stuck = Path(folder, f"stuck-{rank}").read_text() if Path(folder, f"stuck-{rank}").exists() else ""
            found = pickle.loads(path.read_bytes()) if path.exists() else (False, f"exit code {process.exitcode}\n{stuck}")
            outcomes.append(found)
        failed = [f"rank {rank}:\n{value}" for rank, (good, value) in enumerate(outcomes) if not good]
        if failed:
            raise RankError("\n".join(failed))
        return [value for _, value in outcomes]


def _rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: Path,
    args: tuple[Any, ...],
    group: bool,
    limit: int,
) -> None:
    keep_inherited()
    stuck = open(folder / f"stuck-{rank}", "w")  # noqa: SIM115 - open as long as the rank runs
    faulthandler.dump_traceback_later(limit - 15, file=stuck)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        if group:
            _torch_compat.mend_gloo()
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=TIMEOUT
            )
        outcome = (True, function(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    try:
        payload = pickle.dumps(outcome)
    except Exception:
        payload = pickle.dumps((False, f"result cannot be pickled: {outcome!r}"))
    temporary = folder / f"writing-{rank}"
    temporary.write_bytes(payload)
    temporary.rename(folder / f"result-{rank}")
    os._exit(0)  # no atexit handlers of the parent, no waiting for gloo's threads
