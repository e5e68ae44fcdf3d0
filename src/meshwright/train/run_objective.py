"""The objective of a run: the objective of its model's family, with the options from the configuration."""

from typing import TYPE_CHECKING

from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError, Problems, Refusal
from meshwright.models.families.listed import FAMILIES, family_of
from meshwright.models.objective import Objective, RunFacts
from meshwright.train.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["make_objective"]


def make_objective(config: RunConfig, model: "PreTrainedModel") -> Objective:
    """Return the objective of a run.

    Args:
        config: configuration of the run.
        model: the model, on any device.

    Raises:
        ConfigError: the configuration names an objective that the model is not made for, sets options of another objective, or
            has settings that this objective refuses.
    """
    kind, name, wanted = family_of(model).objective(), class_name(model), config.training.objective
    parallel = config.parallel
    run = RunFacts(
        seed=config.training.seed,
        sequence_length=config.data.sequence_length,
        packing=config.data.packing,
        output_dtype=parallel.output_dtype,
        compiled=parallel.compile,
        recomputed={parallel.activation_checkpointing, *parallel.activation_checkpointing_layers.values()},
    )
    options = getattr(config, kind.section) if kind.section else None
    problems = Problems()
    if wanted not in (None, kind.name):
        problems.add(
            "config.objective", f"training.objective={wanted}: {name} is made for {kind.name}; legal are {kind.name} and null"
        )
    for other in dict.fromkeys(family.objective() for family in FAMILIES):
        if other.section not in ("", kind.section):
            section = getattr(config, other.section)
            problems += [
                Refusal(
                    "config.objective",
                    f"{other.section}.{key}={value!r}: applies only to {other.name.replace('_', ' ')}, but {name} is trained "
                    f"to {kind.purpose}; leave it out",
                )
                for key, value in section
                if value != getattr(type(section)(), key)
            ]
    problems += kind.problems(model, options, run)
    if problems:
        raise ConfigError(problems)
    return kind.of(model, options, run)
