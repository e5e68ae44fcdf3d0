"""An adapter against the whole model, and against peft under accelerate's FSDP2, on gloo ranks.

    python benchmarks/adapters.py --check --markdown adapters.md

Both adapters begin with the same values and train on the same tokens (``workload.py``); their losses must agree in every step.
Each contender is a job of its own; rounds are interleaved, and every ratio is taken against a job of the same round.
"""

import argparse
import tempfile
from pathlib import Path

import workload
from jobs import Contender
from report import Bound, Table, publish
from rounds import TIMES, WARMUP_STEPS, Results, check_losses, ratio, run_rounds, times

PEER, OURS, NF4, WHOLE = "accelerate, peft", "meshwright", "meshwright, nf4", "meshwright, whole model"
RESHARD, ONCE = "meshwright, resharded", "meshwright, reduced once"
CONTENDERS = (
    Contender(PEER, "run_accelerate.py", "lora"),
    Contender(OURS, "run_meshwright.py", "lora"),
    Contender(RESHARD, "run_meshwright.py", "lora-reshard"),
    Contender(ONCE, "run_meshwright.py", "lora-once"),
    Contender(NF4, "run_meshwright.py", "lora-nf4"),
    Contender(WHOLE, "run_meshwright.py", "defer"),
)
NOTES = (
    "AG, RS: all-gathers and reduce-scatters of a rank. gathered, reduced: larger buffers of its all-gathers, and of its "
    "reduce-scatters and all-reduces, in one optimizer step that is not timed; held: the most bytes of all storages alive at "
    "once in it, without AdamW's state.",
    "CPU: process time of a step, all threads of a rank; x: against the peer in the same round, median over rounds.",
    "accelerate: on a machine without GPU it does not support FSDP2; its state was set to FSDP by hand, and the run checked "
    "that parameters are sharded.",
    "Everything is in fp32 but the matrices in 4 bits, which another loss shows. The whole model trains all parameters.",
)


def table_of(results: Results, rounds: int, steps: int) -> Table:
    """A row for each contender and number of microbatches."""
    table = Table(
        f"LoRA of rank {workload.RANK}, {workload.RANKS} gloo ranks, medians of {rounds} x {steps - WARMUP_STEPS} steps",
        ("contender", "microbatches", "AG", "RS", "gathered MB", "reduced MB", "held MiB", *TIMES, "loss"),
        notes=NOTES,
    )
    for (count, name), runs in results.items():
        moved = runs[0].bytes
        table.rows.append(
            (
                name,
                str(count),
                *(str(runs[0].counts.get(kind, 0)) for kind in ("all_gather", "reduce_scatter")),
                f"{moved.get('all_gather', 0) / 1e6:.1f}",
                f"{(moved.get('reduce_scatter', 0) + moved.get('all_reduce', 0)) / 1e6:.2f}",
                f"{runs[0].live_bytes / 2**20:.1f}",
                *times(results, (count, name), PEER),
                f"{runs[0].losses[-1]:.6f}",
            )
        )
    return table


def bounds_of(results: Results) -> list[Bound]:
    """No slower than the peer, with fewer bytes; and 4 bits hold and gather less than whole numbers."""
    bounds = []
    for count in {count for count, _ in results}:
        ours, peer, packed, resharded = (results[count, name][0] for name in (OURS, PEER, NF4, RESHARD))
        at = f"{count} microbatches"
        bounds.append(Bound(f"CPU time against {PEER}, {at}", ratio(results, (count, OURS), "cpu_ms", PEER), 1.0))
        bounds.append(Bound(f"bytes moved against {PEER}, {at}", sum(ours.bytes.values()) / sum(peer.bytes.values()), 1.0))
        bounds.append(
            Bound(f"bytes gathered, nf4 against fp32, {at}", packed.bytes["all_gather"] / ours.bytes["all_gather"], 0.5)
        )
        bounds.append(Bound(f"bytes held by resharded units against {PEER}, {at}", resharded.live_bytes / peer.live_bytes, 1.0))
        bounds.append(Bound(f"bytes held, nf4 against fp32, {at}", packed.live_bytes / ours.live_bytes, 1.0, below=True))
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=12, help=f"steps of a job, the first {WARMUP_STEPS} to warm up")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4], help="in an optimizer step")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    arguments = parser.parse_args()
    if arguments.steps <= WARMUP_STEPS:
        parser.error(f"--steps: more than the {WARMUP_STEPS} of warm-up")
    with tempfile.TemporaryDirectory(prefix="meshwright-benchmark-") as name:
        directory = Path(name)
        workload.write(directory, (arguments.steps + 1) * workload.RANKS * workload.BATCH * max(arguments.microbatches))
        workload.write_adapter(directory)
        results = run_rounds(directory, CONTENDERS, arguments.microbatches, arguments.rounds, arguments.steps)
    check_losses({key: runs for key, runs in results.items() if key[1] in (PEER, OURS, RESHARD, ONCE)}, PEER)
    table = table_of(results, arguments.rounds, arguments.steps)
    return publish([table], bounds_of(results), arguments.markdown, check=arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
