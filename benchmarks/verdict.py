"""How long a verdict takes, cold and with kept traces, and what one more candidate of a search costs.

    taskset -c 0 python benchmarks/verdict.py
    taskset -c 0 python benchmarks/verdict.py --against CHECKOUT

Each shape is given to `meshwright plan --gpu h100` twice. The first time no trace is kept, the second time those of the first
are. Seconds are from the start of Python to the verdict, and to the end: then the changes that save most time are priced, too.
In another process, the run is then planned and priced with 3 to 10 times the replicas, as a search does with each candidate:
medians. The first two do not count: they make traces. Such candidates have the same rows of parameters and units. Of those with
3 to 10 times the shards, all rows are made and added up anew.

With another checkout of Meshwright, two shapes are given to both in turn, in two rounds; the least of each time is printed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SHAPES = (
    ("llama_8b", 8, ()),
    ("llama_70b", 256, ()),
    ("llama_70b", 64, ("adapter.rank=16",)),
    ("llama_405b", 16384, ("parallel.activation_checkpointing=full",)),
    ("deepseek_v3", 2048, ()),
)

FOLDER = Path(__file__).parents[1] / "examples" / "shapes"


def candidate(name: str, ranks: int, overrides: tuple[str, ...]) -> None:
    """Print the milliseconds of plans and of prices, as JSON: with more replicas, and with more shards."""
    from meshwright.cli.arguments import load_run
    from meshwright.plan.cost.hardware import load_hardware
    from meshwright.trace.few_layers import Traces
    from meshwright.trace.forecasts import Forecasts
    from meshwright.trace.time import forecast_time
    from meshwright.trace.verdict import fit
    from meshwright.train.start.setup import change_setup, make_setup

    setup = make_setup(load_run(FOLDER / f"{name}.yaml", overrides, ranks), ranks, planning=True)
    found = Forecasts(setup, load_hardware("h100"))
    assert found.verdict.fits
    assert found.time.step_seconds > 0
    costs = {}
    for axis in ("dp_replicate", "dp_shard"):
        plans, prices = [], []
        size, batch = setup.layout.size(axis), setup.config.training.global_batch_size
        for times in range(1, 11):
            layout = setup.config.layout.model_copy(update={axis: times * size})
            training = setup.config.training.model_copy(update={"global_batch_size": times * batch})
            config = setup.config.model_copy(update={"layout": layout, "training": training})
            begun = time.perf_counter()
            again = change_setup(setup, config, times * ranks, program=False)
            planned = time.perf_counter()
            traces = Traces(again, store=found.traces.store)
            fit(again, found.hardware, traces)
            forecast_time(again, found.hardware, traces)
            plans.append(planned - begun)
            prices.append(time.perf_counter() - planned)
        costs[axis] = [1000 * median(plans[2:]), 1000 * median(prices[2:])]
    print(json.dumps(costs))


def command(name: str, ranks: int, overrides: tuple[str, ...], environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of `meshwright plan` until it prints the verdict, and until its end."""
    begun, said = time.perf_counter(), None
    words = [sys.executable, "-m", "meshwright", "plan", str(FOLDER / f"{name}.yaml"), *overrides]
    words += ["--world-size", str(ranks), "--gpu", "h100"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("fits into"):
                said = time.perf_counter() - begun
    if process.returncode or said is None:
        sys.exit(f"{' '.join(words)} failed")
    return said, time.perf_counter() - begun


def main() -> None:
    """Print a table."""
    columns = ["shape", "ranks", "verdict, cold", "with changes", "again", "with changes"]
    columns += ["more replicas: plan", "price", "more shards: plan", "price"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, ranks, overrides in SHAPES:
        with tempfile.TemporaryDirectory(prefix="meshwright-verdict-") as cache:
            environment = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONUNBUFFERED": "1"}
            seconds = [one for _ in range(2) for one in command(name, ranks, overrides, environment)]
            words = [sys.executable, __file__, name, str(ranks), *overrides]
            costs = json.loads(subprocess.run(words, env=environment, check=True, capture_output=True).stdout)
        shown = " ".join((name, *overrides))
        times = " | ".join(f"{one:.1f} s" for one in seconds)
        each = " | ".join(f"{one:.1f} ms" for axis in ("dp_replicate", "dp_shard") for one in costs[axis])
        print(f"| {shown} | {ranks:,} | {times} | {each} |", flush=True)


def compare(checkout: Path, rounds: int = 2) -> None:
    """Print a table of both."""
    print("| shape | code | verdict, cold | with changes | again | with changes |\n|---|---|---|---|---|---|")
    for name, ranks, overrides in SHAPES[2:4]:
        found: dict[str, list[list[float]]] = {"other": [], "own": []}
        for _ in range(rounds):
            for label, root in (("other", checkout), ("own", Path(__file__).parents[1])):
                with tempfile.TemporaryDirectory(prefix="meshwright-verdict-") as cache:
                    paths = {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(root / "src")}
                    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **paths}
                    found[label].append([one for _ in range(2) for one in command(name, ranks, overrides, environment)])
        for label, times in found.items():
            least = " | ".join(f"{min(column):.1f} s" for column in zip(*times, strict=True))
            print(f"| {' '.join((name, *overrides))} | {label} | {least} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--against"]:
        compare(Path(sys.argv[2]).resolve())
    elif len(sys.argv) > 1:
        candidate(sys.argv[1], int(sys.argv[2]), tuple(sys.argv[3:]))
    else:
        main()
