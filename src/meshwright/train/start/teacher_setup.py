"""Resolves the teacher of a run: a second run on the same ranks, which only says the next token. It is checked as a run is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import ConfigError, MeshwrightError, Problems, number_of
from meshwright.layout import Layout
from meshwright.models.families.listed import family_of
from meshwright.models.objective import NextToken
from meshwright.paths import no_directory
from meshwright.plan.cost.price import totals
from meshwright.plan.show.summary import human_bytes
from meshwright.train.config import RunConfig, checked_config
from meshwright.train.schema.parallel_config import PipelineConfig
from meshwright.train.start.setup import EACH_STEP, RunSetup, make_setup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["BYTES", "about_teacher", "check_teacher", "teacher_bytes", "with_teacher"]

BYTES = 8 + 4
"""Of a word and its log-probability, as a batch has them."""

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@contextmanager
def about_teacher() -> Iterator[None]:
    """Inside, errors are about the teacher of a run, and say so."""
    try:
        yield
    except MeshwrightError as error:
        raise type(error)([line.within("teacher: ") for line in error.problems]) from error


def with_teacher(setup: RunSetup) -> RunSetup:
    """Return a run with its teacher, and a plan that says what it costs; without a teacher, the run itself.

    Raises:
        MeshwrightError: the teacher cannot be built, or planned on its layout; or that has other data ranks than the run's.
    """
    asked = setup.config.teacher
    if asked is None or setup.teacher is not None:
        return setup
    if absent := no_directory("teacher.path", asked.path):
        raise ConfigError(absent)
    with about_teacher():
        layout = _layout(setup)
        teacher = make_setup(_config(setup, layout), layout.world_size)
    problems, words = Problems(), int(teacher.model.config.get_text_config().vocab_size)
    if family_of(teacher.model).objective() is not NextToken:
        problems.add(
            "objective.teacher", f"teacher.path={asked.path}: {type(teacher.model).__name__} is not made to say the next token"
        )
    if asked.top_k > words:
        problems.add("objective.teacher", f"teacher.top_k={asked.top_k}: the teacher has {number_of(words, 'word')}")
    if problems:
        raise ConfigError(problems)
    plan = replace(setup.plan, remarks=(*setup.plan.remarks, *_remarks(setup, teacher)))
    return replace(setup, plan=plan, teacher=teacher)


def check_teacher(setup: RunSetup, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return a digest of the weights of a run's teacher, if it has one.

    Refuse one for which the ids of tokens mean something else, or whose files are cut short.

    Args:
        setup: the run, with its teacher if it has one.
        tokenizer: the tokenizer of the run. That of the teacher is compared if there is one beside its weights.

    Raises:
        ConfigError: the teacher has another tokenizer, or too few words.
        ModelError: its files are not those of the model that its config describes.
    """
    from meshwright.data.tokenizer import load_tokenizer, vocabulary_digest
    from meshwright.models.weights.build import check_files, weight_files
    from meshwright.models.weights.source import PLACES, fingerprint

    asked = setup.config.teacher
    if asked is None or setup.teacher is None:
        return None
    problems, words = Problems(), int(setup.teacher.model.config.get_text_config().vocab_size)
    if words < len(tokenizer):
        problems.add(
            "objective.teacher",
            f"teacher.path={asked.path}: has {number_of(words, 'word')}, and the tokenizer of the run {len(tokenizer):,} "
            "tokens; legal is a teacher with the tokenizer of the run",
        )
    local = Path(asked.path).expanduser()
    if not local.is_dir() or any((local / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        own = load_tokenizer(asked.path, setup.config.model.trust_remote_code)
        if vocabulary_digest(own) != vocabulary_digest(tokenizer):
            problems.add(
                "objective.teacher",
                f"teacher.path={asked.path}: its tokenizer gives other ids than that of the run; legal is a teacher with "
                f"the same vocabulary, or tokenizer.path={asked.path}",
            )
    if problems:
        raise ConfigError(problems)
    with about_teacher():
        files = weight_files(setup.teacher.config.model)
        check_files(files, setup.teacher.model)
    return fingerprint(files, within=PLACES)


def teacher_bytes(setup: RunSetup) -> int:
    """Return the bytes of a rank that a run's teacher adds to a step; 0 without one.

    These are its shards, what it gathers at once, and what it says of the microbatches of a step. What its layers compute for a
    moment is left out: it is gone when the model begins.
    """
    if setup.teacher is None:
        return 0
    total = totals(setup.teacher.plan)
    return total.parameter_bytes + total.gathered_peak_bytes + _said(setup)


def _said(setup: RunSetup) -> int:
    options, asked = setup.plan.options, setup.config.teacher
    return 0 if asked is None else BYTES * asked.top_k * (options.tokens or 0) * options.microbatches


def _remarks(setup: RunSetup, teacher: RunSetup) -> list[str]:
    total, asked = totals(teacher.plan), setup.config.teacher
    assert asked is not None
    sent = ", sent from its last stage to all" if teacher.plan.stages else ""
    return [
        f"teacher {asked.path}: {total.parameters:,} parameters that are not trained, on {teacher.layout}: "
        f"{human_bytes(total.parameter_bytes)} of shards on a rank, {human_bytes(total.gathered_peak_bytes)} gathered at once",
        f"{EACH_STEP}: what the teacher says",
        f"the teacher's {number_of(asked.top_k, 'word')} for each token: {human_bytes(_said(setup))} on a rank in a step{sent}",
    ]


def _layout(setup: RunSetup) -> Layout:
    """Return the layout of the teacher, over the ranks of the run.

    Raises:
        LayoutError: the sizes do not fit the ranks.
        ConfigError: it has other data ranks than the run, or other parts of sequences, or experts where they cannot be.
    """
    own, asked = setup.layout, setup.config.teacher
    assert asked is not None
    if asked.layout is None:
        return replace(own, ep=1)
    layout, problems = asked.layout.layout().resolve(own.world_size), Problems()
    if layout.size("dp") != own.size("dp"):
        problems.add(
            "objective.teacher",
            f"layout: has {number_of(layout.size('dp'), 'data rank')} (dp_replicate x dp_shard), and the run {own.size('dp')}; "
            f"legal is pp x tp = {own.size('pp') * own.size('tp')}, as in the run, so that a rank reads the same data for both",
        )
    if layout.size("cp") != own.size("cp"):
        problems.add("objective.teacher", f"layout.cp={layout.cp}: legal is that of the run, {own.cp}")
    if layout.ep > 1 and not problems and (layout.pp, layout.tp) != (own.pp, own.tp):
        sizes = f"pp={own.pp} and tp={own.tp}"
        problems.add("objective.teacher", f"layout.ep={layout.ep}: legal is 1, or the sizes of the run, {sizes}")
    if problems:
        raise ConfigError(problems)
    return layout


def _config(setup: RunSetup, layout: Layout) -> RunConfig:
    """Return the configuration of a run that only says the next token, in batches of the same shape and share of sequences."""
    config, asked = setup.config, setup.config.teacher
    assert asked is not None
    dtype = asked.dtype or config.parallel.param_dtype or config.model.dtype
    training, data, parallel = config.training, config.data, config.parallel
    # A schedule needs a number of microbatches to train, but none here.
    microbatches = PipelineConfig().least(layout.size("pp"), setup.plan.options.microbatches)
    return checked_config(
        {
            "output": config.output,
            "imports": config.imports,
            "model": {
                "path": asked.path,
                "dtype": dtype,
                "experts_implementation": "eager" if dtype == "float64" else None,  # other kernels have no float64
                "trust_remote_code": config.model.trust_remote_code,
            },
            "layout": {**{axis: layout.size(axis) for axis in _AXES}, "ep": layout.ep},
            "parallel": {
                "param_dtype": dtype,
                "reduce_dtype": None,
                "sync": "reduce_each",  # nothing stays gathered from one microbatch to the next
                "context_parallel": parallel.context_parallel,
                "context_balance": parallel.context_balance,
            },
            # Which documents there are is of no use to a plan.
            "data": {"corpus": "python-stdlib", "sequence_length": data.sequence_length, "packing": data.packing},
            "optimizer": {"lr": 1.0},
            "training": {
                "steps": 1,
                "global_batch_size": training.microbatch_size * layout.size("dp") * microbatches,
                "microbatch_size": training.microbatch_size,
            },
            "metrics": {"jsonl": False, "tensorboard": False},
        }
    )
