"""Time and memory of planning an 8B Llama for 1,024 ranks, as `meshwright plan` in a fresh process.

python benchmarks/plan_time.py --check
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import yaml
from report import Bound, Table, publish

LIMIT_SECONDS = 10.0
LIMIT_GIB = 1.0
WORLD_SIZE = 1024

MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
}
LAYOUTS = {
    "dp_shard=1024": {"dp_shard": None},
    "dp_replicate=8 dp_shard=128": {"dp_replicate": 8, "dp_shard": None},
    "pp=4 dp_replicate=4 dp_shard=8 cp=2 tp=4": {"pp": 4, "dp_replicate": 4, "dp_shard": None, "cp": 2, "tp": 4},
}


def plan(layout: dict[str, int | None], directory: Path) -> tuple[float, float]:
    """Seconds and peak GiB of one plan."""
    config = {
        "output": str(directory / "run"),
        "model": {"config": MODEL},
        "layout": layout,
        "data": {"corpus": "python-stdlib", "sequence_length": 8192},
        "training": {"steps": 1, "global_batch_size": 2 * WORLD_SIZE},
    }
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "meshwright.cli.main", "plan", str(file), "-n", str(WORLD_SIZE)]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return seconds, usage.ru_maxrss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each layout, interleaved")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    arguments = parser.parse_args()

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(arguments.rounds):
            for name, layout in LAYOUTS.items():
                found[name].append(plan(layout, Path(directory)))
    table = Table(
        f"`meshwright plan` of Llama 8B on {WORLD_SIZE:,} ranks, fresh process, median of {arguments.rounds}",
        ("layout", "seconds", "peak GiB"),
    )
    medians = {name: tuple(map(median, zip(*values, strict=True))) for name, values in found.items()}
    table.rows = [(name, f"{seconds:.2f}", f"{gib:.2f}") for name, (seconds, gib) in medians.items()]
    bounds = [
        Bound("slowest plan", max(seconds for seconds, _ in medians.values()), LIMIT_SECONDS, " s"),
        Bound("largest plan", max(gib for _, gib in medians.values()), LIMIT_GIB, " GiB"),
    ]
    return publish([table], bounds, arguments.markdown, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
