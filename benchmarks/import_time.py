"""What `import meshwright` costs over `import torch`, in fresh processes.

    python benchmarks/import_time.py --rounds 7 --check

``import meshwright`` is lazy: names are imported on first use. The last row shows what all of them together cost.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from report import Bound, Table, publish

LIMIT_SECONDS = 0.5

STATEMENTS = {
    "import torch": ("", "import torch"),
    "import meshwright, after torch": ("import torch", "import meshwright"),
    "import meshwright, alone": ("", "import meshwright"),
    "every public name of meshwright, after torch": ("import torch", "from meshwright import *"),
}
"""What is timed: statements before, statement timed."""

PROGRAM = """
import sys, time
{before}
begun = time.perf_counter()
{timed}
print(time.perf_counter() - begun, *sorted({{"transformers", "torch._dynamo"}} & set(sys.modules)))
"""


def run(rounds: int) -> dict[str, tuple[float, list[str]]]:
    """Statement to median seconds, and which of the heavy modules it left loaded."""
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    heavy: dict[str, list[str]] = {}
    for _ in range(rounds):
        for name, (before, timed) in STATEMENTS.items():
            program = PROGRAM.format(before=before, timed=timed)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            output = subprocess.run(
                [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment
            ).stdout.split()
            seconds[name].append(float(output[0]))
            heavy[name] = output[1:]
    return {name: (median(values), heavy[name]) for name, values in seconds.items()}


def report(rounds: int) -> tuple[Table, Bound]:
    """Table and bound.

    Raises:
        AssertionError: if ``import meshwright`` loaded transformers or torch._dynamo.
    """
    found = run(rounds)
    for name in ("import meshwright, after torch", "import meshwright, alone"):
        assert not found[name][1], f"{name} loads {', '.join(found[name][1])}"
    table = Table(f"Import time, median of {rounds} fresh processes", ("statement", "seconds", "heavy modules loaded"))
    table.rows = [(name, f"{value:.3f}", ", ".join(heavy) or "none") for name, (value, heavy) in found.items()]
    value = found["import meshwright, after torch"][0]
    return table, Bound("import meshwright over import torch", value, LIMIT_SECONDS, " s", below=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes for each statement")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    arguments = parser.parse_args()
    table, bound = report(arguments.rounds)
    return publish([table], [bound], arguments.markdown, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
