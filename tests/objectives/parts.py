"""Objectives as a user writes them: some that are right, and some with one bug each."""

from typing import Any

import torch
from torch import nn

from meshwright.objectives import Batch, Objective, given

IGNORE = -100


def focal(log_probs: torch.Tensor, batch: Batch, gamma: float = 2.0) -> torch.Tensor:
    return -((1 - log_probs.exp()) ** gamma) * log_probs


def smooth(logits: torch.Tensor, labels: torch.Tensor, eps: float = 0.1) -> torch.Tensor:
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(1 - eps) * own - eps * logs.mean(-1)


def neither(tokens: torch.Tensor) -> torch.Tensor:
    return tokens


class Tokens(Objective):
    """All that is given of tokens, and sums of documents."""

    terms = ("tokens", "documents")
    weights = (1.0, 0.5)

    def counts(self, batches: list[Batch]) -> list[int]:
        return [sum(int((batch["labels"] != IGNORE).sum()) for batch in batches), given.document_count(batches)]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        log_probs, entropy = given.log_probs(model, batch), given.entropy(model, batch)
        scores = given.per_document(log_probs, batch)
        return -(log_probs + 0.1 * entropy).sum(), given.document_sum(-nn.functional.logsigmoid(0.1 * scores), batch)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"entropy": (given.entropy(model, batch).sum(), (batch["labels"] != IGNORE).sum())}


class Vectors(Objective):
    """The hidden states of documents, compared with those of all data ranks."""

    def counts(self, batches: list[Batch]) -> list[int]:
        return [given.document_count(batches)]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        hidden = given.hidden(model, batch)
        means, last = given.pooled(hidden, batch), given.pooled(hidden, batch, "last")
        every = nn.functional.normalize(given.gather(last).flatten(0, 1), dim=-1)
        near = (nn.functional.normalize(means, dim=-1) @ every.T).exp().sum(-1)
        return (given.document_sum(near.log(), batch),)


class Scale(nn.Module):
    """A learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.log, 0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.log.exp()


class Heads(Objective):
    """A head on documents with a temperature, and one on tokens; the temperature is called first, and the head twice."""

    terms = ("documents", "tokens")
    weights = (1.0, 0.3)

    def counts(self, batches: list[Batch]) -> list[int]:
        return [given.document_count(batches), sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)]

    def modules(self, model: Any) -> dict[str, nn.Module]:
        width = model.config.get_text_config().hidden_size
        token = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 1))
        return {"head": nn.Linear(width, 3), "scale": Scale(), "token": token}

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        scale = given.module(model, "scale")(torch.ones(1, device=batch["labels"].device))
        hidden, head = given.hidden(model, batch), given.module(model, "head")
        scores = scale * (head(given.pooled(hidden, batch)) + 0.5 * head(given.pooled(hidden, batch, "last")))
        kind = given.per_document(batch["input_ids"], batch) % 3
        documents = given.document_sum(-scores.log_softmax(-1).gather(-1, kind[..., None])[..., 0], batch)
        values = given.module(model, "token")(hidden)[..., 0] - given.per_token(scores[..., 0], batch).tanh()
        return documents, ((values - 1) ** 2 * (batch["labels"] != IGNORE)).sum()

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        values = given.module(model, "token")(given.hidden(model, batch))[..., 0] * (batch["labels"] != IGNORE)
        return {"value": (values.sum(), (batch["labels"] != IGNORE).sum())}


class Preference(Objective):
    """The loss of tokens, and scores of documents with a learned temperature: one call of the model, so it may be in chunks."""

    terms = ("tokens", "documents")

    def counts(self, batches: list[Batch]) -> list[int]:
        return [sum(int((batch["labels"] != IGNORE).sum()) for batch in batches), given.document_count(batches)]

    def modules(self, model: Any) -> dict[str, nn.Module]:
        return {"scale": Scale()}

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        log_probs = given.log_probs(model, batch)
        scores = given.module(model, "scale")(0.1 * given.per_document(log_probs, batch))
        return -log_probs.sum(), given.document_sum(-nn.functional.logsigmoid(scores), batch)


class Before(Objective):
    """Weights tokens by what the model said of them before the step, and against a reference."""

    def before(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {"old": given.log_probs(model, batch)}

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        log_probs = given.log_probs(model, batch)
        ratio = (log_probs - batch["old"]).exp()
        return (-(ratio * (1 + batch["old"].exp()) + 0.1 * (log_probs - given.reference_log_probs(model, batch))).sum(),)


class Compared(Objective):
    """Tokens against what the model said of them as the run began."""

    reference = "precomputed"

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        ratio = given.log_probs(model, batch) - given.reference_log_probs(model, batch)
        return (-nn.functional.logsigmoid(0.5 * ratio).masked_fill(batch["labels"] == IGNORE, 0.0).sum(),)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        ratio = given.log_probs(model, batch) - given.reference_log_probs(model, batch)
        return {"ratio": (ratio.abs().sum(), (batch["labels"] != IGNORE).sum())}


class MeanOfMeans(Objective):
    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (-given.log_probs(model, batch).sum() / (batch["labels"] != IGNORE).sum().clamp(min=1),)


class NotANumber(Objective):
    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (-given.log_probs(model, batch).sum() / (batch["labels"] != IGNORE).sum(),)


class Remembers(Objective):
    seen = 0

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        self.seen += 1
        return (-given.log_probs(model, batch).sum() / self.seen,)


class CountsBatches(Objective):
    def counts(self, batches: list[Batch]) -> list[int]:
        return [len(batches)]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (-given.log_probs(model, batch).sum(),)


class Detached(Objective):
    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (-given.log_probs(model, batch).detach().sum(),)


class WrongShape(Objective):
    def sums(self, model: nn.Module, batch: Batch) -> Any:
        return given.log_probs(model, batch)


class Raises(Objective):
    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (given.log_probs(model, batch)[batch["no_such_column"]].sum(),)


class CannotBeMade(Objective):
    def __init__(self) -> None:
        raise OSError("no such file of weights")

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError


class Lacks(Objective):
    """It has no sums."""


class ByRow(Objective):
    """A row is taken for a document, which packing breaks; and the largest token of a row, which cp breaks."""

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (-given.log_probs(model, batch).amin(1).sum(),)


class CallsTwice(Objective):
    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        other = {**batch, "input_ids": batch["input_ids"].flip(1)}
        return (-(given.log_probs(model, batch) + given.log_probs(model, other)).sum(),)


class Copies(Objective):
    """It works on a copy of the batch."""

    def counts(self, batches: list[Batch]) -> list[int]:
        return [given.document_count(batches)]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        copy = {**batch}
        return (given.document_sum(given.per_document(given.log_probs(model, copy), copy), copy),)


class TwoTerms(Tokens):
    """It has more terms than the weights that it names."""

    terms = ("tokens", "documents", "more")
    weights = (1.0, 0.5)


class HoldsOut(Objective):
    """It fails in evaluations alone."""

    def held_out(self, batch: Batch, numbers: Any) -> Batch:
        raise KeyError("held out rows have none")

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (-given.log_probs(model, batch).sum(),)


class OtherMetrics(Objective):
    """The names of its metrics depend on the batch."""

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (-given.log_probs(model, batch).sum(),)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        one = torch.ones(())
        return {f"rows_{len(batch['labels'])}": (one, one)}


def weighted(log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return -batch["weight"] * log_probs


class Scored(Objective):
    """Weights tokens by a column, documents by another, and reads what a teacher said, and a reference."""

    terms = ("tokens", "documents", "teacher")
    weights = (1.0, 0.5, 0.2)

    def counts(self, batches: list[Batch]) -> list[int]:
        labels = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
        return [labels, given.document_count(batches), labels]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        log_probs = given.log_probs(model, batch)
        ratio = given.per_document(log_probs - given.reference_log_probs(model, batch), batch)
        kind = nn.functional.one_hot(batch["kind"], 2) * batch["scores"]  # [B, D, 2]
        tokens = batch["weight"] * given.per_token(batch["scores"][..., 1], batch) * log_probs
        documents = given.document_sum(-nn.functional.logsigmoid(0.1 * ratio) * kind.sum(-1), batch)
        return -tokens.sum(), documents, -(batch["teacher"].sum(-1) * log_probs.exp()).sum()


class ReadsInTraining(Objective):
    def training(self, batches: list[Batch], numbers: Any) -> list[Batch]:
        return [{**batch, "twice": 2 * batch["weigth"]} for batch in batches]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (-(batch["twice"] * given.log_probs(model, batch)).sum(),)
