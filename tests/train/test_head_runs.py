"""Runs of models with another head: the examples learn, resume and run on each axis; transformers and peft load exports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

import meshwright as mw
from meshwright.checkpoint.directory import latest
from meshwright.checkpoint.export import export_checkpoint
from meshwright.checkpoint.storage import contents
from meshwright.objectives import Batch, given
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.setup import make_setup
from tests.harness import run_ranks
from tests.tiny import tiny_model
from tests.train.conftest import corpus, tiny
from tests.train.runs import losses, rows, train

__all__ = ["corpus", "tiny"]

ROOT = Path(__file__).parents[2]
SHORT = ("training.steps=12", "training.eval_every=12", "checkpoint.every=6")
LAYOUTS = ["layout.tp=2", "layout.cp=2", "layout.pp=2"]
Tiny = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are run from the root of the repository."""
    monkeypatch.chdir(ROOT)


def example(name: str, tmp_path: Path, *overrides: str) -> RunConfig:
    rows, files = {"classify": ("labeled", 4), "reward": ("pairs", 2), "label_words": ("labeled_words", 4)}[name]
    short = [
        f"data.source={{use: 'examples.parts.docstrings:{rows}', with: {{files: {files}}}}}",
        "data.sequence_length=128",
        "training.steps=16",
        "training.eval_every=16",
        "training.log_every=1",
        "training.microbatch_size=4",
        "checkpoint.every=8",
        "schedule.kind=constant",
        "optimizer.lr=0.01",
    ]
    return load_config(f"examples/{name}.yaml", [*short, f"output={tmp_path}/out", *overrides])


def newest(run: RunConfig) -> Path:
    found = latest(run.directory / "checkpoints")
    assert found is not None
    return found


def exported(run: RunConfig, folder: Path) -> Any:
    export_checkpoint(newest(run), folder)
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def test_a_classifier_learns_and_transformers_says_the_same(tmp_path: Path) -> None:
    run = example("classify", tmp_path)
    train(run, 2)
    last = [row for row in rows(run) if "eval/accuracy" in row][-1]
    assert last["eval/accuracy"] > 0.95
    assert last["eval/f1"] > 0.9
    model, tokenizer = exported(run, tmp_path / "exported")
    assert (model.config.id2label, model.config.problem_type) == ({0: "words", 1: "code"}, "single_label_classification")
    code = "if name is None:\n    return self.close()\nself.names.append(name)"
    texts = ["Return the name of the file that was opened last.", code]
    with torch.no_grad():
        said = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits.argmax(-1)  # of a padded batch
    assert said.tolist() == [0, 1]


@pytest.mark.thorough
def test_a_reward_model_learns(tmp_path: Path) -> None:
    run = example("reward", tmp_path, *SHORT)
    train(run, 2)
    last = [row for row in rows(run) if "eval/accuracy" in row][-1]
    assert last["eval/accuracy"] > 0.9
    assert last["eval/margin"] > 0.5
    model, tokenizer = exported(run, tmp_path / "exported")
    chats = [
        [{"role": "user", "content": "What does close do?"}, {"role": "assistant", "content": said}]
        for said in ("Close the file and return its name.", "name. its return and file the Close")
    ]
    with torch.no_grad():
        ids = [torch.tensor([tokenizer.apply_chat_template(chat, return_dict=False)]) for chat in chats]
        good, bad = (model(one).logits.item() for one in ids)
    assert good > bad


@pytest.mark.thorough
def test_a_reward_model_resumes_sliced(tmp_path: Path) -> None:
    expected = train(example("reward", tmp_path / "whole", *SHORT), 2)
    train(example("reward", tmp_path / "parts", *SHORT, "training.steps=6"), 2)
    again = example("reward", tmp_path / "parts", *SHORT, "layout.tp=2")
    assert train(again, 2) == pytest.approx(expected, rel=2e-3)


@pytest.mark.thorough
def test_words_are_labeled_and_a_run_resumes(tmp_path: Path) -> None:
    run = example("label_words", tmp_path / "whole")
    expected = train(run, 2)
    last = [row for row in rows(run) if "eval/accuracy" in row][-1]
    assert last["eval/accuracy"] > 0.9
    assert last["eval/macro_f1"] > 0.7
    half = example("label_words", tmp_path / "parts", "training.steps=8")
    train(half, 2)
    assert train(example("label_words", tmp_path / "parts"), 2) == expected
    export_checkpoint(newest(run), tmp_path / "exported")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "exported").eval()
    words = ["return", "self", ".", "names", "[", "12", "]"]
    encoded = AutoTokenizer.from_pretrained(tmp_path / "exported")(words, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        said = model(**encoded).logits[0].argmax(-1).tolist()
    places = encoded.word_ids()
    first = [place for place, word in enumerate(places) if word is not None and word not in places[:place]]
    kinds = ["keyword", "name", "sign", "name", "sign", "number", "sign"]
    right = [model.config.id2label[said[place]] == kind for place, kind in zip(first, kinds, strict=True)]
    assert sum(right) >= 6


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["classify", "reward", "label_words"])
def test_an_example_on_each_axis(tmp_path: Path, name: str, layout: str) -> None:
    plain = train(example(name, tmp_path / "plain", "training.steps=6"), 2)
    other = example(name, tmp_path / "other", "training.steps=6", layout)
    assert train(other, 2) == pytest.approx(plain, rel=1e-4)


def test_a_head_beside_an_adapter_is_what_peft_loads(tiny: Tiny, tmp_path: Path) -> None:
    """The base is a causal language model; what is exported, alone or merged, gives the numbers of the trained model."""
    import peft

    base = tmp_path / "base"
    tiny_model("llama", seed=7, vocab_size=270).save_pretrained(base)
    (tmp_path / "rows.jsonl").write_text('{"text": "good words", "label": 1}\n{"text": "bad things", "label": 0}\n' * 20)
    head = "{kind: sequence_classification, labels: [bad, good]}"
    run = tiny(
        f"model={{path: '{base}', head: {head}}}", "training.objective=classification", "adapter={rank: 4}",
        f"data.files=['{tmp_path}/rows.jsonl']", "training.steps=4", "tokenizer.vocab_size=270",
    )  # fmt: skip
    plan = {row.name: row.trainable for row in make_setup(run, 2).plan.parameters}
    assert plan["score.weight"]
    assert not plan["model.embed_tokens.weight"]
    train(run, 2)
    assert losses(run)[-1] < losses(run)[0]
    assert contents(newest(run))["model.score.weight"][0] == (2, 32)
    export_checkpoint(newest(run), tmp_path / "adapter", adapter=True)
    merged, tokenizer = exported(run, tmp_path / "merged")
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=2).eval()
    ids = torch.tensor([tokenizer("good words")["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, merged(ids).logits, atol=1e-5)
        assert merged(ids).logits.abs().max() > 1e-3


# -- a loop of one's own ------------------------------------------------------------------------------------------------------


class Loss(mw.Objective):
    """The third of the sum of the ids of a document is its class. It is named as the loss itself is."""

    def counts(self, batches: list[Batch]) -> list[int]:
        return [given.document_count(batches)]

    def sums(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        logits = given.pooled(given.logits(model, batch), batch, "last")
        kind = given.per_document(batch["input_ids"], batch) % 3
        losses = -logits.log_softmax(-1).gather(-1, kind[..., None])[..., 0]
        return (given.document_sum(losses, batch),)


def classifier() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    config = AutoConfig.for_model("llama", num_labels=3, pad_token_id=95, **sizes)
    return AutoModelForSequenceClassification.from_config(config).double()


def one_step(rank: int, layout: str) -> tuple[float, dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """A step of the engine on a layout, and of transformers' own forward of each text alone."""
    rows = [[[(7 * row + 5 * column) % 95 for column in range(5 + length)] for row in range(2)] for length in (0, 4)]
    engine = mw.Engine(
        classifier(), layout, microbatches=2, parallel={"param_dtype": "float64", "reduce_dtype": "float64"},
        optimizer={"lr": 1e-2, "weight_decay": 0.0}, objective=Loss(),
    )  # fmt: skip
    found = engine.step([{"input_ids": torch.tensor(batch)} for batch in rows])
    plain = classifier()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    texts = [text for batch in rows for text in batch]
    loss = torch.stack([plain(torch.tensor([text]), labels=torch.tensor([sum(text) % 3])).loss for text in texts]).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    ours = {name: tensor.clone() for name, tensor in engine.weights()}
    return found.loss, ours, float(loss.detach()), dict(plain.named_parameters())


def test_an_engine_takes_a_classifier_of_transformers() -> None:
    for ours, weights, theirs, plain in run_ranks(one_step, 2, "tp=2"):
        assert ours == pytest.approx(theirs, rel=1e-11)
        assert weights.keys() == plain.keys()
        for name, expected in plain.items():
            torch.testing.assert_close(weights[name], expected.detach(), rtol=1e-9, atol=1e-11)
