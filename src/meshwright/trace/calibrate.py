"""Measures, on this machine, what a :class:`~meshwright.plan.cost.hardware.Hardware` says of a device."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.device import CPU, device_name, pinned, synchronize, total_memory
from meshwright.distributed import _torch_compat
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.cost.links import REACHED
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.ranks.pool import Pool
from meshwright.trace.fewer import layers_of_config, with_fewer
from meshwright.trace.held.memory import forecast_memory
from meshwright.trace.layer_work import MEMORY_REACHED
from meshwright.trace.step import time_step
from meshwright.trace.time import forecast_time
from meshwright.trace.work import Work, WorkCounter
from meshwright.train.start.setup import RunSetup

__all__ = ["calibrate"]

WARM, RUNS = 2, 5
SHAPES = 12
"""Products that are measured at most: the largest of the plan."""

FAST = 2e12
"""Operations a second from which a device counts as fast. What a fast one is measured with takes seconds on others."""
OPERATIONS = {False: 2e9, True: 2e12}
"""Most operations of a product that is measured, by whether the device is fast; larger ones get fewer tokens."""

LAYERS, LONGEST = 4, 10.0
"""Layers of the step that is run, and the most seconds that it may take."""

OPERATORS = 100
"""Operators in a chain that are started to measure how long it takes."""

SIZES = {
    False: tuple(2**power for power in (16, 18, 20, 21, 22, 24)),
    True: tuple(2**power for power in (16, 18, 20, 23, 26, 28)),
}
"""Bytes of the larger buffer of the collectives that are measured, by whether the device is fast."""


def calibrate(setup: RunSetup, processes: int, kind: str) -> dict[str, Any]:
    """Measure products, attention, memory and links, and return the values of a hardware file.

    Args:
        setup: a run, whose shapes and dtype of compute are used.
        processes: number of processes of this machine.
        kind: kind of device, as in :mod:`meshwright.device`.
    """
    plan = setup.plan
    dtype = plan.options.param_dtype or setup.config.model.dtype
    config = setup.model.config.get_text_config()
    heads = max(1, config.num_attention_heads // plan.layout.size("tp"))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = plan.options.tokens or setup.config.data.sequence_length
    with Pool(processes, kind, patience=timedelta(minutes=5).total_seconds()) as pool:
        found = pool.run(
            _measure, dtype, _products(plan), tokens, (heads, min(tokens, 2048), width), tokens * config.hidden_size
        )
    slowest = {name: (max if name.endswith("_us") else min)(one[name] for one in found) for name in found[0]}
    fastest, typical = slowest["fastest"], slowest["typical"]
    values: dict[str, Any] = {
        "name": f"{device_name(kind)}, calibrated {time.strftime('%Y-%m-%d')}",
        "memory_gib": round(total_memory(kind) / 2**30, 1),
        "reserved_gib": 0.0 if kind == CPU else 2.0,
        "bf16_tflops": _rounded(slowest["bfloat16"]),
        "fp32_tflops": _rounded(slowest["float32"]),
        "achievable": _rounded(min(1.0, typical / fastest)),
        "attention": _rounded(min(1.0, slowest["attention"] / fastest)),
        "hbm_tb_s": _rounded(slowest["memory"] / MEMORY_REACHED),
        "gpus_per_node": processes,
        "link_gb_s": _rounded(slowest["link"] / REACHED),
        "link_us": _rounded(slowest["link_us"]),
        "nic_gb_s": _rounded(slowest["link"] / REACHED),
        "nic_us": _rounded(slowest["link_us"]),
        "host_gb_s": _rounded(slowest["host"]),
        "launch_us": _rounded(slowest["launch_us"]),
        "overlap": _rounded(slowest["overlap"]),
        "calibrated": True,
    }
    return {**values, "beyond": _rounded(_beyond(setup, processes, kind, Hardware(**values)))}


def _beyond(setup: RunSetup, processes: int, kind: str, hardware: Hardware) -> float:
    """Return how much longer a real step of some layers takes than its forecast, as a share of that.

    0 if it takes less, does not fit, or needs other processes than there are.
    """
    layers = min(LAYERS, len(setup.plan.layers)) if layers_of_config(setup) else len(setup.plan.layers)
    small = with_fewer(setup, layers)
    expected = forecast_time(small, hardware).step_seconds
    fits = forecast_memory(small).peak * (processes if kind == CPU else 1) < hardware.memory_gib * 2**30
    if small.layout.world_size != processes or expected > LONGEST or not fits:
        return 0.0
    with Pool(processes, kind, patience=timedelta(minutes=5).total_seconds()) as pool:
        measured = max(pool.run(_timed, setup, layers))
    return max(0.0, measured / expected - 1)


def _timed(device: torch.device, setup: RunSetup, layers: int) -> float:
    return time_step(with_fewer(setup, layers), device.type)


def _products(plan: ShardingPlan) -> list[tuple[int, int]]:
    """Return (in, out) of the largest products of a layer on a rank."""
    tp, shapes = plan.layout.size("tp"), {}
    for row in plan.parameters:
        if len(row.shape) == 2 and row.trainable:
            shape = list(row.shape)
            if placement := dict(row.placements).get("tp"):
                shape[0 if "(0" in placement else 1] //= tp
            shapes[tuple(shape)] = shape[0] * shape[1]
    return [(inner, out) for out, inner in sorted(shapes, key=lambda shape: -shapes[shape])[:SHAPES]]


def _measure(
    device: torch.device,
    name: str,
    products: Sequence[tuple[int, int]],
    tokens: int,
    attention: tuple[int, int, int],
    elements: int,
) -> dict[str, float]:
    """Return 10^12 operations, 10^12 bytes and 10^9 bytes a second, and microseconds, on this rank."""
    dtype = getattr(torch, name)

    def speed(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
        rows, inner, out = shape
        left = torch.randn(rows, inner, dtype=dtype, device=device)
        right = torch.randn(inner, out, dtype=dtype, device=device)
        return 2 * rows * inner * out / _seconds(lambda: left @ right, device) / 1e12

    slowest = torch.tensor(speed((1024, 1024, 1024), dtype), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)  # all ranks measure with the same sizes
    fast = slowest.item() * 1e12 > FAST
    shapes = [(max(1, min(tokens, int(OPERATIONS[fast] / (2 * out * inner)))), inner, out) for inner, out in products]
    speeds = [speed(shape, dtype) for shape in shapes]
    peaks = {one: speed(shapes[0], getattr(torch, one)) for one in ("bfloat16", "float32") if one != name}
    heads, length, width = attention
    # As models have it: heads are a view of the hidden dimension, and so is the gradient.
    projected = [torch.randn(1, length, heads, width, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(1, length, heads, width, dtype=dtype, device=device)

    def attend() -> None:
        query, keys, values = (one.transpose(1, 2) for one in projected)
        attended = nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
        torch.autograd.grad(attended.transpose(1, 2), projected, gradient)

    operations = 7 * 2 * heads * length * length * width // 2  # two products forward, five backward, of half of the scores
    hidden = torch.randn(elements, dtype=dtype, device=device)
    left = hidden.view(-1, width).requires_grad_()

    def norm_and_gate() -> None:
        normed = left * torch.rsqrt(left.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(dtype)
        (nn.functional.silu(normed) * normed).softmax(-1).backward(left.detach())

    with WorkCounter() as work:
        work.begin("once")
        norm_and_gate()
    memory = work.moments["once"][Work.MOVED] / _seconds(norm_and_gate, device) / 1e12
    hidden = hidden.detach()
    few = torch.ones(8, device=device, requires_grad=True)

    def start() -> None:
        result = few
        for _ in range(OPERATORS):
            result = result + 1
        result.sum().backward()

    copied = pinned(hidden.cpu().clone(), device)
    bandwidth, latency = _links(device, fast)
    return {
        "fastest": max(speeds),
        "typical": median(speeds),
        **peaks,
        name: max(speeds),
        "host": hidden.nbytes / _seconds(lambda: hidden.copy_(copied, non_blocking=True), device) / 1e9,
        "launch_us": _seconds(start, device) / (2 * OPERATORS) * 1e6,
        "attention": operations / _seconds(attend, device) / 1e12,
        "memory": memory,
        "link": bandwidth,
        "link_us": latency,
        "overlap": _overlap(device, dtype, fast),
    }


def _overlap(device: torch.device, dtype: torch.dtype, fast: bool) -> float:
    """Return which share of a collective is hidden behind products that run meanwhile."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return 1.0
    part = torch.zeros(SIZES[fast][-1] // 4 // ranks, device=device)
    whole = torch.zeros(len(part) * ranks, device=device)
    width = 8192 if fast else 512
    matrix = torch.randn(width, width, dtype=dtype, device=device)

    def send() -> Any:
        return _torch_compat.all_gather_single(whole, part, async_op=True)

    alone = _seconds(lambda: send().wait(), device)
    times = max(1, round(alone / _seconds(lambda: matrix @ matrix, device)))

    def compute() -> None:
        for _ in range(times):
            torch.matmul(matrix, matrix)

    def both() -> None:
        work = send()
        compute()
        work.wait()

    computing = _seconds(compute, device)
    hidden = alone + computing - _seconds(both, device)
    return min(1.0, max(0.0, hidden / min(alone, computing)))


def _links(device: torch.device, fast: bool) -> tuple[float, float]:
    """Return bandwidth (10^9 bytes a second) and latency of a step (microseconds) of collectives over all ranks.

    Both are medians over all-gather, reduce-scatter, all-reduce and all-to-all, each fitted to its smallest and largest size.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return 1e3, 0.0
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "all_gather": lambda whole, part: _torch_compat.all_gather_single(whole, part),
        "reduce_scatter": lambda whole, part: _torch_compat.reduce_scatter_single(part, whole),
        "all_reduce": lambda whole, part: dist.all_reduce(whole),
        "all_to_all": lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
    }
    bandwidths, latencies = [], []
    for name, call in calls.items():
        times, steps = 2 if name == "all_reduce" else 1, (ranks - 1).bit_length()
        points = []
        for size in SIZES[fast]:
            part = torch.zeros(size // 4 // ranks, device=device)
            whole = torch.zeros(len(part) * ranks, device=device)
            points.append((times * part.nbytes * (ranks - 1), _seconds(partial(call, whole, part), device)))
        (small, first), *_, (large, last) = points
        slope = max((last - first) / (large - small), 1e-15)
        bandwidths.append(1 / slope / 1e9)
        latencies.append(max(0.0, first - small * slope) / steps / times * 1e6)
    return median(bandwidths), median(latencies)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of a call."""
    times = []
    for index in range(WARM + RUNS):
        synchronize(device)
        begun = time.perf_counter()
        run()
        synchronize(device)
        if index >= WARM:
            times.append(time.perf_counter() - begun)
    return median(times)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
