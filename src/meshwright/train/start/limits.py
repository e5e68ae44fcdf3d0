"""What a run may ask of its model: positions as long as its sequences, and a vocabulary as large as its tokenizer's."""

import json
import math
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.train.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["length_problems", "vocabulary_problems"]


def length_problems(config: RunConfig, model: "PreTrainedModel") -> list[MeshwrightError]:
    """Return why the sequences of a run are too long for the positions of its model; nothing if they are not."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = config.data.sequence_length
    if not isinstance(longest, int) or longest < 1 or length <= longest:  # -1: no limit
        return []
    where = "model.config" if config.model.config is not None else config.model.path
    longer = _longer(config, getattr(model.config.get_text_config(), "rope_parameters", None), longest)
    return [
        ConfigError(
            "data.sequence_length",
            f"data.sequence_length={length}: {where} has max_position_embeddings={longest}; legal is 2 to {longest}{longer}",
        )
    ]


def _longer(config: RunConfig, rope: dict[str, Any] | None, longest: int) -> str:
    """Say how a model gets more positions, as the end of a message.

    Args:
        config: configuration of the run.
        rope: how transformers computes the model's rotary positions; ``None``: it has none.
        longest: the positions that it has.
    """
    length = config.data.sequence_length
    if config.model.config is not None:
        return f", or more with model.config.max_position_embeddings={length}"
    if not rope:
        return "; its positions are not rotary, and cannot be scaled"
    if rope.get("rope_type") != "default":  # scaled already, or each kind of attention has its own
        return "; for more, its config.json needs other max_position_embeddings and rope_parameters"
    factor = math.ceil(length / longest)
    scaled = {**rope, "rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": longest}
    text = json.dumps({"max_position_embeddings": factor * longest, "rope_parameters": scaled})
    return f"; for more, scale its rotary positions: write {text[1:-1]} into the config.json of a copy of it"


def vocabulary_problems(config: RunConfig, model: "PreTrainedModel", tokens: int) -> list[MeshwrightError]:
    """Return why a model has too few words for a tokenizer of so many tokens; nothing if it has enough."""
    vocabulary = model.config.get_text_config().vocab_size
    if tokens <= vocabulary:
        return []
    where = "model.config.vocab_size" if config.model.config is not None else f"the vocabulary of {config.model.path}"
    return [
        ConfigError(
            "model.config.vocab_size",
            f"{where}={vocabulary}: the tokenizer has {tokens} tokens, so ids from {vocabulary} on would have no embedding; "
            f"legal is {tokens} or more, or another tokenizer",
        )
    ]
