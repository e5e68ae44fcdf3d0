"""What one worker thread for each gloo group costs against torch's two, which corrupt the heap (docs/upstream.md).

    python benchmarks/gloo_workers.py --rounds 5 --check

Two ranks, forked: a step of FSDP2 over eight layers with prefetch, in which several collectives are in flight; the same many
times. Rounds are interleaved, every other one backwards.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch._dynamo  # before the fork: FSDP's hooks import it on first use
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Bound, Table, publish
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.distributed import _torch_compat

RANKS, LAYERS, WIDTH, ROWS, WARMUP = 2, 8, 512, 64, 3
LIMIT = 1.05


def job(rank: int, one: bool, steps: int, folder: str) -> None:
    """Time steps on a rank; rank 0 writes CPU and wall seconds of a step."""
    torch.set_num_threads(1)
    if one:
        _torch_compat.one_gloo_worker()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for layer, following in zip(model, list(model)[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
    batch = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    seconds = clock(step, steps)
    if rank == 0:
        Path(folder, "seconds").write_text(" ".join(map(str, seconds)))
    dist.barrier()


def clock(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """CPU and wall seconds of a step, median."""
    cpu, wall = [], []
    for _ in range(WARMUP + steps):
        begun = time.process_time(), time.perf_counter()
        step()
        cpu.append(time.process_time() - begun[0])
        wall.append(time.perf_counter() - begun[1])
    return median(cpu[WARMUP:]), median(wall[WARMUP:])


def run(one: bool, steps: int) -> tuple[float, float]:
    """CPU and wall seconds of a step with one or two worker threads."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(job, (one, steps, folder), nprocs=RANKS, start_method="fork")
        cpu, wall = map(float, Path(folder, "seconds").read_text().split())
    return cpu, wall


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--check", action="store_true")
    wanted = parser.parse_args()
    ratios: list[tuple[float, float]] = []
    for number in range(wanted.rounds):
        found = {one: run(one, wanted.steps) for one in ((False, True) if number % 2 else (True, False))}
        ratios.append((found[True][0] / found[False][0], found[True][1] / found[False][1]))
    cpu, wall = (sorted(values) for values in zip(*ratios, strict=True))
    rows = [
        (what, f"{values[0]:.3f}", f"{median(values):.3f}", f"{values[-1]:.3f}")
        for what, values in (("CPU", cpu), ("wall", wall))
    ]
    table = Table("One worker thread a gloo group against two, ratio of a step", ["time", "least", "median", "most"], rows)
    return publish([table], [Bound("CPU time, median", median(cpu), LIMIT)], wanted.markdown, check=wanted.check)


if __name__ == "__main__":
    raise SystemExit(main())
