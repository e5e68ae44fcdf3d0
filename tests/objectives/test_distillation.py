"""Distillation: each divergence as its paper has it, on every axis as in one process; what no teacher says is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.audit.conduct import Auditor
from meshwright.audit.ranks import RankTrainer
from meshwright.data.preparation import write_documents
from meshwright.data.store import TokenStore
from meshwright.errors import ConfigError, DataError
from meshwright.objectives import given
from meshwright.objectives.distillation import Distillation
from meshwright.train.config import RunConfig
from tests.audit.conftest import auditor, folder
from tests.harness import refuses
from tests.objectives.shipped import LORA, PLACES, compare, facts, gradients, plain_step, tiny_model

__all__ = ["auditor", "folder"]

WORDS, K = 50, 4


def columns(width: int) -> dict[str, Any]:
    return {
        "teacher_ids": {"per": "token", "width": width, "dtype": "int64"},
        "teacher_log_probs": {"per": "token", "width": width},
    }


def run_of(packing: str, width: int, **arguments: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output": "nowhere",
            "model": {"config": {"model_type": "llama", "vocab_size": WORDS}},
            "data": {"files": ["none"], "sequence_length": 40, "packing": packing, "tensors": columns(width)},
            "training": {"steps": 1, "global_batch_size": 1, "objective": {"use": "distillation", "with": arguments}},
        }
    )


def said(teacher: nn.Module, tokens: np.ndarray, width: int) -> dict[str, Any]:
    """What a teacher says in the place of each token but the first."""
    with torch.no_grad():
        logs = torch.log_softmax(teacher(input_ids=torch.from_numpy(tokens)[None]).logits[0, :-1], -1)
    top = logs.topk(width, -1)
    blank = [np.zeros((1, width))]
    return {
        "teacher_ids": np.concatenate([*blank, top.indices.numpy()]),
        "teacher_log_probs": np.concatenate([*blank, top.values.numpy()]).astype(np.float32),
    }


def documents(directory: Path, config: RunConfig, teacher: nn.Module, width: int, words: int = WORDS) -> TokenStore:
    """Documents of unequal lengths, of which some tokens are learned."""
    draw = np.random.default_rng(5)
    tokens = [draw.integers(0, WORDS, int(draw.integers(4, 20))) for _ in range(7)]
    masks = [draw.integers(0, 2, len(ids)).astype(np.bool_) | (np.arange(len(ids)) == 1) for ids in tokens]
    values = [said(teacher, ids, width) for ids in tokens]
    return write_documents(directory, tokens, masks, sequence_length=40, tensors=config.data.values, values=values)


def paper(kind: str, q: torch.Tensor, p: torch.Tensor, beta: float, temperature: float, tail: bool) -> torch.Tensor:
    """The divergence of one token, from the probabilities of the teacher's words."""
    q, p = (torch.cat([one, 1 - one.sum(0, keepdim=True)]) if tail else one / one.sum() for one in (q, p))
    q, p = (one ** (1 / temperature) / (one ** (1 / temperature)).sum() for one in (q, p))
    if kind == "forward_kl":
        return (q * torch.log(q / p)).sum()
    if kind == "reverse_kl":
        return (p * torch.log(p / q)).sum()
    m = beta * q + (1 - beta) * p
    return beta * (q * torch.log(q / m)).sum() + (1 - beta) * (p * torch.log(p / m)).sum()


def expected(options: dict[str, Any], model: nn.Module, store: TokenStore) -> torch.Tensor:
    kind, beta, temperature = options.get("divergence", "forward_kl"), options.get("beta", 0.5), options.get("temperature", 1.0)
    losses, plain = [], []
    assert store.loss_mask is not None
    for begin, end in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        ids = torch.from_numpy(store.tokens[begin:end].astype(np.int64))
        own = model(input_ids=ids[None]).logits[0].softmax(-1)
        for place in range(1, len(ids)):
            if store.loss_mask[begin + place]:
                words = torch.tensor(store.values["teacher_ids"][begin + place])
                q = torch.tensor(store.values["teacher_log_probs"][begin + place]).double().exp()
                losses.append(paper(kind, q, own[place - 1, words], beta, temperature, options.get("loss_add_tail", True)))
                plain.append(-own[place - 1, ids[place]].log())
    return torch.stack(losses).mean() + options.get("next_token_weight", 0.0) * torch.stack(plain).mean()


CASES: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "forward_kl, warm, with the plain loss": {"temperature": 2.0, "next_token_weight": 0.3},
    "forward_kl over the words alone": {"loss_add_tail": False},
    "reverse_kl": {"divergence": "reverse_kl", "temperature": 0.7},
    "js": {"divergence": "js"},
    "js, nearer to the teacher": {"divergence": "js", "beta": 0.2, "loss_add_tail": False, "next_token_weight": 1.0},
}


@pytest.mark.parametrize("label", CASES)
def test_each_divergence_is_that_of_its_paper(tmp_path: Path, label: str) -> None:
    options, packing = CASES[label], "pad" if "js" in label else "pack"
    config = run_of(packing, K, **options)
    model, teacher = tiny_model(0), tiny_model(1)
    store = documents(tmp_path, config, teacher, K)
    objective = Distillation(**options)
    objective.begin(model, facts(config))
    loss, metrics = plain_step(objective, model, store, config, microbatches=3)
    found = gradients(model)
    truth = expected(options, model, store)
    truth.backward()
    assert float(loss) == pytest.approx(float(truth.detach()), abs=1e-11)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-11)
    assert 0 < metrics["student_mass"] < metrics["teacher_mass"] < 1
    assert 0 <= metrics["agreement"] < 1


def test_with_all_words_it_is_the_divergence_itself(tmp_path: Path) -> None:
    config, model, teacher = run_of("pack", WORDS, temperature=1.5), tiny_model(0), tiny_model(1)
    store = documents(tmp_path, config, teacher, WORDS)
    objective = Distillation(temperature=1.5)
    objective.begin(model, facts(config))
    loss, _ = plain_step(objective, model, store, config, microbatches=1)
    assert float(loss) == pytest.approx(float(expected({"temperature": 1.5, "loss_add_tail": False}, model, store)), abs=1e-5)
    assert metrics_of_itself(tmp_path / "itself", config, model) == pytest.approx(0.0, abs=1e-5)


def metrics_of_itself(directory: Path, config: RunConfig, model: nn.Module) -> float:
    objective = Distillation()
    objective.begin(model, facts(config))
    loss, metrics = plain_step(objective, model, documents(directory, config, model, WORDS), config, microbatches=1)
    assert metrics["agreement"] == 1
    return float(loss)


def test_a_word_that_the_model_does_not_have_is_one_of_the_others(tmp_path: Path) -> None:
    config = run_of("pack", K)
    store = documents(tmp_path, config, tiny_model(1, vocab_size=80), K)
    beyond = store.values["teacher_ids"] >= WORDS
    assert beyond.any()
    model = tiny_model(0)
    objective = Distillation()
    objective.begin(model, facts(config))
    loss, _ = plain_step(objective, model, store, config, microbatches=2)
    words, logs = store.values["teacher_ids"], store.values["teacher_log_probs"]
    merged, own = 0.0, 0
    assert store.loss_mask is not None
    for begin, end in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        p = model(input_ids=torch.from_numpy(store.tokens[begin:end].astype(np.int64))[None]).logits[0].softmax(-1)
        for place in range(1, end - begin):
            if store.loss_mask[begin + place]:
                kept = ~beyond[begin + place]
                q = torch.from_numpy(logs[begin + place][kept]).double().exp()
                merged += float(
                    paper("forward_kl", q, p[place - 1, torch.from_numpy(words[begin + place][kept])], 0.5, 1.0, True)
                )
                own += 1
    assert float(loss) == pytest.approx(merged / own, abs=1e-9)


AXES = [
    ("tp 2", "llama", {"divergence": "js", "next_token_weight": 0.5}, {"loss_parallel": True, "loss_chunks": 3}),
    ("shard 2", "llama", {}, {"loss_chunks": 3}),
    ("cp 2", "llama", {"divergence": "reverse_kl"}, {}),
    ("pp 2", "llama", {"temperature": 2.0}, {}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("label", "family", "arguments", "options"), AXES, ids=lambda value: str(value).replace(" ", "-")[:20])
def test_an_axis(
    auditor: Auditor, folder: Path, label: str, family: str, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    objective = {"use": "distillation", "with": arguments}
    compare(auditor, folder, PLACES[label], objective, family, tensors=columns(3), **options)


PRODUCTS = [
    ("shard 2", "llama", {"adapter": LORA}),
    ("2 x shard 2", "llama", {}),
    ("tp 2", "llama", {"loss_parallel": True, "adapter": LORA}),
    ("tp 2 seq", "llama", {"loss_parallel": True}),
    ("pp 2", "llama", {"packing": "pad"}),
    ("cp 2 x tp 2", "llama", {"loss_parallel": True, "loss_chunks": 3}),
    ("cp 2 x shard 2", "llama", {"packing": "pad"}),
    ("ep 2", "mixtral", {}),
    ("tp 2 x shard 2", "llama", {"loss_chunks": 2}),
]


@pytest.mark.thorough
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
@pytest.mark.parametrize(("label", "family", "options"), PRODUCTS, ids=lambda value: str(value).replace(" ", "-")[:20])
def test_products(auditor: Auditor, folder: Path, label: str, family: str, options: dict[str, Any], divergence: str) -> None:
    objective = {"use": "distillation", "with": {"divergence": divergence, "next_token_weight": 0.1}}
    compare(auditor, folder, PLACES[label], objective, family, tensors=columns(3), microbatches=3, **options)


def teacher_of_the_token_before(trainer: RankTrainer) -> None:
    """What the teacher says is beside the inputs, and not beside the labels."""
    found = trainer.objective._log_probs  # type: ignore[attr-defined]

    def before(model: Any, batch: Any) -> Any:
        own, teacher, label = found(model, batch)
        return own, teacher.roll(1, 1), label

    trainer.objective._log_probs = before  # type: ignore[attr-defined]


def words_of_a_slice(trainer: RankTrainer) -> None:
    """A rank of `tp` has only what the other words are in its own slice."""
    found = trainer.objective._distribution  # type: ignore[attr-defined]
    scale = 1 + 0.1 * trainer.mesh.rank("tp")
    trainer.objective._distribution = lambda values: found(values * scale)  # type: ignore[attr-defined]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("plant", "words"), [(teacher_of_the_token_before, "the gradient of"), (words_of_a_slice, "the gradient of")]
)
def test_planted(auditor: Auditor, folder: Path, plant: Any, words: str) -> None:
    options = {"loss_parallel": True}
    report = compare(auditor, folder, PLACES["tp 2"], {"use": "distillation"}, tensors=columns(3), plants=[plant], **options)
    assert words in report.verdict


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    model = tiny_model(0)
    with refuses(ConfigError, "config.part.arguments"):
        Distillation(beta=0.3)
    with refuses(ConfigError, "objective.batch") as caught:
        Distillation().begin(model, facts(RunConfig.model_validate({**run_of("pack", K).model_dump(mode="json"), **bare()})))
    assert "data.tensors.teacher_ids={per: token, width: 64, dtype: int64, column: top_ids}" in str(caught.value)
    config = run_of("pack", K)
    store = documents(tmp_path, config, tiny_model(1), K)
    objective = Distillation()
    objective.begin(model, facts(config))
    batch = given_batch(store, config)
    assert objective.held_out(batch, [0]) is batch
    logits = {**batch, "teacher_log_probs": batch["teacher_log_probs"] + 5}
    with refuses(DataError, "data.tensors") as data:
        objective.training([logits], [[7]])
    assert "sequence 7, token " in str(data.value)
    assert "which no probabilities do" in str(data.value)
    with refuses(DataError, "data.tensors"):
        objective.training([{**batch, "teacher_ids": batch["teacher_ids"] - 60}], [[7]])


def bare() -> dict[str, Any]:
    return {"data": {"files": ["none"], "sequence_length": 40}}


def given_batch(store: TokenStore, config: RunConfig) -> dict[str, torch.Tensor]:
    from meshwright.data.loader import TrainLoader

    return TrainLoader(store, global_batch_size=1, microbatch_size=1, sequence_length=40).microbatches(0)[0]


def test_top_words_have_no_gradient_and_others_keep_theirs() -> None:
    from meshwright.objectives.running import Running, running

    model, ids = tiny_model(0), torch.arange(12).view(2, 6)
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": torch.arange(6).expand(2, -1)}
    with running(Running()):
        words, logs = given.top_k(model, batch, 3)
        own = given.log_probs_of(model, batch, words)
        plain = given.log_probs(model, batch)
    assert (logs.requires_grad, own.requires_grad, plain.requires_grad) == (False, True, True)
    torch.testing.assert_close(own, logs)
    assert (logs[..., 0] >= logs[..., 2]).all()
