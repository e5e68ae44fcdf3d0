"""The programs in the README and in docs/own-loop.md run as they stand, and compute the same on any number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def program(page: str, first: str) -> str:
    """Return the program of a page that begins with a line."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if block.startswith(first))
    return found


def steps(folder: Path, name: str, code: str, ranks: int) -> list[float]:
    """Run a program on some ranks, and return the losses that it prints."""
    (folder / name).write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr
    told = re.findall(r"step (\d+)  loss (\d+\.\d{4})", found.stdout)
    assert [int(step) for step, _ in told] == list(range(1, len(told) + 1))
    return [float(loss) for _, loss in told]


@pytest.mark.command
def test_the_parts_run_under_torchrun_and_sum(tmp_path: Path) -> None:
    code = program("docs/own-loop.md", "import os\n")
    one, two = (steps(tmp_path, "parts.py", code, ranks) for ranks in (1, 2))
    assert len(one) == 3
    assert two == pytest.approx(one, abs=2e-4)
    assert one[2] < one[0] - 0.1


@pytest.mark.command
def test_the_loop_of_the_readme_learns(tmp_path: Path) -> None:
    code = program("README.md", "# my_loop.py\n")
    found = steps(tmp_path, "my_loop.py", code, 2)
    assert len(found) == 32
    assert found[-1] < found[0] - 1
    assert (tmp_path / "runs" / "mine" / "last" / "meta.json").is_file()
