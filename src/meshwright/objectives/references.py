"""Which model gives the log-probabilities that an objective compares with."""

from meshwright.errors import ConfigError
from meshwright.models.objective import RunFacts

__all__ = ["reference_of"]


def reference_of(wanted: str | None, run: RunFacts) -> bool:
    """Return the attribute :attr:`~meshwright.objectives.Objective.reference` of an objective that needs a reference.

    Args:
        wanted: ``adapter_off``, ``precomputed``, or ``None``: the first if an adapter is trained, or else the second.
        run: facts of the run.

    Raises:
        ConfigError: it is the model without its adapter, and there is none.
    """
    chosen = wanted or ("adapter_off" if run.adapter else "precomputed")
    if chosen == "adapter_off" and not run.adapter:
        said = "training.objective.with.reference=adapter_off: no adapter is trained"
        raise ConfigError("objective.reference", f"{said}; legal are precomputed and none, or set adapter")
    return True
