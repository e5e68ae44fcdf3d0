"""Meshwright's training step against others' on gloo ranks.

    python benchmarks/throughput.py --check --markdown throughput.md
    python benchmarks/throughput.py --layout dp-tp --check --markdown dp-tp.md

``--layout dp``, two ranks: against FSDP2 by hand and against accelerate. ``--layout dp-tp``, four ranks: against the tensor
parallel and FSDP of transformers (``dp_tp.py``).

All train the same model from the same weights on the same tokens (``workload.py``); their losses must agree in every
step, or there is nothing to compare. Each is a job of its own; rounds are interleaved, and every ratio is taken against
a job of the same round. See README.md.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

import dp_tp
import import_time
import workload
from jobs import Contender, first_step_of_train
from report import Bound, Table, publish
from rounds import TIMES, WARMUP_STEPS, Key, Results, check_losses, ratio, run_rounds, say, times

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

NOTES = (
    "AG, RS, AR: all-gathers, reduce-scatters, all-reduces of a rank in an optimizer step, counted in a step that is not "
    "timed; MB: the larger buffer of each, added up.",
    "CPU: process time of a step, all threads of a rank; x: against the floor of the same round, median over rounds.",
    "floor-deferred with 1 microbatch is the same program as floor: how far its ratio is from 1 is the noise.",
    "accelerate: on a machine without GPU it does not support FSDP2; its state was set to FSDP by hand, and the run checked "
    "that parameters are sharded. This shows what its code does, not what its makers support.",
)


def run(contenders: list[str], microbatches: list[int], rounds: int, steps: int) -> tuple[list[Table], list[Bound]]:
    """Rounds of all contenders, and what starts and imports cost: tables and bounds."""
    startups: list[float] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-benchmark-") as name:
        directory = Path(name)
        workload.write(directory, (steps + 1) * workload.RANKS * workload.BATCH * max(microbatches))

        def start(key: Key, number: int) -> None:
            if key == (1, FLOOR) and OURS in contenders:  # next to the start that it is compared with
                startups.append(first_step_of_train(directory))
                say(f"round {number + 1}: meshwright train: first step after {startups[-1]:.2f} s")

        results = run_rounds(directory, [CONTENDERS[name] for name in contenders], microbatches, rounds, steps, start)
    check_losses(results, FLOOR)
    import_table, import_bound = import_time.report(rounds=5)
    tables = [step_table(results, rounds, steps), startup_table(results, startups), import_table]
    return tables, [*bounds_of(results, startups), import_bound]


def step_table(results: Results, rounds: int, steps: int) -> Table:
    """A row for each contender and number of microbatches."""
    table = Table(
        f"Optimizer step, {workload.RANKS} gloo ranks, fp32, medians of {rounds} x {steps - WARMUP_STEPS} steps",
        ("contender", "microbatches", "AG", "RS", "AR", "MB", *TIMES, "peak RSS MiB", "loss"),
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
                *times(results, (count, name), FLOOR),
                f"{median(run.peak_rss for run in runs) / 2**20:.0f}",
                f"{runs[0].losses[-1]:.6f}",
            )
        )
    return table


def startup_table(results: Results, startups: list[float]) -> Table:
    """Launch to the end of the first step, of one microbatch."""
    table = Table("From launch to the end of the first step, seconds, median", ("started by", "seconds"))
    if startups:
        table.rows.append(("`meshwright train`, nothing prepared", f"{median(startups):.2f}"))
    for (count, name), runs in results.items():
        if count == 1:
            table.rows.append((f"torchrun, {name}", f"{median(run.first_step_seconds for run in runs):.2f}"))
    return table


def bounds_of(results: Results, startups: list[float]) -> list[Bound]:
    """The promises that these results can tell of."""
    bounds = []
    if (1, OURS) in results:
        value = ratio(results, (1, OURS), "cpu_ms", FLOOR)
        bounds.append(Bound("CPU time against the floor, 1 microbatch", value, MAX_STEP_RATIO))
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
    parser.add_argument("--layout", choices=("dp", "dp-tp"), default="dp", help="what is parallel")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="some of them, besides what they are compared with")
    parser.add_argument("--markdown", type=Path, help="file to write the tables to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    arguments = parser.parse_args()
    if arguments.steps <= WARMUP_STEPS:
        parser.error(f"--steps: more than the {WARMUP_STEPS} of warm-up")

    module = dp_tp if arguments.layout == "dp-tp" else sys.modules[__name__]
    reference = dp_tp.PEER if arguments.layout == "dp-tp" else FLOOR
    chosen = arguments.contenders or list(module.CONTENDERS)
    if unknown := sorted(set(chosen) - module.CONTENDERS.keys()):
        parser.error(f"--contenders: {', '.join(unknown)}; legal are {'; '.join(module.CONTENDERS)}")
    names = [name for name in module.CONTENDERS if name in (reference, *chosen)]
    tables, bounds = module.run(names, arguments.microbatches, arguments.rounds, arguments.steps)
    return publish(tables, bounds, arguments.markdown, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
