"""The time of a step that `meshwright plan` forecasts on this machine, against the step: the quickstart on two processes.

    python benchmarks/predict_cpu.py

The machine is calibrated first. Nothing else may run beside it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
STEPS = 30


def _meshwright(*arguments: str) -> str:
    command = [sys.executable, "-m", "meshwright", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print a table of one line for each variant of the run."""
    print("| run | forecast, ms | measured, ms | error |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        device = f"{folder}/device.yaml"
        for number, more in enumerate(([], ["layout.tp=2", "layout.dp_shard=1"], ["parallel.activation_checkpointing=full"])):
            run = ["examples/quickstart.yaml", f"output={folder}/{number}", "training.eval_every=0", "export=false", *more]
            run += [f"training.steps={STEPS}", "training.log_every=1", "schedule.warmup_steps=0", "sample.prompts=[]"]
            _meshwright("calibrate", run[0], device, *run[1:], "--nproc", "2")
            forecast = json.loads(_meshwright("plan", *run, "--world-size", "2", "--gpu", device, "--json"))["time"]
            _meshwright("train", *run)
            lines = map(json.loads, Path(folder, str(number), "metrics.jsonl").read_text().splitlines())
            times = [line["step_seconds"] for line in lines if "step_seconds" in line][5:]
            found, truth = 1000 * forecast["step_seconds"], 1000 * median(times)
            print(f"| quickstart {' '.join(more)} | {found:.0f} | {truth:.0f} | {found / truth - 1:+.0%} |", flush=True)


if __name__ == "__main__":
    main()
