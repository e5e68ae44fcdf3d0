"""What a rank of `cp` holds of activations and logits, as a share of that without `cp`.

Of hybrids, of models whose own code computes attention or counts positions, and of DiffusionGemma:

    python benchmarks/context_memory.py [--check]

A step of small models on one sequence of 1,024 tokens is run under fake tensors, in one process. `--check` exits with 1 if a
share is above that of its rank by more than 0.1, but for `gather`, which has the keys of whole sequences.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from report import Bound, Table, publish

from meshwright.trace.live import Kind
from meshwright.trace.step import trace_step
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import make_setup

LENGTH = 1024

HYBRID = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "vocab_size": 512, "max_position_embeddings": LENGTH,
}  # fmt: skip

DIFFUSION = {
    "model_type": "diffusion_gemma",
    "canvas_length": 64,
    "text_config": {
        **HYBRID, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128,
        "global_head_dim": 32, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128,
    },
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
    },
}  # fmt: skip

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Nemotron-H: Mamba-2, 8 groups": (
        {
            "model_type": "nemotron_h", **HYBRID, "layers_block_type": ["linear_attention", "mlp"] * 2, "mamba_num_heads": 16,
            "mamba_head_dim": 32, "n_groups": 8, "ssm_state_size": 32, "chunk_size": 64,
        },
        {},
    ),
    "Bamba: Mamba-2, 1 group": (
        {
            "model_type": "bamba", **HYBRID, "num_hidden_layers": 4, "attn_layer_indices": [3], "mamba_n_heads": 16,
            "mamba_d_head": 32, "mamba_expand": 2, "mamba_d_state": 32, "mamba_chunk_size": 64, "mamba_n_groups": 1,
        },
        {},
    ),
    "Qwen3-Next: gated delta nets": (
        {
            "model_type": "qwen3_next", **HYBRID, "num_hidden_layers": 4, "mlp_only_layers": [0, 1, 2, 3],
            "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        },
        {},
    ),
    "xLSTM: heads that a config counts": (
        {
            "model_type": "xlstm", "hidden_size": 256, "embedding_dim": 256, "num_hidden_layers": 4, "num_blocks": 4,
            "num_heads": 8, "vocab_size": 512,
        },
        {},
    ),
    "MiniMax: lightning attention": (
        {
            "model_type": "minimax", **HYBRID, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 4,
            "block_size": 64, "num_local_experts": 4,
        },
        {},
    ),
    "LFM2: the tokens before": (
        {"model_type": "lfm2", **HYBRID, "num_hidden_layers": 4, "layer_types": ["conv"] * 3 + ["full_attention"]},
        {},
    ),
    "BLOOM: its own attention": ({"model_type": "bloom", "hidden_size": 256, "n_head": 8, "n_layer": 4, "vocab_size": 512}, {}),
    "Pegasus: its own positions": (
        {
            "model_type": "pegasus", "is_encoder_decoder": False, "is_decoder": True, "d_model": 256, "decoder_layers": 4,
            "decoder_attention_heads": 8, "decoder_ffn_dim": 1024, "vocab_size": 512,
        },
        {},
    ),
    "DiffusionGemma, `gather`": (DIFFUSION, {}),
    "DiffusionGemma, `context_recompute`": (DIFFUSION, {"context_recompute": True}),
    "DiffusionGemma, `ring`": (DIFFUSION, {"context_parallel": "ring"}),
}  # fmt: skip


def held(model: dict[str, Any], parallel: dict[str, Any], cp: int, folder: Path) -> int:
    """Return the bytes of activations and logits at the worst moment of a step."""
    objective = {"objective": "block_diffusion"} if model is DIFFUSION else {}
    run = {
        "output": str(folder),
        "model": {"config": model},
        "layout": {"dp_shard": 1, "cp": cp},
        "parallel": {"param_dtype": None, "loss_chunks": 0, **(parallel if cp > 1 else {})},
        "data": {"files": ["drawn"], "sequence_length": LENGTH, "packing": "pad"},
        "training": {"steps": 1, "global_batch_size": 1, **objective},
    }
    moments = trace_step(make_setup(RunConfig.model_validate(run), cp)).moments
    return max(of.get(Kind.ACTIVATIONS, 0) + of.get(Kind.LOGITS, 0) for of in moments.values())


def main() -> None:
    """Trace all rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound fails")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    arguments = parser.parse_args()
    rows, bounds = [], []
    with tempfile.TemporaryDirectory(prefix="meshwright-context-") as folder:
        for name, (model, parallel) in ROWS.items():
            alone, *parts = (held(model, parallel, cp, Path(folder)) for cp in (1, 2, 4))
            shares = [part / alone for part in parts]
            rows.append((name, f"{alone / 2**20:.1f}", *(f"{share:.3f}" for share in shares)))
            if not name.endswith("`gather`"):
                bounds += [Bound(f"{name}: cp {cp}", share, 1 / cp + 0.1) for cp, share in zip((2, 4), shares, strict=True)]
    headers = ("model", "without cp, MiB", "cp 2", "cp 4")
    title = f"Activations and logits of a rank, one sequence of {LENGTH:,} tokens, fake tensors"
    raise SystemExit(publish([Table(title, headers, rows)], bounds, arguments.markdown, check=arguments.check))


if __name__ == "__main__":
    main()
