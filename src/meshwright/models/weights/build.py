"""Builds a model on the meta device from a ModelConfig, and then gives it values: random ones, or those of safetensors."""

import dataclasses
import difflib
import functools
import importlib.util
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError, ModelError, Problems, Refusal, described
from meshwright.models import heads
from meshwright.models.model_config import AdapterConfig, ModelConfig
from meshwright.paths import mistaken, no_directory
from meshwright.plan.axes.context.sharing import is_flash
from meshwright.plan.given.names import within

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["build_on_meta", "check_files", "legal_keys", "materialize", "pretrained_config", "weight_files"]


def pretrained_config(
    config: ModelConfig, defaults: Mapping[str, Any] | None = None, *, strict: bool = True
) -> "PretrainedConfig":
    """Return the config of transformers for a ModelConfig.

    Args:
        config: from the run's configuration.
        defaults: values for keys that a new model's config leaves out (vocabulary and special tokens of the tokenizer).
        strict: refuse keys that the family does not know. A config that was written by transformers has some such keys.

    Raises:
        ConfigError: an unknown model type or key, or values that the family refuses.
        ModelError: a pretrained model that does not exist.
    """
    found = _load_config(config) if config.config is None else _new_config(config, defaults or {}, strict)
    return heads.with_labels(found, config, defaults or {})


def _new_config(config: ModelConfig, defaults: Mapping[str, Any], strict: bool) -> "PretrainedConfig":
    from transformers import AutoConfig

    assert config.config is not None
    values = dict(config.config)
    kind = values.pop("model_type")
    if too_many := _too_many_layers(values, "model.config"):
        raise ConfigError(too_many)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), n=3)
        raise ConfigError(
            "model.config.type", f"model.config.model_type={kind!r}: unknown to transformers; near: {', '.join(near) or 'none'}"
        )
    parts = getattr(CONFIG_MAPPING[kind], "sub_configs", {})
    legal = legal_keys(CONFIG_MAPPING[kind])
    if legal and config.head is not None:  # what transformers' heads for any family read, such as classifier_dropout
        legal |= _keys_read("transformers.modeling_layers")
    problems = _unknown_keys(values, legal, "model.config", kind) if strict else Problems()
    if "text_config" in parts and isinstance(values.get("text_config", {}), dict):
        text = values.get("text_config", {})
        part = parts["text_config"]
        if part is AutoConfig:  # of any type; what the family takes by default counts for one that names none
            named = text.get("model_type", type(AutoConfig.for_model(kind).text_config).model_type)
            part = CONFIG_MAPPING.get(named, None)
        text_legal = {"model_type", "per_layer_config"} | legal_keys(part) if part else set[str]()
        problems += _unknown_keys(text, text_legal, "model.config.text_config", kind) if strict else Problems()
        values["text_config"] = _filled(text, defaults, text_legal)
        legal = _own_keys(CONFIG_MAPPING[kind])  # other keys that its files read are those of its parts, such as the vocabulary
    if problems:
        raise ConfigError(problems)
    try:
        return AutoConfig.for_model(kind, **_filled(values, defaults, legal))
    except Exception as error:  # families check their own values, with exceptions of many kinds
        raise ConfigError(
            "model.config.refused", f"model.config: {kind!r} refuses it: {' '.join(str(error).split())}"
        ) from error


MOST_LAYERS = 1024
"""Largest number of layers of a new model. Each layer is built on the meta device before anything else is known, which would
never end if the number had a digit too many."""


def _too_many_layers(values: Mapping[str, Any], where: str) -> Problems:
    problems = Problems()
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("_config"):
            problems += _too_many_layers(value, f"{where}.{key}")
        elif isinstance(value, int | float) and value > MOST_LAYERS and re.search(r"(layers?|blocks|depth)$", key):
            problems.add("model.config.layers", f"{where}.{key}={value}: legal are at most {MOST_LAYERS:,} layers")
    return problems


def _filled(values: Mapping[str, Any], defaults: Mapping[str, Any], legal: set[str]) -> dict[str, Any]:
    """Return a config's values, with defaults for the keys that it knows and leaves out."""
    return {**{key: value for key, value in defaults.items() if not legal or key in legal}, **values}


_RENAMED = {"rope_scaling": "rope_parameters", "rope_theta": "rope_parameters"}
"""Keys of earlier releases of transformers, and where their values are now."""


def _unknown_keys(values: Mapping[str, Any], legal: set[str], where: str, kind: str) -> Problems:
    problems = Problems()
    for key in values:
        if legal and key not in legal:
            near = [_RENAMED[key]] if _RENAMED.get(key) in legal else difflib.get_close_matches(key, sorted(legal), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.add("model.config.unknown_key", f"{where}.{key}: unknown key of {kind!r}{hint}")
    return problems


def _load_config(config: ModelConfig) -> "PretrainedConfig":
    from transformers import AutoConfig

    assert config.path is not None
    if absent := no_directory("model.path", config.path):
        raise ModelError(absent)
    if config.local is not None and not (config.local / "config.json").is_file():
        raise ModelError(
            "model.path", f"model.path={config.path!r}: the directory has no config.json{mistaken(config.path, 'model')}"
        )
    try:
        return AutoConfig.from_pretrained(config.local or config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, TypeError) as error:  # TypeError: JSON that is no object, for transformers 5.17
        raise ModelError("model.path", f"model.path={config.path!r}: {str(error).splitlines()[0]}") from error


def legal_keys(kind: type) -> set[str]:
    """Return the keys that a config class knows.

    These are its fields with those of every config, their other names, and all keys that its family reads.

    Some published configs have keys that are no field of their class but that the model reads, such as head_dim in those of
    qwen3_moe.
    """
    return _own_keys(kind) | _keys_read(kind.__module__)


def _own_keys(kind: type) -> set[str]:
    """Return the fields of a config class, and their other names."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    fields |= set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs", "args"}  # type: ignore[misc]
    return fields | set(getattr(kind, "attribute_map", {}))


@functools.cache
def _keys_read(module: str) -> frozenset[str]:
    """Return the keys that the source files of a config class and of its model read from a config."""
    keys: set[str] = set()
    for name in (module, module.replace("configuration_", "modeling_")):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).suffix == ".py":
            text = Path(spec.origin).read_text(encoding="utf-8")
            for pair in re.findall(
                r"\bconfig\.([a-z]\w*)\b(?!\()|(?:getattr\(\w*config, |kwargs\.(?:get|pop)\()\"(\w+)\"", text
            ):
                keys.update(key for key in pair if key)
    return frozenset(keys)


def build_on_meta(
    config: ModelConfig,
    hf_config: "PretrainedConfig",
    *,
    adapter: AdapterConfig | None = None,
    param_dtype: str | None = None,
    planning: bool = False,
) -> "PreTrainedModel":
    """Build the model of a config on the meta device: that of its head, or a causal language model, or what its family names.

    Args:
        config: what a run says of its model.
        hf_config: the config of transformers.
        adapter: the adapter that the model gets (:func:`~meshwright.models.adapters.adapt.adapt`); ``None``: none.
        param_dtype: dtype of compute, in which what an adapter freezes is stored.
        planning: whether the model will not run here. Then the package of its flash kernel may be absent.

    Raises:
        ModelError: there is no such model, or the family refuses the config.
    """
    import torch

    from meshwright.models import _transformers_compat
    from meshwright.models.adapters.adapt import adapt
    from meshwright.models.families.listed import family_named

    _transformers_compat.check()
    keywords: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "trust_remote_code": config.trust_remote_code}
    for name in ("attn_implementation", "experts_implementation"):
        if getattr(config, name) is not None:
            keywords[name] = getattr(config, name)
    kernel = config.attn_implementation
    auto_class = heads.auto_class(config.head.kind) if config.head else family_named(hf_config.model_type).auto_class()
    try:
        with torch.device("meta"):
            try:
                model = auto_class.from_config(hf_config, **keywords)
            except ImportError:
                if not planning or kernel is None or not is_flash(kernel):
                    raise
                model = auto_class.from_config(hf_config, **{**keywords, "attn_implementation": None})
                _transformers_compat.set_attention(model, kernel)
    except Exception as error:  # transformers raises errors of many kinds here, all about what the config asks for
        raise ModelError("model.build", f"model: {described(error)}") from error
    model = heads.with_outputs_of_tokens(model) if config.head else model
    model.config.use_cache = False  # training never reads the key/value cache
    _transformers_compat.keep_in_fp32(model)
    _transformers_compat.keep_scale(model)
    if config.dtype == "float64":  # an audit computes in it; some constructors store fp32, whatever the config says
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    if adapter is not None:
        adapt(model, adapter, param_dtype)
    return model


def weight_files(config: ModelConfig) -> list[Path]:
    """Return the safetensors files of a pretrained model. Those on the hub are downloaded first.

    Raises:
        ModelError: there are none, or the index names one that is missing.
    """
    folder = config.local
    if folder is None:
        from huggingface_hub import snapshot_download

        assert config.path is not None
        try:
            folder = Path(snapshot_download(config.path, allow_patterns=["*.safetensors", "*.json"]))
        except OSError as error:
            raise ModelError("model.path", f"model.path={config.path!r}: {str(error).splitlines()[0]}") from error
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError("model.weights.files", f"{index}: not an index of safetensors: {described(error)}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError("model.weights.files", f"{folder}: the index names files that are missing: {', '.join(missing)}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ModelError(
            "model.weights.files",
            f"{folder}: has neither model.safetensors nor model.safetensors.index.json (no pickles are read)",
        )
    return [single]


def check_files(files: list[Path], model: "nn.Module") -> None:
    """Read the headers of safetensors files, to check that the files are complete and that shapes match.

    Raises:
        ModelError: names each truncated file, and each parameter whose shape differs.
    """
    from safetensors import SafetensorError, safe_open

    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = Problems()
    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 (not a dict)
                    shape = tuple(content.get_slice(name).get_shape())
                    if shapes.get(name, shape) != shape:
                        said = f"{file.name}: {name} has shape {shape}, the model has {shapes[name]}"
                        problems.add("model.weights.mismatch", f"{said}{heads.other_labels(name, shape)}")
        except SafetensorError as error:
            problems.add("model.weights.files", f"{file}: truncated or not safetensors: {error}")
    if problems:
        raise ModelError(problems)


def materialize(
    model: "PreTrainedModel",
    config: ModelConfig,
    device: "torch.device",
    seed: int,
    units: tuple[str, ...] = (),
    elsewhere: tuple[str, ...] = (),
    adapter: AdapterConfig | None = None,
) -> None:
    """Give values to a meta model, which may be parallelized already.

    For a pretrained model, each rank reads only its own slices. A new model gets random values, the same on every layout; and
    so does a head that the files of a pretrained model do not have.

    Args:
        model: the model, on the meta device; its parameters may be DTensors.
        config: says whether the model is pretrained, and where its files are.
        device: the device of the shards.
        seed: seed of the values of a new model.
        units: names of the layers; initializing them one by one bounds memory.
        elsewhere: names of modules that the files have, and the model has not, because it is a stage of a pipeline.
        adapter: the adapter that the model has; ``None``: none.

    Raises:
        ModelError: parameters that are missing in the files, have another shape there, or are not in the model.
    """
    from meshwright.models import _transformers_compat
    from meshwright.models.weights.initial_values import initialize
    from meshwright.models.weights.packed import receiving

    if adapter is not None:
        from meshwright.models.adapters.adapt import initialize_adapters, without_adapters

        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        with without_adapters(model):
            materialize(model, config, device, seed, units, elsewhere)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)  # what is read may be a new parameter
        initialize_adapters(model, device, seed, adapter.path, elsewhere)
        return
    if config.path is None:
        initialize(model, device, seed, units)
        return
    files = weight_files(config)
    fresh = heads.fresh_head(model, files)
    with heads.without_part(model, fresh), receiving(model, device):
        report = _transformers_compat.load_sharded(model, [str(file) for file in files], device)
    if fresh:
        initialize(model, device, seed, part=fresh)
    problems = [
        Refusal("model.weights.mismatch", f"{name}: not in the files") for name in report.missing if not within(name, elsewhere)
    ]
    said = "{}: shape {} in the files, {} in the model{}"
    problems += [
        Refusal("model.weights.mismatch", said.format(*one, heads.other_labels(one[0], one[1]))) for one in report.mismatched
    ]
    problems += [Refusal("model.weights.mismatch", line) for line in report.errors]
    unknown = [name for name in report.unexpected if not within(name, elsewhere)]
    unknown = [name for name in unknown if not (fresh and heads.of_other_head(model, name))]
    problems += [
        Refusal("model.weights.mismatch", f"{name}: in the files, but the model has no such parameter") for name in unknown
    ]
    if problems:
        raise ModelError(
            "model.weights.mismatch", "\n  ".join([f"model.path={config.path!r} does not fit {class_name(model)}:", *problems])
        )
