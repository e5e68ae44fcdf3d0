"""Policy gradients on given rollouts: answers that a model gave before, how likely they were then, and how good they are."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from meshwright.errors import ConfigError, Problems
from meshwright.models.objective import Batch, RunFacts
from meshwright.models.token_loss import IGNORE, count_tokens
from meshwright.objectives import given
from meshwright.objectives.references import reference_of
from meshwright.objectives.shipped import Shipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Policy"]

NORMALIZATION = {
    "importance_sampling": "token",
    "ppo": "token",
    "grpo": "sequence",
    "dapo": "token",
    "dr_grpo": "constant",
    "bnpo": "token",
    "gspo": "sequence",
    "cispo": "token",
}
UNITS = {"token": "token", "sequence": "document", "constant": "possible token"}
"""What is counted, in words."""

CLIP = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 5.0)}
"""Where they are not 0.2 and the same: what the papers use."""

Positive = Annotated[float, Field(gt=0)]


class Policy(Shipped):
    r"""Make tokens with a positive advantage more likely, and others less.

    With the ratio :math:`r_t = \pi(y_t) / \pi_{old}(y_t)` of a token, its advantage :math:`A_t`, and the clip range
    :math:`[1 - \epsilon, 1 + \epsilon_{high}]`:

    ======================= ==================================================================================================
    loss_type               loss of a token
    ======================= ==================================================================================================
    ``importance_sampling`` :math:`-r_t A_t`, not clipped
    ``ppo``                 :math:`-\min(r_t A_t, \mathrm{clip}(r_t) A_t)` (Schulman et al. 2017, arXiv 1707.06347, equation 7)
    ``grpo``                the same (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, equation 3)
    ``dapo``                the same, with a larger :math:`\epsilon_{high}` (Yu et al. 2025, arXiv 2503.14476, equation 8)
    ``dr_grpo``             the same (Liu et al. 2025, arXiv 2503.20783, section 3.2)
    ``bnpo``                the same, divided as ``dapo`` (as TRL names it; here the batch is the whole step)
    ``gspo``                the same, with :math:`r` of the whole answer: the exponential of the mean of :math:`\log r_t`
                            (Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7)
    ``cispo``               :math:`-\mathrm{sg}(\min(r_t, \epsilon_{high})) A_t \log\pi(y_t)`, where sg has no gradient
                            (MiniMax 2025, arXiv 2506.13585, equation 4; the bound as ScaleRL, arXiv 2510.13786, has it)
    ======================= ==================================================================================================

    What the sum is divided by, over all microbatches and ranks of the step: ``token``: the number of tokens (DAPO, equation 8);
    ``sequence``: each answer's mean over its tokens, and then the number of answers (GRPO, equation 3); ``constant``: the
    number of answers times ``max_completion_length`` (Dr. GRPO).

    Args:
        loss_type: see above.
        epsilon: lower part of the clip range; ``None``: that of the paper.
        epsilon_high: upper part; of ``cispo`` the bound itself. ``None``: that of the paper, or ``epsilon`` if it is given.
        beta: weight of the divergence from a reference, which is divided in the same way.
        kl_estimator: of this divergence, with :math:`d = \log\pi(y_t) - \log\pi_0(y_t)`: ``k1``: d; ``k2``: :math:`d^2 / 2`;
            ``k3``: :math:`e^{-d} + d - 1` (Schulman 2020, "Approximating KL divergence").
        normalization: see above; ``None``: that of the paper.
        max_completion_length: for ``constant``: tokens of the longest answer; ``None``: ``data.sequence_length``.
        scale_rewards: ``group``: advantages that come of rewards are divided by the standard deviation of the rewards of their
            group; ``none``: they are not. ``None``: ``none`` for ``dr_grpo``, or else ``group``. Advantages are computed when
            rows are read.
        reference: with ``beta``, see :class:`~meshwright.objectives.preference.Preference`.

    Raises:
        ConfigError: an argument has no effect.
    """

    name = "policy"
    purpose = "answer with a larger reward"
    nats = False
    packs = shares = True

    def __init__(
        self,
        loss_type: Literal["importance_sampling", "ppo", "grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo"] = "grpo",
        epsilon: Positive | None = None,
        epsilon_high: Positive | None = None,
        beta: Annotated[float, Field(ge=0)] = 0.0,
        kl_estimator: Literal["k1", "k2", "k3"] | None = None,
        normalization: Literal["token", "sequence", "constant"] | None = None,
        max_completion_length: Annotated[int, Field(gt=0)] | None = None,
        scale_rewards: Literal["group", "none"] | None = None,
        reference: Literal["adapter_off", "precomputed"] | None = None,
    ) -> None:
        self.loss_type, self.beta, self.estimator = loss_type, beta, kl_estimator or "k3"
        self.normalization, self.longest = normalization or NORMALIZATION[loss_type], max_completion_length
        self.unit = UNITS[self.normalization]
        unused = {
            "epsilon": epsilon is not None and loss_type in ("importance_sampling", "cispo"),
            "epsilon_high": epsilon_high is not None and loss_type == "importance_sampling",
            "kl_estimator": kl_estimator is not None and not beta,
            "reference": reference is not None and not beta,
            "max_completion_length": max_completion_length is not None and self.normalization != "constant",
        }
        why = {"kl_estimator": "beta is 0", "reference": "beta is 0"}
        why["max_completion_length"] = f"the sum is divided by {self.normalization}"
        problems = Problems()
        for key in (key for key, wrong in unused.items() if wrong):
            said = why.get(key, f"{loss_type} has no such bound")
            problems.add("config.part.arguments", f"training.objective.with.{key}: has no effect, since {said}; leave it out")
        if problems:
            raise ConfigError(problems)
        low, high = CLIP.get(loss_type, (0.2, 0.2))
        self.low = low if epsilon is None else epsilon
        self.high = epsilon_high if epsilon_high is not None else high if epsilon is None else epsilon
        self.wants = reference
        self.documents = self.normalization != "token" or loss_type == "gspo"

    def begin(self, model: "PreTrainedModel", run: RunFacts) -> None:
        """Choose the reference, and the length to divide by."""
        self.reference = reference_of(self.wants, run) if self.beta else False
        self.longest = self.longest or run.sequence_length

    def counts(self, batches: list[Batch]) -> list[int]:
        """Return the number of tokens; of answers; or of answers times the length of the longest."""
        if self.normalization == "token":
            return [count_tokens(batches)]
        return [given.document_count(batches) * (1 if self.normalization == "sequence" else int(self.longest or 1))]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the sum of the loss over the tokens of a batch."""
        valid, log_probs, ratio = self._ratio(model, batch)
        advantages = batch["advantages"].to(log_probs.dtype)
        if self.loss_type == "importance_sampling":
            loss = -ratio * advantages
        elif self.loss_type == "cispo":
            loss = -ratio.detach().clamp(max=self.high) * advantages * log_probs
        else:
            loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)
        if self.beta:
            loss = loss + self.beta * self._divergence(model, batch, log_probs)
        if self.normalization == "sequence":
            loss = loss / self._lengths(valid, batch).clamp(min=1)
        return (torch.where(valid, loss, 0).sum(),)

    def _ratio(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return which tokens count, their log-probabilities, and their ratios to those of before, [B, S] each."""
        valid, log_probs = batch["labels"] != IGNORE, given.log_probs(model, batch)
        logs = torch.where(valid, log_probs - batch["old_log_probs"].to(log_probs.dtype), 0)
        if self.loss_type == "gspo":
            found = given.per_document(torch.stack([logs, valid.to(logs.dtype)], -1), batch)
            logs = given.per_token(found[..., 0] / found[..., 1].clamp(min=1), batch)
        return valid, log_probs, logs.exp()

    def _lengths(self, valid: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return for each token the number of tokens of its answer [B, S]."""
        return given.per_token(given.per_document(valid.double(), batch), batch)

    def _divergence(self, model: nn.Module, batch: Batch, log_probs: torch.Tensor) -> torch.Tensor:
        away = log_probs - given.reference_log_probs(model, batch).to(log_probs.dtype)
        if self.estimator == "k1":
            return away
        return away**2 / 2 if self.estimator == "k2" else torch.exp(-away) + away - 1

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return means over tokens: of the ratio, of how often it is clipped, and of the divergence from the reference."""
        valid, log_probs, ratio = self._ratio(model, batch)
        advantages, tokens = batch["advantages"], valid.sum()
        found = {"ratio": (torch.where(valid, ratio, 0).sum(), tokens)}
        if self.loss_type != "importance_sampling":
            low = -torch.inf if self.loss_type == "cispo" else 1 - self.low
            high = self.high if self.loss_type == "cispo" else 1 + self.high
            clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
            found["clipped"] = ((valid & clipped).sum(), tokens)
        if self.beta:
            found["kl"] = (torch.where(valid, self._divergence(model, batch, log_probs), 0).sum(), tokens)
        return found
