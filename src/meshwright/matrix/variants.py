"""Variants of a model type: each switch of its config class that makes another model when it is flipped.

A released model seldom has the default config of its type. A switch is a boolean of the config (norms of queries and keys,
biases, tied or not), or a number that may be absent (windows, shared experts, convolutions). A switch counts if the flipped model
has other names, shapes or operators, which is seen without values on a small model.
"""

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import MeshwrightError
from meshwright.models.build import build_on_meta, pretrained_config
from meshwright.models.config import ModelConfig

__all__ = ["flipped", "variants_of"]

NUMBERS = {r"window": 8, r"shared_experts?$": 1, r"conv(_kernel|_size|_dim)?$": 4}
"""Pattern of the keys of numbers that may be absent, to what is put in where they are."""

POSITIONS = 24
"""Number of tokens of the sequence that operators are recorded on: more than a window, and no size of a model."""

OTHER_TASK = r"^(is_|add_cross_attention$|return_|output_|use_cache$)"
"""Pattern of the keys that make no other causal language model."""

Signature = tuple[dict[str, tuple[int, ...]], Counter[str]]


def variants_of(model: ModelConfig) -> dict[str, Any]:
    """Return the switches of a small model's config that make another model, key to the flipped value.

    Args:
        model: a new model with a small config.
    """
    values = _language(dict(model.config or {}))
    plain = _signature(model)
    if plain is None:
        return {}
    found = {}
    for key, value in _candidates(model):
        other = _signature(model.model_copy(update={"config": flipped(dict(model.config or {}), key, value)}))
        if other is not None and other != plain and values.get(key) != value:
            found[key] = value
    return found


def flipped(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a config, or one with a nested config of the language model, with another value of a key."""
    config = copy.deepcopy(config)
    _language(config)[key] = value
    return config


def _language(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config's values that is the language model's: the one with the vocabulary."""
    return next((value for value in config.values() if isinstance(value, dict) and "vocab_size" in value), config)


def _candidates(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys of switches, with their other values."""
    from transformers import PretrainedConfig

    config = pretrained_config(model, {}).get_text_config()
    general = vars(PretrainedConfig()).keys() - {"tie_word_embeddings"}
    for key, value in config.to_dict().items():
        if key in general or key.startswith("_") or re.search(OTHER_TASK, key):
            continue
        if isinstance(value, bool):
            yield key, not value
            continue
        for pattern, number in NUMBERS.items():
            if re.search(pattern, key) and (value is None or type(value) is int):
                yield from ([(key, number)] if not value else [(key, None), (key, 0)])


class _Operators(TorchDispatchMode):
    """Counts the operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _signature(model: ModelConfig) -> Signature | None:
    """Return names and shapes of parameters, and the operators of a forward; ``None`` if the model cannot be made."""
    try:
        built = build_on_meta(model, pretrained_config(model, {})).eval()
        shapes = {name: tuple(own.shape) for name, own in built.named_parameters(remove_duplicate=False)}
        names = {name for name, _ in built.named_parameters()}
        shapes |= {f"{name} (again)": () for name in shapes.keys() - names}
    except (MeshwrightError, Exception):  # whatever a config checks or computes
        return None
    ids = torch.zeros((2, POSITIONS), dtype=torch.long, device="meta")
    operators = _Operators()
    with contextlib.suppress(Exception), torch.no_grad(), operators:  # code that reads values ends here, on both sides alike
        built(input_ids=ids, use_cache=False)
    return shapes, operators.counts
