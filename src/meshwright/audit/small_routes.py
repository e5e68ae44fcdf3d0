"""The column of given experts for the small model of an audit, which has fewer mixtures, and fewer experts in each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.rows.columns import ROUTED_EXPERTS, TensorColumn
from meshwright.shrink.small_config import Change
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import RunSetup

__all__ = ["Routes", "fit_routes", "without_routes"]


@dataclass(frozen=True)
class Routes:
    """How many experts the small model has.

    Attributes:
        mixtures: number of its mixtures.
        each: number of experts of a token in each.
        experts: number of experts of the mixture that has the fewest.
    """

    mixtures: int
    each: int
    experts: int

    def columns(self, columns: Mapping[str, TensorColumn]) -> dict[str, TensorColumn]:
        """Return columns, that of given experts with the width of the small model."""
        routes = columns[ROUTED_EXPERTS].model_copy(update={"width": self.mixtures * self.each})
        return {**columns, ROUTED_EXPERTS: routes}

    def fit(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return experts of the small model for those of rows [tokens, width]: different ones, and -1 where rows have it."""
        first = values[:, np.arange(self.mixtures) % values.shape[1], None].astype(np.int64)
        fitted = np.where(first < 0, -1, (first + np.arange(self.each)) % self.experts)
        return fitted.reshape(len(values), self.mixtures * self.each)


def without_routes(config: RunConfig) -> RunConfig:
    """Return a configuration without the column, so that a small model is not asked for one of the width of the large."""
    tensors = {name: column for name, column in config.data.tensors.items() if name != ROUTED_EXPERTS}
    return config.model_copy(update={"data": config.data.model_copy(update={"tensors": tensors})})


def fit_routes(config: RunConfig, ready: RunConfig, setup: RunSetup) -> tuple[RunConfig, Routes | None, tuple[Change, ...]]:
    """Give the small run a column of its own width, if the large one has the column.

    Args:
        config: the large run.
        ready: the small one, from :func:`without_routes`.
        setup: of the small one.
    """
    rows, given = setup.plan.experts, config.data.tensors.get(ROUTED_EXPERTS)
    if given is None or not rows or setup.spec.traces is None:
        return ready, None, ()
    routers = {row.router: row.experts for row in rows}
    each = next(iter(setup.spec.traces(setup.model).choices(routers).values()))
    routes = Routes(len(rows), each, min(routers.values()))
    data = ready.data.model_copy(update={"tensors": routes.columns(config.data.tensors)})
    after = data.tensors[ROUTED_EXPERTS].width
    changed = Change(
        f"data.tensors.{ROUTED_EXPERTS}.width", given.width, after, "mixtures of the small model; numbers of its experts"
    )
    return ready.model_copy(update={"data": data}), routes, (changed,)
