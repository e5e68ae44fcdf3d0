"""Distillation: a model learns what a teacher says of the next token, from the likeliest words that are columns of the data."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from meshwright.errors import ConfigError, DataError, Problems
from meshwright.models.objective import Batch, Column, RunFacts
from meshwright.models.token_loss import IGNORE
from meshwright.objectives import given
from meshwright.objectives.shipped import Shipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["IDS", "LOG_PROBS", "Distillation"]

IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"
"""Columns: the likeliest words of the teacher in the place of each token, and their log-probabilities."""

NEVER = -1e4
"""Log-probability of a word that is left out: its probability is 0, and no product with it is NaN."""

_MORE_THAN_ALL = 1e-3
"""By how much the logarithm of a sum of probabilities that were rounded may be above 0."""


class Distillation(Shipped):
    r"""Say the next token as a teacher does.

    With the probabilities :math:`q` of the teacher and :math:`p` of the model in the place of a token, over the words that the
    teacher finds likeliest there (columns ``teacher_ids`` and ``teacher_log_probs`` [K]), its loss is

    ============== ===========================================================================================================
    divergence     loss of a token
    ============== ===========================================================================================================
    ``forward_kl`` :math:`KL(q \| p)` (Hinton et al. 2015, arXiv 1503.02531, section 2, less the entropy of the teacher)
    ``reverse_kl`` :math:`KL(p \| q)` (Gu et al. 2023, MiniLLM, arXiv 2306.08543, equation 1, here for each token)
    ``js``         :math:`\beta KL(q \| m) + (1 - \beta) KL(p \| m)` with :math:`m = \beta q + (1 - \beta) p` (Agarwal et al.
                   2023, GKD, arXiv 2306.13649, equation 1)
    ============== ===========================================================================================================

    **All other words** are one further word of both: its probability is what is left of 1. So K + 1 words are compared, and the
    divergence is a lower bound of that over the whole vocabulary, with which it agrees where K is all of it. Without
    ``loss_add_tail`` both are divided by their sums over the K words instead, and nothing says how likely the others may be.

    The ``temperature`` :math:`T` changes both to :math:`p^{1/T}`, divided by their sums, over these words. That of the other
    words is taken as a whole, because a teacher that gave K words does not say how it is spread. The loss is not multiplied by
    :math:`T^2`. A word that the vocabulary of the model does not have counts as one of the others.

    The sum over tokens is divided by the number of tokens that are learned in the step, as the plain loss, which is added with
    a weight.

    Args:
        divergence: see above. TRL's ``beta`` of 0, of 1, and between.
        beta: of ``js``; ``None``: 0.5.
        temperature: see above.
        loss_add_tail: whether all other words count as one.
        next_token_weight: weight of the plain loss, the cross-entropy of the next token.

    Raises:
        ConfigError: ``beta`` is given without ``js``.
    """

    name = "distillation"
    purpose = "say the next token as a teacher does"
    terms = ("distillation", "next_token")
    pipelines = chunks = shares = packs = True

    def __init__(
        self,
        divergence: Literal["forward_kl", "reverse_kl", "js"] = "forward_kl",
        beta: Annotated[float, Field(gt=0, lt=1)] | None = None,
        temperature: Annotated[float, Field(gt=0)] = 1.0,
        loss_add_tail: bool = True,
        next_token_weight: Annotated[float, Field(ge=0)] = 0.0,
    ) -> None:
        if beta is not None and divergence != "js":
            raise ConfigError(
                "config.part.arguments",
                f"training.objective.with.beta={beta}: applies to divergence=js, and not to {divergence}; leave it out",
            )
        self.divergence, self.beta, self.temperature = divergence, 0.5 if beta is None else beta, temperature
        self.adds_tail, self.weights = loss_add_tail, (1.0, next_token_weight)

    def begin(self, model: "PreTrainedModel", run: RunFacts) -> None:
        """Check the columns.

        Raises:
            ConfigError: one is missing, or has not a value for each of the K words of a token.
        """
        self.words, problems = int(model.config.get_text_config().vocab_size), Problems()
        width = next((run.columns[name].width for name in (IDS, LOG_PROBS) if name in run.columns), None) or 64
        for name, dtype, field in ((IDS, "int64", "top_ids"), (LOG_PROBS, "float32", "top_log_probs")):
            legal = Column("token", width, dtype)
            if run.columns.get(name) != legal:
                problems.add(
                    "objective.batch",
                    "objective distillation reads what a teacher says; set teacher.path, a model that says it in each step, or "
                    f"data.tensors.{name}={{per: token, width: {width}, dtype: {dtype}, column: {field}}}, as "
                    f"`meshwright score --top-k {width}` writes it",
                )
        if problems:
            raise ConfigError(problems)

    # -- on the host ------------------------------------------------------------------------------------------------------

    def training(self, batches: list[Batch], numbers: Sequence[Sequence[int]]) -> list[Batch]:
        """Refuse what no teacher says.

        Raises:
            DataError: the probabilities of a token add up to more than 1, or a word is below 0.
        """
        for batch, of in zip(batches, numbers, strict=True):
            _check(batch, of)
        return batches

    def held_out(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Refuse what no teacher says."""
        _check(batch, numbers)
        return batch

    # -- on the device ----------------------------------------------------------------------------------------------------

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the sum of the divergence over the tokens of a batch, and that of the plain loss."""
        own, teacher, label = self._log_probs(model, batch)
        p, q = (self._distribution(values) for values in (own, teacher))
        found = self._divergence(p, q).masked_fill(batch["labels"] == IGNORE, 0.0)
        return found.sum(), -label.sum()

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the probability of the teacher's words, by the teacher and the model; and how often the likeliest is alike."""
        own, teacher, _ = self._log_probs(model, batch)
        learned = batch["labels"] != IGNORE
        alike = own.argmax(-1) == teacher.argmax(-1)
        numbers = {"teacher_mass": teacher.exp().sum(-1), "student_mass": own.exp().sum(-1), "agreement": alike.to(own.dtype)}
        return {name: (torch.where(learned, value, 0).sum(), learned.sum()) for name, value in numbers.items()}

    def _log_probs(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probabilities of the teacher's words, by the model and the teacher [B, S, K], and of labels [B, S]."""
        labels, ids = batch["labels"], batch[IDS]
        there = ids < self.words
        key = "distillation.ids"
        if key not in batch:  # one tensor for all calls of a batch, which has one forward
            batch[key] = torch.cat([labels.clamp(min=0).unsqueeze(-1), torch.where(there, ids, 0)], -1)
        found = given.log_probs_of(model, batch, batch[key])
        own, teacher = (torch.where(there, one, NEVER) for one in (found[..., 1:], batch[LOG_PROBS].to(found.dtype)))
        return own, teacher, found[..., 0]

    def _distribution(self, values: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities over the words that are compared, at the temperature: [B, S, K + 1], or [B, S, K]."""
        if self.adds_tail:
            # Log-probabilities of the teacher are those of float32: what is left of 1 is not known more precisely.
            whole = values.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(torch.float32).eps)
            values = torch.cat([values, torch.log(-torch.expm1(whole))], -1)
        return torch.log_softmax(values / self.temperature, -1)

    def _divergence(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each token [B, S], from log-probabilities of the model and of the teacher."""
        if self.divergence == "forward_kl":
            return _kl(q, p)
        if self.divergence == "reverse_kl":
            return _kl(p, q)
        m = torch.logaddexp(q + math.log(self.beta), p + math.log(1 - self.beta))
        return self.beta * _kl(q, m) + (1 - self.beta) * _kl(p, m)


def _kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of two distributions, given by their logarithms, over the last dimension."""
    return (one.exp() * (one - other)).sum(-1)


def _check(batch: Batch, numbers: Sequence[int]) -> None:
    if LOG_PROBS not in batch:  # a teacher that runs beside the model says it later
        return
    wrong = (batch[LOG_PROBS].logsumexp(-1) > _MORE_THAN_ALL) & (batch["labels"] != IGNORE)
    below = (batch[IDS] < 0).any(-1)
    if bool((wrong | below).any()):
        row = int((wrong | below).any(1).nonzero()[0])
        place = int((wrong | below)[row].nonzero()[0])
        what = f"{LOG_PROBS} add up to {float(batch[LOG_PROBS][row, place].exp().sum()):.4g}, which no probabilities do"
        what = f"{IDS} has {int(batch[IDS][row, place].min())}, which is no word" if bool(below[row, place]) else what
        raise DataError(
            "data.tensors", f"sequence {numbers[row]}, token {place}: {what}; legal is what `meshwright score --top-k` writes"
        )
