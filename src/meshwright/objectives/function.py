"""An objective from a function of the log-probabilities, or of the logits, that returns a value for each token."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.objective import Batch, Objective
from meshwright.models.token_loss import IGNORE
from meshwright.objectives import given

__all__ = ["FunctionObjective"]


class FunctionObjective(Objective):
    """A loss that is the mean of a function over the valid labels of the optimizer step.

    Args:
        function: ``f(log_probs, batch, ...)`` or ``f(logits, labels, ...)``, also as a method or with arguments bound by
            ``functools.partial``; it returns the loss of each token [B, S].
        arguments: its further arguments.

    Raises:
        ConfigError: its parameters are others.
    """

    def __init__(self, function: Callable[..., torch.Tensor], arguments: Mapping[str, Any]) -> None:
        self.kind = inspect.unwrap(function.func if isinstance(function, partial) else function)
        self.name = getattr(self.kind, "__name__", "function")
        self.purpose, self.terms = self.name.replace("_", " "), (self.name,)
        self.function = partial(function, **arguments)
        first = list(inspect.signature(function).parameters)[:2]
        if first not in (["log_probs", "batch"], ["logits", "labels"]):
            raise ConfigError(
                "part.signature",
                f"training.objective={self.kind.__module__}:{self.name}: takes ({', '.join(first)}, ...); legal are "
                "(log_probs, batch, ...) and (logits, labels, ...), which return the loss of each token",
            )
        self.whole_logits = first[0] == "logits"

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the sum of the function over the valid labels."""
        labels = batch["labels"]
        if self.whole_logits:
            values = self.function(given.logits(model, batch), labels)
        else:
            values = self.function(given.log_probs(model, batch), batch)
        if values.shape != labels.shape:
            raise ValueError(f"returns {list(values.shape)}; legal is a value for each token, {list(labels.shape)}")
        return (values.masked_fill(labels == IGNORE, 0.0).sum(),)
