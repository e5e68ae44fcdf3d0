"""What layers read beside their hidden state, as a trace sees it: tensors that their calls give them, which may cross cuts."""

from collections.abc import Iterable, Mapping

import torch

from meshwright.plan.given.cut_points import POSITIONS, ROWS, Carried, Path

__all__ = ["CarriedTensors"]


class _Given:
    """A tensor that calls of layers have. It is kept alive, so that no other one is taken for it."""

    def __init__(self, tensor: torch.Tensor, made: Iterable[int]) -> None:
        self.tensor, self.made = tensor, frozenset(made)
        self.calls: dict[int, list[Path]] = {}
        self.read = False


class CarriedTensors:
    """Notes which tensors of others the layers of a model read from their calls.

    Args:
        batch: numbers of rows and of positions that the model is called with. They divide no size of a parameter.
    """

    def __init__(self, batch: tuple[int, ...]) -> None:
        self._rows, self._positions = batch
        self._given: dict[int, _Given] = {}
        self._layer = -1

    def enter(
        self,
        layer: int,
        given: Iterable[tuple[Path, torch.Tensor]],
        hidden: torch.Tensor,
        origins: Mapping[torch.Tensor, set[int]],
    ) -> None:
        """At the call of a layer: note what it is given beside its hidden state that was computed from parameters.

        Args:
            layer: its index.
            given: the tensors of the call, and where it has them.
            hidden: the hidden state among them.
            origins: what each tensor was computed from.
        """
        self._layer = layer
        for path, tensor in given:
            if tensor is not hidden and tensor in origins:
                known = self._given.setdefault(id(tensor), _Given(tensor, origins[tensor]))
                known.calls.setdefault(layer, []).append(path)

    def read(self, tensor: torch.Tensor) -> frozenset[int] | None:
        """Return what a tensor was computed from that the running layer reads, if its call has it and it can cross cuts."""
        given = self._given.get(id(tensor))
        if given is None or self._layer not in given.calls:
            return None
        if not tensor.is_floating_point() or not self.sizes_of(tensor):
            return None
        given.read = True
        return given.made

    def sizes_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the sizes of a tensor as :data:`~meshwright.plan.given.cut_points.Carried` has them.

        They are empty if it does not have the same number of values for each position, for each row or for all rows together.
        """
        sizes = [{self._rows: ROWS, self._positions: POSITIONS}.get(size, size) for size in tensor.shape]
        several = any(size > 0 and (size % self._rows == 0 or size % self._positions == 0) for size in sizes)
        legal = sizes.count(POSITIONS) == 1 and sizes.count(ROWS) <= 1 and 0 not in sizes and not several
        return tuple(sizes) if legal else ()

    def facts(self) -> tuple[Carried, ...]:
        """Return what crosses some cut. A layer whose call has it is given it, whether it reads it or not."""
        found = [
            (
                self.sizes_of(given.tensor),
                max(given.made),
                tuple((layer, tuple(paths)) for layer, paths in sorted(given.calls.items())),
            )
            for given in self._given.values()
            if given.read
        ]
        return tuple(item for item in found if item[2][-1][0] > max(item[1], 0))
