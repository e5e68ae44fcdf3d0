"""What one process does before the others train: check everything that can be checked, then tokenizer and tokens.

The launcher does it before it starts workers; under torchrun or Slurm rank 0 does.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from meshwright.checkpoint.directory import complete, latest, read_meta
from meshwright.checkpoint.manager import check_same_model, check_writable
from meshwright.distributed.conductor import check_supported
from meshwright.errors import CheckpointError, ConfigError, DataError, MeshwrightError
from meshwright.plan.explain import explain
from meshwright.plan.sharding_plan import itemsize
from meshwright.train.config import RunConfig, load_config
from meshwright.train.guard import waits
from meshwright.train.resume import checkpoint_to_resume, pass_over_damaged
from meshwright.train.setup import Paths, RunSetup, make_setup, plain_config, together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from meshwright.data.loader import TrainLoader
    from meshwright.data.store import TokenStore

__all__ = ["describe_data", "introduce", "load_run_tokenizer", "locked", "prepare_run", "warn"]


def prepare_run(config: RunConfig, world_size: int) -> "tuple[RunSetup, PreTrainedTokenizerBase, TokenStore]":
    """Check a run and prepare what its workers read.

    Returns:
        The resolved run, its tokenizer and its tokens. The tokenizer is saved with the run.

    Raises:
        MeshwrightError: everything that would fail later and can be known now.
    """
    from meshwright.data.store import prepare
    from meshwright.distributed import _torch_compat
    from meshwright.models import _transformers_compat
    from meshwright.models.build import check_files, weight_files
    from meshwright.models.source import facts

    # Before the tokenizer: layout, model and plan need only the size of its vocabulary, and are quicker to check.
    draft = _checked_draft(config, world_size)
    for line in (_torch_compat.untested(), _transformers_compat.untested()):
        if line:
            warn(line)
    paths = Paths(config.directory)
    check_writable(paths.root)
    pass_over_damaged(config, warn)
    resume = checkpoint_to_resume(config)
    # Steps that epochs give are known once the data are: until then a single checkpoint is counted.
    check_writable(paths.root, _checkpoint_bytes(draft, config, resume, config.training.steps))
    if resume is not None:
        check_same_model(resume, {row.name: row.shape for row in draft.plan.parameters})
        source = read_meta(resume).get("source", {})
    elif config.model.path is not None:
        files = weight_files(config.model)
        check_files(files, draft.model)
        source = facts(files)
    else:
        source = {}

    tokenizer = _tokenizer(config, paths)
    setup = make_setup(config, world_size, tokenizer)
    tokenizer.save_pretrained(paths.tokenizer)
    store = prepare(config.data, tokenizer, paths.tokens, config.training.seed)
    if store.index.train_documents == 0:
        raise DataError("data: no documents left to train on")
    loader = _loader(config, store)
    if resume is not None:
        # The checks of every rank, here before there are any.
        shapes = {row.name: row.shape for row in setup.plan.parameters}
        check_same_model(resume, shapes, plain_config(setup.model))
        loader.check_state(read_meta(resume)["loader"])
    if config.training.epochs is not None:
        steps = loader.steps(config.training.epochs)
        if problem := config.warmup_problem(steps):
            raise ConfigError(problem)
        check_writable(paths.root, _checkpoint_bytes(setup, config, resume, steps))
    paths.config.write_text(config.to_yaml())
    paths.source.write_text(json.dumps({**source, "data": store.index.kind}))
    return setup, tokenizer, store


def warn(line: str) -> None:
    """Say in the terminal what the user has to know, and what stops nothing."""
    Console().print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)


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

    return load_tokenizer(Paths(config.directory).tokenizer, config.model.trust_remote_code)


def _tokenizer(config: RunConfig, paths: Paths) -> "PreTrainedTokenizerBase":
    """The run's tokenizer: the one it saved, if it resumes; otherwise as configured."""
    from meshwright.data.tokenizer import build_tokenizer

    resuming = latest(paths.checkpoints) is not None
    if resuming and (paths.tokenizer / "tokenizer_config.json").is_file():
        _refuse_another_tokenizer(config, paths)
        return load_run_tokenizer(config)
    return build_tokenizer(
        config.tokenizer,
        config.data,
        model_path=config.model.local or config.model.path,
        default_vocab_size=config.model.said("vocab_size"),
        trust_remote_code=config.model.trust_remote_code,
        cache_dir=paths.tokens / "datasets-cache",
    )


def _refuse_another_tokenizer(config: RunConfig, paths: Paths) -> None:
    """A run that resumes goes on with its own tokenizer, so it must not be asked for another."""
    if not paths.config.is_file():
        return
    earlier = load_config(paths.config).tokenizer
    if earlier != config.tokenizer:
        raise CheckpointError(
            f"tokenizer: the run in {config.output} began with {earlier.model_dump(exclude_none=True)}, and is asked to go on "
            f"with {config.tokenizer.model_dump(exclude_none=True)}; choose another output"
        )


@contextmanager
def locked(config: RunConfig) -> Iterator[None]:
    """Inside, the output directory belongs to this run; workers forked from here hold it too.

    Raises:
        CheckpointError: another run has it.
    """
    directory = config.directory
    check_writable(directory)
    with open(directory / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"output={config.output}: another run is writing there; wait, or choose another") from None
        except OSError:
            pass  # a file system without locks
        yield


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


def introduce(setup: RunSetup, config: RunConfig, store: "TokenStore") -> None:
    """Print what a run is about to do: the plan without its parameters, when the host waits, and the data."""
    console = Console()
    console.print(explain(setup.plan, parameters=False))
    for line in filter(None, (waits(config), describe_data(config, store))):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe_data(config: RunConfig, store: "TokenStore") -> str:
    """What became of the data, and how often a run sees them, in a few lines.

    Args:
        config: of the run.
        store: its tokens.
    """
    index, loader = store.index, _loader(config, store)
    length, batch, sequences = config.data.sequence_length, config.training.global_batch_size, loader.sequences(1)
    steps = config.training.steps or loader.steps(config.training.epochs or 0)
    epochs, filled = steps * batch / sequences, index.train_tokens / (sequences * length)
    packed = "packed " if config.data.packing == "pack" else ""
    lines = [
        f"data: {index.rows:,} rows, {index.documents:,} documents of {index.tokens:,} tokens, {index.eval_documents:,} held "
        f"out; {index.truncated:,} truncated, {index.dropped:,} dropped, {index.empty:,} empty, {index.bad:,} bad",
        f"{sequences:,} {packed}sequences of {length:,}, {filled:.1%} full; "
        f"{steps:,} steps of {batch:,} are {epochs:.3g} epochs",
    ]
    if index.bad:
        rest = index.bad - len(index.bad_rows)
        lines += ["left out (data.bad_rows=skip):", *(f"  {row}" for row in index.bad_rows)]
        lines += [f"  ... and {rest:,} more"] if rest else []
    return "\n".join(lines)


def _checkpoint_bytes(setup: RunSetup, config: RunConfig, resume: Path | None, steps: int | None) -> int:
    """Bytes that the checkpoints of a run will take beyond those that are there: those kept, and the one being written.

    Args:
        setup: the run.
        config: of the run.
        resume: the checkpoint that it goes on from.
        steps: optimizer steps in all; ``None``: not known yet, and at least one.
    """
    stored = [row.numel * itemsize(row.dtype) * (3 if row.trainable else 1) for row in setup.plan.parameters]
    done = read_meta(resume)["step"] if resume is not None else 0
    left = 1 if steps is None else max(0, steps - done)
    every, minutes, keep = config.checkpoint.every, config.checkpoint.every_minutes, config.checkpoint.keep
    saves = min(left, 1) if every == 0 else -(-left // every)
    if minutes is not None and keep is not None and left > 1:
        saves = max(saves, min(left, keep + 1))  # how many the clock will ask for is not known
    if config.checkpoint.keep is not None:
        there = len(complete(Paths(config.directory).checkpoints))
        saves = min(saves, config.checkpoint.keep + 1 - min(there, config.checkpoint.keep))
    exported = sum(row.numel * itemsize(row.dtype) for row in setup.plan.parameters) if config.export else 0
    return sum(stored) * saves + exported
