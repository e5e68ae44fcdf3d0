"""Options that a command does not have, and what a user may have meant by them."""

from typing import Any

__all__ = ["suggest"]

_ALIKE = (
    {"--world-size", "--nproc", "--nproc-per-node", "--num-processes", "--gpus", "--ranks", "--processes", "-n", "-np"},
    {"--overwrite", "--force", "-f"},
    {"--max-new-tokens", "--max-tokens", "--max-length"},
)
"""Names of one thing, of which a command has at most one."""


def suggest(error: Any) -> None:
    """Add what was meant to the message for an unknown option: another option, or a key of the configuration.

    Args:
        error: any exception; one that is not about an unknown option stays as it is.
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not hasattr(error, "possibilities") or option is None or context is None:
        return
    name = option.replace("_", "-").lower()
    parameters = context.command.params
    legal = {written for parameter in parameters for written in parameter.opts if written.startswith("--")}
    meant = {other for alike in _ALIKE if name in alike for other in alike & legal}
    if meant:
        error.possibilities = sorted(meant)
    elif any(parameter.name == "overrides" for parameter in parameters) and (key := _key(name)):
        error.possibilities = None
        error.message += f". A key of the configuration is written without dashes: {key}=VALUE"


def _key(option: str) -> str | None:
    """The key that an option stands for; ``None`` if there is none, or more than one."""
    from meshwright.train.config import RunConfig
    from meshwright.train.problems import FOREIGN, sections

    name = option.lstrip("-")
    fields = RunConfig.model_fields
    if name in fields:
        return name
    section, _, rest = name.partition(".")
    if rest and section in fields:
        return name.replace("-", "_")
    name = name.replace("-", "_")
    found = [f"{section}.{name}" for section, keys in sections(RunConfig).items() if name in keys.model_fields]
    if len(found) == 1:
        return found[0]
    here = FOREIGN.get(name, "")
    return here if here.replace(".", "").replace("_", "").isalpha() else None
