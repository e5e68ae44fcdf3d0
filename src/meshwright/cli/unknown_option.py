"""Options that a command does not have, and what a user may have meant by them."""

from typing import Any

__all__ = ["suggest"]

_ALIKE = (
    {"--world-size", "--nproc", "--nproc-per-node", "--num-processes", "--gpus", "--num-gpus", "--ranks", "-n", "-np"},
    {"--world-size", "--nnodes", "--nodes", "--num-machines"},
    {"--gpu", "--device", "--hardware"},
    {"--adapter", "--lora", "--peft"},
    {"--overwrite", "--force", "-f"},
    {"--max-new-tokens", "--max-tokens", "--max-length"},
    {"--directory", "--output", "--output-dir", "--out", "-o"},
)
"""Names of one thing, of which a command has at most one."""

_LAUNCHED = "torchrun --nnodes NODES --nproc-per-node GPUS ... -m meshwright train CONFIG"


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
    names = {name}.union(*(alike for alike in _ALIKE if name in alike))
    arguments = [item for item in parameters if item.param_type_name == "argument" and f"--{item.name}" in names]
    if meant := names & legal:
        error.possibilities = sorted(meant)
    elif arguments:
        error.possibilities = None
        error.message += f". {arguments[0].name.upper()} is written without an option"
    elif context.command.name == "train" and "--nnodes" in names:
        error.possibilities = None
        error.message += f". On several machines torchrun or Slurm starts the processes: {_LAUNCHED}"
    elif any(parameter.name == "overrides" for parameter in parameters) and (key := _key(name)):
        error.possibilities = None
        error.message += f". A key of the configuration is written without dashes: {key}=VALUE"


def _key(option: str) -> str | None:
    """The key that an option stands for; ``None`` if there is none, or more than one."""
    from meshwright.train.config import RunConfig
    from meshwright.train.schema.config_problems import FOREIGN, sections

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
