"""One GPU: time and memory of a step beside the forecast of `meshwright plan --gpu`, FSDP2 by hand, and transformers' Trainer.

    python benchmarks/one_gpu.py --gpu h100 --markdown FILE
    python benchmarks/one_gpu.py --only "1b" "1b, by hand"

World size 1, mixed precision (bf16, parameters and AdamW in fp32). Each row is a process of its own, one after another, or all
are in one (``--together``). The model of narrow rows has nearly nothing to compute: their time is the host's.
"""

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import workload
import yaml
from report import Table, publish

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "1b": LLAMA,
    "1b, 128k words": {**LLAMA, "vocab_size": 128256},
    "8b": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
    },
    "experts": {
        **LLAMA, "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 12,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    },
}  # fmt: skip
NARROW = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "vocab_size": 1024,
}  # fmt: skip
MODELS["narrow"] = {**LLAMA, **NARROW}
MODELS["narrow experts"] = {**MODELS["experts"], **NARROW, "moe_intermediate_size": 16, "num_experts": 8}
MODELS["narrow 32"] = {**MODELS["narrow"], "num_hidden_layers": 32}
WARM_STEPS, STEPS, PROFILED = 4, 8, 2
LONGEST = 16
"""Kernels of a job that are noted."""
FOUND = "FOUND "
"""What a line of results of a job begins with."""


@dataclass(frozen=True)
class Row:
    """A job.

    Attributes:
        model: of :data:`MODELS`.
        by: who trains it.
        parallel: Meshwright's section ``parallel``.
        more: of its other sections.
        compiled: whether others than Meshwright compile.
        batch: sequences of a microbatch.
    """

    model: str = "1b"
    by: str = "meshwright"
    parallel: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    batch: int = 4
    sequence: int = 2048
    microbatches: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence * self.microbatches

    def config(self, directory: Path) -> dict[str, Any]:
        """Meshwright's configuration of the run."""
        return {
            "output": str(directory / "run"),
            "model": {"config": MODELS[self.model], **self.more.get("model", {})},
            "adapter": self.more.get("adapter"),
            "parallel": {"param_dtype": "bfloat16", **self.parallel},
            "data": {"corpus": "python-stdlib", "sequence_length": self.sequence, "eval_fraction": 0.0, "shuffle": False},
            "optimizer": {"lr": workload.LR, "betas": workload.BETAS, "eps": workload.EPS, **self.more.get("optimizer", {})},
            "schedule": {"kind": "constant"},
            "training": {
                "steps": 1_000_000, "global_batch_size": self.batch * self.microbatches, "microbatch_size": self.batch,
                "clip_norm": workload.CLIP,
            },
            "metrics": {"jsonl": False, "tensorboard": False},
        }  # fmt: skip


COMPILED = {"compile": True}
LORA = {"adapter": {"rank": 16, "alpha": 32}}
ROWS = {
    "1b": Row(),
    "1b, by hand": Row(by="hand"),
    "1b, Trainer": Row(by="transformers"),
    "1b, compiled": Row(parallel=COMPILED),
    "1b, compiled, by hand": Row(by="hand", compiled=True),
    "1b, compiled, Trainer": Row(by="transformers", compiled=True),
    "1b, four microbatches": Row(batch=1, microbatches=4),
    "1b, four microbatches, by hand": Row(by="hand", batch=1, microbatches=4),
    "1b, selective": Row(parallel={"activation_checkpointing": "selective"}),
    "1b, full": Row(parallel={"activation_checkpointing": "full"}),
    "1b, selective, compiled": Row(parallel={**COMPILED, "activation_checkpointing": "selective"}),
    "1b, 8k": Row(batch=1, sequence=8192),
    "1b, 128k words": Row("1b, 128k words"),
    "1b, Muon": Row(more={"optimizer": {"kind": "muon"}}),
    "experts": Row("experts"),
    "experts, by hand": Row("experts", by="hand"),
    "experts, compiled": Row("experts", parallel=COMPILED),
    "8b, LoRA": Row("8b", batch=1, more={**LORA, "model": {"dtype": "bfloat16"}}),
    "narrow": Row("narrow", batch=1, sequence=64),
    "narrow, by hand": Row("narrow", by="hand", batch=1, sequence=64),
    "narrow, selective": Row("narrow", batch=1, sequence=64, parallel={"activation_checkpointing": "selective"}),
    "narrow, full": Row("narrow", batch=1, sequence=64, parallel={"activation_checkpointing": "full"}),
    "narrow, four microbatches": Row("narrow", batch=1, sequence=64, microbatches=4),
    "narrow, experts": Row("narrow experts", batch=1, sequence=64),
    "narrow, LoRA": Row("narrow 32", batch=1, sequence=64, more={**LORA, "model": {"dtype": "bfloat16"}}),
    "narrow, compiled": Row("narrow", batch=1, sequence=64, parallel=COMPILED),
    "narrow, compiled, by hand": Row("narrow", by="hand", batch=1, sequence=64, compiled=True),
    "8b, LoRA, compiled": Row("8b", batch=1, parallel=COMPILED, more={**LORA, "model": {"dtype": "bfloat16"}}),
}


@dataclass(frozen=True)
class Found:
    """What a job measured: milliseconds of a step, and of its kernels; bytes of tensors, and of the allocator, at the peak; the
    loss of the last step; the kernels that took longest, in milliseconds."""

    step_ms: float
    kernels_ms: float
    allocated: int
    reserved: int
    loss: float
    longest: dict[str, float] = field(default_factory=dict)


def measure(train_step: Callable[[], Any], loss: Callable[[], float]) -> Found:
    """Time steps together, so that nothing waits between them."""
    for _ in range(WARM_STEPS):
        train_step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    for _ in range(STEPS):
        train_step()
    torch.cuda.synchronize()
    step = time.perf_counter() - begun
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            train_step()
        torch.cuda.synchronize()
    kernels = {item.key: item.self_device_time_total / 1000 / PROFILED for item in profile.key_averages()}
    longest = dict(sorted(kernels.items(), key=lambda item: -item[1])[:LONGEST])
    return Found(1000 * step / STEPS, sum(kernels.values()), *peaks, loss(), longest)


def batches(row: Row) -> torch.Tensor:
    """Microbatches of every step: int64 [steps, microbatches, batch, sequence], by Zipf's law."""
    chances = 1 / torch.arange(1, 1 + min(32768, MODELS[row.model]["vocab_size"]))
    steps = WARM_STEPS + STEPS + PROFILED + 1
    drawn = torch.multinomial(chances, steps * row.tokens, replacement=True, generator=torch.Generator().manual_seed(0))
    return drawn.view(steps, row.microbatches, row.batch, row.sequence)


def by_meshwright(row: Row, directory: Path) -> Found:
    """The trainer's own step."""
    from datetime import timedelta

    from meshwright.data.store import TokenStore
    from meshwright.distributed.process_group import process_group
    from meshwright.train.config import RunConfig
    from meshwright.train.start.setup import make_setup
    from meshwright.train.trainer import Trainer

    workload.write_store(directory / "store", batches(row).numpy().reshape(-1, row.sequence))
    config = RunConfig.model_validate(row.config(directory))
    with process_group(timedelta(minutes=2), "cuda") as device:
        trainer = Trainer(make_setup(config, 1), TokenStore.open(directory / "store"), device)

        def train_step() -> None:
            trainer.train_step()
            trainer.step += 1  # as Trainer.run does

        return measure(train_step, lambda: trainer.metrics()["loss"])


def made(row: Row) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = dict(MODELS[row.model])
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))


def by_hand(row: Row, directory: Path) -> Found:
    """FSDP2 as a competent user writes it; reduces in the last microbatch."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{directory}/meet", rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    model = made(row)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:  # type: ignore[union-attr]
        if row.compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.train()
    optimizer = workload.make_optimizer(model)
    steps, last = iter(batches(row).pin_memory()), [torch.zeros(())]

    def train_step() -> None:
        found = []
        for index, batch in enumerate(next(steps)):
            model.set_requires_gradient_sync(index == row.microbatches - 1)
            ids = batch.to("cuda", non_blocking=True)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / row.microbatches
            loss.backward()
            found.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        last[0] = torch.stack(found).sum()

    found = measure(train_step, lambda: last[0].item())
    dist.destroy_process_group()
    return found


def by_transformers(row: Row, directory: Path) -> Found:
    """transformers' Trainer with its mixed precision, timed between its own callbacks."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model = made(row)
    arguments = TrainingArguments(
        output_dir=str(directory / "run"), bf16=True, torch_compile=row.compiled, optim="adamw_torch_fused",
        max_steps=WARM_STEPS + STEPS, per_device_train_batch_size=row.batch, gradient_accumulation_steps=row.microbatches,
        learning_rate=workload.LR, adam_beta1=workload.BETAS[0], adam_beta2=workload.BETAS[1], lr_scheduler_type="constant",
        weight_decay=workload.WEIGHT_DECAY, max_grad_norm=workload.CLIP, save_strategy="no", report_to=[],
        logging_steps=WARM_STEPS + STEPS, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": item, "labels": item} for item in batches(row).view(-1, row.sequence)]

    class Clock(TrainerCallback):
        begun = step = 0.0

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM_STEPS:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                self.begun = time.perf_counter()
            elif state.global_step == WARM_STEPS + STEPS:
                torch.cuda.synchronize()
                self.step = time.perf_counter() - self.begun

    clock = Clock()
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[clock]).train()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Found(1000 * clock.step / STEPS, float("nan"), *peaks, float("nan"))  # it shuffles, so its loss is another


def forecast(row: Row, gpu: str) -> subprocess.Popen[str]:
    """Start the forecast of a row; it needs no GPU."""
    path = Path(tempfile.mkdtemp()) / "run.yaml"
    path.write_text(yaml.safe_dump(row.config(path.parent)))
    command = [sys.executable, "-m", "meshwright", "plan", str(path), "-n", "1", "--gpu", gpu, "--json"]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def table(found: dict[str, Found], forecasts: dict[str, dict[str, Any]]) -> Table:
    """A line a row; a forecast is of Meshwright's rows."""
    columns = (
        "run", "tokens a step", "ms a step", "forecast", "error", "kernels ms", "tensors GiB", "forecast", "error",
        "reserved GiB", "loss",
    )  # fmt: skip
    result = Table(f"One GPU ({torch.cuda.get_device_name()}): {STEPS} steps, timed together, after {WARM_STEPS}", columns)
    for name, item in found.items():
        time_cells = memory_cells = ("", "")
        if name in forecasts:
            seconds, verdict = forecasts[name]["time"]["step_seconds"], forecasts[name]["verdict"]
            parts = verdict["parts"]
            held = verdict["peak_bytes"] - parts["allocator"] - parts["reserved"]
            time_cells = f"{1000 * seconds:.0f}", f"{1000 * seconds / item.step_ms - 1:+.0%}"
            memory_cells = f"{held / 2**30:.2f}", f"{held / item.allocated - 1:+.1%}"
        result.rows.append(
            (
                name, f"{ROWS[name].tokens:,}", f"{item.step_ms:.1f}", *time_cells, _shown(item.kernels_ms, 1),
                f"{item.allocated / 2**30:.2f}", *memory_cells, f"{item.reserved / 2**30:.2f}", _shown(item.loss, 4),
            )
        )  # fmt: skip
    return result


def _shown(value: float, digits: int) -> str:
    """Return a cell; that of a number that is not known is empty."""
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", help="for the forecast, as of `meshwright plan --gpu`")
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--json", type=Path, help="what was found, row after row")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--together", action="store_true", help="run the rows in one process, which saves their starts")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        for name in arguments.job:
            row = ROWS[name]
            with tempfile.TemporaryDirectory() as folder:
                work = {"meshwright": by_meshwright, "hand": by_hand, "transformers": by_transformers}[row.by]
                print(FOUND + json.dumps([name, asdict(work(row, Path(folder)))]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
        return
    ours = [name for name in arguments.only if arguments.gpu and ROWS[name].by == "meshwright"]
    started = {name: forecast(ROWS[name], arguments.gpu) for name in ours}
    forecasts = {}
    for name, process in started.items():
        out, err = process.communicate()
        if process.returncode:
            print(f"{name}: no forecast: {err[-500:]}", flush=True)
        else:
            forecasts[name] = json.loads(out)
    found = {}
    for names in [arguments.only] if arguments.together else [[name] for name in arguments.only]:
        run = subprocess.run([sys.executable, __file__, "--job", *names], text=True, capture_output=True, check=False)
        for line in run.stdout.splitlines():
            if line.startswith(FOUND):
                name, values = json.loads(line.removeprefix(FOUND))
                found[name] = Found(**values)
                print(f"{name}: {found[name]}", flush=True)
        if run.returncode:
            print(f"{names}: {run.stderr[-1500:]}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({key: asdict(item) for key, item in found.items()}))
    publish([table(found, forecasts)], [], markdown=arguments.markdown, check=False)


if __name__ == "__main__":
    main()
