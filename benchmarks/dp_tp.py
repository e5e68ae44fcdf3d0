"""FSDP x tensor parallel on four gloo ranks, against transformers' own: what ``throughput.py --layout dp-tp`` runs.

Collectives are told apart by the ranks of their group: on both sides tensor parallel is the innermost axis of the mesh.
"""

import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

import workload
from jobs import Contender, Result, run_job
from report import Bound, Table
from rounds import WARMUP_STEPS, Key, Results, check_losses, ratio, run_rounds, say
from workload import BATCH, RANKS, TP, train_config

MAX_SAVED_RATIO = 1.005
"""Each row of a batch has positions of its own, since it may hold several documents: for rotation the peer keeps one row."""

PEER = "transformers"
ALONE = "one process"

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(PEER, "run_transformers.py", "tp", RANKS * TP),
        Contender("meshwright, whole logits", "run_meshwright.py", "tp-whole_logits", RANKS * TP),
        Contender("meshwright, loss parallel", "run_meshwright.py", "tp-loss", RANKS * TP),
        Contender("meshwright, sequence and loss parallel", "run_meshwright.py", "tp-loss-sequence", RANKS * TP),
    )
}

AXES = {"0 1": "tp", "0 2": "dp"}
"""Of rank 0: the ranks of its groups."""

KINDS = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}

RING = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""What a rank of n sends, in units of (n - 1) / n of the larger buffer, where ranks form a ring."""

BESIDES = {"dp": 4, "tp": 1}
"""All-reduces of single numbers that the trainer makes in a step and the plan does not price: tokens and loss over dp, and the
gradient norm: of matrices over both axes, of the vectors of norms over dp."""

NOTES = (
    "AG, RS, AR: all-gathers, reduce-scatters, all-reduces of rank 0 in an optimizer step over each axis, counted in a step "
    "that is not timed; MB: the larger buffer of each, added up; sent: what a rank sends where ranks form a ring, which makes "
    "one all-reduce as dear as a reduce-scatter and an all-gather (gloo itself does a reduce-scatter as an all-reduce).",
    "saved: the most that autograd holds for backward at once, parameters not counted; RSS: high-water of the process, "
    "with all that it imported (of Meshwright some 11 MiB) and, of Meshwright under `sync: defer`, gathered parameters and "
    "unsharded gradients through the step; both of the largest rank.",
    "CPU: process time of a step, all threads of a rank; x: against transformers in the same round, median over rounds. Four "
    "ranks share two cores, so wall time is mostly waiting for a core.",
    "transformers: `from_pretrained(distributed_config=DistributedConfig(fsdp_size=2, tp_size=2))`, fp32; FSDP does not "
    "reduce between microbatches, as in its Trainer. `torch.nn.utils.clip_grad_norm_` refuses its parameters (two meshes), so "
    "its side clips mesh by mesh, as its Trainer does. It has no loss parallel, and its sequence parallel "
    "(`enable_sequence_parallel`) is reserved and changes nothing, so neither is compared like with like.",
    "one process: the same batch without parallelism, one share after another; its losses are the reference (all steps, "
    "relative 1e-5), its times are not compared.",
)


def run(contenders: list[str], microbatches: list[int], rounds: int, steps: int) -> tuple[list[Table], list[Bound]]:
    """Rounds of all contenders: table and bounds.

    Raises:
        SystemExit: if losses differ from those of one process, or a contender has a group that is neither axis.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-benchmark-") as name:
        directory = Path(name)
        workload.write(directory, (steps + 1) * RANKS * BATCH * max(microbatches))
        due = {
            (count, name): _due(directory, CONTENDERS[name].variant, count)
            for count in microbatches
            for name in contenders
            if name != PEER
        }
        alone = Contender(ALONE, "run_alone.py", "alone", 1)
        results: dict[Key, list[Result]] = {}
        for count in microbatches:
            results[count, ALONE] = [run_job(alone, directory, count, steps, WARMUP_STEPS)]
            say(f"{ALONE} x {count}: loss {results[count, ALONE][0].losses[0]:.6f} in the first step")
        chosen = [CONTENDERS[name] for name in contenders]
        results.update(run_rounds(directory, chosen, microbatches, rounds, steps))
    check_losses(results, ALONE)
    return [table_of(results, rounds, steps)], bounds_of(results, due)


def _due(directory: Path, variant: str, microbatches: int) -> Counter[tuple[str, str]]:
    """What the plan says of (axis, kind): counts, and bytes over dp under ``kind bytes``."""
    from meshwright.plan.axes.tensor.traffic import tensor_parallel_counts
    from meshwright.plan.cost.price import totals
    from meshwright.train.config import RunConfig
    from meshwright.train.start.setup import make_setup

    config = RunConfig.model_validate(train_config(directory, directory / "planned", microbatches, variant))
    plan = make_setup(config, RANKS * TP).plan
    traffic = totals(plan).traffic
    due = Counter({("tp", kind): count for kind, count in tensor_parallel_counts(plan).items()})
    for kind in KINDS:
        due["dp", kind] = getattr(traffic, f"{kind}s")
        if kind != "all_reduce":  # those are of single numbers here, see BESIDES
            due["dp", f"{kind} bytes"] = getattr(traffic, f"{kind}_bytes")
    due.update({(axis, "all_reduce"): count for axis, count in BESIDES.items()})
    return +due


def _made(result: Result) -> Counter[tuple[str, str]]:
    """The same of what was counted."""
    made = Counter({(_axis(ranks), kind): count for ranks, of in result.counts_of.items() for kind, count in of.items()})
    for kind, size in _by_axis(result.bytes_of).get("dp", {}).items():
        if kind != "all_reduce":
            made["dp", f"{kind} bytes"] = size
    return made


def _axis(ranks: str) -> str:
    if ranks not in AXES:
        raise SystemExit(f"collectives over the ranks {ranks}, which are neither of {', '.join(AXES.values())}")
    return AXES[ranks]


def _by_axis(of_groups: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return {_axis(ranks): found for ranks, found in of_groups.items()}


def _sent(result: Result) -> float:
    """Bytes that a rank sends in an optimizer step, over both axes."""
    sizes = {"dp": RANKS, "tp": TP}
    return sum(
        RING[kind] * (sizes[axis] - 1) / sizes[axis] * size
        for axis, found in _by_axis(result.bytes_of).items()
        for kind, size in found.items()
    )


def table_of(results: Results, rounds: int, steps: int) -> Table:
    """A row for each contender and number of microbatches."""
    columns = [f"{axis} {short}" for axis in ("dp", "tp") for short in (*KINDS.values(), "MB")]
    table = Table(
        f"Optimizer step, dp_shard={RANKS} x tp={TP}, {RANKS * TP} gloo ranks, fp32, medians of {rounds} x "
        f"{steps - WARMUP_STEPS} steps",
        ("contender", "microbatches", *columns, "sent MB", "saved MiB", "RSS MiB", "CPU ms", "x", "wall ms", "x", "first loss"),
        notes=NOTES,
    )
    for (count, name), runs in results.items():
        counts, sizes = _by_axis(runs[0].counts_of), _by_axis(runs[0].bytes_of)
        cells = [name, str(count)]
        for axis in ("dp", "tp"):
            cells += [str(counts.get(axis, {}).get(kind, 0)) for kind in KINDS]
            cells.append(f"{sum(sizes.get(axis, {}).values()) / 1e6:.1f}")
        cells += [f"{_sent(runs[0]) / 1e6:.1f}", f"{runs[0].saved_bytes / 2**20:.1f}"]
        cells.append(f"{median(run.peak_rss for run in runs) / 2**20:.0f}")
        for what in ("cpu_ms", "wall_ms"):
            cells.append(f"{median(getattr(run, what) for run in runs):.0f}")
            cells.append("" if name == ALONE else f"{ratio(results, (count, name), what, PEER):.3f}")
        table.rows.append((*cells, f"{runs[0].losses[0]:.6f}"))
    return table


def bounds_of(results: Results, due: dict[Key, Counter[tuple[str, str]]]) -> list[Bound]:
    """That each variant makes what its plan says, and costs less than the peer. Only the last depends on time."""
    bounds = []
    for (count, name), expected in due.items():
        run, other = results[count, name][0], results[count, PEER][0]
        made = _made(run)
        wrong = [f"{axis} {kind} {made[axis, kind]} for {expected[axis, kind]}" for axis, kind in made.keys() | expected.keys()
                 if made[axis, kind] != expected[axis, kind]]  # fmt: skip
        of = f"{name}, {count} microbatches"
        bounds.append(Bound(f"{of}: unlike its plan{''.join(f'; {item}' for item in wrong)}", len(wrong), 0))
        bounds.append(Bound(f"{of}: sent against {PEER}", _sent(run) / _sent(other), 1.0, below=True))
        saved = run.saved_bytes / other.saved_bytes
        bounds.append(Bound(f"{of}: saved for backward against {PEER}", saved, MAX_SAVED_RATIO))
        bounds.append(Bound(f"{of}: CPU time against {PEER}", ratio(results, (count, name), "cpu_ms", PEER), 1.0, below=True))
    return bounds
