"""Preferences: each loss as its paper has it, on every axis as in one process, planted bugs, and runs that learn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.audit.conduct import Auditor
from meshwright.audit.ranks import RankTrainer
from meshwright.data.packing import IGNORE
from meshwright.data.preparation import write_documents
from meshwright.data.store import TokenStore
from meshwright.errors import ConfigError
from meshwright.objectives import given
from meshwright.objectives.preference import Kto, Preference
from meshwright.objectives.running import Running, running
from meshwright.train.config import RunConfig
from tests.audit.conftest import auditor, folder
from tests.audit.plants import around_backward
from tests.objectives.shipped import LORA, PLACES, compare, documents_of, facts, gradients, plain_step, tiny_model

__all__ = ["auditor", "folder"]

REFERENCE = {"reference_log_probs": {"per": "token"}}


def run_of(packing: str, **arguments: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output": "nowhere",
            "model": {"config": {"model_type": "llama", "vocab_size": 50}},
            "data": {"files": ["none"], "sequence_length": 40, "packing": packing, "tensors": REFERENCE},
            "training": {"steps": 1, "global_batch_size": 1, "objective": {"use": "preference", "with": arguments}},
        }
    )


def pairs(directory: Path, config: RunConfig, *, pairs: int = 7) -> TokenStore:
    """Pairs of unequal lengths, of which the end of each member is learned."""
    draw = np.random.default_rng(3)
    tokens, masks, values, seconds = [], [], [], []
    for number in range(pairs):
        first, second = int(draw.integers(4, 12)), int(draw.integers(4, 12))
        tokens.append(draw.integers(0, 50, first + second))
        mask = np.zeros(first + second, dtype=np.bool_)
        mask[first - int(draw.integers(1, 3)) : first] = mask[-int(draw.integers(1, 3)) :] = True
        masks.append(mask)
        seconds.append(first)
        values.append(
            {"reference_log_probs": np.zeros(first + second, np.float32), "label": np.asarray(number % 2, np.float32)}
        )
    columns = config.data.values
    return write_documents(
        directory / "store", tokens, masks, sequence_length=40, tensors=columns, values=values, seconds=seconds
    )


def answer(model: nn.Module, tokens: list[int], mask: list[bool]) -> tuple[torch.Tensor, int]:
    """The log-probability of what is learned of a document, alone; and of how many tokens that is."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0].double()
    logs = torch.log_softmax(logits, -1)
    learned = [place for place in range(1, len(tokens)) if mask[place]]
    return torch.stack([logs[place - 1, tokens[place]] for place in learned]).sum(), len(learned)


def paper(kind: str, w: Any, l: Any, beta: float, eps: float, gamma: float) -> torch.Tensor:  # noqa: E741
    """The loss of one pair, from (log pi, log pi of the reference, tokens) of both answers."""
    ratio_w, ratio_l = w[0] - w[1], l[0] - l[1]
    if kind == "dpo":
        h = ratio_w - ratio_l
        return -(1 - eps) * torch.log(torch.sigmoid(beta * h)) - eps * torch.log(torch.sigmoid(-beta * h))
    if kind == "ipo":
        return (ratio_w / w[2] - ratio_l / l[2] - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return torch.clamp(1 - beta * (ratio_w - ratio_l), min=0)
    if kind == "simpo":
        return -torch.log(torch.sigmoid(beta * w[0] / w[2] - beta * l[0] / l[2] - gamma))
    if kind == "cpo":
        return -torch.log(torch.sigmoid(beta * (w[0] - l[0])))
    p_w, p_l = torch.exp(w[0] / w[2]), torch.exp(l[0] / l[2])  # orpo
    odds = (p_w / (1 - p_w)) / (p_l / (1 - p_l))
    return -beta * torch.log(torch.sigmoid(torch.log(odds)))


CASES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "dpo with the chosen answer": {"rpo_alpha": 0.7},
    "ipo": {},
    "hinge": {"beta": 2.0},
    "simpo": {"simpo_gamma": 0.3},
    "orpo": {"beta": 0.5},
    "cpo": {"cpo_alpha": 0.4},
}


def expected(kind: str, options: dict[str, Any], model: nn.Module, reference: nn.Module, store: TokenStore) -> torch.Tensor:
    beta = options.get("beta", 2.0 if kind == "simpo" else 0.1)
    losses, chosen, tokens = [], [], 0
    for number, (first, second, _) in enumerate(documents_of(store)):
        begin, middle = int(store.offsets[number]), len(first)
        assert store.loss_mask is not None
        mask = [bool(one) for one in store.loss_mask[begin : begin + middle + len(second)]]
        sides = []
        for ids, learned in ((first, mask[:middle]), (second, mask[middle:])):
            with torch.no_grad():
                base = answer(reference, ids, learned)[0]
            value, count = answer(model, ids, learned)
            sides.append((value, base, count))
        losses.append(paper(kind, *sides, beta, options.get("label_smoothing", 0.0), options.get("simpo_gamma", 0.5)))
        chosen.append(-sides[0][0])
        tokens += sides[0][2]
    weight = options.get("rpo_alpha", options.get("cpo_alpha", {"cpo": 1.0, "orpo": 1.0}.get(kind, 0.0)))
    return torch.stack(losses).mean() + weight * torch.stack(chosen).sum() / tokens


def with_reference(reference: nn.Module) -> Any:
    def more(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with running(Running()), torch.no_grad():
            return {"reference_log_probs": given.log_probs(reference, batch)}

    return more


@pytest.mark.sampled(8)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("case", CASES)
def test_the_papers(tmp_path: Path, case: str, packing: str, microbatches: int) -> None:
    kind, options = case.split()[0], CASES[case]
    config = run_of(packing, loss_type=kind, **options)
    model, reference, store = tiny_model(0), tiny_model(1), pairs(tmp_path, config)
    objective = Preference(kind, **options)  # type: ignore[arg-type]
    objective.begin(model, facts(config))  # type: ignore[arg-type]
    objective.reference = False  # it is a column
    loss, metrics = plain_step(objective, model, store, config, microbatches, with_reference(reference))
    ours = gradients(model)
    truth = expected(kind, options, model, reference, store)
    truth.backward()
    assert float((loss - truth.detach()).abs()) < 1e-11 * max(1.0, abs(float(truth)))
    theirs = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).abs().max()) < 1e-11, name
    assert 0 <= metrics["rewards/accuracies"] <= 1
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])


@pytest.mark.parametrize("microbatches", [1, 3])
def test_kto(tmp_path: Path, microbatches: int) -> None:
    options = {"loss_type": "kto", "beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    config = run_of("pack", **options)
    model, reference, store = tiny_model(0), tiny_model(1), pairs(tmp_path, config)
    objective = Kto(**options)  # type: ignore[arg-type]
    objective.begin(model, facts(config))  # type: ignore[arg-type]
    objective.reference = False
    loss, metrics = plain_step(objective, model, store, config, microbatches, with_reference(reference))
    ours = gradients(model)
    ratios = []
    for number, (first, second, values) in enumerate(documents_of(store)):
        begin, middle = int(store.offsets[number]), len(first)
        assert store.loss_mask is not None
        mask = [bool(one) for one in store.loss_mask[begin : begin + middle + len(second)]]
        both = [
            answer(model, ids, at)[0] - answer(reference, ids, at)[0].detach()
            for ids, at in ((first, mask[:middle]), (second, mask[middle:]))
        ]
        ratios.append((*both, bool(values["label"])))
    z = torch.stack([other for _, other, _ in ratios]).mean().detach().clamp(min=0)
    assert z > 0
    truth = torch.stack(
        [
            1.5 * (1 - torch.sigmoid(0.4 * (own - z))) if good else 0.5 * (1 - torch.sigmoid(0.4 * (z - own)))
            for own, _, good in ratios
        ]
    ).mean()
    truth.backward()
    assert float((loss - truth.detach()).abs()) < 1e-11
    for name, gradient in gradients(model).items():
        assert float((ours[name] - gradient).abs().max()) < 1e-11, name
    assert metrics["rewards/baseline"] == pytest.approx(0.4 * float(z))


# -- axes ---------------------------------------------------------------------------------------------------------------------

DPO = {"use": "preference", "with": {"rpo_alpha": 0.5}}
KINDS = {"dpo": DPO, **{kind: {"use": "preference", "with": {"loss_type": kind}} for kind in ("kto", "orpo")}}


def test_an_axis(auditor: Auditor, folder: Path) -> None:
    compare(auditor, folder, PLACES["cp 2"], DPO, tensors=REFERENCE)


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", ["shard 2", "2 x shard 2", "tp 2", "tp 2 seq", "cp 2", "pp 2", "ep 2", "cp 2 x tp 2"])
def test_products(auditor: Auditor, folder: Path, label: str, kind: str, adapter: bool, packing: str) -> None:
    if adapter and label == "ep 2":
        pytest.skip("adapters of experts are slices of their own")
    family, given_columns = "mixtral" if "ep" in label else "llama", {} if adapter else REFERENCE
    options = {"adapter": LORA} if adapter else {}
    compare(
        auditor, folder, PLACES[label], KINDS[kind], family, packing=packing, tensors=given_columns, microbatches=3, **options
    )


# -- planted bugs -------------------------------------------------------------------------------------------------------------


def mean_over_microbatches(trainer: RankTrainer) -> None:
    """Each microbatch is divided by its own pairs, and the mean over microbatches and ranks is taken."""
    runner = trainer.runner.inner  # type: ignore[attr-defined]
    inner, many = runner.loss, trainer.setup.plan.options.microbatches * dist.get_world_size()

    def loss(model: Any, batch: Any, counts: torch.Tensor, sums: Any) -> torch.Tensor:
        return inner(model, batch, torch.tensor(trainer.objective.counts([batch])).clamp(min=1) * many, sums)

    runner.loss = loss


def pairs_of_a_rank(trainer: RankTrainer) -> None:
    """Each rank divides by its own pairs, and the mean over ranks is taken."""

    def before(batches: Any, counts: torch.Tensor) -> Any:
        return batches, torch.tensor(trainer.objective.counts(batches)) * dist.get_world_size()

    around_backward(trainer, before)


def _batches(trainer: RankTrainer, change: Any) -> None:
    inner = trainer.objective.sums

    def sums(model: Any, batch: Any) -> Any:
        batch.update(change(model, batch))
        return inner(model, batch)

    trainer.objective.sums = sums  # type: ignore[method-assign]


def pair_split_over_ranks(trainer: RankTrainer) -> None:
    """Rank 1 takes the second answer of each pair for the first, and compares it with that of the next pair."""
    if dist.get_rank() == 1:
        _batches(trainer, lambda model, batch: {"member": 3 - batch["member"]})


def reference_not_detached(trainer: RankTrainer) -> None:
    """The reference has the right values, and a gradient."""

    def change(model: Any, batch: Any) -> Any:
        values = given.log_probs(model, batch)
        return {"reference_log_probs": batch["reference_log_probs"] + values - values.detach()}

    _batches(trainer, change)


def mask_off_by_one(trainer: RankTrainer) -> None:
    """The first token of each answer is not learned."""

    def change(model: Any, batch: Any) -> Any:
        labels = batch["labels"]
        begins = torch.ones_like(labels, dtype=torch.bool)
        begins[:, 1:] = (labels[:, :-1] == IGNORE) | (batch["documents"].diff(dim=1) != 0)
        return {"labels": labels.masked_fill(begins, IGNORE)}

    _batches(trainer, change)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (mean_over_microbatches, "weighs the microbatches of the ranks by"),
        (pairs_of_a_rank, "weighs the microbatches of the ranks by"),
        (pair_split_over_ranks, "is no weighted sum of the gradients of the microbatches"),
        (reference_not_detached, "lacks microbatch 1, 2 of 2"),
        (mask_off_by_one, "of the microbatches: it has other contributions"),
    ],
)
def test_planted(auditor: Auditor, folder: Path, plant: Any, words: str) -> None:
    report = compare(auditor, folder, PLACES["shard 2"], {"use": "preference"}, tensors=REFERENCE, plants=[plant])
    assert words in report.verdict


# -- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [(0.0, -1.0), (-1.0, 0.0)])
def test_odds_of_an_answer_that_is_certain(values: tuple[float, float]) -> None:
    both = torch.tensor(values, requires_grad=True)
    loss = Preference("orpo")._loss(both[:1], both[1:])
    loss.sum().backward()
    assert loss.isfinite().all()
    assert both.grad is not None
    assert both.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"loss_type": "dpo", "simpo_gamma": 1.0}, "simpo_gamma=1.0: applies to loss_type simpo, and not to dpo"),
        ({"loss_type": "kto"}, "loss_type=kto is the class Kto"),
        ({"loss_type": "orpo", "label_smoothing": 0.1}, "label_smoothing=0.1: applies to loss_type dpo, cpo, simpo"),
        ({"loss_type": "cpo", "reference": "none"}, "reference=none: applies to loss_type dpo, ipo, hinge, kto"),
    ],
)
def test_arguments_of_another_loss(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Preference(**arguments)


def test_a_reference_needs_an_adapter() -> None:
    config = run_of("pack")
    with pytest.raises(ConfigError, match="no adapter is trained; legal is precomputed or none, or set adapter"):
        Preference(reference="adapter_off").begin(tiny_model(), facts(config))  # type: ignore[arg-type]


def test_a_column_stands_beside_no_other_reference() -> None:
    told = replace(facts(run_of("pack"), adapter=True), begins_without=True)
    with pytest.raises(ConfigError, match="reference_log_probs gives the values of another; leave one of them out"):
        Preference(reference="adapter_off").begin(tiny_model(), told)  # type: ignore[arg-type]
