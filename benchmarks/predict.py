"""Forecasts of `meshwright plan --gpu` against published measurements: tokens per second and device, and memory.

    python benchmarks/predict.py [NUMBER ...]

The devices are not calibrated. Each row has the layout, batch, sequence, dtype, recomputation and synchronization that its
source ran with; where a step of theirs has several runs of a pipeline, the row has one. The published runs are of other code,
and the forecast is of Meshwright's: a row compares both at once. Constants of the forecast are fitted on rows 1 and 3 alone.
"""

import logging
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from meshwright.plan.cost.hardware import Hardware, load_hardware
from meshwright.trace.few_layers import Traces
from meshwright.trace.time import forecast_time
from meshwright.trace.verdict import judge
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import make_setup

SHAPES = Path(__file__).parents[1] / "examples" / "shapes"

H100, H200, A100 = map(load_hardware, ("h100", "h200", "a100"))
SLOWER = replace(H100, name="H100 96 GB, 500 W", bf16_tflops=0.8 * H100.bf16_tflops, hbm_tb_s=2.4, memory_gib=94.5)
"""The part that torchtitan's tables of 2024 and 2025 were measured on."""

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 8192,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
    "max_position_embeddings": 8192,
}  # fmt: skip
GPT_OSS_120B = {**GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128}
QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN25_32B = {
    **QWEN25_7B, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8,
}  # fmt: skip


def _read(shape: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((SHAPES / f"{shape}.yaml").read_text())["model"]["config"]
    return found


KIMI_K2 = _read("deepseek_v3") | {
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        name: number and source.
        shape: file in examples/shapes, or a config.
        ranks: devices.
        hardware: the device.
        tokens: published tokens a second and device; ``None``: not published.
        memory: published GiB; ``None``: not published.
        sections: sections of the configuration.
        sent: what their exchange of tokens sends, as a share of what ours does.
        allocated: whether the published memory is that of tensors (``max_memory_allocated``), and not what torch's allocator
            holds (``max_memory_reserved``). Neither has what is outside of the allocator.
        held: GiB that their program holds at its worst moment, and Meshwright's does not.
        fitted: whether a constant of the forecast was fitted on this row.
    """

    name: str
    shape: str | dict[str, Any]
    ranks: int
    hardware: Hardware
    tokens: float | None
    memory: float | None
    sections: dict[str, Any]
    sent: float = 1.0
    allocated: bool = False
    held: float = 0.0
    fitted: bool = False


def _row(
    name: str, shape: str | dict[str, Any], ranks: int, hardware: Hardware, tokens: float | None, memory: float | None,
    micro: int, batch: int, length: int, recomputed: str, *, kernel: str | None = None, stages: int | None = None,
    fused: bool = False, adapter: dict[str, Any] | None = None, chunks: int | None = None, dtype: str = "float32",
    sync: str | None = None, sliced: bool | None = None, sent: float = 1.0, allocated: bool = False, held: float = 0.0,
    fitted: bool = False, **layout: Any,
) -> Row:  # fmt: skip
    sliced = layout.get("tp", 1) > 1 if sliced is None else sliced
    parallel: dict[str, Any] = {"activation_checkpointing": recomputed, "sequence_parallel": sliced, "compile": fused}
    parallel["loss_chunks"] = 0 if hardware is SLOWER else chunks
    parallel["sync"] = sync
    if stages is not None:
        parallel["pipeline"] = {"schedule": "interleaved_1f1b", "stages_per_rank": stages}
    sections = {
        "layout": layout, "parallel": parallel, "data": {"files": ["x"], "sequence_length": length, "packing": "pad"},
        "training": {"steps": 1, "microbatch_size": micro, "global_batch_size": batch},
        "model": {"attn_implementation": kernel, "dtype": dtype}, "adapter": adapter,
    }  # fmt: skip
    return Row(name, shape, ranks, hardware, tokens, memory, sections, sent, allocated, held, fitted)


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": 51200, "max_position_embeddings": 2048,
    }  # fmt: skip


def _gpt_tokens(tflops: float, layers: int, hidden: int) -> float:
    """Return tokens a second from 10^12 operations, those of recomputation too (Narayanan et al. 2021, arXiv 2104.04473)."""
    return tflops * 1e12 / (96 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)))


LLAMA_1B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}  # fmt: skip

LOGITS = 8 * 2048 * 128256 * 2 / 2**30
"""Rows a and b: their loop holds the model's output, with logits in bf16, until backward is over (``_forward_backward_step`` in
nemo_automodel/recipes/llm/train_ft.py at 6aadbaeda)."""

LLAMA_OURS: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 32768, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS_OURS = {
    **LLAMA_OURS, "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
LORA_OURS = {**LLAMA_OURS, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}

LLAMA_405B = 6 * 405.8e9 + 12 * 126 * 16384 * 8192
"""Operations for a token, as torchtitan counts them."""

LORA: dict[str, Any] = {"rank": 16, "alpha": 32}
LORA_70B: dict[str, Any] = {"fused": True, "adapter": LORA, "dtype": "bfloat16", "tp": 2}
STAGES: dict[str, Any] = {"sliced": False, "pp": 4, "adapter": LORA, "dtype": "bfloat16"}
HF: dict[str, Any] = {"fused": True, "dtype": "bfloat16"}
NO_SP: dict[str, Any] = {"sliced": False}
SMALL: dict[str, Any] = {"dtype": "bfloat16", "allocated": True}
MIXTURE: dict[str, Any] = {"fused": True, "dtype": "bfloat16", "sync": "defer"}
LLAMA_3: dict[str, Any] = {"pp": 16, "tp": 8, "stages": 4, "fused": True, "sync": "defer"}
MEGATRON: dict[str, Any] = {
    "fused": True, "kernel": "eager", "sliced": False, "dp_shard": 1, "dp_replicate": None, "sync": "defer",
}  # fmt: skip

ROWS = (
    _row("1 torchtitan 8B", "llama_8b", 8, SLOWER, 5762, 82.4, 2, 16, 8192, "selective", fitted=True),
    _row("2 the same, compiled", "llama_8b", 8, SLOWER, 6667, 77.0, 2, 16, 8192, "selective", fused=True),
    _row("3 torchtitan 8B", "llama_8b", 128, SLOWER, 5605, 67.0, 2, 256, 8192, "selective", fitted=True),
    _row("4 the same, compiled", "llama_8b", 128, SLOWER, 6514, 62.0, 2, 256, 8192, "selective", fused=True),
    _row("5 torchtitan 70B, compiled", "llama_70b", 256, SLOWER, 597, None, 16, 512, 8192, "full", tp=8, fused=True),
    _row("7 torchtitan 8B, compiled", "llama_8b", 64, SLOWER, 4378, None, 12, 96, 8192, "submodule", tp=8, fused=True),
    _row(
        "8 NeMo 70B, compiled", "llama_70b", 64, H100, 867, None, 1, 128, 8192, "full", cp=2, dtype="bfloat16",
        sync="reduce_each", fused=True,
    ),
    _row("9 NeMo Qwen3-30B-A3B", QWEN3_30B, 8, H100, 12040, None, 4, 512, 4096, "full", ep=8, sent=1 / 8, **MIXTURE),
    _row(
        "10 NeMo GPT-OSS-20B", GPT_OSS_20B, 8, H100, 13058, None, 2, 256, 4096, "full", kernel="flex_attention", ep=8,
        sent=1 / 4, **MIXTURE | {"sync": "reshard_each"},
    ),
    _row(
        "11 NeMo Kimi-K2", KIMI_K2, 256, H100, 924, None, 1, 256, 4096, "full", pp=8, ep=32, stages=4, sent=1 / 8, **MIXTURE
    ),
    _row(
        "12 NeMo DeepSeek-V3", "deepseek_v3", 256, H100, 1002, None, 1, 512, 4096, "full", pp=4, ep=64, stages=8, sent=1 / 8,
        **MIXTURE,
    ),
    _row(
        "13 NeMo DeepSeek-V3", "deepseek_v3", 1024, H100, 865, None, 1, 2048, 4096, "full", pp=4, ep=64, stages=8, sent=1 / 8,
        **MIXTURE,
    ),
    _row("17 NeMo 8B, LoRA", "llama_8b", 1, H100, 12473, None, 2, 32, 4096, "none", adapter=LORA | {"dropout": 0.1}, **HF),
    _row("18 NeMo Qwen2.5-7B, LoRA", QWEN25_7B, 1, H100, 14110, None, 2, 32, 4096, "none", adapter=LORA, **HF),
    _row("19a NeMo 70B, LoRA", "llama_70b", 8, H100, 1092, None, 2, 32, 4096, "full", **LORA_70B),
    _row("19b the same", "llama_70b", 16, H100, 985, None, 2, 32, 4096, "full", **LORA_70B),
    _row("19c NeMo Qwen2.5-32B, LoRA", QWEN25_32B, 8, H100, 2250, None, 2, 32, 4096, "full", **LORA_70B | NO_SP),
    _row("19d the same", QWEN25_32B, 16, H100, 2073, None, 2, 32, 4096, "full", **LORA_70B | NO_SP),
    _row("19e NeMo 70B, LoRA, stages", "llama_70b", 8, H100, 659, None, 1, 4, 4096, "full", stages=10, tp=2, **STAGES),
    _row("19f the same", "llama_70b", 16, H100, 681, None, 1, 16, 4096, "full", stages=10, tp=2, **STAGES),
    _row("19g NeMo Qwen2.5-32B, LoRA, stages", QWEN25_32B, 8, H100, 1951, None, 1, 16, 4096, "full", stages=8, **STAGES),
    _row("19h the same", QWEN25_32B, 16, H100, 1826, None, 1, 32, 4096, "full", stages=8, **STAGES),
    _row("20 Llama 405B", "llama_405b", 8192, H100, 430e12 / LLAMA_405B, None, 1, 2048, 8192, "none", **LLAMA_3),
    _row("21 Llama 405B", "llama_405b", 16384, H100, 400e12 / LLAMA_405B, None, 1, 2048, 8192, "none", **LLAMA_3),
    _row(
        "23 Megatron 7.5B", _gpt(36, 4096, 32), 128, A100, _gpt_tokens(142, 36, 4096), None, 4, 512, 2048, "full", tp=4,
        **MEGATRON,
    ),
    _row(
        "24 Megatron 18.4B", _gpt(40, 6144, 48), 256, A100, _gpt_tokens(135, 40, 6144), None, 4, 1024, 2048, "full", tp=8,
        **MEGATRON,
    ),
    _row(
        "25 Megatron 39.1B", _gpt(48, 8192, 64), 512, A100, _gpt_tokens(138, 48, 8192), None, 4, 1536, 2048, "full", pp=2,
        tp=8, **MEGATRON,
    ),
    _row("a NeMo 1B", LLAMA_1B, 8, H100, None, 47.59, 8, 64, 2048, "none", chunks=0, fused=True, held=LOGITS, **SMALL),
    _row("b the same, recomputed", LLAMA_1B, 8, H100, None, 33.06, 8, 64, 2048, "full", chunks=0, held=LOGITS, **SMALL),
    _row("c the same, logits never whole", LLAMA_1B, 8, H100, None, 7.3, 8, 64, 2048, "full", **SMALL),
    _row("d 1.1B on an H200", LLAMA_OURS, 1, H200, None, 35.19, 4, 4, 2048, "none"),
    _row("e the same, selective", LLAMA_OURS, 1, H200, None, 26.41, 4, 4, 2048, "selective"),
    _row("f Qwen3-MoE of 1.3B", EXPERTS_OURS, 1, H200, None, 33.16, 4, 4, 2048, "none"),
    _row("g 8B, LoRA", LORA_OURS, 1, H200, None, 31.34, 1, 1, 2048, "none", adapter=LORA, dtype="bfloat16"),
    _row(
        "h 1.1B by hand, compiled", LLAMA_OURS, 1, H200, None, 25.08, 4, 4, 2048, "none", chunks=0, fused=True, allocated=True,
        held=0.5, sync="reduce_each",
    ),
)  # fmt: skip
"""Rows of research/next-wave.md, section 4.6, and of the same pages. ``fused``: their code is compiled or has fused kernels
where transformers has many operators, and `parallel.compile` stands for that. What else was set is in docs/measurements.md.
"""


@dataclass(frozen=True)
class Found:
    """A forecast of a row: tokens a second and device, and GiB as its source counts them."""

    tokens: float
    memory: float


def forecast(row: Row) -> Found:
    """Forecast a row."""
    config = _read(row.shape) if isinstance(row.shape, str) else row.shape
    sections = row.sections | {"model": {**row.sections["model"], "config": config}}
    setup = make_setup(RunConfig.model_validate({"output": "runs/x", **sections}), row.ranks)
    traces = Traces(setup)
    time = forecast_time(setup, row.hardware, traces)
    step = time.step_seconds - (1 - row.sent) * time.parts.get("ep", 0.0)
    verdict = judge(setup, replace(row.hardware, memory_gib=1e6), traces)
    outside = verdict.parts["reserved"] + (verdict.parts["allocator"] if row.allocated else 0)
    memory = (verdict.peak_bytes - outside) / 2**30 + row.held
    return Found(time.tokens_per_second_per_device * time.step_seconds / step, memory)


def main() -> None:
    """Print a line for each row."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| row | devices | tokens/s, published | forecast | error | GiB, published | forecast | error |")
    print("|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        if sys.argv[1:] and row.name.split()[0] not in sys.argv[1:]:
            continue
        found = forecast(row)
        cells = [row.name, str(row.ranks), *_compared(row.tokens, found.tokens), *_compared(row.memory, found.memory)]
        print(f"| {' | '.join(cells)} |", flush=True)


def _compared(published: float | None, found: float) -> tuple[str, str, str]:
    if published is None:
        return "", _number(found), ""
    return _number(published), _number(found), f"{found / published - 1:+.0%}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


if __name__ == "__main__":
    main()
