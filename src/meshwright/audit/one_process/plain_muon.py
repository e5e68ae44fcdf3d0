"""Muon of the reference: one matrix after another, each step of Newton-Schulz as it is written, in one process."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import nn

from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.names import match_names
from meshwright.plan.given.parameter_storage import is_conv1d, is_transposed
from meshwright.plan.update.matrices import Apart

__all__ = ["PlainMuon", "is_matrix_of_layer", "taken_apart"]


def is_matrix_of_layer(model: nn.Module, name: str, experts: int) -> bool:
    """Return whether Muon takes a parameter by itself: a matrix in a numbered layer, which is no embedding, norm or router.

    Args:
        model: the plain model.
        name: first name of the parameter.
        experts: number of experts of a layer; 0: unknown.
    """
    path, _, own = name.rpartition(".")
    holder, shape = model.get_submodule(path), list(model.get_parameter(name).shape)
    if not re.search(r"\.\d+\.", name) or (len(shape) == 2 and experts and shape[0] == experts):
        return False
    if len(shape) == 3:
        return bool(experts) and shape[0] == experts and min(shape[1:]) > 1
    linear = isinstance(holder, nn.Linear) or is_conv1d(holder)
    return linear and own == "weight" and min(shape) > 1


def taken_apart(model: nn.Module, *, by_head: bool) -> dict[str, Apart]:
    """Return how weights are taken apart, by name. There are no words for it: the code of the model says it, as to a plan."""
    spec = spec_of(model)
    modules = [name for name, _ in model.named_modules()]
    layers = [name for pattern in spec.layers for name in match_names(pattern, modules)]
    found = {} if spec.traces is None else spec.traces(model).fused(layers)
    return {name: own if by_head else own._replace(heads=()) for name, own in found.items()}


class PlainMuon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/), line by line. Options are those of the configuration.

    Args:
        params: groups of parameters.
        lr: learning rate.
        model: has the parameters.
        options: options of the kind.
    """

    def __init__(self, params: Any, lr: float, model: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self.options, apart = options, taken_apart(model, by_head=options["by_head"])
        self.apart: dict[torch.Tensor, Apart | None] = {own: apart.get(name) for name, own in model.named_parameters()}
        modules = dict(model.named_modules())
        self.turned: dict[torch.Tensor, bool] = {
            own: is_transposed(modules[name.rpartition(".")[0]]) for name, own in model.named_parameters()
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run one step."""
        momentum = self.options["momentum"]
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                m.copy_(momentum * m + (1 - momentum) * p.grad)
                update = momentum * m + (1 - momentum) * p.grad if self.options["nesterov"] else m
                p *= 1 - group["lr"] * group["weight_decay"]
                for weight, own in zip(self._weights(p, p.data), self._weights(p, update), strict=True):
                    for rows in self._matrices(p, len(weight)):
                        found = self._orthogonal(own[rows].to(getattr(torch, self.options["dtype"])))
                        weight[rows] -= group["lr"] * self._factor(*found.shape) * found

    def _weights(self, p: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the weights [out, in]."""
        return [one.T if self.turned[p] else one for one in (values if values.ndim == 3 else [values])]

    def _matrices(self, p: torch.Tensor, features: int) -> Iterator[torch.Tensor]:
        sizes, runs, heads = self.apart[p] or Apart((features,))
        parts: Sequence[torch.Tensor] = torch.arange(features).view(runs, -1).split(list(sizes), dim=1)
        for part, count in zip(parts, heads or (1,) * len(parts), strict=True):
            yield from part.flatten().chunk(count)

    def _orthogonal(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.options["ns_coefficients"]
        if len(x) > x.shape[1]:
            return self._orthogonal(x.T).T
        x = x / x.norm().clamp(min=self.options["eps"])
        for _ in range(self.options["ns_steps"]):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        return x

    def _factor(self, rows: int, columns: int) -> float:
        if self.options["adjust_lr_fn"] == "original":
            return sqrt(max(1.0, rows / columns))
        return 0.2 * sqrt(max(rows, columns))
