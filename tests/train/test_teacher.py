"""A teacher beside the model: on its own layout it gives the losses and gradients that its columns in files give."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshwright.audit.case import digest
from meshwright.data.rows.columns import TensorColumn
from meshwright.data.store import TokenStore
from meshwright.distributed.mesh import whole_tensor
from meshwright.distributed.pipeline.stage_parts import models_of
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from meshwright.train.trainer import Trainer
from tests.harness import run_ranks
from tests.tiny import tiny_model
from tests.train.runs import CPU, tiny_run, trainer_on_rank, write_corpus

K = 5
FP64 = ("parallel.param_dtype=float64", "parallel.reduce_dtype=float64", "model.dtype=float64")
COLUMNS = {
    "teacher_ids": {"per": "token", "width": K, "dtype": "int64"},
    "teacher_log_probs": {"per": "token", "width": K},
}
"""The same from files."""

CELLS = {
    "shard 2": (2, ()),
    "tp 2, teacher pp 2": (2, ("layout.tp=2", "parallel.loss_parallel=true", "teacher.layout={pp: 2}")),
    "pp 2, teacher tp 2": (2, ("layout.pp=2", "teacher.layout={tp: 2}")),
}
PRODUCTS = {
    "one": (1, ()),
    "shard 2, teacher replicated": (2, ("teacher.layout={dp_replicate: 2, dp_shard: 1}",)),
    "tp 2 x shard 2, teacher pp 2 x shard 2": (4, ("layout.tp=2", "teacher.layout={pp: 2}")),
    "pp 2 x shard 2, teacher tp 2 x replicate 2": (
        4,
        ("layout.pp=2", "teacher.layout={tp: 2, dp_replicate: 2, dp_shard: 1}"),
    ),
    "cp 2 x tp 2, teacher cp 2 x pp 2": (4, ("layout.cp=2", "layout.tp=2", "teacher.layout={cp: 2, pp: 2}")),
    "pp 2 x cp 2": (4, ("layout.pp=2", "layout.cp=2")),
    "tp 2 seq, teacher pp 2": (2, ("layout.tp=2", "parallel.sequence_parallel=true", "teacher.layout={pp: 2}")),
}


def teacher_in(folder: Path, family: str = "llama") -> PreTrainedModel:
    model = tiny_model(family, seed=7, vocab_size=320)  # wider than the vocabulary of the run
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # it is sure of some words
    model.save_pretrained(folder)
    model.set_experts_implementation("eager")  # others have no float64
    return model.double().eval()


def run(folder: Path, *overrides: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    corpus = write_corpus(folder / "words.jsonl", documents=40)
    sets = ("data.packing=pad", "data.long_documents=truncate", "data.sequence_length=64", *FP64)
    objective = "training.objective={use: distillation, with: {divergence: js, next_token_weight: 0.2}}"
    return tiny_run(folder, corpus, *sets, objective, *overrides)


def said(model: PreTrainedModel, store: TokenStore) -> dict[str, tuple[TensorColumn, np.ndarray]]:
    """The columns of a teacher by the plain model of transformers, a document after another."""
    ids, logs = (np.zeros((store.index.tokens, K), dtype) for dtype in (np.int64, np.float32))
    for begin, end in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        tokens = torch.from_numpy(store.tokens[begin:end].astype(np.int64))[None]
        with torch.no_grad():
            top = torch.log_softmax(model(input_ids=tokens).logits[0, :-1], -1).topk(K)
        ids[begin + 1 : end], logs[begin + 1 : end] = top.indices.numpy(), top.values.numpy()
    pairs = {"teacher_ids": ids, "teacher_log_probs": logs}
    return {name: (TensorColumn(**COLUMNS[name]), values) for name, values in pairs.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor).clone()


def found_of(trainer: Trainer) -> dict[str, Any]:
    """The loss of a step, its gradients and an evaluation."""
    gathered = trainer.run_microbatches(trainer.microbatches(0))
    named = [pair for part in models_of(trainer.model) for pair in part.named_parameters()]
    gradients = {name: whole(parameter.grad) for name, parameter in named if parameter.grad is not None}
    return {"means": {name: float(value) for name, value in trainer.means(gathered).items()}, "gradients": gradients}


def online_on_rank(rank: int, config: RunConfig, store: Path) -> dict[str, Any]:
    trainer = trainer_on_rank(config, store)
    teacher = trainer.runner.teach.model  # type: ignore[union-attr]
    before = [digest(parameter) for parameter in teacher.parameters()]
    found = found_of(trainer)
    trainer.train_step()
    found["eval"] = trainer.measure()
    assert [digest(parameter) for parameter in teacher.parameters()] == before
    assert not teacher.training
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not any("teacher" in name for name in trainer.tensors_to_save())
    return found


def offline_on_rank(rank: int, config: RunConfig, store: Path, columns: Any) -> dict[str, Any]:
    trainer = Trainer(make_setup(config, 1), TokenStore.open(store).beside(columns), CPU)
    found = found_of(trainer)
    trainer.train_step()
    found["eval"] = trainer.measure()
    return found


def compare(folder: Path, ranks: int, overrides: tuple[str, ...], family: str = "llama") -> None:
    teacher = teacher_in(folder / "teacher", family)
    config = run(folder, f"teacher.path={folder}/teacher", f"teacher.top_k={K}", *overrides)
    store = prepare_run(config, ranks)[2]
    online = run_ranks(online_on_rank, ranks, config, store.directory)
    content = run(folder / "files").model_dump(mode="json")
    content["data"]["tensors"] = COLUMNS
    alone = RunConfig.model_validate(content)
    offline = run_ranks(offline_on_rank, 1, alone, store.directory, said(teacher, store))[0]
    gradients: dict[str, torch.Tensor] = {}
    for found in online:
        assert found["means"] == pytest.approx(offline["means"], abs=1e-11)
        assert found["eval"] == pytest.approx(offline["eval"], abs=1e-11)
        gradients |= found["gradients"]
    assert gradients.keys() == offline["gradients"].keys()
    for name, gradient in offline["gradients"].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize("label", CELLS)
def test_a_teacher_gives_what_its_columns_give(tmp_path: Path, label: str) -> None:
    compare(tmp_path, *CELLS[label])


@pytest.mark.thorough
@pytest.mark.parametrize("label", PRODUCTS)
def test_products(tmp_path: Path, label: str) -> None:
    compare(tmp_path, *PRODUCTS[label])


@pytest.mark.thorough
def test_a_teacher_of_experts(tmp_path: Path) -> None:
    compare(tmp_path, 2, ("teacher.layout={ep: 2}",), "mixtral")
