"""A model of rewards: one number for each text, which is larger for better ones."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import logsigmoid

from meshwright.errors import ConfigError
from meshwright.models.objective import Batch, RunFacts
from meshwright.objectives import given
from meshwright.objectives.of_documents import OfLastTokens, Pairs, correlation, moments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Reward"]

MARGIN, SCORE = "margin", "score"


class Reward(OfLastTokens):
    r"""Give better answers larger rewards.

    With the reward :math:`r(y)` of an answer:

    ================= ========================================================================================================
    loss_type         loss
    ================= ========================================================================================================
    ``bradley_terry`` :math:`-\log\sigma(r(w) - r(l) - m)` of a pair, with the chosen answer :math:`w` and the rejected one
                      :math:`l` (Ouyang et al. 2022, arXiv 2203.02155, equation 1). The margin :math:`m` is the column
                      ``margin`` of the data (Touvron et al. 2023, arXiv 2307.09288, equation 2), or 0 without one
    ``mse``           :math:`(r(y) - s)^2` of an answer with the score :math:`s`
    ================= ========================================================================================================

    The sum over pairs or answers is divided by their number in the step.

    Metrics, over the whole step or evaluation and all its ranks: of pairs ``accuracy``, ``margin``, ``rewards/chosen`` and
    ``rewards/rejected``; of scores ``pearson``, the correlation with them.

    Args:
        loss_type: see above.
        center_rewards_coefficient: of pairs, weight of :math:`(r(w) + r(l))^2`, which keeps rewards around 0 (Eisenstein et al.
            2023, arXiv 2312.09244).

    Raises:
        ConfigError: an argument is of another ``loss_type``.
    """

    name = "reward"
    purpose = "give better texts larger rewards"
    has_margin = False

    def __init__(
        self,
        loss_type: Literal["bradley_terry", "mse"] = "bradley_terry",
        center_rewards_coefficient: Annotated[float, Field(ge=0)] | None = None,
    ) -> None:
        self.paired, self.center = loss_type == "bradley_terry", center_rewards_coefficient or 0.0
        self.unit, self.nats = "pair" if self.paired else "document", self.paired
        if center_rewards_coefficient is not None and not self.paired:
            said = f"training.objective.with.center_rewards_coefficient={center_rewards_coefficient}"
            raise ConfigError("config.part.arguments", f"{said}: applies to loss_type bradley_terry; leave it out")

    def begin(self, model: "PreTrainedModel", run: RunFacts) -> None:
        """Read whether pairs have margins.

        Raises:
            ConfigError: the head gives several numbers, or a pair has not one margin.
        """
        super().begin(model, run)
        labels = model.config.num_labels
        if labels != 1:
            raise ConfigError(
                "config.objective",
                f"training.objective=reward: the head gives {labels} numbers; legal is model.head.num_labels=1",
            )
        margin = run.columns.get(MARGIN) if self.paired else None
        self.has_margin = margin is not None
        if margin is not None and (margin.per, margin.width) != ("document", None):
            raise ConfigError(
                "config.objective",
                f"training.objective=reward: data.tensors.{MARGIN} is {{per: {margin.per}, width: {margin.width}}}; a pair has "
                "one margin: legal is {per: document}",
            )

    def counts(self, batches: list[Batch]) -> list[int]:
        """Return the number of pairs, or of texts."""
        return [given.pair_count(batches)] if self.paired else super().counts(batches)

    def _pairs(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rewards of the first and the second document of each pair, and which there are, [B, D] each."""
        rewards, first = self.outputs(model, batch)[..., 0], given.first_of_pairs(batch)
        return torch.where(first, rewards, 0), torch.where(first, given.second_of_pairs(rewards), 0), first

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the sum of the losses of pairs, or of texts."""
        if not self.paired:
            rewards = self.outputs(model, batch)[..., 0]
            return (given.document_sum((rewards - batch[SCORE].to(rewards.dtype)) ** 2, batch),)
        chosen, rejected, first = self._pairs(model, batch)
        margin = batch[MARGIN].to(chosen.dtype) if self.has_margin else 0.0
        losses = -logsigmoid(chosen - rejected - margin)
        if self.center:
            losses = losses + self.center * (chosen + rejected) ** 2
        return (given.document_sum(torch.where(first, losses, 0), batch),)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return what is counted of pairs, or what the correlation with scores is made of."""
        if not self.paired:
            return moments(self.outputs(model, batch).double(), batch[SCORE].double()[..., None], batch)
        chosen, rejected, first = self._pairs(model, batch)
        count = given.document_sum(first.double(), batch)
        values = {
            "accuracy": (chosen > rejected).double(),
            "margin": (chosen - rejected).double(),
            "rewards/chosen": chosen.double(),
            "rewards/rejected": rejected.double(),
        }
        return {name: (given.document_sum(torch.where(first, one, 0), batch), count) for name, one in values.items()}

    def summary(self, sums: Pairs) -> dict[str, torch.Tensor]:
        """Return means of what is counted of pairs, or the correlation."""
        return super().summary(sums) if self.paired else {"pearson": correlation(sums, "moment_0_")}
