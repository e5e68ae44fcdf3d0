"""Labels of texts: one of several, several at once, or numbers."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.objective import Batch, RunFacts
from meshwright.objectives import given
from meshwright.objectives.of_documents import OfLastTokens, Pairs, correlation, moments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Classification"]

MOST_CLASSES = 64
"""Largest number of labels of which each is counted alone, for the mean of their F1 scores and correlations."""


class Classification(OfLastTokens):
    """Say the labels of a text: ``problem_type`` of the model's config, as in transformers, says what they are.

    ``single_label_classification``: the label [B, D] is a class; the loss of a document is the cross-entropy.
    ``multi_label_classification``: the labels [B, D, labels] are 0 or 1; the loss is the mean of their binary cross-entropies.
    ``regression``: the labels [B, D], or [B, D, labels] if there are several, are numbers; the loss is the mean of the squared
    differences. The sum over documents is divided by their number in the step.

    Metrics, over the whole step or evaluation and all its ranks: ``accuracy`` (all labels of a document are right), ``f1`` of
    label 1 where there are two, ``micro_f1`` (several labels at once), ``macro_f1`` (the mean over the labels that are said or
    true, for at most 64 labels), ``pearson`` (the correlation of numbers and labels, the mean over labels).
    """

    purpose = "say the labels of a text"
    kind_of_labels = ""
    labels = 0

    def begin(self, model: "PreTrainedModel", run: RunFacts) -> None:
        """Read what the labels are."""
        super().begin(model, run)
        self.labels, kind = model.config.num_labels, getattr(model.config, "problem_type", None)
        self.kind_of_labels = kind or ("regression" if self.labels == 1 else "single_label_classification")  # of a loop's model
        self.nats = self.kind_of_labels != "regression"
        if self.kind_of_labels == "single_label_classification" and self.labels < 2:
            raise ConfigError(
                "config.objective",
                "training.objective=classification: one label is always right; legal are model.head.num_labels=2 or more, and "
                "model.head.problem_type=regression",
            )
        column, width = run.columns.get("label"), self.width
        dtype = "int64" if self.kind_of_labels == "single_label_classification" else "float32"
        if column is None or (column.per, column.width, column.dtype) != ("document", width, dtype):
            has = "none" if column is None else f"{{per: {column.per}, width: {column.width}, dtype: {column.dtype}}}"
            raise ConfigError(
                "config.objective",
                f"training.objective=classification: {self.kind_of_labels} with {self.labels} labels needs data.tensors.label="
                f"{{per: document, width: {'null' if width is None else width}, dtype: {dtype}}}; it is {has}",
            )

    @property
    def width(self) -> int | None:
        """Size of the last dimension of the labels in a batch; ``None``: there is none."""
        one = self.kind_of_labels == "regression" and self.labels == 1
        return None if one or self.kind_of_labels == "single_label_classification" else self.labels

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the sum of the losses of documents."""
        outputs, label = self.outputs(model, batch), batch["label"]
        if self.kind_of_labels == "single_label_classification":
            losses = nn.functional.cross_entropy(outputs.flatten(0, 1), label.flatten(), reduction="none").view(label.shape)
        else:
            label = label.to(outputs.dtype).view(outputs.shape)
            if self.kind_of_labels == "regression":
                losses = ((outputs - label) ** 2).mean(-1)
            else:
                losses = nn.functional.binary_cross_entropy_with_logits(outputs, label, reduction="none").mean(-1)
        return (given.document_sum(losses, batch),)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return what is counted: right documents, and for each label what its F1 score or correlation is made of."""
        outputs, label = self.outputs(model, batch).double(), batch["label"]
        one = torch.ones_like(outputs[..., 0])
        documents = given.document_sum(one, batch)
        if self.kind_of_labels == "regression":
            return moments(outputs, label.double().view(outputs.shape), batch) if self.labels <= MOST_CLASSES else {}
        if self.kind_of_labels == "single_label_classification":
            right = outputs.argmax(-1) == label
            said, true = (nn.functional.one_hot(classes, self.labels) > 0 for classes in (outputs.argmax(-1), label))
        else:
            said, true = outputs > 0, label > 0.5
            right = (said == true).all(-1)
        found = {"accuracy": (given.document_sum(right.double(), batch), documents)}
        both, either = 2.0 * (said & true), said.double() + true.double()
        if self.kind_of_labels == "multi_label_classification":
            found["micro_f1"] = (given.document_sum(both.sum(-1), batch), given.document_sum(either.sum(-1), batch))
        if self.labels <= MOST_CLASSES:
            for number, (top, bottom) in enumerate(zip(both.unbind(-1), either.unbind(-1), strict=True)):
                found[f"f1_{number}"] = (given.document_sum(top, batch), given.document_sum(bottom, batch))
        return found

    def summary(self, sums: Pairs) -> dict[str, torch.Tensor]:
        """Return the metrics. An F1 score is 2 TP / (2 TP + FP + FN)."""
        own = {name: pair for name, pair in sums.items() if not name.startswith(("f1_", "moment_"))}
        found = super().summary(own)
        each = [pair for name, pair in sums.items() if name.startswith("f1_")]
        if each:
            top, bottom = (torch.stack(parts) for parts in zip(*each, strict=True))
            found["macro_f1"] = (top / bottom.clamp(min=1)).sum() / (bottom > 0).sum().clamp(min=1)
            if self.kind_of_labels == "single_label_classification" and self.labels == 2:
                found["f1"] = top[1] / bottom[1].clamp(min=1)
        if self.kind_of_labels == "regression" and sums:
            found["pearson"] = torch.stack([correlation(sums, f"moment_{number}_") for number in range(self.labels)]).mean()
        return found
