"""Tiny runs: a configuration over a small local corpus, and training it on forked ranks."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from meshwright.data.store import TokenStore
from meshwright.trace.background import command
from meshwright.train.config import RunConfig, load_config
from meshwright.train.parts import PARTS
from meshwright.train.start.prepare import load_run_tokenizer, prepare_run
from meshwright.train.start.resume import checkpoint_to_resume
from meshwright.train.start.run_files import Paths
from meshwright.train.start.setup import make_setup
from meshwright.train.start.teacher_setup import with_teacher
from meshwright.train.trainer import Trainer
from tests.harness import run_ranks

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_WITH_DROPOUT = (
    "model.config={model_type: gpt2, n_embd: 32, n_head: 4, n_layer: 2, n_positions: 64, "
    "resid_pdrop: 0.2, embd_pdrop: 0.1, attn_pdrop: 0.1}"
)
CPU = torch.device("cpu")


def write_corpus(path: Path, documents: int = 80, seed: int = 0) -> Path:
    """JSONL of texts that a model can learn something of: few words, each followed mostly by the same one."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcdefghij") for _ in range(draw.randint(2, 6))) for _ in range(40)]
    lines = []
    for _ in range(documents):
        at, text = draw.randrange(40), []
        for _ in range(draw.randint(4, 50)):
            at = (at * 7 + 3) % 40 if draw.random() < 0.9 else draw.randrange(40)
            text.append(words[at])
        lines.append(json.dumps({"text": " ".join(text)}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_config(directory: Path, corpus: Path, **sections: Any) -> Path:
    """The YAML file of a tiny fp32 run of six steps, whose output is ``directory/out``."""
    content = {
        "output": str(directory / "out"),
        "model": {"config": dict(LLAMA)},
        "parallel": {"param_dtype": "float32"},
        "data": {"files": [str(corpus)], "sequence_length": 32, "eval_fraction": 0.1},
        "tokenizer": {"vocab_size": 300},
        "optimizer": {"lr": 0.01},
        "training": {"steps": 6, "global_batch_size": 8, "microbatch_size": 2},
        "metrics": {"tensorboard": False},
        **sections,
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def tiny_run(directory: Path, corpus: Path, *overrides: str) -> RunConfig:
    """That run with some overrides."""
    return load_config(write_config(directory, corpus), overrides)


def train(config: RunConfig, ranks: int = 1) -> list[float]:
    """Prepare a run here, train it on forked ranks, and return its losses: every step's since step 1."""
    _, _, store = prepare_run(config, ranks)
    run_ranks(train_on_rank, ranks, config, store.directory)
    return losses(config)


def trainer_on_rank(config: RunConfig, store: Path) -> Trainer:
    """A rank's trainer, as a worker makes it."""
    setup = with_teacher(make_setup(config, dist.get_world_size(), load_run_tokenizer(config)))
    return Trainer(setup, TokenStore.open(store), CPU, checkpoint_to_resume(config), replace(PARTS, forecast=command))


def train_on_rank(rank: int, config: RunConfig, store: Path) -> None:
    trainer_on_rank(config, store).run()


def rows(config: RunConfig) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in Paths(config.directory).metrics.read_text().splitlines()]


def losses(config: RunConfig) -> list[float]:
    """Training losses in the order of the file."""
    return [row["loss"] for row in rows(config) if "loss" in row]


def eval_losses(config: RunConfig) -> list[float]:
    return [row["eval/loss"] for row in rows(config) if "eval/loss" in row]


def checkpoints(config: RunConfig) -> list[str]:
    """Names in the directory of checkpoints, sorted."""
    return sorted(path.name for path in Paths(config.directory).checkpoints.iterdir())
