"""A mixture of experts on two gloo ranks, sharded and expert parallel, against transformers' own FSDP and expert parallel.

    python benchmarks/moe.py --check --markdown moe.md

All train the same Qwen3-MoE from the same weights on the same tokens (``workload.SPARSE``); their losses must be those of one
process in every step, or there is nothing to compare. Each is a job of its own; rounds are interleaved, and every ratio is
taken against the job of transformers with the same layout in the same round. See README.md.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

import workload
from jobs import Contender, Result, run_job
from report import Bound, Table, publish
from rounds import WARMUP_STEPS, Key, Results, check_losses, ratio, run_rounds, say
from workload import BATCH, RANKS, SEQUENCE_LENGTH, train_config

ALONE = "one process"

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("transformers, fsdp 2", "run_transformers.py", "fsdp"),
        Contender("meshwright, shard 2", "run_meshwright.py", "defer"),
        Contender("meshwright, shard 2, reduce_each", "run_meshwright.py", "reduce_each"),
        Contender("transformers, fsdp 2, ep 2", "run_transformers.py", "ep"),
        Contender("meshwright, ep 2", "run_meshwright.py", "ep"),
        Contender("meshwright, ep 2, reduce_each", "run_meshwright.py", "ep-reduce_each"),
    )
}

KINDS = {"all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A", "all_reduce": "AR"}

NOTES = (
    "AG, RS, A2A, AR: all-gathers, reduce-scatters, all-to-alls, all-reduces of rank 0 in an optimizer step, counted in a step "
    "that is not timed; MB: the larger buffer of each, added up.",
    "saved: the most that autograd holds for backward at once, parameters not counted. peak: the most bytes of all storages "
    "alive at once but AdamW's state. RSS: high-water of the process, imports included. All of the largest rank.",
    "tokens/s: of both ranks, of wall time; CPU: process time of a step, all threads of a rank. x: against transformers with "
    "the same layout in the same round, median over rounds; of tokens/s, more is better.",
    "transformers: `from_pretrained(distributed_config=DistributedConfig(fsdp_size=2, ep_size=1 or 2))`, fp32; FSDP does not "
    "reduce between microbatches, as in its Trainer, and the norm is taken mesh by mesh.",
    "one process: the same batch, one share after another; its losses are the reference (all steps, relative 1e-5), its times "
    "are not compared.",
)


def peer_of(name: str) -> str:
    """The contender of transformers with the same layout."""
    return "transformers, fsdp 2, ep 2" if "ep 2" in name else "transformers, fsdp 2"


def run(names: list[str], microbatches: list[int], rounds: int, steps: int) -> tuple[list[Table], list[Bound]]:
    """Rounds of all contenders: table and bounds.

    Raises:
        SystemExit: if losses differ from those of one process.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-benchmark-") as folder:
        directory = Path(folder)
        workload.write(directory, (steps + 1) * RANKS * BATCH * max(microbatches), sparse=True)
        ours = [(count, name) for count in microbatches for name in names if name.startswith("meshwright")]
        due = {(count, name): _due(directory, CONTENDERS[name].variant, count) for count, name in ours}
        alone = Contender(ALONE, "run_alone.py", "alone", 1)
        results: dict[Key, list[Result]] = {}
        for count in microbatches:
            results[count, ALONE] = [run_job(alone, directory, count, steps, WARMUP_STEPS)]
            say(f"{ALONE} x {count}: loss {results[count, ALONE][0].losses[0]:.6f} in the first step")
        results.update(run_rounds(directory, [CONTENDERS[name] for name in names], microbatches, rounds, steps))
    check_losses(results, ALONE)
    return [table_of(results, rounds, steps)], bounds_of(results, due)


def _due(directory: Path, variant: str, microbatches: int) -> dict[str, int]:
    """Collectives that the plan says."""
    from meshwright.plan.axes.experts import expert_parallel_counts
    from meshwright.plan.cost.price import totals
    from meshwright.train.config import RunConfig
    from meshwright.train.start.setup import make_setup

    config = RunConfig.model_validate(train_config(directory, directory / "planned", microbatches, variant))
    plan = make_setup(config, RANKS).plan
    traffic = totals(plan).traffic
    sent = expert_parallel_counts(plan).get("ep", {}).get("all_to_all", 0)
    return {"all_gather": traffic.all_gathers, "reduce_scatter": traffic.reduce_scatters, "all_to_all": sent}


def table_of(results: Results, rounds: int, steps: int) -> Table:
    """A row for each contender and number of microbatches."""
    table = Table(
        f"Qwen3-MoE, optimizer step, {RANKS} gloo ranks, fp32, medians of {rounds} x {steps - WARMUP_STEPS} steps",
        (
            "contender",
            "microbatches",
            *KINDS.values(),
            "MB",
            "saved MiB",
            "peak MiB",
            "RSS MiB",
            "CPU ms",
            "x",
            "tokens/s",
            "x",
            "last loss",
        ),
        notes=NOTES,
    )
    for (count, name), runs in results.items():
        cells = [name, str(count), *(str(runs[0].counts.get(kind, 0)) for kind in KINDS)]
        cells.append(f"{sum(runs[0].bytes.values()) / 1e6:.1f}")
        cells.append(f"{runs[0].saved_bytes / 2**20:.1f}")
        cells.append(f"{runs[0].live_bytes / 2**20:.1f}")
        cells.append(f"{median(run.peak_rss for run in runs) / 2**20:.0f}")
        cells.append(f"{median(run.cpu_ms for run in runs):.0f}")
        cells.append("" if name == ALONE else f"{ratio(results, (count, name), 'cpu_ms', peer_of(name)):.3f}")
        cells.append(f"{median(1000 * count * RANKS * BATCH * SEQUENCE_LENGTH / run.wall_ms for run in runs):.0f}")
        cells.append("" if name == ALONE else f"{1 / ratio(results, (count, name), 'wall_ms', peer_of(name)):.3f}")
        table.rows.append((*cells, f"{runs[0].losses[-1]:.6f}"))
    return table


def bounds_of(results: Results, due: dict[Key, dict[str, int]]) -> list[Bound]:
    """That each makes the collectives of its plan, and costs no more than the peer: ``defer``, which the plan chooses where it
    fits, in time; ``reduce_each``, which gathers and reduces more often to hold less, in bytes held while gradients accumulate.
    """
    bounds = []
    for (count, name), expected in due.items():
        made = results[count, name][0].counts
        wrong = [f"{kind} {made.get(kind, 0)} for {number}" for kind, number in expected.items() if made.get(kind, 0) != number]
        bounds.append(
            Bound(f"{name}, {count} microbatches: unlike its plan{''.join(f'; {item}' for item in wrong)}", len(wrong), 0)
        )
        where = f"{name}, {count} microbatches"
        if not name.endswith("reduce_each"):
            value = ratio(results, (count, name), "cpu_ms", peer_of(name))
            bounds.append(Bound(f"{where}: CPU time against transformers", value, 1.0))
        elif count > 1:
            value = ratio(results, (count, name), "live_bytes", peer_of(name))
            bounds.append(Bound(f"{where}: bytes held against transformers", value, 1.0))
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=9, help=f"steps of a job, the first {WARMUP_STEPS} to warm up")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4], help="in an optimizer step")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="some of them, besides what they are compared with")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    arguments = parser.parse_args()
    if arguments.steps <= WARMUP_STEPS:
        parser.error(f"--steps: more than the {WARMUP_STEPS} of warm-up")
    chosen = arguments.contenders or list(CONTENDERS)
    if unknown := sorted(set(chosen) - CONTENDERS.keys()):
        parser.error(f"--contenders: {'; '.join(unknown)}; legal are {'; '.join(CONTENDERS)}")
    needed = {*chosen, *map(peer_of, chosen)}
    names = [name for name in CONTENDERS if name in needed]
    tables, bounds = run(names, arguments.microbatches, arguments.rounds, arguments.steps)
    return publish(tables, bounds, arguments.markdown, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
