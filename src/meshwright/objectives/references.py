"""Which model gives the log-probabilities that an objective compares with."""

from typing import Literal

from meshwright.errors import ConfigError, Problems
from meshwright.models.model_config import AdapterConfig
from meshwright.models.objective import PRECOMPUTED, Objective, RunFacts
from meshwright.objectives.call import named
from meshwright.objectives.trying.invented import REFERENCE

__all__ = ["reference_of", "reference_problems"]


def reference_of(wanted: str | None, run: RunFacts, legal: str = "precomputed") -> bool | Literal["precomputed"]:
    """Return the attribute :attr:`~meshwright.objectives.Objective.reference` of an objective that needs a reference.

    Args:
        wanted: ``adapter_off``, ``precomputed``, or ``None``: a column of the data if there is one, or else the first if a
            new adapter alone is trained, or else the second.
        run: facts of the run.
        legal: what the objective may have without an adapter, for the message.

    Raises:
        ConfigError: it is the model without its adapter, and there is none, or the data have a column of a reference.
    """
    chosen = wanted or ("adapter_off" if run.adapter and run.begins_without else "precomputed")
    if chosen == "adapter_off" and not run.adapter:
        said = "training.objective.with.reference=adapter_off: no adapter is trained"
        raise ConfigError("objective.reference", f"{said}; legal is {legal}, or set adapter")
    if wanted == "adapter_off" and REFERENCE in run.columns:
        said = f"training.objective.with.reference=adapter_off: data.tensors.{REFERENCE} gives the values of another"
        raise ConfigError("objective.reference", f"{said}; leave one of them out")
    given_by_rows = REFERENCE in run.columns and wanted is None
    return PRECOMPUTED if chosen == PRECOMPUTED and not given_by_rows else True


def reference_problems(objective: Objective, adapter: AdapterConfig | None) -> Problems:
    """Return why the model with its adapters off is no reference for an objective that compares with it before each step."""
    problems = Problems()
    if objective.reference is not True:
        return problems
    if adapter is None:
        problems.add(
            "objective.reference",
            f"objective {named(objective)} needs the log-probabilities of a reference, the model with its adapters off; "
            "set adapter, or data.tensors.reference_log_probs={per: token}, a column with them; or let the objective have "
            "reference = 'precomputed'",
        )
    elif adapter.save_modules:
        problems.add(
            "objective.reference",
            f"adapter.save_modules={adapter.save_modules}: are trained, so the model with its adapters off is not what it "
            f"was, and no reference for objective {named(objective)}; legal is reference = 'precomputed'",
        )
    return problems
