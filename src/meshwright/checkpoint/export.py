"""Exports a checkpoint as a Hugging Face directory, and generates text with such a directory."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.beside_model import read_average, write_added
from meshwright.checkpoint.directory import damage, read_meta
from meshwright.checkpoint.manager import check_base, check_writable
from meshwright.checkpoint.prompts import encoded, ends
from meshwright.device import claim, default_kind
from meshwright.errors import CheckpointError, ModelError, Refusal, described
from meshwright.files import honour_umask, put_in_place, save_tensors
from meshwright.models.weights.bars import one_bar
from meshwright.paths import mistaken, no_directory

__all__ = ["check_target", "export_checkpoint", "generate", "needed_paths"]

MARK = ".meshwright-export"
"""A file in every export, which names its checkpoint."""

_WRITTEN = frozenset(
    {
        *("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
        *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    }
)
"""Files of exports, beside the weights. By them, an export of a version that wrote no mark is known."""


def _unmarked(folder: Path) -> bool:
    """Whether a directory has what an export has, and nothing else."""
    if not folder.is_dir():
        return False
    entries = {entry.name: entry for entry in folder.iterdir()}
    known = set(_WRITTEN)
    if "adapter_config.json" in entries:
        known.add("README.md")  # of peft
    weights = {name for name in entries if name.endswith(".safetensors")}
    whole = bool(weights) and ("config.json" in entries or "adapter_config.json" in entries)
    return whole and entries.keys() <= known | weights and all(entry.is_file() for entry in entries.values())


def check_target(directory: Path, *, overwrite: bool, needed: Mapping[str, str | Path | None] | None = None) -> None:
    """Refuse a directory that no export may take the place of.

    Args:
        directory: directory to write. It may be absent or empty.
        overwrite: whether it may be an earlier export.
        needed: what holds a path, such as ``model.path``, to the path: directories that must stay. Names of the hub and what
            does not exist are passed over.

    Raises:
        CheckpointError: it holds something else, or an export that must stay.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    mark = directory / MARK
    place = directory.resolve()
    for knob, path in (needed or {}).items():
        kept = None if path is None else Path(path).expanduser().resolve()
        if kept is None or not kept.exists():
            continue
        if kept.is_relative_to(place) or (place.is_relative_to(kept) and not mark.is_file()):
            where = "is" if kept == place else "contains" if kept.is_relative_to(place) else "is inside"
            raise CheckpointError(
                "export.directory",
                f"{directory}: {where} {knob}={str(path)!r}, which the run needs to resume; choose another directory",
            )
    if not mark.is_file() and not _unmarked(directory):
        raise CheckpointError(
            "export.directory", f"{directory}: has files that are no export of Meshwright; choose another directory"
        )
    if not overwrite:
        of = f" of {mark.read_text().strip()}" if mark.is_file() else ""
        raise CheckpointError("export.exists", f"{directory}: is an export{of} already; --overwrite replaces it")


def needed_paths(config: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the knobs of a run that may name directories which it reads when it resumes, with their values.

    Args:
        config: the configuration of the run, as plain data.
    """
    return {f"{section}.path": (config.get(section) or {}).get("path") for section in ("model", "adapter")}


def export_checkpoint(
    checkpoint: Path,
    directory: Path,
    dtype: str | None = None,
    *,
    adapter: bool = False,
    average: str = "",
    overwrite: bool = False,
) -> None:
    """Write a checkpoint as a directory that ``from_pretrained`` of transformers loads.

    An adapter is merged: it is added in fp32 to the weights as their files have them, and the sum is rounded once.

    The directory has safetensors under the names of the hub, each tied weight once, the config, and the tokenizer if there is
    one; what an objective added to the model is in ``objective/objective.safetensors``. This process holds the whole model in
    memory once. The directory appears when it is complete; until then an earlier
    export stays.

    Args:
        checkpoint: a complete checkpoint of a run; it may have been copied elsewhere.
        directory: directory to write. It must not exist, or be empty; with ``overwrite`` it may be an earlier export.
        dtype: dtype of the exported weights. ``None``: ``export_dtype`` of the run; if that is not set, the dtype of the files
            that the run began with, for each tensor its own if there were several; for a new model, the dtype of the stored
            parameters.
        adapter: write the adapter alone, as a directory that peft loads.
        average: name of a callback whose moving averages are written, in place of what was trained: ``ema``.
        overwrite: replace an earlier export. Other files are never replaced.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or the directory has files already, is one that the run
            needs to resume, or cannot be written.
    """
    import torch

    from meshwright.checkpoint.state import read_model
    from meshwright.data.tokenizer import DEFAULT_CHAT_TEMPLATE, load_tokenizer
    from meshwright.models.adapters.adapt import initialize_adapters, merge, without_adapters
    from meshwright.models.adapters.adapter_files import write_adapter
    from meshwright.models.model_config import AdapterConfig, ModelConfig
    from meshwright.models.weights.build import build_on_meta, materialize, pretrained_config, weight_files
    from meshwright.models.weights.initial_values import initialize_buffers
    from meshwright.user_code import import_modules

    meta = read_meta(checkpoint)
    if damages := damage(checkpoint):
        raise CheckpointError([Refusal("checkpoint.damaged", f"{checkpoint}: is damaged: {line}") for line in damages])
    place = directory.resolve()  # what a link names is written, and the link stays
    temporary, replaced = (place.with_name(f".{place.name}.{kind}") for kind in ("tmp", "old"))
    if replaced.is_dir() and not place.exists():  # an export was killed between its two renames
        replaced.rename(place)
    check_target(directory, overwrite=overwrite, needed={**needed_paths(meta["config"]), "CHECKPOINT": checkpoint})
    check_writable(place.parent)
    import_modules(meta["config"].get("imports", []))  # the run's imports, which may define the model
    config = ModelConfig.model_validate(meta["config"]["model"])
    section = meta["config"].get("adapter")
    if adapter and section is None:
        raise CheckpointError(
            "export.adapter", f"{checkpoint}: its run trained the whole model, and has no adapter; leave --adapter out"
        )
    if adapter and dtype is not None:
        raise CheckpointError(
            "export.dtype", f"--dtype={dtype}: an adapter is written as it was trained; leave it out, or export --merged"
        )
    adapted = None if section is None else AdapterConfig.model_validate({**section, "path": None, "base": None})
    base = config if adapted is not None and config.path is not None else None
    words = checkpoint / "tokenizer"  # a loop of one's own may have none
    tokenizer = load_tokenizer(words, config.trust_remote_code) if words.is_dir() else None
    if not config.trust_remote_code:  # what was trained, even if model.path changed since
        config = config.model_copy(update={"path": None, "config": {**meta["model_config"], "use_cache": True}})
    source = meta.get("source", {})
    model = build_on_meta(config, pretrained_config(config, strict=False), adapter=adapted)
    if base is not None:
        check_base(checkpoint, source, weight_files(base))
        materialize(model, base, torch.device("cpu"), 0, adapter=adapted)
    elif adapted is None:
        initialize_buffers(model, torch.device("cpu"))
    else:
        with without_adapters(model):
            initialize_buffers(model, torch.device("cpu"))
        initialize_adapters(model, torch.device("cpu"), 0)
    read_model(checkpoint, model, trained=base is not None)
    if average:
        read_average(checkpoint, model, average)
    if adapted is not None and not adapter:
        merge(model)
    dtype = dtype or meta["config"].get("export_dtype")
    exceptions: dict[str, str] = {}
    if dtype is None:
        dtype, exceptions = source.get("dtype"), source.get("other_dtypes", {})
    if dtype is not None and not exceptions and not adapter:
        model = model.to(getattr(torch, dtype))
    model.config.use_cache = True
    generation = source.get("generation_config") if config.head is None else None
    learned_chats = source.get("data", "chat") == "chat"
    if tokenizer is not None and not learned_chats and tokenizer.chat_template == DEFAULT_CHAT_TEMPLATE:
        tokenizer.chat_template = None  # it came with a tokenizer that was trained here, and the model has never seen a chat
    if tokenizer is not None and generation is None and learned_chats and config.head is None:
        model.generation_config.eos_token_id = ends(tokenizer, model.generation_config.eos_token_id)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        if adapter:
            assert adapted is not None
            temporary.mkdir()
            write_adapter(model, adapted, None if base is None else base.path, temporary)
        else:
            with one_bar("writing weights"):
                model.save_pretrained(temporary)
            if exceptions:
                _cast_files(temporary, str(dtype), exceptions)
        if generation is not None and not adapter:  # as it was written: transformers would refuse or drop some keys
            (temporary / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        write_added(checkpoint, temporary, average)
        (temporary / MARK).write_text(f"{checkpoint.resolve()}\n")
        honour_umask(temporary)
        put_in_place(temporary, place, replaced)
    except OSError as error:
        raise CheckpointError("export.unwritten", f"{directory}: not written: {described(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _cast_files(folder: Path, dtype: str, exceptions: Mapping[str, str]) -> None:
    """Cast the tensors of safetensors files to the dtypes of the original files. Only one file is in memory at once.

    Args:
        folder: the export, in the dtype of the stored parameters.
        dtype: dtype of all tensors except the exceptions.
        exceptions: tensor name, as in the files, to dtype.
    """
    import torch
    from safetensors.torch import load_file

    total = 0
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.to(getattr(torch, exceptions.get(name, dtype)))
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_tensors(tensors, file)
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    if index.is_file():
        content = json.loads(index.read_text())
        content["metadata"]["total_size"] = total
        index.write_text(json.dumps(content, indent=2) + "\n")
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": dtype}, indent=2) + "\n")


def generate(
    directory: Path,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float | None = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    trust_remote_code: bool = False,
    steps: int | None = None,
    show: Callable[[str], None] | None = None,
    raw: bool = False,
    adapter: Path | None = None,
    warn: Callable[[str], None] | None = None,
) -> str:
    """Continue a prompt with the model of a Hugging Face directory, in the way of its family; by default token by token.

    If its tokenizer has a chat template, the prompt is a user's turn, and the model answers it.

    Args:
        directory: a directory that :func:`export_checkpoint` wrote, or any model that Meshwright trains.
        prompt: the text.
        max_new_tokens: largest number of new tokens.
        temperature: 0 takes the most likely token each time. ``None``: the family's default, which is 0, except for a model
            that denoises, which has to sample.
        top_p: nucleus of the distribution to sample from.
        seed: seed of sampling.
        trust_remote_code: run model code that comes with the directory.
        steps: largest number of denoising steps of a canvas; for block diffusion.
        show: is called with a line about each denoising step; for block diffusion.
        raw: continue the prompt as it is, even if there is a chat template.
        adapter: a directory of peft, whose adapter the model gets.
        warn: is called with a line if the text may become longer than the model's positions.

    Returns:
        The text after the prompt: its continuation or, on a new line, the answer.

    Raises:
        ModelError: the directory has no model, or the chat template refuses the prompt.
        ConfigError: a setting that this kind of model does not use.
    """
    from transformers import AutoConfig, AutoTokenizer

    from meshwright.models.adapters.adapter_files import refuse_no_adapter, with_adapter
    from meshwright.models.families.family import Sampling
    from meshwright.models.families.listed import family_named
    from meshwright.models.heads import kind_named

    if absent := no_directory("DIRECTORY", str(directory), hub=False):
        raise ModelError(absent)
    if not (directory / "config.json").is_file():
        instead = mistaken(directory, "model", "DIRECTORY", "--adapter")
        raise ModelError("generate.directory", f"{directory}: holds no model (no config.json){instead}")
    if adapter is not None:
        refuse_no_adapter(adapter)
    try:
        with one_bar("reading weights"):
            config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
            if kind := next(filter(None, map(kind_named, config.architectures or ())), None):
                raise ValueError(f"holds a model of {kind}, which generates no text")
            family = family_named(config.model_type)
            model = family.auto_class().from_pretrained(directory, dtype="auto", trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError("generate.directory", f"{directory}: {str(error).splitlines()[0]}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            "generate.directory", f"{directory}: holds no tokenizer that can be read: {str(error).splitlines()[0]}"
        ) from error
    if adapter is not None:
        model = with_adapter(model, adapter)
    device = claim(default_kind(), 0)
    model.to(device).eval()
    asked, inputs = encoded(tokenizer, prompt, raw=raw)
    before = "\n" if asked else ""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    tokens = inputs["input_ids"].shape[1] + max_new_tokens
    if warn is not None and isinstance(longest, int) and 0 < longest < tokens:
        warn(f"up to {tokens} tokens, beyond the {longest} positions of the model: what it says there may make no sense")
    if asked:
        model.generation_config.eos_token_id = ends(tokenizer, model.generation_config.eos_token_id)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed, steps, show)
    return before + family.generate(model, tokenizer, inputs.to(device), sampling)
