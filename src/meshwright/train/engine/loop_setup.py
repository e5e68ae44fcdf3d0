"""What a loop of one's own says of its run: its arguments as a configuration, and the model that it gives."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.models.heads import kind_named, with_outputs_of_tokens
from meshwright.train.config import RunConfig, checked_config
from meshwright.train.start.setup import RunSetup, make_setup, spec_of_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from meshwright.train.parts import RankSetup

__all__ = ["OwnLoop", "describe_loop", "fill_from", "layout_of"]

LENGTH = 4096
"""Tokens of a sequence, of which a plan counts the activations, where nothing says how long they are."""

_DTYPES = {torch.float32, torch.bfloat16, torch.float64}

_OF_FILES = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Keys of a model's config that describe its files, and not the model."""


@dataclass(frozen=True)
class OwnLoop:
    """What a loop of one's own says of its run.

    Attributes:
        config: its arguments, as a configuration, with the sequences of one data rank until it is :meth:`resolved`.
        model: the model that it gives; ``None``: that of a path.
        objective: an objective, a class or a function; ``None``: what the model is made for.
        fixed: whether all sequences have the length that the configuration says.
    """

    config: RunConfig
    model: "PreTrainedModel | None"
    objective: Any
    fixed: bool

    def resolved(self, world_size: int) -> "OwnLoop":
        """Return the same with the sequences of a step that all data ranks have together.

        Raises:
            LayoutError: the layout does not fit the number of ranks.
        """
        training = self.config.training
        each = training.global_batch_size * self.config.layout.layout().resolve(world_size).size("dp")
        together = training.model_copy(update={"global_batch_size": each})
        return replace(self, config=self.config.model_copy(update={"training": together}))

    def setup(self, world_size: int) -> RunSetup:
        """Resolve the run for a number of ranks. The model that was given is not changed."""
        described = None
        if self.model is not None:
            from meshwright.models.adapters.adapt import adapt

            model = on_meta(self.model)
            model = model if self.config.model.head is None else with_outputs_of_tokens(model)
            model.config.use_cache = False
            if self.config.adapter is not None:
                adapt(model, self.config.adapter, self.config.parallel.param_dtype)
            described = (spec_of_run(self.config, model), model)
        return make_setup(self.config, world_size, described=described, objective_given=self.objective)


def layout_of(layout: "str | Mapping[str, int | None] | Layout") -> dict[str, int | None]:
    """Return the sizes of axes, given as ``dp_shard=2,tp=2``, as a mapping or as a layout.

    Raises:
        ConfigError: the text is not of that form; names of axes are checked with the configuration.
    """
    if isinstance(layout, Layout):
        return {item.name: getattr(layout, item.name) for item in fields(Layout)}
    if not isinstance(layout, str):
        return dict(layout)
    sizes: dict[str, int | None] = {}
    for item in filter(None, (part.strip() for part in layout.split(","))):
        axis, equals, size = (part.strip() for part in item.partition("="))
        if not equals or not size.lstrip("-").isdigit():
            raise ConfigError("config.value", f"layout={layout!r}: legal are sizes of axes such as 'dp_shard=2,tp=2'")
        sizes[axis] = None if int(size) == -1 else int(size)
    return sizes


def describe_loop(
    model: "PreTrainedModel | str | Path",
    layout: "str | Mapping[str, int | None] | Layout",
    *,
    microbatches: int,
    microbatch_size: int,
    sequence_length: int | None,
    objective: Any,
    training: Mapping[str, Any],
    sections: Mapping[str, Any],
) -> OwnLoop:
    """Return what a loop says, as the configuration of a run.

    Args:
        model: a causal language model of transformers, or a directory or hub name of one.
        layout: sizes of the axes.
        microbatches: microbatches of each data rank in a step.
        microbatch_size: sequences in one.
        sequence_length: tokens of a sequence; ``None``: unknown.
        objective: what the model is trained to do; ``None``: what it is made for.
        training: further keys of the section ``training``.
        sections: further sections.

    Raises:
        ConfigError: all wrong arguments together; they are named by their keys in a configuration.
    """
    given = model if isinstance(model, nn.Module) else None
    if given is None and not isinstance(model, str | Path):
        raise ConfigError(
            "engine.model", f"Engine: model is {model!r}; legal are a model, or a directory or hub name of one, as text or Path"
        )
    parallel = dict(sections.get("parallel") or {})
    if given is not None:
        _check_model(given)
        described: dict[str, Any] = _described(given)
        if sections.get("adapter") is None:
            frozen = [name for name, parameter in given.named_parameters() if not parameter.requires_grad]
            parallel["freeze"] = [*parallel.get("freeze", ()), *frozen]
    else:
        described = {"path": str(model)}
    sizes = layout_of(layout)
    content = {
        "output": ".",
        "model": described,
        "layout": sizes,
        "data": {"corpus": "python-stdlib", "sequence_length": sequence_length or _length(given), "packing": "pad"}
        | dict(sections.get("data") or {}),
        "training": {
            "global_batch_size": microbatches * microbatch_size,
            "microbatch_size": microbatch_size,
            "on_nonfinite": "skip",
            "max_skipped": None,
            **training,
        },
        **{name: value for name, value in sections.items() if name != "data" and value is not None},
        "parallel": parallel,
        "metrics": {"jsonl": False, "tensorboard": False},
        "checkpoint": {"every_minutes": None},
    }
    return OwnLoop(checked_config(content), given, objective, sequence_length is not None)


def _check_model(model: nn.Module) -> None:
    """Refuse a module that an engine cannot run, with what is missing."""
    name, config = type(model).__name__, getattr(model, "config", None)
    inner = next((where for where in ("_orig_mod", "module") if isinstance(getattr(model, where, None), nn.Module)), None)
    if inner is not None:
        instead = "parallel={'compile': True}" if inner == "_orig_mod" else "layout="
        wrong = f"{name} wraps a model; give the model itself, its attribute {inner}, and {instead}"
    elif hasattr(model, "peft_config"):
        wrong = f"{name} has adapters of peft already; give the model without them, and adapter="
    elif not hasattr(config, "get_text_config"):
        wrong = (
            f"{name} has no config of transformers; a plain module needs an attribute `config` of a class of "
            "transformers, with its vocab_size, and a forward of input_ids and position_ids that returns an object with "
            "logits; or build a loop from the parts: meshwright.parallelize, GradSync and Pipeline (docs/own-loop.md)"
        )
    elif getattr(config, "is_encoder_decoder", False):
        wrong = f"{name} has an encoder and a decoder; legal is a decoder"
    elif isinstance(model, _pretrained()) and not _says_logits(model):
        wrong = f"{name} has no output head, so it gives no logits; legal is a model that AutoModelForCausalLM makes"
    elif dtypes := {one.dtype for one in model.parameters() if one.is_floating_point()} - _DTYPES:
        wrong = f"{name} is stored in {min(map(str, dtypes))}; legal are float32, bfloat16 and float64: model.to(...)"
    else:
        return
    raise ConfigError("engine.model", f"Engine: {wrong}")


def _pretrained() -> type[nn.Module]:
    from transformers import PreTrainedModel

    return PreTrainedModel


def _says_logits(model: "PreTrainedModel") -> bool:
    return model.get_output_embeddings() is not None or kind_named(class_name(model)) is not None


def _described(model: "PreTrainedModel") -> dict[str, Any]:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtype = next((name for name in ("float64", "float32", "bfloat16") if getattr(torch, name) in dtypes), "float32")
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in _OF_FILES}
    kernel, kind = getattr(model.config, "_attn_implementation", None), kind_named(class_name(model))
    head = None if kind is None else {"kind": kind, "num_labels": model.config.num_labels}
    return {"config": config, "dtype": dtype, "attn_implementation": kernel, "head": head}


def _length(model: "PreTrainedModel | None") -> int:
    longest = None if model is None else getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(longest, LENGTH) if isinstance(longest, int) and longest > 1 else LENGTH


def on_meta(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a copy of a model whose parameters and buffers have no values. Tied ones stay tied."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def fill_from(given: "PreTrainedModel") -> "Callable[[RankSetup, nn.Module, torch.device], None]":
    """Return the part of a trainer that gives a model the values of another, of which each rank keeps its slices.

    Args:
        given: a model with values, the same on all ranks.
    """

    def fill(run: "RankSetup", model: nn.Module, device: torch.device) -> None:
        from meshwright.distributed.pipeline.stage_parts import models_of
        from meshwright.models.adapters.adapt import initialize_adapters, without_adapters
        from meshwright.models.added_modules import initialize_added, without_added
        from meshwright.models.weights.initial_values import initialize_buffers
        from meshwright.plan.axes.pipeline.stage_plan import elsewhere, parts_of_rank

        parts, adapter = parts_of_rank(run.plan, run.mesh.rank("pp")), run.config.adapter
        for part, stages in zip(models_of(model), parts, strict=True):
            seed = run.config.training.seed
            with without_added(part):
                trained = {name for name, parameter in part.named_parameters() if parameter.requires_grad}
                with without_adapters(part):
                    initialize_buffers(part, device)
                    _copy(given, part)
                if adapter is not None:
                    for name, parameter in part.named_parameters():
                        parameter.requires_grad_(name in trained)
                    initialize_adapters(part, device, seed, adapter.path, elsewhere(run.plan, stages))
            initialize_added(part, device, seed)

    return fill


@torch.no_grad()
def _copy(source: nn.Module, model: nn.Module) -> None:
    from meshwright.models.weights.initial_values import keep_slice

    values = dict(source.named_parameters(remove_duplicate=False)) | dict(source.named_buffers(remove_duplicate=False))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        keep_slice(tensor, values[name].to(tensor.device))
