"""The program in the README runs as it stands, and computes the same on any number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.command
def test_the_parts_run_under_torchrun_and_sum(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "parts.py").write_text(block)
    told = []
    for ranks in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "parts.py"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert found.returncode == 0, found.stderr[-2000:]
        told.append(re.findall(r"step (\d)  loss (\d\.\d{4})", found.stdout))
    assert [step for step, _ in told[0]] == ["1", "2", "3"]
    losses = [[float(loss) for _, loss in lines] for lines in told]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert losses[0][2] < losses[0][0] - 0.1
