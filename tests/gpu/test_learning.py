"""What only a GPU shows: `pytest -m gpu`. Skipped elsewhere. One GPU is enough: world size 1 keeps every policy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_train_on_one_gpu_learns_in_bf16_and_resumes(tmp_path: Path) -> None:
    common = [
        "parallel.param_dtype=bfloat16", "launch.nproc=1", f"output={tmp_path}/run", "data.max_documents=60",
        "tokenizer.vocab_size=512", "training.eval_sequences=8", "export=false", "sample.prompts=[]", "training.log_every=1",
    ]  # fmt: skip
    for steps in (20, 30):
        command = [sys.executable, "-m", "meshwright.cli.main", "train", str(EXAMPLES / "quickstart.yaml")]
        subprocess.run([*command, *common, f"training.steps={steps}"], check=True, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 1
    assert all(row["memory_bytes"] > 0 for row in rows if "memory_bytes" in row)


def test_gradients_on_the_gpu_equal_the_plain_model() -> None:
    script = """
import torch, torch.distributed as dist
from datetime import timedelta
from meshwright import GradSync, Layout, ParallelOptions, build_mesh, parallelize, resolve
from meshwright.distributed.process_group import process_group
from tests.tiny import batches, make, summed_loss
torch.backends.cuda.matmul.allow_tf32 = False
with process_group(timedelta(seconds=60), "cuda") as device:
    data = [{k: v.to(device) for k, v in batch.items()} for batch in batches(3)]
    for policy in ("defer", "reshard_each", "reduce_each"):
        alone, spec = make("llama"); alone.to(device)
        model, _ = make("llama"); model.to(device)
        plan = resolve(spec, model, Layout(), ParallelOptions(param_dtype="float32", sync=policy, microbatches=3), world_size=1)
        parallelize(model, plan, build_mesh(plan.layout))
        for _, batch in GradSync.from_plan(model, plan).microbatches(data):
            summed_loss(model, batch).backward()
        for batch in data:
            summed_loss(alone, batch).backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
            error = (ours.grad.full_tensor() - theirs.grad).abs().max() / theirs.grad.abs().max()
            assert error < 1e-5, (policy, name, float(error))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, cwd=EXAMPLES.parent)


def test_the_host_waits_for_the_gpu_in_no_step(tmp_path: Path) -> None:
    """As on the simulated accelerator: tests/accelerator. The first step is left out: FSDP and the allocator begin in it."""
    script = """
import sys, warnings, torch
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from meshwright.device import accelerator
from meshwright.distributed.process_group import process_group
from meshwright.train.parts import PARTS
from meshwright.train.start.prepare import load_run_tokenizer, prepare_run
from meshwright.train.start.setup import make_setup
from meshwright.train.trainer import Trainer
from tests.train.runs import tiny_run, write_corpus

folder = Path(sys.argv[1])
config = tiny_run(folder, write_corpus(folder / "corpus.jsonl"), "training.steps=4", "training.microbatch_size=2")
_, _, store = prepare_run(config, 1)
with process_group(timedelta(seconds=60), accelerator()) as device:
    trainer = Trainer(make_setup(config, 1, load_run_tokenizer(config)), store, device, None, replace(PARTS))
    plain = trainer.train_step
    def train_step():
        torch.cuda.set_sync_debug_mode("warn" if trainer.step else "default")
        try:
            plain()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    trainer.train_step = train_step
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.run()
waits = [f"{item.filename}:{item.lineno} {item.message}" for item in seen if "synchronizing" in str(item.message)]
assert not waits, waits
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=300, cwd=EXAMPLES.parent)
