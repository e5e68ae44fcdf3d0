"""Heads of other tasks than to say the next token: numbers for a text, or for each of its tokens.

The model is that of transformers for the task, so files, exports and names are those of transformers. Its own forward takes
the last token of each row that is no padding. But a row may hold several documents, and a rank may have a part of a row. So
here its forward returns what the head makes of each token [B, S, labels], where a causal language model returns logits. Then
all that reads, slices and cuts such models holds for it too; an objective says which tokens count.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError, ModelError
from meshwright.models.model_config import ModelConfig
from meshwright.plan.given.names import inside

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "ENDINGS",
    "PEFT_TASKS",
    "auto_class",
    "causal_twin",
    "fresh_head",
    "head_of",
    "is_other_task",
    "kind_named",
    "of_other_head",
    "of_task",
    "other_labels",
    "task_of",
    "with_labels",
    "with_outputs_of_tokens",
    "without_part",
]

ENDINGS = {"sequence_classification": "ForSequenceClassification", "token_classification": "ForTokenClassification"}
"""Kind of a head to how the names of its classes of transformers end."""

HEAD = "score"
"""Name of the head in the decoders of transformers."""

PEFT_TASKS = {None: "CAUSAL_LM", "sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS"}
"""Kind of a head, ``None`` for that of a causal language model, to the name of its task in peft."""


def auto_class(kind: str) -> Any:
    """Return the class of transformers that creates and loads models with a kind of head."""
    import transformers

    return getattr(transformers, f"AutoModel{ENDINGS[kind]}")


def of_task(kind: str, config: type) -> bool:
    """Return whether transformers has models with a kind of head for a class of configs."""
    import transformers

    mappings = {
        "sequence_classification": transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "token_classification": transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    }
    return config in mappings[kind]


def other_labels(name: str, shape: Sequence[int]) -> str:
    """Return the end of a message about a parameter of another shape in the files: what to set if it is that of a head."""
    own = name.rpartition(".")[0].rpartition(".")[2] in ("score", "classifier")
    return f"; set model.head.num_labels={shape[0]}" if own else ""


def task_of(model: "nn.Module") -> str | None:
    """Return the kind of a model's head; ``None``: it says the next token, or is no model of this module."""
    return kind_named(class_name(model)) if is_other_task(model) else None


def kind_named(name: str) -> str | None:
    """Return the kind of head that a class of transformers has, by its name; ``None``: another one."""
    return next((kind for kind, ending in ENDINGS.items() if name.endswith(ending)), None)


def is_other_task(model: "nn.Module") -> bool:
    """Return whether a model was built with a head of another task."""
    return hasattr(type(model), "_meshwright_outputs_of_tokens")


def head_of(model: "nn.Module") -> str:
    """Return the name of the head of another task; empty: the model has none."""
    return HEAD if is_other_task(model) else ""


# -- config -------------------------------------------------------------------------------------------------------------------


def with_labels(config: "PretrainedConfig", wanted: ModelConfig, defaults: Mapping[str, Any]) -> "PretrainedConfig":
    """Write into a config of transformers what a head is, as ``from_pretrained`` needs it. Returns the config.

    Args:
        config: the config, as it was read or made.
        wanted: says which head; without one, nothing changes.
        defaults: of the tokenizer: ``pad_token_id``, for a config without one.

    Raises:
        ConfigError: the number of labels is unknown.
    """
    head = wanted.head
    if head is None:
        return config
    if wanted.config is None:  # a causal language model has a number of labels too, which says nothing
        described = any(map(kind_named, getattr(config, "architectures", None) or ()))
    else:
        described = not {"num_labels", "id2label"}.isdisjoint(wanted.config)
    said = {name: getattr(config, name, None) for name in ("id2label", "problem_type")} if described else {}
    task = head.task(said)
    if task is None:
        raise ConfigError(
            "model.head", "model.head.num_labels: the model does not say how many numbers its head gives; set it, or labels"
        )
    config.problem_type, count, names = task
    if count != config.num_labels or names:
        names = names or tuple(f"LABEL_{number}" for number in range(count))
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:  # without one, transformers pools no batch of several texts
        end = getattr(text, "eos_token_id", None)
        ends = end if isinstance(end, list) else [end]
        text.pad_token_id = defaults.get("pad_token_id", ends[0])
    return config


# -- the model ----------------------------------------------------------------------------------------------------------------


def with_outputs_of_tokens(model: "PreTrainedModel") -> "PreTrainedModel":
    """Let the forward of a model return what its head makes of each token. Returns the model.

    Raises:
        ModelError: it is not built as the decoders of transformers are.
    """
    import torch

    if type(getattr(model, HEAD, None)) is not torch.nn.Linear or model.base_model is model:
        raise ModelError(
            "model.head",
            f"model.head: {class_name(model)} is not a decoder with one linear layer {HEAD!r} after it; take a decoder, such "
            "as one of llama, qwen3 or gemma3_text",
        )
    model.__class__ = _with_outputs_of_tokens(type(model))  # type: ignore[arg-type]
    return model


@functools.cache
def _with_outputs_of_tokens(kind: type) -> type:
    from transformers.modeling_outputs import TokenClassifierOutput

    def forward(self: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> TokenClassifierOutput:
        """Return what the head makes of each token, as ``logits`` [batch, tokens, labels]."""
        hidden = self.base_model(input_ids=input_ids, position_ids=position_ids, **kwargs)[0]
        dropout = getattr(self, "dropout", None)  # before the head of tokens
        return TokenClassifierOutput(logits=self.score(hidden if dropout is None else dropout(hidden)))

    own = {
        "forward": forward,
        "get_output_embeddings": lambda self: self.score,
        "_meshwright_outputs_of_tokens": True,
        **{name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    return type(kind.__name__, (kind,), own)  # the name that an export writes into its config


def causal_twin(model: "nn.Module") -> str | None:
    """Return the name of the class that has the same layers and says the next token; ``None``: unknown."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = type(getattr(model, "config", None))
    return MODEL_FOR_CAUSAL_LM_MAPPING[config].__name__ if config in MODEL_FOR_CAUSAL_LM_MAPPING else None


# -- weights ------------------------------------------------------------------------------------------------------------------


def fresh_head(model: "nn.Module", files: Sequence[Path]) -> str:
    """Return the name of the head of a model if its files do not have it, such as those of a causal language model.

    Args:
        model: the model.
        files: safetensors files, whose headers are read.
    """
    from safetensors import safe_open

    head = head_of(model)
    if not head:
        return ""
    for file in files:
        with safe_open(file, framework="pt") as content:
            if any(inside(name, head) for name in content.keys()):  # noqa: SIM118 (not a dict)
                return ""
    return head


def of_other_head(model: "nn.Module", name: str) -> bool:
    """Return whether a tensor of files is not of the layers, but of the head that a model has another one in place of."""
    return is_other_task(model) and re.match(rf"{model.base_model_prefix}\.", name) is None


@contextmanager
def without_part(model: "nn.Module", name: str) -> Iterator[None]:
    """Inside, a model has no module of this name. An empty name: nothing changes."""
    part = model._modules.pop(name) if name else None
    try:
        yield
    finally:
        if name:
            model._modules[name] = part
