"""The source of a model: whether the model can be trained here, and what an export must restore from it."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from meshwright.errors import ModelError, Refusal, described
from meshwright.models.heads import ENDINGS, of_task
from meshwright.models.model_config import ModelConfig
from meshwright.paths import mistaken, no_directory

__all__ = ["PLACES", "facts", "fingerprint", "refuse_untrainable"]

ENDS = 2**20
"""Bytes of each end of a file that :func:`fingerprint` reads."""

PLACE, PLACES = 4096, 512
"""Bytes of a place within a file, and how many of them tell one model from another that was exported to the same path."""

_WHOLE = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt|h5|msgpack|gguf|npz)")
_NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
_SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_CONVERT = (
    "write it anew as safetensors: AutoModelForCausalLM.from_pretrained({path!r}).save_pretrained(another directory), and set "
    "model.path to that"
)


def refuse_untrainable(config: ModelConfig) -> None:
    """Refuse a run whose model cannot be trained, before anything is built or read. This is the only place that decides it.

    Args:
        config: from the run's configuration: a directory, a name on the hub (its files are listed if the hub can be reached),
            or the config of a new model.

    Raises:
        ModelError: there is no such directory, and no such name on the hub; or what the model is instead, and what to do.
    """
    if config.path is not None and (absent := no_directory("model.path", config.path)):
        raise ModelError(absent)
    where = "model.config" if config.path is None else f"model.path={config.path!r}"
    problem = None if config.path is None else _files_problem(config.path, _files(config))
    problem = problem or _quantized_problem(_declared(config))
    problem = problem or _kind_problem(_declared(config), config)
    if problem:
        raise ModelError(problem.within(f"{where}: "))


def _files(config: ModelConfig) -> frozenset[str]:
    """Return the names of the files at the top of a model's directory; empty if they are unknown."""
    if config.local is not None:
        return frozenset(path.name for path in config.local.iterdir())
    assert config.path is not None
    from huggingface_hub import list_repo_files, snapshot_download

    try:
        return frozenset(list_repo_files(config.path))
    except Exception:  # no network, no such name, or no access: the code that reads the config says which
        try:
            cached = Path(snapshot_download(config.path, local_files_only=True))
            return frozenset(path.name for path in cached.iterdir())
        except Exception:
            return frozenset()


def _files_problem(path: str, names: frozenset[str]) -> Refusal | None:
    if names.intersection(_WHOLE):
        return None
    if "adapter_config.json" in names:
        return Refusal(
            "model.path",
            f"holds an adapter (adapter_config.json), no whole model{mistaken(path, 'model')}; or merge it into its base model "
            "with peft's merge_and_unload(), save that, and set model.path to it",
        )
    pickled = sorted(name for name in names if _PICKLED.fullmatch(name) and name not in _NO_WEIGHTS)
    if pickled:
        shown = ", ".join(pickled[:3]) + (", ..." if len(pickled) > 3 else "")
        return Refusal(
            "model.weights.pickle",
            f"its weights are in {shown}, and only safetensors are read (no pickles are read: they can run code); "
            + (_CONVERT.format(path=path)),
        )
    return None


def _declared(config: ModelConfig) -> dict[str, Any]:
    """Return the config as it is written; empty if it cannot be read. The code that loads it reports that."""
    if config.config is not None:
        return config.config
    from transformers import PretrainedConfig

    try:
        values, _ = PretrainedConfig.get_config_dict(str(config.local or config.path))
    except Exception:
        return {}
    return values if isinstance(values, dict) else {}


def _quantized_problem(declared: dict[str, Any]) -> Refusal | None:
    """Return why quantized weights cannot be trained on; ``None`` if a config declares none."""
    declaration = declared.get("quantization_config")
    if not declaration:
        return None
    method = str(declaration.get("quant_method", "unknown")) if isinstance(declaration, dict) else "unknown"
    why = "are not read"
    if method == "bitsandbytes":  # github.com/bitsandbytes-foundation/bitsandbytes issue 1945
        why = "lose their scales and some of their bytes under FSDP2, without an error"
    return Refusal(
        "model.weights.quantized",
        f"its weights are quantized ({method}), and {why}; take the model that they were made of, and for frozen weights in 4 "
        "bits set adapter.base: nf4",
    )


_GENERATES = ("CausalLM", "ConditionalGeneration", "BlockDiffusion")


def _kind_problem(declared: dict[str, Any], wanted: ModelConfig) -> Refusal | None:
    """Return why a config does not describe a decoder, or one with another head than is wanted; ``None`` if it does."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers import MODEL_FOR_MASKED_LM_MAPPING as MASKED

    from meshwright.models.families.listed import FAMILIES

    kind, architectures = declared.get("model_type"), declared.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    task = re.search(r"For([A-Z]\w+)$", named) if isinstance(named, str) else None
    head = "" if wanted.head is None else ENDINGS[wanted.head.kind]
    if task is not None and not task.group(1).startswith(_GENERATES) and task.group() != head:
        own = next((name for name, ending in ENDINGS.items() if ending == task.group()), None)
        remedy = f"set model.head={own} to train it, or take" if own and not head else "take"
        return Refusal(
            "model.kind",
            f"is {_article(str(named))}, which has the head of another task; {remedy} the base model that it was made of, or "
            "another model for causal language modeling",
        )
    known = {family.name for family in FAMILIES}
    if head and kind in known:
        return Refusal("model.head", f"model.head={head}: a model of {kind} has no such head; leave it out")
    custom = wanted.trust_remote_code and f"AutoModel{head or 'ForCausalLM'}" in (declared.get("auto_map") or {})
    if not isinstance(kind, str) or custom or kind in known or kind not in CONFIG_MAPPING:
        return None
    of = CONFIG_MAPPING[kind]
    if declared.get("is_encoder_decoder", getattr(of, "is_encoder_decoder", False)):
        return Refusal(
            "model.encoder",
            f"is an encoder-decoder ({kind}); Meshwright trains models that continue a text: take a decoder, such as one of "
            "llama, qwen3 or gemma3_text",
        )
    sees_all = of in MASKED and not declared.get("is_decoder", getattr(of, "is_decoder", of in MODEL_FOR_CAUSAL_LM_MAPPING))
    if sees_all and wanted.head is not None:
        return Refusal(
            "model.encoder",
            f"is an encoder ({kind}), on which model.head={wanted.head.kind} is not there yet: its attention sees all tokens "
            "of a row, so it needs a mask for padding and for other documents, which decoders do without; and its head reads "
            "the first token by layers of its own, not the last one by 'score'; take a decoder, such as one of llama, qwen3 or "
            "gemma3_text",
        )
    if of not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return Refusal(
            "model.kind",
            f"is a model of images and text ({kind}); Meshwright trains on text alone: save its language model with its own "
            "config (the text_config), and take that"
            if of in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            else f"is of a kind ({kind}) that has no head to generate text; take a model for causal language modeling",
        )
    if sees_all:
        remedy = "set is_decoder: true for a new model with causal attention" if wanted.path is None else "take a decoder"
        return Refusal(
            "model.encoder",
            f"is an encoder ({kind}), whose attention sees the tokens after each; Meshwright trains decoders: {remedy}",
        )
    if wanted.head is not None and not of_task(wanted.head.kind, of):
        return Refusal("model.head", f"model.head={wanted.head.kind}: transformers has no {head[3:]} of {kind}; leave it out")
    return None


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"


# -- what an export restores --------------------------------------------------------------------------------------------------


def facts(files: list[Path]) -> dict[str, Any]:
    """Return what training does not keep of a pretrained model: its generation config, and the dtypes of its files.

    Args:
        files: its safetensors files, whose headers are read. Its generation_config.json is in the same directory.

    Returns:
        Plain values for JSON: ``generation_config`` as it is written, or ``None``; ``dtype``, that of most elements; and
            ``other_dtypes``, name to dtype of the tensors with another one.

    Raises:
        ModelError: generation_config.json cannot be read, or is no mapping.
    """
    from safetensors import safe_open

    dtypes: dict[str, str] = {}
    elements: Counter[str] = Counter()
    for file in files:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                part = content.get_slice(name)
                dtype = _SAFETENSORS.get(part.get_dtype())
                if dtype is not None:
                    size = 1
                    for length in part.get_shape():
                        size *= length
                    dtypes[name] = dtype
                    elements[dtype] += size
    most = elements.most_common(1)[0][0] if elements else None
    others = {name: dtype for name, dtype in dtypes.items() if dtype != most}
    return {"generation_config": _generation(files[0].parent), "dtype": most, "other_dtypes": others}


def fingerprint(files: list[Path], *, within: int = 0) -> str:
    """Return a digest of weights: of the names, sizes and both ends of their files, so that large ones take no time.

    Args:
        files: the files.
        within: how many places between the ends of each are read too. A tensor that has more than this share of a file is seen.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            digest.update(content.read(ENDS))
            content.seek(max(0, size - ENDS))
            digest.update(content.read(ENDS))
            for place in range(within):
                content.seek(size * (2 * place + 1) // (2 * within))
                digest.update(content.read(PLACE))
    return digest.hexdigest()[:32]


def _generation(folder: Path) -> dict[str, Any] | None:
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError("model.path", f"{path}: cannot be read: {described(error)}") from error
    if not isinstance(values, dict):
        raise ModelError("model.path", f"{path}: must be a mapping, found {type(values).__name__}")
    return values
