"""What one process does before the others train: check everything that can be checked, then tokenizer and tokens.

The launcher does it before it starts workers; under torchrun or Slurm rank 0 does.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.manager import check_same_model, check_writable, latest, read_meta
from meshwright.distributed.parallelizer import check_supported
from meshwright.errors import CheckpointError, ConfigError, DataError, MeshwrightError
from meshwright.plan.price import totals
from meshwright.train.config import RunConfig
from meshwright.train.setup import Paths, RunSetup, make_setup, together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from meshwright.data.loader import TrainLoader
    from meshwright.data.store import TokenStore

__all__ = ["checkpoint_to_resume", "load_run_tokenizer", "prepare_run"]


def checkpoint_to_resume(config: RunConfig) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means.

    Raises:
        CheckpointError: a path without a complete checkpoint, or of an earlier step than the output directory has; or
            ``never`` in a directory that has some.
    """
    newest = latest(Paths(config.directory).checkpoints)
    wish = config.checkpoint.resume
    if wish == "auto":
        return newest
    if wish == "never":
        if newest is not None:
            raise CheckpointError(
                f"checkpoint.resume=never, but {config.output} holds {newest.name}; choose another output, or resume=auto"
            )
        return None
    path = Path(wish).expanduser()
    meta = read_meta(path)
    if newest is not None and read_meta(newest)["step"] > meta["step"]:
        # What is saved from here on would be older than what is there: it would be dropped, and not resumed from.
        raise CheckpointError(
            f"checkpoint.resume={wish}: {config.output} holds the later {newest.name}; choose another output, resume=auto, or "
            f"remove what is later than step {meta['step']}"
        )
    return path


def prepare_run(config: RunConfig, world_size: int) -> "tuple[RunSetup, PreTrainedTokenizerBase, TokenStore]":
    """Check a run and prepare what its workers read.

    Returns:
        The resolved run, its tokenizer and its tokens. The tokenizer is saved with the run.

    Raises:
        MeshwrightError: everything that would fail later and can be known now.
    """
    from meshwright.data.store import prepare
    from meshwright.models.build import check_files, weight_files

    # Before the tokenizer: layout, model and plan need only the size of its vocabulary, and are quicker to check.
    draft = _checked_draft(config, world_size)
    paths = Paths(config.directory)
    check_writable(paths.root, _checkpoint_bytes(draft, config))
    resume = checkpoint_to_resume(config)
    if resume is not None:
        check_same_model(resume, {row.name: row.shape for row in draft.plan.parameters})
    elif config.model.path is not None:
        check_files(weight_files(config.model), draft.model)

    tokenizer = _tokenizer(config, paths)
    setup = make_setup(config, world_size, tokenizer)
    tokenizer.save_pretrained(paths.tokenizer)
    store = prepare(config.data, tokenizer, paths.tokens, config.training.seed)
    if store.index.train_documents == 0:
        raise DataError("data: no documents left to train on")
    if resume is not None:
        # The loader's own check, here rather than on every rank.
        _loader(config, store).load_state_dict(read_meta(resume)["loader"])
    paths.config.write_text(config.to_yaml())
    return setup, tokenizer, store


def _checked_draft(config: RunConfig, world_size: int) -> RunSetup:
    """The resolved run, once data files, extras, layout, model and plan are all found good; all problems in one report."""
    from importlib.util import find_spec

    found: list[MeshwrightError] = []
    if problems := config.data.problems():
        found.append(DataError(problems))
    if problems := [
        f"metrics.{name}={getattr(config.metrics, name)!r}: needs `pip install 'meshwright[{name}]'`"
        for name in ("wandb", "mlflow")
        if getattr(config.metrics, name) is not None and find_spec(name) is None
    ]:
        found.append(ConfigError(problems))
    draft = None
    try:
        draft = make_setup(config, world_size)
        check_supported(draft.layout)
    except MeshwrightError as error:
        found.append(error)
    if draft is None or found:
        raise together(found)
    return draft


def load_run_tokenizer(config: RunConfig) -> "PreTrainedTokenizerBase":
    """The tokenizer that :func:`prepare_run` saved with the run."""
    from meshwright.data.tokenizer import load_tokenizer

    return load_tokenizer(Paths(config.directory).tokenizer)


def _tokenizer(config: RunConfig, paths: Paths) -> "PreTrainedTokenizerBase":
    """The run's tokenizer: the one it saved, if it resumes; otherwise as configured."""
    from meshwright.data.tokenizer import build_tokenizer

    resuming = latest(paths.checkpoints) is not None
    if resuming and (paths.tokenizer / "tokenizer_config.json").is_file():
        return load_run_tokenizer(config)
    default = (config.model.config or {}).get("vocab_size")
    return build_tokenizer(
        config.tokenizer,
        config.data,
        model_path=config.model.local or config.model.path,
        default_vocab_size=default,
        trust_remote_code=config.model.trust_remote_code,
        cache_dir=paths.tokens / "datasets-cache",
    )


def _loader(config: RunConfig, store: "TokenStore") -> "TrainLoader":
    from meshwright.data.loader import TrainLoader

    return TrainLoader(
        store,
        sequence_length=config.data.sequence_length,
        global_batch_size=config.training.global_batch_size,
        microbatch_size=1,
        seed=config.training.seed,
        packing=config.data.packing,
        shuffle=config.data.shuffle,
    )


def _checkpoint_bytes(setup: RunSetup, config: RunConfig) -> int:
    """Bytes that the checkpoints of a run take at most: those kept, and the one being written."""
    whole = sum(
        row.numel * row.bytes_per_rank // max(1, _numel(row.local_shape)) * (3 if row.trainable else 1)
        for row in setup.plan.parameters
    )
    saves = 1 if config.checkpoint.every == 0 else -(-config.training.steps // config.checkpoint.every)
    held = saves if config.checkpoint.keep is None else min(saves, config.checkpoint.keep + 1)
    return whole * held + (totals(setup.plan).parameters * 4 if config.export else 0)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
