"""Whether the first three layouts of a search hold the one that is fastest when it is measured, on two CPU processes.

    python benchmarks/search.py [--check]

The machine is calibrated for a small dense model and a small mixture. Of each, the layouts on two ranks are searched, and all
that the search returns are measured with `meshwright train`. `--check` exits with 1 if the fastest of them is not among the
first three of the search.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "num_key_value_heads": 4, "intermediate_size": 1024},
    "mixture": {
        "model_type": "qwen3_moe", "num_key_value_heads": 4, "intermediate_size": 512, "moe_intermediate_size": 256,
        "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32,
    },
}  # fmt: skip

SHARED = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}

RANKS = 2


def written(folder: Path, name: str) -> Path:
    """Write the data and the configuration of a model, and return the path of the latter."""
    rows = [json.dumps({"text": f"sentence {index} says little, and says it in a few words"}) for index in range(4000)]
    (folder / "text.jsonl").write_text("\n".join(rows))
    run = {
        "output": str(folder / f"run-{name}"),
        "model": {"config": {**SHARED, **MODELS[name]}},
        "data": {"files": [str(folder / "text.jsonl")], "sequence_length": 256},
        "tokenizer": {"vocab_size": 2048},
        "training": {"steps": 100, "global_batch_size": 16},
        "parallel": {"param_dtype": None, "compile": False, "cpu_offload": False},
        "launch": {"device": "cpu"},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(run))  # JSON is YAML
    return file


def meshwright(*arguments: str) -> str:
    """Run a command, and return what it printed."""
    done = subprocess.run([sys.executable, "-m", "meshwright", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    arguments, failed = parser.parse_args(), []
    for name in MODELS:
        with tempfile.TemporaryDirectory(prefix="meshwright-search-") as place:
            folder = Path(place)
            config, device = written(folder, name), folder / "here.yaml"
            meshwright("calibrate", str(config), str(device), "--nproc", str(RANKS))
            options = ("--search", "--world-size", str(RANKS), "--gpu", str(device), "--free", "layout", "--try", "5", "--json")
            found = json.loads(meshwright("plan", str(config), *options))
        order = [tuple(option["overrides"]) for option in found["answers"][0]["options"]]
        print(f"{name}: {found['answers'][0]['tally']['candidates']} candidates")
        print(f"{'forecast':>9} {'measured':>9}  place  overrides")
        for trial in found["trials"]:
            measured = "failed" if trial["seconds"] is None else f"{1000 * trial['seconds']:.0f} ms"
            place_found = order.index(tuple(trial["option"]["overrides"])) + 1
            forecast = 1000 * trial["option"]["step_seconds"]
            print(f"{forecast:6.0f} ms {measured:>9}  {place_found:5}  {' '.join(trial['option']['overrides'])}")
        best = found["trials"][0]
        if best["seconds"] is None or order.index(tuple(best["option"]["overrides"])) >= 3:
            failed.append(name)
    if arguments.check and failed:
        sys.exit(f"the fastest is not among the first three of: {', '.join(failed)}")


if __name__ == "__main__":
    main()
