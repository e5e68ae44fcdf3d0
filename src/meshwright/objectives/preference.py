"""Preferences: a model learns to prefer one answer to another, by the log-probabilities of both.

Each loss is a mean over the pairs of the optimizer step; for KTO, over its answers. What it is computed from are sums over
documents, so that no layout and no packing changes it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import logsigmoid

from meshwright.errors import ConfigError, Problems
from meshwright.models.objective import Batch, RunFacts
from meshwright.models.token_loss import IGNORE
from meshwright.objectives import given
from meshwright.objectives.references import reference_of
from meshwright.objectives.shipped import Shipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Kto", "Preference"]

BASELINE = "preference_baseline"
"""Key of KTO's baseline in a batch."""

WITH_REFERENCE = ("dpo", "ipo", "hinge", "kto")
MEAN_OF_TOKENS = ("ipo", "simpo", "orpo")
SMOOTHED = ("dpo", "cpo", "simpo")

Weight = Annotated[float, Field(ge=0)]
Reference = Literal["adapter_off", "precomputed", "none"]


class Preference(Shipped):
    r"""Prefer the chosen answer to the rejected one.

    With log-probabilities :math:`\log\pi(y)` of answers given their prompt, those of a reference :math:`\log\pi_0(y)`, the
    ratio :math:`r(y) = \log\pi(y) - \log\pi_0(y)`, the chosen answer :math:`w` and the rejected one :math:`l`:

    ========= ================================================================================================================
    loss_type loss
    ========= ================================================================================================================
    ``dpo``   :math:`-\log\sigma(\beta(r(w) - r(l)))` (Rafailov et al. 2023, arXiv 2305.18290, equation 7); with
              ``label_smoothing`` :math:`\epsilon`, plus :math:`\epsilon` times what a swapped pair adds (Mitchell 2023, cDPO)
    ``ipo``   :math:`(r(w) - r(l) - 1 / 2\beta)^2` (Azar et al. 2023, arXiv 2310.12036, equation 17)
    ``hinge`` :math:`\max(0, 1 - \beta(r(w) - r(l)))` (Zhao et al. 2023, SLiC-HF, arXiv 2305.10425, with ratios)
    ``simpo`` :math:`-\log\sigma(\beta(\overline{\log\pi}(w) - \overline{\log\pi}(l)) - \gamma)`, of means over tokens (Meng
              et al. 2024, arXiv 2405.14734, equation 6)
    ``orpo``  :math:`-\beta\log\sigma(\log o(w) - \log o(l))` with the odds :math:`o = p / (1 - p)` of means over tokens, plus
              the loss of the chosen answer (Hong et al. 2024, arXiv 2403.07691, equations 6 and 7)
    ``cpo``   :math:`-\log\sigma(\beta(\log\pi(w) - \log\pi(l)))`, plus ``cpo_alpha`` times the loss of the chosen answer (Xu et
              al. 2024, arXiv 2401.08417, equation 3)
    ========= ================================================================================================================

    The loss of the chosen answer is the mean over all tokens of chosen answers in the step. A prompt is never learned. With
    ``loss_type=kto`` it is :class:`Kto`.

    Args:
        loss_type: see above.
        beta: see above; ``None``: 0.1, of ``simpo`` 2.
        label_smoothing: share of pairs that are taken to be the wrong way round, for ``dpo``, ``cpo`` and ``simpo``.
        length_normalization: whether log-probabilities of an answer are means over its tokens, and not sums; ``None``: for
            ``ipo`` (as TRL has it; equation 17 has sums), ``simpo`` and ``orpo``.
        reference: ``adapter_off``: the model without its adapter; ``precomputed``: computed once, before the first step;
            ``none``: the ratio is the log-probability itself. ``None``: ``adapter_off`` if a new adapter alone is trained,
            or else ``precomputed``. A column ``reference_log_probs`` of the data stands for both.
        rpo_alpha: weight of the loss of the chosen answer, for ``dpo``, ``ipo`` and ``hinge`` (Pang et al. 2024, arXiv
            2404.19733, equation 1, there a mean over each answer).
        cpo_alpha: the same, for ``cpo`` and ``simpo``; ``None``: 1 for ``cpo``, 0 for ``simpo``.
        simpo_gamma: the margin of ``simpo``.

    Raises:
        ConfigError: an argument is of another ``loss_type``.
    """

    name = "preference"
    purpose = "prefer one answer to another"
    unit = "pair"
    packs = shares = True
    documents = True

    def __init__(
        self,
        loss_type: Literal["dpo", "ipo", "hinge", "kto", "simpo", "orpo", "cpo"] = "dpo",
        beta: Annotated[float, Field(gt=0)] | None = None,
        label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0,
        length_normalization: bool | None = None,
        reference: Reference | None = None,
        rpo_alpha: Weight | None = None,
        cpo_alpha: Weight | None = None,
        simpo_gamma: float | None = None,
    ) -> None:
        given_to = {
            "label_smoothing": (label_smoothing or None, SMOOTHED),
            "length_normalization": (length_normalization, ("dpo", "ipo", "hinge", "cpo")),
            "reference": (reference, WITH_REFERENCE),
            "rpo_alpha": (rpo_alpha, ("dpo", "ipo", "hinge")),
            "cpo_alpha": (cpo_alpha, ("cpo", "simpo")),
            "simpo_gamma": (simpo_gamma, ("simpo",)),
        }
        problems = Problems()
        if loss_type == "kto" and not isinstance(self, Kto):
            problems.add("config.part.arguments", "Preference: loss_type=kto is the class Kto, in the same module")
        for key, (value, kinds) in given_to.items():
            if value is not None and loss_type not in kinds:
                said = f"training.objective.with.{key}={value}: applies to loss_type {', '.join(kinds)}, and not to {loss_type}"
                problems.add("config.part.arguments", f"{said}; leave it out")
        if problems:
            raise ConfigError(problems)
        self.nats = loss_type not in ("ipo", "hinge", "kto")
        self.loss_type, self.smoothing, self.wants = loss_type, label_smoothing, reference
        self.beta = beta if beta is not None else 2.0 if loss_type == "simpo" else 0.1
        self.means = loss_type in MEAN_OF_TOKENS if length_normalization is None else length_normalization
        self.margin = 0.5 if simpo_gamma is None else simpo_gamma
        weight = {"cpo": 1.0, "orpo": 1.0}.get(loss_type, 0.0)
        weight = next((one for one in (rpo_alpha, cpo_alpha) if one is not None), weight)
        self.chosen_loss = weight > 0
        self.terms = ("preference", "chosen") if self.chosen_loss else ("preference",)
        self.weights = (1.0, weight) if self.chosen_loss else (1.0,)

    def begin(self, model: "PreTrainedModel", run: RunFacts) -> None:
        """Choose the reference.

        Raises:
            ConfigError: it is the model without its adapter, and there is none.
        """
        self.relative = self.loss_type in WITH_REFERENCE and self.wants != "none"
        self.reference = self.relative and reference_of(self.wants, run, "precomputed or none")

    # -- what is computed from --------------------------------------------------------------------------------------------

    def counts(self, batches: list[Batch]) -> list[int]:
        """Return the number of pairs (of answers, for KTO), and that of tokens of chosen answers."""
        tokens = [int(_of_chosen(batch).sum()) for batch in batches] if self.chosen_loss else []
        return [given.pair_count(batches), *([sum(tokens)] if self.chosen_loss else [])]

    def _log_probs(self, model: nn.Module, batch: Batch, *, relative: bool) -> torch.Tensor:
        """Return the log-probability of each document, or its ratio to the reference; a mean or a sum over tokens [B, D]."""
        values = given.log_probs(model, batch)
        if relative:
            values = values - given.reference_log_probs(model, batch).to(values.dtype)
        if not self.means:
            return given.per_document(values, batch)
        labelled = (batch["labels"] != IGNORE).to(values.dtype)
        found = given.per_document(torch.stack([values, labelled], -1), batch)
        return found[..., 0] / found[..., 1].clamp(min=1)

    def _pairs(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what is compared of the first and the second document of each pair, and which there are, [B, D] each."""
        values, first = self._log_probs(model, batch, relative=self.relative), given.first_of_pairs(batch)
        inside = torch.where(first, values, -1.0), torch.where(first, given.second_of_pairs(values), -1.0)
        return (*inside, first)

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the sum of the loss over the pairs of a batch, and that of the loss of its chosen answers."""
        chosen, rejected, first = self._pairs(model, batch)
        total = _once(self._loss(chosen, rejected), first, batch)
        if not self.chosen_loss:
            return (total,)
        return total, -torch.where(_of_chosen(batch), given.log_probs(model, batch), 0).sum()

    def _loss(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair."""
        margin = chosen - rejected
        if self.loss_type == "ipo":
            return (margin - 1 / (2 * self.beta)) ** 2
        if self.loss_type == "hinge":
            return torch.relu(1 - self.beta * margin)
        if self.loss_type == "orpo":
            # An answer that is certain has a log-probability of 0 in float32, and its odds are infinite.
            chosen, rejected = (one.clamp(max=-torch.finfo(torch.float32).eps) for one in (chosen, rejected))
            odds = chosen - rejected - (torch.log(-torch.expm1(chosen)) - torch.log(-torch.expm1(rejected)))
            return -self.beta * logsigmoid(odds)
        logits = self.beta * margin - (self.margin if self.loss_type == "simpo" else 0.0)
        return -(1 - self.smoothing) * logsigmoid(logits) - self.smoothing * logsigmoid(-logits)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the rewards of both answers, their difference, and how often the chosen one has the larger."""
        chosen, rejected, first = self._pairs(model, batch)
        chosen, rejected, ones = self.beta * chosen, self.beta * rejected, torch.ones_like(chosen)
        pairs = _once(ones, first, batch)
        return {
            "rewards/chosen": (_once(chosen, first, batch), pairs),
            "rewards/rejected": (_once(rejected, first, batch), pairs),
            "rewards/margins": (_once(chosen - rejected, first, batch), pairs),
            "rewards/accuracies": (_once((chosen > rejected).to(chosen.dtype), first, batch), pairs),
        }


class Kto(Preference):
    r"""Make desirable answers more likely than a baseline, and others less (Ethayarajh et al. 2024, arXiv 2402.01306).

    With :math:`\log\pi(y)`, those of a reference :math:`\log\pi_0(y)` and the ratio :math:`r(y)` of both, the loss of a
    desirable answer is :math:`\lambda_D (1 - \sigma(\beta(r(y) - z)))`, and of another one :math:`\lambda_U (1 -
    \sigma(\beta(z - r(y))))` (equations 7 and 8). z is the mean ratio of answers to other prompts over the whole step, at least
    0, without gradient. Each answer has one of these beside it, so a step costs twice its own tokens, and a forward more.

    Args:
        loss_type: ``kto``.
        beta: see above.
        length_normalization: see :class:`Preference`.
        reference: see :class:`Preference`.
        desirable_weight: :math:`\lambda_D`.
        undesirable_weight: :math:`\lambda_U`.
    """

    unit = "document"

    def __init__(
        self,
        loss_type: Literal["kto"] = "kto",
        beta: Annotated[float, Field(gt=0)] = 0.1,
        length_normalization: bool = False,
        reference: Reference | None = None,
        desirable_weight: Weight = 1.0,
        undesirable_weight: Weight = 1.0,
    ) -> None:
        super().__init__(loss_type, beta, reference=reference)
        self.arguments = {"loss_type": loss_type, **self.arguments}
        self.means, self.weight_of = length_normalization, (undesirable_weight, desirable_weight)

    def baselines(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the mean ratio of answers to other prompts."""
        _, other, first = self._pairs(model, batch)
        return {BASELINE: (_once(other, first, batch), _once(torch.ones_like(other), first, batch))}

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the sum of the loss over the answers of a batch."""
        ratio, _, first = self._pairs(model, batch)
        baseline, desirable = batch[BASELINE].clamp(min=0).to(ratio.dtype), batch["label"] > 0.5
        value = torch.sigmoid(self.beta * torch.where(desirable, ratio - baseline, baseline - ratio))
        bad, good = self.weight_of
        return (_once(torch.where(desirable, good, bad) * (1 - value), first, batch),)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the rewards of both kinds of answers, and the baseline."""
        ratio, _, first = self._pairs(model, batch)
        reward, ones, desirable = self.beta * ratio, torch.ones_like(ratio), batch["label"] > 0.5
        good, bad, all_of = first & desirable, first & ~desirable, _once(ones, first, batch)
        return {
            "rewards/chosen": (_once(reward, good, batch), _once(ones, good, batch)),
            "rewards/rejected": (_once(reward, bad, batch), _once(ones, bad, batch)),
            "rewards/baseline": (self.beta * batch[BASELINE].clamp(min=0) * all_of, all_of),
        }


def _of_chosen(batch: Batch) -> torch.Tensor:
    """Return which tokens are those of chosen answers, bool [B, S]."""
    return given.per_token(given.first_of_pairs(batch), batch).bool() & (batch["labels"] != IGNORE)


def _once(values: torch.Tensor, where: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum of values of some documents [B, D], which counts each once over the ranks that share them."""
    return given.document_sum(torch.where(where, values, 0), batch)
