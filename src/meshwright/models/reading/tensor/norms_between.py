"""Norms over the features between two matrices that can be sliced: BitNet's ``o_proj(norm(attention))``.

Such a norm takes the mean of squares of all features, of which a rank has some. A mean over ranks of means over slices of one
width is the mean of all. So the norm can be computed on slices if all that it does with all features is to take their mean, if
nothing but features is multiplied with what it makes of the mean, and if its own parameters have one entry for each feature.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from meshwright.models.reading.tracing import Labels, Operator

__all__ = ["NormsBetween"]

Sources = frozenset[str]
"""Names of the linear layers that features come from."""


class _Mean(NamedTuple):
    """What is made of means of features alone: the module that does it, and where the features come from."""

    module: str
    sources: Sources


class NormsBetween:
    """Follows means of features, and what has an entry for each feature, inside of modules that may be norms.

    Args:
        own: names of these modules, to those of their parameters.
        tensors: the model's parameters by name.

    Attributes:
        unfit: names of the linear layers whose features such a module does not treat so.
    """

    def __init__(self, own: Mapping[str, Collection[str]], tensors: Mapping[str, torch.Tensor]) -> None:
        self.unfit: set[str] = set()
        self._own = {module: frozenset(names) for module, names in own.items()}
        self._entries = Labels({tensors[name]: (module, name) for module, names in own.items() for name in names})
        self._made = Labels()  # of means alone
        self._means: Counter[str] = Counter()
        self._sources: dict[str, Sources] = {}
        self._cut: set[str] = set()  # parameters with an entry for each feature
        self._ran: Counter[str] = Counter()

    def among(self, names: Collection[str], elsewhere: Collection[str]) -> tuple[tuple[str, int], ...]:
        """Return the norms of the features of some linear layers, with their numbers of means.

        Args:
            names: the linear layers.
            elsewhere: parameters that are used otherwise, too: their layers become unfit.
        """
        found = []
        for module, sources in self._sources.items():
            if sources & set(names):
                found.append((module, self._means[module]))
                if self._ran[module] != 1 or self._own[module] - self._cut or self._own[module] & set(elsewhere):
                    self.unfit |= sources
        return tuple(sorted(found))

    def enter(self, name: str) -> None:
        """Note that a module runs."""
        self._ran[name] += name in self._own

    def takes_mean(self, operator: Operator, sources: Sources, dim: int) -> bool:
        """Return whether an operator takes the mean of features, which are along a dimension, inside of a possible norm."""
        first, operands = operator.tensors[0], operator.operands
        dims = operands.get("dim")
        if operator.name != "mean" or operator.module not in self._own or dim != first.ndim - 1 or not operands.get("keepdim"):
            return False
        if not isinstance(dims, list | tuple) or [own % first.ndim for own in dims] != [dim]:
            return False
        self._means[operator.module] += 1
        self._join(operator.module, sources)
        self._made.put(operator.results, _Mean(operator.module, sources))
        return True

    def has_each(self, tensor: torch.Tensor, module: str, width: int, sources: Sources) -> bool:
        """Return whether a tensor beside features is a parameter of the module that runs, with an entry for each feature."""
        holder, name = self._entries.get(tensor, ("", ""))
        if not name or holder != module or tuple(tensor.shape) != (width,):
            return False
        self._cut.add(name)
        self._join(module, sources)
        return True

    def is_mean(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is made of means of features alone. Ranks sum its gradient."""
        return tensor in self._made

    def follow(self, operator: Operator, learned: Iterable[torch.Tensor], *, features: bool, pointwise: bool) -> bool:
        """Carry labels on after an operator, and return whether its results have an entry for each feature, and are none.

        Args:
            operator: the operator.
            learned: those of its tensors that have a gradient.
            features: whether it reads features.
            pointwise: whether it treats each entry alone.
        """
        tensors = operator.tensors
        means: list[_Mean] = self._made.among(tensors)
        for mean in means:
            alone = all(tensor in self._made for tensor in learned)
            if mean.module != operator.module or (not alone and not features) or (features and not pointwise):
                self.unfit |= mean.sources
        if means and not features:
            sources = frozenset[str]().union(*(mean.sources for mean in means))
            self._made.put(operator.results, _Mean(operator.module, sources))
        elif pointwise and not features and len(tensors) == 1 and tensors[0] in self._entries:
            self._entries.put(operator.results, self._entries[tensors[0]])
            return True
        return False

    def leave(self, name: str, outputs: Iterable[torch.Tensor]) -> None:
        """Note what a possible norm puts out: a mean of its own would be used by others."""
        for mean in self._made.among(outputs) if name in self._own else ():
            self.unfit |= mean.sources

    def _join(self, module: str, sources: Sources) -> None:
        self._sources[module] = self._sources.get(module, frozenset()) | sources
