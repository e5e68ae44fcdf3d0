"""The preparation of a run by one process: it checks all that can be checked, then makes the tokenizer and the tokens.

The launcher does it before it starts workers; under torchrun or Slurm rank 0 does it.
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.directory import complete, latest, read_meta
from meshwright.checkpoint.export import check_target, needed_paths
from meshwright.checkpoint.manager import check_base, check_same_model, check_writable
from meshwright.errors import CheckpointError, ConfigError, DataError, MeshwrightError, Refusal, during
from meshwright.files import write_whole
from meshwright.plan.cost.hardware import load_hardware
from meshwright.plan.given.options import NF4
from meshwright.plan.result.sharding_plan import bytes_of, itemsize
from meshwright.plan.show.explain import explain
from meshwright.terminal import console
from meshwright.train.callbacks.exports import directories
from meshwright.train.callbacks.make_callbacks import check_callbacks, make_callbacks
from meshwright.train.callbacks.moving_average import MovingAverage
from meshwright.train.config import RunConfig
from meshwright.train.host import host_lines
from meshwright.train.start.data_lines import describe_data, describe_sharing, plain_loader, unread_columns
from meshwright.train.start.given_routes import check_routes
from meshwright.train.start.reference_values import BYTES, REFERENCE_FACTS, check_reference, reference_values
from meshwright.train.start.resume import checkpoint_to_resume, pass_over_damaged
from meshwright.train.start.run_files import Paths
from meshwright.train.start.run_plan import together
from meshwright.train.start.setup import RunSetup, make_setup, plain_config, with_tokenizer
from meshwright.train.start.teacher_setup import check_teacher, with_teacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from meshwright.data.store import TokenStore

__all__ = ["introduce", "load_run_tokenizer", "locked", "prepare_run", "warn"]


@during("the run is prepared")
def prepare_run(
    config: RunConfig, world_size: int, *, fast: bool = False, noted: Callable[[str], None] | None = None
) -> "tuple[RunSetup, PreTrainedTokenizerBase, TokenStore]":
    """Check a run, and prepare the files that its workers read.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        fast: of tokens that are there already, compare only a sample with their digests.
        noted: called with the origin of each document of new tokens, in their order; ``None``: nobody asks.

    Returns:
        The resolved run, its tokenizer and its tokens. The tokenizer is saved with the run.

    Raises:
        MeshwrightError: something would fail later, as far as this can be known now.
    """
    from meshwright.data.preparation import prepare
    from meshwright.distributed import _torch_compat
    from meshwright.models import _transformers_compat
    from meshwright.models.adapters.adapt import without_adapters
    from meshwright.models.adapters.adapter_files import check_adapter
    from meshwright.models.weights.build import check_files, weight_files
    from meshwright.models.weights.source import facts, fingerprint

    # Layout, model and plan are quicker to check than the tokenizer, and need only the size of its vocabulary: they come first.
    draft = _checked_draft(config, world_size)
    for line in (_torch_compat.untested(), _transformers_compat.untested()):
        if line:
            warn(line)
    paths = Paths(config.directory)
    check_writable(paths.root)
    if paths.config.exists() and not paths.source.exists() and latest(paths.checkpoints) is None:
        words = "is not of a run, and the run would write its own in its place; rename it, or choose another output"
        raise ConfigError("run.output", f"output={config.output}: {paths.config} {words}")
    for directory in directories(config):  # at the end, an export takes the place of that of an earlier part of the run
        check_target(directory, overwrite=True, needed=needed_paths(config.model_dump()))
    pass_over_damaged(config, warn)
    resume = checkpoint_to_resume(config)
    # If the run is given in epochs, its steps are known only after the data are read; until then count a single checkpoint.
    check_writable(paths.root, _checkpoint_bytes(draft, config, resume, config.training.steps))
    if resume is None and config.adapter is not None and config.adapter.path is not None:
        check_adapter(draft.model, config.adapter.path)
    if resume is not None:
        check_same_model(resume, draft.stored)
        source = read_meta(resume).get("source", {})
        if config.saves_trained_only:
            check_base(resume, source, weight_files(config.model))
    elif config.model.path is not None:
        files = weight_files(config.model)
        with without_adapters(draft.model):
            check_files(files, draft.model)
        source = facts(files)
        if config.adapter is not None:
            source["base"] = fingerprint(files)
    else:
        source = {}

    with during("the tokenizer is made"):
        tokenizer = _tokenizer(config, paths)
    setup = with_teacher(with_tokenizer(draft, tokenizer))
    teacher = check_teacher(setup, tokenizer)
    if None not in (teacher, source.get("teacher")) and teacher != source["teacher"]:
        warn("teacher: its weights are others than when the run began, which goes on with these")
    tokenizer.save_pretrained(paths.tokenizer)
    with during("the data are read"):
        store = prepare(config.data, tokenizer, paths.tokens, config.training.seed, fast=fast, say=warn, noted=noted)
    if store.index.train_documents == 0:
        raise DataError("data.split", "data: no documents left to train on")
    check_routes(store, draft.plan)
    loader = plain_loader(config, store)
    if resume is not None:
        # The checks that every rank will make again; here they fail before ranks are started.
        check_same_model(resume, setup.stored, plain_config(setup.model))
        loader.check_state(read_meta(resume)["loader"])
    _prepare_reference(setup, store, resume, fast=fast)
    if config.training.epochs is not None:
        steps = loader.steps(config.training.epochs)
        if problem := config.warmup_problem(steps):
            raise ConfigError(problem)
        check_writable(paths.root, _checkpoint_bytes(setup, config, resume, steps))
    write_whole(
        paths.source, json.dumps({**source, **({} if teacher is None else {"teacher": teacher}), "data": store.index.kind})
    )
    write_whole(paths.config, config.to_yaml())
    return setup, tokenizer, store


def _prepare_reference(setup: RunSetup, store: "TokenStore", resume: Path | None, *, fast: bool) -> None:
    """Check what a reference has said of the tokens, or will say before the first step."""
    values = reference_values(setup, store)
    if resume is not None:
        check_reference(read_meta(resume).get(REFERENCE_FACTS), values)
    if values is None:
        return
    if damages := values.check(store, fast=fast):
        for line in damages:
            warn(f"{line}; the reference's log-probabilities are computed again")
        shutil.rmtree(values.directory)
    if damages or not values.there:
        check_writable(setup.paths.root, 2 * BYTES * store.index.tokens)  # the parts of ranks, and what is made of them


def warn(line: str) -> None:
    """Print a warning in the terminal; the run goes on."""
    console().print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _checked_draft(config: RunConfig, world_size: int) -> RunSetup:
    """Check data files, extras, layout, model and plan, and return the resolved run; raise all problems as one error."""
    from importlib.util import find_spec

    from meshwright.data.rows.corpora import first_rows
    from meshwright.data.rows.own_rows import part_problems

    errors: list[MeshwrightError] = []
    if problems := config.data.problems() or part_problems(config.data) or first_rows(config.data):
        errors.append(DataError(problems))
    if missing := [
        Refusal("run.extra", f"metrics.{name}={getattr(config.metrics, name)!r}: needs `pip install 'meshwright[{name}]'`")
        for name in ("wandb", "mlflow")
        if getattr(config.metrics, name) is not None and find_spec(name) is None
    ]:
        errors.append(ConfigError(missing))
    if config.metrics.html and not config.metrics.jsonl:
        text = "metrics.html=True: is made from metrics.jsonl, which metrics.jsonl=False leaves out"
        errors.append(ConfigError("config.together", text))
    if config.metrics.gpu is not None:
        try:
            load_hardware(config.metrics.gpu, "metrics.gpu")
        except ConfigError as error:
            errors.append(error)
    if config.adapter is not None and config.adapter.base is not None and config.model.path is None:
        errors.append(
            ConfigError("adapter.base", f"adapter.base={config.adapter.base}: is for weights that are in files; set model.path")
        )
    draft = None
    try:
        draft = with_teacher(make_setup(config, world_size))
        check_callbacks(config, draft.plan)
    except MeshwrightError as error:
        errors.append(error)
    if draft is None or errors:
        raise together(errors)
    return draft


def load_run_tokenizer(config: RunConfig, directory: Path | None = None) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that :func:`prepare_run` saved with the run, or a copy of it in ``directory``."""
    from meshwright.data.tokenizer import load_tokenizer

    return load_tokenizer(directory or Paths(config.directory).tokenizer, config.model.trust_remote_code)


def _tokenizer(config: RunConfig, paths: Paths) -> "PreTrainedTokenizerBase":
    """Return the run's tokenizer: that of its newest checkpoint, if the output directory has one, otherwise as configured."""
    from meshwright.data.tokenizer import build_tokenizer

    if (checkpoint := latest(paths.checkpoints)) is not None:
        # Files of a checkpoint have checksums, which were compared; the one beside it is written anew from it.
        for directory in (checkpoint / "tokenizer", paths.tokenizer):
            if (directory / "tokenizer_config.json").is_file():
                _refuse_another_tokenizer(config, checkpoint)
                return load_run_tokenizer(config, directory)
    return build_tokenizer(
        config.tokenizer,
        config.data,
        model_path=config.model.local or config.model.path,
        default_vocab_size=config.model.configured("vocab_size"),
        trust_remote_code=config.model.trust_remote_code,
        cache_dir=paths.tokens / "datasets-cache",
    )


def _refuse_another_tokenizer(config: RunConfig, checkpoint: Path) -> None:
    """Raise an error if a run that resumes, and so keeps its tokenizer, is configured with another one."""
    before = read_meta(checkpoint).get("config", {}).get("tokenizer", {})
    earlier = {key: value for key, value in before.items() if value is not None}
    now = config.tokenizer.model_dump(mode="json", exclude_none=True)
    if earlier != now:
        raise CheckpointError(
            "checkpoint.tokenizer",
            f"tokenizer: the run in {config.output} began with {earlier}, but the configuration now has {now}; choose another "
            "output",
        )


@contextmanager
def locked(config: RunConfig) -> Iterator[None]:
    """Inside, hold the lock of the output directory for this run; workers that are forked inside hold it too.

    Raises:
        CheckpointError: another run holds the lock.
    """
    directory = config.directory
    check_writable(directory)
    with open(directory / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                "run.locked", f"output={config.output}: another run is writing there; wait, or choose another"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def introduce(setup: RunSetup, config: RunConfig, store: "TokenStore") -> None:
    """Print what a run will do: the plan without its parameters, why the host waits in each step (if it does), and the data."""
    page = console()
    page.print(explain(setup.plan, parameters=False))
    values = reference_values(setup, store)
    lines = (
        *config.own_parts,
        *host_lines(config, setup.plan),
        describe_data(config, store),
        unread_columns(setup),
        describe_sharing(setup, store),
        "" if values is None else values.describe(store),
    )
    for line in filter(None, lines):
        page.print(line, highlight=False, markup=False, soft_wrap=True)


def _checkpoint_bytes(setup: RunSetup, config: RunConfig, resume: Path | None, steps: int | None) -> int:
    """Return the bytes that a run will write beyond its existing checkpoints.

    These are the checkpoints that are kept, the one that is being written, and the exported model, if there is one.

    Args:
        setup: the run.
        config: configuration of the run.
        resume: the checkpoint that it resumes from; ``None``: none.
        steps: number of optimizer steps in all; ``None``: not known yet, and at least one.
    """
    kept = [row for row in setup.plan.parameters if row.name in setup.stored]
    averages = sum(isinstance(callback, MovingAverage) for _, callback in make_callbacks(config))
    stored = [
        bytes_of(row.numel, row.dtype) * (3 if row.trainable else 1) + averages * (4 * row.numel if row.trainable else 0)
        for row in kept
    ]
    done = read_meta(resume)["step"] if resume is not None else 0
    left = 1 if steps is None else max(0, steps - done)
    every, minutes, keep = config.checkpoint.every, config.checkpoint.every_minutes, config.checkpoint.keep
    saves = min(left, 1) if every == 0 else -(-left // every)
    if minutes is not None and keep is not None and left > 1:
        saves = max(saves, min(left, keep + 1))  # the number of checkpoints by the clock is not known
    if config.checkpoint.keep is not None:
        there = len(complete(Paths(config.directory).checkpoints))
        saves = min(saves, config.checkpoint.keep + 1 - min(there, config.checkpoint.keep))
    saves += config.checkpoint.best is not None and left > 0
    whole = config.parallel.param_dtype or config.model.dtype  # of what is stored in 4 bits, before it was packed
    exported = sum(row.numel * itemsize(whole if row.dtype == NF4 else row.dtype) for row in setup.plan.parameters)
    return sum(stored) * saves + exported * len(directories(config))
