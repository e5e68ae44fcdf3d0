"""Checks the parts of the user that need no model: they are found, made and tried before any process starts."""

from meshwright.errors import ConfigError, MeshwrightError, PartError
from meshwright.train.callbacks.make_callbacks import make_callbacks
from meshwright.train.config import RunConfig
from meshwright.train.metrics import make_sinks
from meshwright.train.optimizer import check_parts

__all__ = ["problems_of_parts"]


def problems_of_parts(config: RunConfig) -> list[MeshwrightError]:
    """Return what is wrong with the optimizer, the schedule, the sinks and the callbacks of a configuration."""
    problems: list[MeshwrightError] = []
    for check in (
        lambda: check_parts(config, config.training.steps or 100),
        lambda: make_sinks(config),
        lambda: make_callbacks(config),
    ):
        try:
            check()
        except (ConfigError, PartError) as error:
            problems.append(error)
    return problems
