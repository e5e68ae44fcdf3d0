"""Labels of texts: on every axis against one process, and against transformers' own forward of each text alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from meshwright.audit.conduct import Auditor
from meshwright.audit.ranks import RankTrainer
from meshwright.models.weights.build import materialize
from meshwright.objectives import Batch
from meshwright.objectives.documents import number_documents
from meshwright.objectives.of_documents import LAST
from meshwright.objectives.running import Running, running
from meshwright.train.config import load_config
from meshwright.train.start.setup import make_setup
from tests.audit.conftest import auditor, folder
from tests.audit.plants import around_backward
from tests.objectives.shipped import LORA, PLACES, compare
from tests.train.runs import write_config

__all__ = ["auditor", "folder"]

SIZES = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
USE = {"use": "classification"}
KINDS = {"single_label_classification": 2, "multi_label_classification": 3, "regression": 1}


def head_of(kind: str) -> dict[str, Any]:
    return {"kind": "sequence_classification", "num_labels": KINDS[kind], "problem_type": kind}


def test_an_axis(auditor: Auditor, folder: Path) -> None:
    compare(auditor, folder, PLACES["cp 2"], USE, head=head_of("single_label_classification"))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize(
    "label", ["shard 2", "2 x shard 2", "tp 2", "tp 2 seq", "cp 2", "pp 2", "ep 2", "cp 2 x tp 2", "cp 2 x shard 2"]
)
def test_every_axis(auditor: Auditor, folder: Path, label: str, packing: str, kind: str) -> None:
    family = "mixtral" if "ep" in label else "llama"
    compare(auditor, folder, PLACES[label], USE, family, packing=packing, microbatches=3, head=head_of(kind))


FAMILIES = [
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
]


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["tp 2", "tp 2 seq", "pp 2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(auditor: Auditor, folder: Path, family: str, label: str) -> None:
    compare(auditor, folder, PLACES[label], USE, family, head=head_of("single_label_classification"))


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["shard 2", "tp 2", "pp 2", "cp 2"])
def test_beside_adapters(auditor: Auditor, folder: Path, label: str) -> None:
    compare(auditor, folder, PLACES[label], USE, head=head_of("multi_label_classification"), adapter=LORA)


# -- planted bugs -------------------------------------------------------------------------------------------------------------


def _marks(trainer: RankTrainer, change: Any) -> None:
    inner = trainer.objective.sums

    def sums(model: Any, batch: Batch) -> Any:
        batch[LAST] = change(batch)
        return inner(model, batch)

    trainer.objective.sums = sums  # type: ignore[method-assign]


def last_of_each_row(trainer: RankTrainer) -> None:
    """As in transformers: the last token of a row that is learned stands for all of its documents."""

    def change(batch: Batch) -> torch.Tensor:
        places = torch.arange(batch[LAST].shape[1]) * batch[LAST].bool()
        return torch.zeros_like(batch[LAST]).scatter_(1, places.argmax(1, keepdim=True), 1.0)

    _marks(trainer, change)


def token_before(trainer: RankTrainer) -> None:
    """The second rank takes the token before the last one."""
    if dist.get_rank() == 1:
        _marks(trainer, lambda batch: batch[LAST].roll(-1, 1))


def documents_of_a_rank(trainer: RankTrainer) -> None:
    """Each rank divides by its own documents, and the mean over ranks is taken."""

    def before(batches: Any, counts: torch.Tensor) -> Any:
        return batches, torch.tensor(trainer.objective.counts(batches)) * dist.get_world_size()

    around_backward(trainer, before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("label", "plant", "words"),
    [
        ("shard 2", last_of_each_row, "of the microbatches"),
        ("cp 2", token_before, "the gradient of"),
        ("shard 2", documents_of_a_rank, "weighs the microbatches of the ranks by"),
    ],
)
def test_planted(auditor: Auditor, folder: Path, label: str, plant: Any, words: str) -> None:
    head = head_of("single_label_classification")
    assert words in compare(auditor, folder, PLACES[label], USE, head=head, plants=[plant]).verdict


# -- against transformers and formulas ----------------------------------------------------------------------------------------

PAD = 3


def one_process(
    tmp_path: Path, kind: str, name: str = "meshwright.objectives.classification:Classification", **data: Any
) -> Any:
    """A model with values, its objective as a run has it, and the model that transformers loads of it; float64."""
    model = {"config": {**SIZES, "pad_token_id": PAD}, "dtype": "float64", "head": head_of(kind)}
    training = {"steps": 2, "global_batch_size": 8, "microbatch_size": 2, "objective": "classification"}
    sections = {"model": model, "training": training, "data": {"files": ["no"], "sequence_length": 16}}
    config = load_config(write_config(tmp_path, tmp_path / "words.jsonl", **sections))
    setup = make_setup(config, 1)
    setup.model.eval()
    materialize(setup.model, config.model, torch.device("cpu"), 0)
    setup.model.save_pretrained(tmp_path / "saved")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    return setup, theirs.eval()


def packed_rows(kind: str) -> tuple[Batch, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Two rows of documents, of which some end with padding tokens; and these documents one by one, with their labels."""
    draw = torch.Generator().manual_seed(0)
    lengths, width = ((5, 4, 7), (2, 9)), KINDS[kind]
    rows, alone = [], []
    for number, row in enumerate(lengths):
        ids, labels, positions, values = [], [], [], []
        for length in row:
            own = torch.randint(4, 64, (length,), generator=draw)
            own[length - 1 - number :] = PAD if length in (4, 9) else own[-1]
            label = {
                "single_label_classification": lambda: torch.randint(0, width, (), generator=draw),
                "multi_label_classification": lambda: torch.randint(0, 2, (width,), generator=draw).double(),
                "regression": lambda: torch.randn((), generator=draw, dtype=torch.float64),
            }[kind]()
            alone.append((own, label))
            ids.append(own)
            labels.append(torch.cat([own[1:], torch.tensor([-100])]))
            positions.append(torch.arange(length))
            values.append(label.expand(length, *label.shape))
        rest = 16 - sum(row)
        empty = values[0].new_zeros(rest, *values[0].shape[1:])
        full = torch.full((rest,), -100)
        rows.append(
            [
                *map(
                    torch.cat,
                    ([*ids, full.clamp(min=PAD)], [*labels, full], [*positions, torch.arange(rest)], [*values, empty]),
                )
            ]
        )
    names = ("input_ids", "labels", "position_ids", "label")
    return dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True)), alone


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    setup, theirs = one_process(tmp_path, kind)
    batch, alone = packed_rows(kind)
    ready = setup.objective.training([batch], [range(2)])[0]
    ready = {**ready, **number_documents(ready, spread=["label"])}
    count = setup.objective.counts([ready])[0]
    assert count == len(alone) == 5
    with running(Running()):
        loss = setup.objective.sums(setup.model, ready)[0] / count
        said = setup.objective.outputs(setup.model, ready)[ready["document_exists"]]
    loss.backward()
    outputs = [theirs(ids[None], labels=label[None]) for ids, label in alone]
    expected = torch.stack([output.loss for output in outputs]).mean()
    expected.backward()
    assert torch.allclose(said, torch.cat([output.logits for output in outputs]), rtol=0, atol=1e-12)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    gradients = {name: parameter.grad for name, parameter in setup.model.named_parameters()}
    for name, parameter in theirs.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=0, atol=1e-11), name
    assert gradients["score.weight"].abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_add_up_over_batches(tmp_path: Path, kind: str) -> None:
    """What is reported of the sums of two rows apart is what the formula says of all documents."""
    setup, theirs = one_process(tmp_path, kind)
    batch, alone = packed_rows(kind)
    summed: dict[str, Any] = {}
    for row in range(2):
        ready = setup.objective.training([{name: tensor[row : row + 1] for name, tensor in batch.items()}], [range(1)])[0]
        ready = {**ready, **number_documents(ready, spread=["label"])}
        with running(Running()), torch.no_grad():
            for name, (total, number) in setup.objective.metrics(setup.model, ready).items():
                before = summed.get(name, (0.0, 0.0))
                summed[name] = (before[0] + total, before[1] + number)
    found = {name: float(value) for name, value in setup.objective.summary(summed).items()}
    with torch.no_grad():
        outputs = torch.cat([theirs(ids[None]).logits for ids, _ in alone])
    labels = torch.stack([label for _, label in alone])
    if kind == "regression":
        assert found == {"pearson": pytest.approx(float(np.corrcoef(outputs[:, 0], labels)[0, 1]), abs=1e-9)}
        return
    single = kind == "single_label_classification"
    said = torch.nn.functional.one_hot(outputs.argmax(-1), 2) if single else (outputs > 0).long()
    true = torch.nn.functional.one_hot(labels, 2) if single else labels.long()
    both, either = (said * true).sum(0), said.sum(0) + true.sum(0)
    each = [2 * int(one) / int(other) for one, other in zip(both, either, strict=True) if other]
    expected = {"accuracy": float((said == true).all(1).double().mean()), "macro_f1": sum(each) / len(each)}
    expected |= {"f1": each[1]} if single else {"micro_f1": 2 * int(both.sum()) / int(either.sum())}
    assert found == pytest.approx(expected, abs=1e-12)
