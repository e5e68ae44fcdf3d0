"""Meshwright's training step against a loop by hand and against accelerate, on two gloo ranks.

    python benchmarks/throughput.py --check --markdown throughput.md

All train the same model from the same weights on the same tokens (``workload.py``); their losses must agree in every
step, or there is nothing to compare. Each is a job of its own; rounds are interleaved, and every ratio is taken against
the floor of the same round. See README.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import import_time
import workload
from jobs import Contender, Result, first_step_of_train, run_job
from report import Bound, Table, publish

WARMUP_STEPS = 3
LOSS_TOLERANCE = 1e-5
"""Relative. Sums in another order move the loss of step 12 by some 1e-7."""

MAX_STEP_RATIO = 1.03
MAX_STARTUP_SECONDS = 1.0

FLOOR = "floor"
OURS = "meshwright"
ACCELERATE = "accelerate"

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(FLOOR, "floor.py", "naive"),
        Contender("floor-deferred", "floor.py", "deferred"),
        Contender(OURS, "run_meshwright.py", "defer"),
        Contender("meshwright-reduce_each", "run_meshwright.py", "reduce_each"),
        Contender(ACCELERATE, "run_accelerate.py", "accumulate"),
    )
}

Key = tuple[int, str]
"""Microbatches, and the contender's name."""

NOTES = (
    "AG, RS, AR: all-gathers, reduce-scatters, all-reduces of a rank in an optimizer step, counted in a step that is not "
    "timed; MB: the larger buffer of each, added up.",
    "CPU: process time of a step, all threads of a rank; x: against the floor of the same round, median over rounds.",
    "floor-deferred with 1 microbatch is the same program as floor: how far its ratio is from 1 is the noise.",
    "accelerate: on a machine without GPU it does not support FSDP2; its state was set to FSDP by hand, and the run checked "
    "that parameters are sharded. This shows what its code does, not what its makers support.",
)


def run_rounds(
    contenders: list[str], microbatches: list[int], rounds: int, steps: int
) -> tuple[dict[Key, list[Result]], list[float]]:
    """All jobs, interleaved: results by key, in the order of rounds; and seconds to the first step of `meshwright train`."""
    results: dict[Key, list[Result]] = {(count, name): [] for count in microbatches for name in contenders}
    startups: list[float] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-benchmark-") as name:
        directory = Path(name)
        workload.write(directory, (steps + 1) * workload.RANKS * workload.BATCH * max(microbatches))
        for number in range(rounds):
            # Every other round backwards, so that a machine that grows slower or faster favours nobody.
            for key in list(results)[:: -1 if number % 2 else 1]:
                count, contender = key
                result = run_job(CONTENDERS[contender], directory, count, steps, WARMUP_STEPS)
                results[key].append(result)
                _say(f"round {number + 1}: {contender} x {count}: {result.cpu_ms:.0f} ms CPU, {result.wall_ms:.0f} ms")
                if key == (1, FLOOR) and OURS in contenders:  # next to the start that it is compared with
                    startups.append(first_step_of_train(directory))
                    _say(f"round {number + 1}: meshwright train: first step after {startups[-1]:.2f} s")
    return results, startups


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_losses(results: Mapping[Key, list[Result]]) -> None:
    """Refuse results of different computations.

    Raises:
        SystemExit: the first step in which a contender's loss is not the floor's.
    """
    for (count, name), runs in results.items():
        reference = results[count, FLOOR][0].losses
        for run in runs:
            for step, (found, expected) in enumerate(zip(run.losses, reference, strict=True)):
                if not abs(found - expected) <= LOSS_TOLERANCE * abs(expected):
                    raise SystemExit(
                        f"{name}, {count} microbatches: loss {found:.8f} in step {step + 1}, the floor has {expected:.8f}: "
                        "they do not compute the same, so their times cannot be compared"
                    )


def ratio(results: Mapping[Key, list[Result]], key: Key, what: str, against: str = FLOOR) -> float:
    """Median over rounds of a contender's time over another's in the same round."""
    pairs = zip(results[key], results[key[0], against], strict=True)
    return median(getattr(run, what) / getattr(other, what) for run, other in pairs)


def step_table(results: Mapping[Key, list[Result]], rounds: int, steps: int) -> Table:
    """A row for each contender and number of microbatches."""
    table = Table(
        f"Optimizer step, {workload.RANKS} gloo ranks, fp32, medians of {rounds} x {steps - WARMUP_STEPS} steps",
        ("contender", "microbatches", "AG", "RS", "AR", "MB", "CPU ms", "x", "wall ms", "x", "peak RSS MiB", "loss"),
        notes=NOTES,
    )
    for (count, name), runs in results.items():
        counts = runs[0].counts
        table.rows.append(
            (
                name,
                str(count),
                *(str(counts.get(kind, 0)) for kind in ("all_gather", "reduce_scatter", "all_reduce")),
                f"{sum(runs[0].bytes.values()) / 1e6:.1f}",
                f"{median(run.cpu_ms for run in runs):.0f}",
                f"{ratio(results, (count, name), 'cpu_ms'):.3f}",
                f"{median(run.wall_ms for run in runs):.0f}",
                f"{ratio(results, (count, name), 'wall_ms'):.3f}",
                f"{median(run.peak_rss for run in runs) / 2**20:.0f}",
                f"{runs[0].losses[-1]:.6f}",
            )
        )
    return table


def startup_table(results: Mapping[Key, list[Result]], startups: list[float]) -> Table:
    """Launch to the end of the first step, of one microbatch."""
    table = Table("From launch to the end of the first step, seconds, median", ("started by", "seconds"))
    if startups:
        table.rows.append(("`meshwright train`, nothing prepared", f"{median(startups):.2f}"))
    for (count, name), runs in results.items():
        if count == 1:
            table.rows.append((f"torchrun, {name}", f"{median(run.first_step_seconds for run in runs):.2f}"))
    return table


def bounds_of(results: Mapping[Key, list[Result]], startups: list[float]) -> list[Bound]:
    """The promises that these results can tell of."""
    bounds = []
    if (1, OURS) in results:
        bounds.append(Bound("CPU time against the floor, 1 microbatch", ratio(results, (1, OURS), "cpu_ms"), MAX_STEP_RATIO))
        later = median(ours - run.first_step_seconds for ours, run in zip(startups, results[1, FLOOR], strict=True))
        bounds.append(Bound("meshwright train later than the floor", later, MAX_STARTUP_SECONDS, " s"))
    for other in (FLOOR, ACCELERATE):
        if {(4, OURS), (4, other)} <= results.keys():
            value = ratio(results, (4, OURS), "cpu_ms", other)
            bounds.append(Bound(f"CPU time against {other}, 4 microbatches", value, 1.0, below=True))
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=12, help=f"steps of a job, the first {WARMUP_STEPS} to warm up")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4], help="in an optimizer step")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="besides the floor")
    parser.add_argument("--markdown", type=Path, help="file to write the tables to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    arguments = parser.parse_args()
    if arguments.steps <= WARMUP_STEPS:
        parser.error(f"--steps: more than the {WARMUP_STEPS} of warm-up")

    names = [name for name in CONTENDERS if name in (FLOOR, *arguments.contenders)]
    results, startups = run_rounds(names, arguments.microbatches, arguments.rounds, arguments.steps)
    check_losses(results)
    import_table, import_bound = import_time.report(rounds=5)
    tables = [
        step_table(results, arguments.rounds, arguments.steps),
        startup_table(results, startups),
        import_table,
    ]
    return publish(tables, [*bounds_of(results, startups), import_bound], arguments.markdown, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
