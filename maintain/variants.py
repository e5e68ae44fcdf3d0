"""Variants of a model type: each switch of its config class that makes another model when it is flipped.

A released model seldom has the default config of its type. A switch is a boolean of the config (norms of queries and keys,
biases, tied or not), or a number that may be absent (windows, shared experts, convolutions). A switch counts if the flipped
model has other names, shapes, operators or attentions, which is seen without values on a small model.
"""

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.models.model_config import ModelConfig
from meshwright.models.reading.context.trace_context import trace_attentions
from meshwright.models.reading.tracing import Inputs, Operator, Tracer, traced
from meshwright.models.specs.registry import spec_of
from meshwright.models.weights.build import build_on_meta, pretrained_config
from meshwright.plan.given.attentions import AttentionFacts

__all__ = ["flipped", "parsed", "variants_of", "written"]

NUMBERS = {r"window": (8, None), r"shared_experts?$": (1, 0), r"conv(_kernel|_size|_dim)?$": (4, 0)}
"""Pattern of the keys of numbers that may be absent, to a value that is put in where they are, and one that removes them."""

OTHER_TASK = r"^(is_|add_cross_attention$|return_|output_|use_cache$)"
"""Pattern of the keys that make no other causal language model."""

Signature = tuple[dict[str, tuple[int, ...]], Counter[str], Sequence[AttentionFacts]]


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
        other = _signature(model.model_copy(update={"config": flipped(model.config or {}, {key: value})}))
        runs = other is not None and bool(other[1]) >= bool(plain[1])
        if runs and other != plain and values.get(key) != value:
            found[key] = value
    return found


def written(model_type: str, key: str, value: Any) -> str:
    """Return the name of a variant, such as ``glm4_moe use_qk_norm=true``."""
    return f"{model_type} {key}={json.dumps(value)}"


def parsed(name: str) -> tuple[str, dict[str, Any]]:
    """Return model type and switch of a variant's name; the name of a model type has no switch."""
    model_type, _, switch = name.partition(" ")
    key, _, value = switch.partition("=")
    return model_type, {key: json.loads(value)} if switch else {}


def flipped(config: Mapping[str, Any], switch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose language model, which may have a config of its own inside, has other values of some keys."""
    other = copy.deepcopy(dict(config))
    _language(other).update(switch)
    return other


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
        for pattern, (there, absent) in NUMBERS.items():
            if re.search(pattern, key) and (value is None or type(value) is int):
                yield key, absent if value else there


class _Operators(Tracer):
    """Counts the operators of a forward."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.counts: Counter[str] = Counter()

    def operator(self, operator: Operator) -> None:
        self.counts[str(operator.function)] += 1


def _signature(model: ModelConfig) -> Signature | None:
    """Return names and shapes of parameters, the operators of a forward, and how it attends.

    ``None``: transformers or Meshwright cannot make the model. Operators are empty if it cannot be called without values.
    """
    try:
        built = build_on_meta(model, pretrained_config(model, {}))
        experts = spec_of(built).experts
    except Exception:  # whatever a config checks or computes
        return None
    distinct = {name for name, _ in built.named_parameters()}
    shapes = {
        name if name in distinct else f"{name} (tied)": tuple(own.shape)
        for name, own in built.named_parameters(remove_duplicate=False)
    }
    counted, _ = traced(built, experts, _Operators)
    return shapes, counted.counts if counted else Counter(), trace_attentions(built, experts).rows
