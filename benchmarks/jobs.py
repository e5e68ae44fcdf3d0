"""Runs one contender as a job of its own, and reads what its ranks found."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import yaml
from measure import LAUNCHED
from workload import RANKS, train_config

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Contender:
    """A script that trains the workload, which of its variants, and in how many processes."""

    name: str
    script: str
    variant: str
    processes: int = RANKS


@dataclass(frozen=True)
class Result:
    """What one job found. Times are of the steps after warm-up.

    Attributes:
        cpu_ms: CPU time of a step, all threads of a rank: median over steps, mean over ranks.
        wall_ms: the same of wall time.
        peak_rss: bytes, of the largest rank.
        first_step_seconds: from the start of the launcher to the end of the first step of the slower rank.
        counts: collectives of rank 0 in an optimizer step, by kind.
        bytes: bytes of them, by kind.
        counts_of: ranks of a group, with blanks between them, to the counts in it; ``bytes_of``: to their bytes.
        saved_bytes: the most that autograd held for backward at once, of the largest rank.
        live_bytes: the most bytes of all storages alive at once but AdamW's state, of the largest rank.
        losses: of every step, mean over ranks.
    """

    cpu_ms: float
    wall_ms: float
    peak_rss: int
    first_step_seconds: float
    counts: dict[str, int]
    bytes: dict[str, int]
    counts_of: dict[str, dict[str, int]]
    bytes_of: dict[str, dict[str, int]]
    saved_bytes: int
    live_bytes: int
    losses: list[float]


def run_job(contender: Contender, directory: Path, microbatches: int, steps: int, warmup: int) -> Result:
    """Train as one job under torchrun.

    Raises:
        SystemExit: if the job fails, with the end of what it said.
    """
    output = directory / "job"
    shutil.rmtree(output, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(contender.processes)),
        *(str(HERE / contender.script), str(directory), str(output)),
        *("--microbatches", str(microbatches), "--steps", str(steps), "--variant", contender.variant),
    ]
    _run(command)
    ranks = [json.loads((output / f"rank-{rank}.json").read_text()) for rank in range(contender.processes)]
    return Result(
        cpu_ms=1000 * fmean(median(rank["cpu"][warmup:]) for rank in ranks),
        wall_ms=1000 * fmean(median(rank["wall"][warmup:]) for rank in ranks),
        peak_rss=max(rank["peak_rss"] for rank in ranks),
        first_step_seconds=max(rank["first_step_seconds"] for rank in ranks),
        counts=ranks[0]["counts"],
        bytes=ranks[0]["bytes"],
        counts_of=ranks[0]["counts_of"],
        bytes_of=ranks[0]["bytes_of"],
        saved_bytes=max(rank["saved_bytes"] for rank in ranks),
        live_bytes=max(rank["live_bytes"] for rank in ranks),
        losses=[fmean(of_step) for of_step in zip(*(rank["losses"] for rank in ranks), strict=True)],
    )


def first_step_of_train(directory: Path) -> float:
    """Seconds from the start of `meshwright train CONFIG` in an empty directory to the end of its first step.

    The same model from the same weights. Everything that the command does by default is in it: training a tokenizer,
    tokenizing, the plan, TensorBoard. The end of the step is the time at which its line of metrics was written.
    """
    output = directory / "train"
    shutil.rmtree(output, ignore_errors=True)
    text = directory / "text.txt"
    text.write_text("\n".join(f"{number} times {number} is {number * number}." for number in range(1000)))
    config = train_config(directory, output, microbatches=1, variant="defer")
    config["data"].pop("corpus")
    config["data"]["files"] = [str(text)]
    config["tokenizer"] = {"vocab_size": 300}
    config["training"]["steps"] = 1
    config["launch"] = {"nproc": RANKS}
    del config["metrics"]
    file = directory / "train.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(config))))
    begun = _run([sys.executable, "-m", "meshwright.cli.main", "train", str(file)])
    metrics = output / "metrics.jsonl"
    written = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    if written != [1]:
        raise SystemExit(f"{metrics}: expected the line of step 1 alone, found steps {written}")
    return metrics.stat().st_mtime - begun


def _run(command: list[str]) -> float:
    """Run a command to its end, in a session of its own; returns when it was started."""
    begun = time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", LAUNCHED: repr(begun)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except BaseException:  # a timeout, or the user's Ctrl-C: no rank stays behind
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed with exit code {process.returncode}:\n{said[-4000:]}")
    return begun
