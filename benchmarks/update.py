"""What an update costs under FSDP2 on gloo ranks: AdamW, AdamW of torchao in 8 bits, Muon of ours, and Muon of torch.

    python benchmarks/update.py --check --markdown update.md

All update the same matrices, those of the layers of a small Llama, from the same values with the same gradients. The two Muons
must move them alike, or there is nothing to compare. Each is a job of its own on forked ranks; rounds are interleaved, every
other one backwards, and every ratio is taken in the same round. See README.md.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch._dynamo  # before the fork: FSDP's hooks import it on first use
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Bound, Table, publish
from rounds import say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from meshwright.distributed import _torch_compat
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.update.quantized import quantized_optimizer
from meshwright.distributed.update.sharded_muon import Muon
from meshwright.layout import Layout
from meshwright.plan.update.muon_cost import traffic_of

LAYERS, HIDDEN, HEADS, FEATURES, WARMUP, RATE, BUCKET = 4, 256, 128, 688, 2, 1e-3, 2**18
SHAPES = [(HIDDEN, HIDDEN), (HEADS, HIDDEN), (HEADS, HIDDEN), (HIDDEN, HIDDEN), *[(FEATURES, HIDDEN)] * 2, (HIDDEN, FEATURES)]
OURS, THEIRS, ADAMW, BITS = "Muon, ours", "Muon, torch's", "AdamW, fused", "AdamW, 8 bits"
LEAST_GAIN, MOST_BYTES, ALIKE = 2.0, 2.2, 0.1

CONTENDERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    ADAMW: lambda parameters: torch.optim.AdamW(parameters, lr=RATE, fused=True),
    BITS: lambda parameters: quantized_optimizer("adamw8bit")(parameters, lr=RATE, compiled=False),
    OURS: lambda parameters: Muon(parameters, lr=RATE, bucket=BUCKET),
    THEIRS: lambda parameters: torch.optim.Muon(parameters, lr=RATE),
}

NOTES = (
    "AG, RS, A2A, AR: all-gathers, reduce-scatters, all-to-alls, all-reduces of rank 0 in an update; MB: the larger buffer of "
    "each, added up; of momentum: the same, over the bytes of a rank's shards of the momentum (fp32).",
    "CPU: process time of an update, all threads of a rank: median over updates, mean over ranks, median over rounds. x: "
    "against torch's Muon in the same round. AdamW in 8 bits is torchao's, made of several operators, as on a CPU.",
    f"{LAYERS} layers of {len(SHAPES)} matrices, {LAYERS * sum(a * b for a, b in SHAPES) / 1e6:.1f} M parameters in fp32; both "
    "Muons orthogonalise in bfloat16, and ours exchanges in it.",
)


def job(rank: int, name: str, ranks: int, steps: int, folder: str) -> None:
    """Time updates on a rank, count one, and write what was found."""
    torch.set_num_threads(1)
    _torch_compat.mend_gloo()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = build_mesh(Layout(dp_shard=ranks), "cpu").fsdp()
    draw = torch.Generator().manual_seed(0)
    model = nn.ModuleList(nn.ParameterList(torch.randn(shape, generator=draw) / 16 for shape in SHAPES) for _ in range(LAYERS))
    gradients = [nn.ParameterList(torch.randn(shape, generator=draw) for shape in SHAPES) for _ in range(LAYERS)]
    for layer, gradient in zip(model, gradients, strict=True):
        fully_shard(layer, mesh=mesh)
        fully_shard(gradient, mesh=mesh)
        for own, other in zip(layer.parameters(), gradient.parameters(), strict=True):
            own.grad = other.data
    before = [own.to_local().clone() for own in model.parameters() if isinstance(own, DTensor)]
    optimizer = CONTENDERS[name](model.parameters())
    cpu, wall = [], []
    for _ in range(WARMUP + steps):
        begun = time.process_time(), time.perf_counter()
        optimizer.step()
        cpu.append(time.process_time() - begun[0])
        wall.append(time.perf_counter() - begun[1])
    moved = torch.cat([(own.to_local() - old).flatten() for own, old in zip(model.parameters(), before, strict=True)])
    with CommCounter() as counter:
        optimizer.step()
    found: dict[str, Any] = {"cpu": median(cpu[WARMUP:]), "wall": median(wall[WARMUP:])}
    found |= {"counts": dict(counter.counts), "bytes": sum(counter.bytes.values()), "shard": 4 * len(moved)}
    if isinstance(optimizer, Muon):
        planned = traffic_of(optimizer.held, optimizer.at, 2, [4] * len(optimizer.held), bucket=BUCKET)
        found |= {"planned": planned.all_to_alls, "held": planned.held}
    torch.save(moved, Path(folder, f"moved-{rank}"))
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def run(name: str, ranks: int, steps: int) -> tuple[dict[str, Any], torch.Tensor]:
    """What a contender's updates cost, and how they moved the parameters."""
    with tempfile.TemporaryDirectory(prefix="meshwright-benchmark-") as folder:
        mp.start_processes(job, (name, ranks, steps, folder), nprocs=ranks, start_method="fork")
        each = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        moved = torch.cat([torch.load(Path(folder, f"moved-{rank}")) for rank in range(ranks)])
    means = {what: 1000 * fmean(one[what] for one in each) for what in ("cpu", "wall")}
    return {**each[0], **means, "bytes": max(one["bytes"] for one in each)}, moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=8, help=f"updates of a job, after {WARMUP} to warm up")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    wanted = parser.parse_args()
    columns = ("contender", "ranks", "AG", "RS", "A2A", "AR", "MB", "of momentum", "CPU ms", "x", "wall ms", "x")
    table, bounds = Table("An update of 28 matrices under FSDP2, fp32", columns, notes=NOTES), []
    kinds = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    for ranks in wanted.ranks:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
        moved: dict[str, torch.Tensor] = {}
        for number in range(wanted.rounds):
            for name in list(CONTENDERS)[:: -1 if number % 2 else 1]:
                outcome, moved[name] = run(name, ranks, wanted.steps)
                found[name].append(outcome)
                say(f"round {number + 1}: {name}, {ranks} ranks: {outcome['cpu']:.1f} ms CPU, {outcome['wall']:.1f} ms")
        off = float((moved[OURS] - moved[THEIRS]).norm() / moved[THEIRS].norm())
        if not off < ALIKE:
            raise SystemExit(f"{OURS} and {THEIRS} move the matrices otherwise, by {off:.3f} of the movement")
        for name, runs in found.items():
            first = runs[0]
            ratios = {
                what: median(a[what] / b[what] for a, b in zip(runs, found[THEIRS], strict=True)) for what in ("cpu", "wall")
            }
            cells = [name, str(ranks), *(str(first["counts"].get(kind, 0)) for kind in kinds)]
            cells += [f"{first['bytes'] / 1e6:.2f}", f"{first['bytes'] / first['shard']:.2f}"]
            for what in ("cpu", "wall"):
                cells += [f"{median(one[what] for one in runs):.1f}", f"{ratios[what]:.3f}"]
            table.rows.append(cells)
            if name == OURS:
                made, where = sum(first["counts"].values()), f"{OURS}, {ranks} ranks"
                bounds.append(Bound(f"{where}: collectives beyond two a bucket", abs(made - first["planned"]), 0))
                bounds.append(Bound(f"{where}: bytes over a momentum's", first["bytes"] / first["shard"], MOST_BYTES))
                bounds.append(Bound(f"{where}: CPU time over torch's", ratios["cpu"], 1 / LEAST_GAIN))
    return publish([table], bounds, wanted.markdown, check=wanted.check)


if __name__ == "__main__":
    sys.exit(main())
