"""The objectives that Meshwright brings, by the names that a configuration calls them, and which rows each reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.data.rows.columns import FORMATS, PLAIN
from meshwright.data.rows.wanted import Labels, Wanted
from meshwright.models.model_config import ModelConfig
from meshwright.user_code import PartConfig

__all__ = ["OURS", "PAIRS", "OurObjective", "as_ours", "wanted_of"]


PAIRS = ("preference", "token_pairs")
"""Formats of two answers to one prompt, of which only the answers are learned."""


@dataclass(frozen=True)
class OurObjective:
    """An objective of ours.

    Attributes:
        part: returns its class, as ``module:Name``, of its arguments.
        formats: returns the formats of rows that it reads, of its arguments.
        unpairs: returns whether it learns each answer of a pair by itself.
        whole: whether all tokens of a row count, and not only answers.
        scales: returns whether advantages that come of rewards are divided by the standard deviation of those of their group.
    """

    part: Callable[[Mapping[str, Any]], str]
    formats: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda arguments: PLAIN
    unpairs: Callable[[Mapping[str, Any]], bool] = lambda arguments: False
    whole: bool = False
    scales: Callable[[Mapping[str, Any]], bool] = lambda arguments: True


def _of_preference(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return ("preference", "unpaired_preference") if _is_kto(arguments) else PAIRS


def _is_kto(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("loss_type") == "kto"


def _preference(arguments: Mapping[str, Any]) -> str:
    return f"meshwright.objectives.preference:{'Kto' if _is_kto(arguments) else 'Preference'}"


def _of_reward(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return ("scored",) if arguments.get("loss_type") == "mse" else ("preference",)


def _scales(arguments: Mapping[str, Any]) -> bool:
    wanted = arguments.get("scale_rewards")
    return wanted == "group" if wanted is not None else arguments.get("loss_type") != "dr_grpo"


OURS = {
    "preference": OurObjective(_preference, _of_preference, _is_kto),
    "policy": OurObjective(
        lambda arguments: "meshwright.objectives.policy:Policy", lambda arguments: ("rollout",), scales=_scales
    ),
    "reward": OurObjective(lambda arguments: "meshwright.objectives.reward:Reward", _of_reward, whole=True),
    "token_classification": OurObjective(
        lambda arguments: "meshwright.objectives.token_classification:TokenClassification",
        lambda arguments: ("labeled_words",),
        whole=True,
    ),
    "classification": OurObjective(
        lambda arguments: "meshwright.objectives.classification:Classification", lambda arguments: ("labeled",), whole=True
    ),
    "distillation": OurObjective(lambda arguments: "meshwright.objectives.distillation:Distillation"),
}


def as_ours(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part as a configuration names it, ``use`` and ``with``; a class of ours by its short name."""
    arguments = dict(part.get("with", {}))
    name = next((name for name, ours in OURS.items() if ours.part(arguments) == part["use"]), part["use"])
    return {"use": name, **({"with": arguments} if arguments else {})}


def wanted_of(part: PartConfig | None, format: str, model: ModelConfig) -> Wanted:
    """Return what an objective wants of rows.

    Args:
        part: the objective of a configuration; ``None``: that of the family.
        format: ``data.format``. An objective of the user's reads any format that is named.
        model: the model, whose head says what labels are.
    """
    if part is None:
        return Wanted()
    labels = None if model.task is None else Labels(*model.task)
    if part.use not in OURS:
        named = (format,) if ":" in part.use and format in FORMATS else ()
        return Wanted(part.use, named or PLAIN, labels=labels)
    ours = OURS[part.use]
    arguments = part.arguments
    return Wanted(part.use, ours.formats(arguments), ours.unpairs(arguments), ours.whole, labels, scales=ours.scales(arguments))
