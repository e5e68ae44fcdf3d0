"""Which model gives the log-probabilities that an objective compares with."""

from typing import Literal

from meshwright.errors import ConfigError
from meshwright.models.objective import PRECOMPUTED, RunFacts
from meshwright.objectives.invented import REFERENCE

__all__ = ["reference_of"]


def reference_of(wanted: str | None, run: RunFacts) -> bool | Literal["precomputed"]:
    """Return the attribute :attr:`~meshwright.objectives.Objective.reference` of an objective that needs a reference.

    Args:
        wanted: ``adapter_off``, ``precomputed``, or ``None``: a column of the data if there is one, or else the first if an
            adapter is trained, or else the second.
        run: facts of the run.

    Raises:
        ConfigError: it is the model without its adapter, and there is none.
    """
    chosen = wanted or ("adapter_off" if run.adapter else "precomputed")
    if chosen == "adapter_off" and not run.adapter:
        said = "training.objective.with.reference=adapter_off: no adapter is trained"
        raise ConfigError("objective.reference", f"{said}; legal are precomputed and none, or set adapter")
    given_by_rows = REFERENCE in run.columns and wanted is None
    return PRECOMPUTED if chosen == PRECOMPUTED and not given_by_rows else True
