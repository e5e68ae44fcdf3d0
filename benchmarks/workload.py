"""What every contender trains: one small Llama, one set of initial weights, one stream of tokens, one AdamW.

A directory that :func:`write` fills holds ``model/`` (config and safetensors, as transformers saves them) and ``store/``
(a token store of Meshwright's, whose ``tokens.bin`` the others read as a plain array). Light to import: it is part of
the start-up that is measured.
"""

from pathlib import Path

import numpy as np
import torch

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
SPARSE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
"""A Qwen3-MoE of 4.2 M parameters, three quarters of them experts."""
SEQUENCE_LENGTH = 256
BATCH = 4
"""Sequences of a rank in a microbatch."""
RANKS = 2
"""That share the batch (data ranks)."""
TP = 2
"""Ranks of tensor parallel, where there is some: then RANKS * TP processes."""
SEED = 0
RANK = 8
"""Of adapters."""

LR = 3e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP = 1.0


def write(directory: Path, sequences: int, *, sparse: bool = False) -> None:
    """Draw the initial weights, of the mixture of experts if ``sparse``, and ``sequences`` sequences of tokens.

    Tokens follow Zipf's law, so that there is something to learn in a dozen steps and losses of contenders can differ.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = AutoConfig.for_model("qwen3_moe", **SPARSE) if sparse else AutoConfig.for_model("llama", **MODEL)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    chances = 1 / torch.arange(1, config.vocab_size + 1)
    tokens = torch.multinomial(chances, sequences * SEQUENCE_LENGTH, replacement=True)
    write_store(directory / "store", tokens.numpy().reshape(sequences, SEQUENCE_LENGTH))


def write_adapter(directory: Path) -> None:
    """Draw the first values of an adapter of every linear layer, as a directory of peft."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    names = [name.rpartition(".")[2] for name, module in model.model.named_modules() if isinstance(module, torch.nn.Linear)]
    settings = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=sorted(set(names)), task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(directory / "adapter")


def write_store(directory: Path, tokens: np.ndarray) -> None:
    """Write a token store of [sequences, length]: each is one document, so there is no padding, and nothing to mask."""
    from meshwright.data.index import FORMAT_VERSION, StoreIndex, write_index
    from meshwright.data.sums import sums_of

    directory.mkdir()
    count, length = tokens.shape
    tokens.astype(np.uint16).tofile(directory / "tokens.bin")
    np.save(directory / "offsets.npy", np.arange(count + 1, dtype=np.int64) * length)
    np.save(directory / "held_out.npy", np.zeros(count, dtype=bool))
    index = StoreIndex(
        format_version=FORMAT_VERSION,
        fingerprint="benchmark",
        kind="text",
        long_documents="error",
        sequence_length=length,
        token_dtype="uint16",
        pad_token_id=0,
        documents=count,
        tokens=tokens.size,
        train_documents=count,
        train_tokens=tokens.size,
        eval_documents=0,
        eval_tokens=0,
        split=0,
        truncated=0,
        dropped=0,
        empty=0,
        files={path.name: sums_of(path) for path in directory.iterdir()},
    )
    write_index(directory, index)


def read_tokens(directory: Path) -> torch.Tensor:
    """All sequences: int64 [sequences, SEQUENCE_LENGTH]."""
    flat = np.fromfile(directory / "store" / "tokens.bin", dtype=np.uint16)
    return torch.from_numpy(flat.astype(np.int64)).view(-1, SEQUENCE_LENGTH)


def share(tokens: torch.Tensor, step: int, rank: int, microbatches: int) -> list[torch.Tensor]:
    """Microbatches of a rank in a step, in the order of Meshwright's loader without shuffling."""
    begin = (step * RANKS + rank) * microbatches * BATCH
    batches = tokens[begin : begin + microbatches * BATCH].split(BATCH)
    return [batch.clone() for batch in batches]  # a view would keep all tokens alive where autograd holds a batch


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Matrices decay, vectors do not; each kind is a group."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


MESHWRIGHT = {
    "defer": {"sync": "defer"},
    "reduce_each": {"sync": "reduce_each"},
    "reshard_each": {"sync": "reshard_each"},
    "tp-whole_logits": {"sync": "defer", "loss_parallel": False},
    "tp-loss": {"sync": "defer", "loss_parallel": True},
    "tp-loss-sequence": {"sync": "defer", "loss_parallel": True, "sequence_parallel": True},
    "ep": {"sync": "defer"},
    "ep-reduce_each": {"sync": "reduce_each"},
    "lora": {},
    "lora-reshard": {"sync": "reshard_each", "reshard_after_forward": True},
    "lora-once": {},
    "lora-nf4": {},
}
"""Variants of Meshwright: its section ``parallel``, beyond dtypes."""

ADAPTERS: dict[str, dict] = {"lora": {}, "lora-reshard": {}, "lora-once": {"reduce": "once"}, "lora-nf4": {"base": "nf4"}}
"""Variants that train an adapter: its section ``adapter``, beyond rank and first values."""


def train_config(directory: Path, output: Path, microbatches: int, variant: str) -> dict:
    """Meshwright's configuration of this workload, as its YAML file would give it."""
    adapter = {"rank": RANK, "alpha": 2 * RANK, "path": str(directory / "adapter"), **ADAPTERS.get(variant, {})}
    return {
        "output": str(output),
        "model": {"path": str(directory / "model")},
        "adapter": adapter if variant in ADAPTERS else None,
        "layout": {"tp": TP if variant.startswith("tp-") else 1, "ep": RANKS if variant.startswith("ep") else 1},
        "parallel": {"param_dtype": "float32", "reduce_dtype": "float32", **MESHWRIGHT[variant]},
        "data": {"corpus": "python-stdlib", "sequence_length": SEQUENCE_LENGTH, "eval_fraction": 0.0, "shuffle": False},
        "optimizer": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
        "schedule": {"kind": "constant"},
        "training": {
            "steps": 1_000_000,
            "global_batch_size": RANKS * microbatches * BATCH,
            "microbatch_size": BATCH,
            "clip_norm": CLIP,
            "seed": SEED,
        },
        "metrics": {"jsonl": False, "tensorboard": False},
    }
