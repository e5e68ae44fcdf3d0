"""What a model says of a data set: the run of `meshwright score`, on the processes of a training run."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from meshwright.checkpoint import state, storage
from meshwright.checkpoint.directory import damage_in_brief, latest, read_meta
from meshwright.data.rows.columns import ROUTED_EXPERTS
from meshwright.data.store import TokenStore
from meshwright.errors import CheckpointError, ConfigError, Problems, Refusal, number_of
from meshwright.models.families.listed import family_of
from meshwright.models.objective import NextToken
from meshwright.paths import mistaken
from meshwright.terminal import console
from meshwright.train.config import RunConfig, checked_config, load_config, overridden
from meshwright.train.engine.score_store import LOG_PROBS, TOP_IDS, TOP_LOG_PROBS, PassLines, score_store
from meshwright.train.engine.steps import StepEngine
from meshwright.train.parts import PARTS, RankSetup
from meshwright.train.start.prepare import load_run_tokenizer
from meshwright.train.start.reference_values import model_facts
from meshwright.train.start.run_files import Paths
from meshwright.train.start.setup import RunSetup

__all__ = ["SUFFIXES", "ScoreJob", "config_to_score", "run_to_score"]

SUFFIXES = (".jsonl", ".parquet")
PAIRED = {"use": "preference", "with": {"loss_type": "cpo"}}
"""An objective that reads pairs, and needs nothing else of them; it computes nothing here."""
TOGETHER = 256
"""Documents that are written to a table at once."""


def run_to_score(run: Path, overrides: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """Return the configuration of a run, and the checkpoint with the weights, if it is not named by its YAML file.

    Args:
        run: a YAML file, the directory of a run, or a checkpoint.
        overrides: of the form ``section.key=value``.

    Raises:
        CheckpointError: the directory has no complete checkpoint, or a damaged one.
        ConfigError: the configuration is wrong.
    """
    if not run.is_dir():
        return load_config(run, overrides), None
    checkpoint = run if (run / "meta.json").is_file() else latest(Paths(run).checkpoints)
    if checkpoint is None:
        said = f"{run}: neither a complete checkpoint nor a run that has one{mistaken(run, 'checkpoint')}"
        raise CheckpointError("checkpoint.incomplete", said)
    if damages := damage_in_brief(checkpoint):
        raise CheckpointError([Refusal("checkpoint.damaged", f"{checkpoint}: is damaged: {line}") for line in damages])
    return overridden(read_meta(checkpoint)["config"], overrides), checkpoint.absolute()


def config_to_score(config: RunConfig, work: Path, checkpoint: Path | None) -> RunConfig:
    """Return the configuration of a run that says what a model gives for tokens: no objective, and nothing that trains.

    Args:
        config: that of the run.
        work: a directory for its tokens and tokenizer.
        checkpoint: where the weights come from, and the tokenizer; ``None``: as the run begins.

    Raises:
        ConfigError: the model says labels, or each answer has one to another prompt beside it.
    """
    problems = Problems()
    if config.model.head is not None:
        said = f"score: model.head={config.model.head.kind}: the model says labels, not the next token"
        problems.add("config.objective", f"{said}; set model.head=null, and model.path to a causal language model")
    if config.data.unpairs:
        problems.add(
            "config.objective",
            "score: answers that are learned by themselves (loss_type: kto) have some to other prompts beside them; score "
            "pairs with training.objective=preference, and single answers with training.objective=null "
            "data.format=prompt_completion; reference: precomputed needs no scores",
        )
    if problems:
        raise ConfigError(problems)
    content = config.model_dump(mode="json")
    content["output"] = str(work)
    content["training"] |= {"objective": PAIRED if config.data.pairs else None, "steps": 1, "epochs": None, "eval_every": 0}
    routes = {name: one for name, one in content["data"]["tensors"].items() if name == ROUTED_EXPERTS}
    content["data"] |= {"tensors": routes, "shuffle": False}
    content["optimizer"], content["schedule"] = {"lr": 1.0}, {"kind": "constant"}
    content["metrics"] = {"jsonl": False, "tensorboard": False}
    content |= {"teacher": None, "callbacks": [], "checkpoint": {}, "sample": {}, "moe": {}, "profile": None, "export": False}
    if checkpoint is not None:
        content["tokenizer"] = {"path": str(checkpoint / "tokenizer")}
    return checked_config(content)


@dataclass(frozen=True)
class ScoreJob:
    """What the processes do in place of training.

    Attributes:
        out: the file to write, with one of :data:`SUFFIXES`.
        work: the directory of tokens, which is removed afterwards.
        checkpoint: where the weights come from; ``None``: as the run begins.
        top_k: number of the likeliest words in the place of each token; 0: none.
    """

    out: Path
    work: Path
    checkpoint: Path | None
    top_k: int = 0

    @property
    def sources(self) -> Path:
        """The file with the origin of each document, a line each."""
        return self.work / "sources.jsonl"

    def check(self, setup: RunSetup) -> None:
        """Refuse what cannot be scored.

        Raises:
            ConfigError: the model says no next token, or has not so many words.
        """
        problems, words = Problems(), setup.model.config.get_text_config().vocab_size
        if family_of(setup.model).objective() is not NextToken:
            problems.add("config.objective", f"score: {type(setup.model).__name__} is not made to say the next token")
        if self.top_k > words:
            problems.add("config.value", f"--top-k={self.top_k}: the model has {number_of(words, 'word')}")
        if problems:
            raise ConfigError(problems)

    def noted(self) -> Callable[[str], None]:
        """Return what is called with the origin of each document that becomes tokens, in their order."""
        self.work.mkdir(parents=True, exist_ok=True)
        file = self.sources.open("w", encoding="utf-8", buffering=1)
        return lambda source: print(json.dumps(source), file=file)

    def run(self, setup: RunSetup, store: TokenStore, device: torch.device, progress: Callable[[str], None] | None) -> None:
        """Score the documents, and write the rows. All ranks call it.

        Raises:
            CheckpointError: the checkpoint is of another model.
            DataError: the values cannot be written.
        """
        facts = {**model_facts(setup), "checkpoint": None if self.checkpoint is None else str(self.checkpoint)}
        parts = replace(PARTS, optimizer=_trains_nothing)
        engine = StepEngine(setup, device, parts, resumes=self.checkpoint is not None)
        engine.progress = progress or engine.progress
        if self.checkpoint is not None:
            _read(engine, self.checkpoint)
        lines = PassLines("score", store.index.tokens, speaks=engine.rank == 0)
        scores = score_store(engine, store, self.work / "scores", facts, top_k=self.top_k, progress=lines.progress)
        if engine.rank == 0:
            digest = vocabulary_of(setup.config)
            said = write_rows(scores.beside(store), self, digest)
            console().print(said, highlight=False, markup=False, soft_wrap=True)


def vocabulary_of(config: RunConfig) -> str:
    """Return the digest of the vocabulary of a run that is prepared."""
    from meshwright.data.tokenizer import vocabulary_digest

    return vocabulary_digest(load_run_tokenizer(config))


def _trains_nothing(run: RankSetup, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without a state for the parameters of a model."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(1, device=run.device))], lr=0.0)


def _read(engine: StepEngine, checkpoint: Path) -> None:
    """Read the parameters of the model from a checkpoint on any layout, without the state of its optimizer."""
    tensors, stored = state.model_tensors(engine.model, trained=engine.config.saves_trained_only), storage.contents(checkpoint)
    wrong = [name for name, tensor in tensors.items() if name not in stored or tuple(tensor.shape) != stored[name][0]]
    if wrong:
        shown = ", ".join(name.removeprefix("model.") for name in wrong[:4]) + (", ..." if len(wrong) > 4 else "")
        raise CheckpointError("checkpoint.model", f"{checkpoint}: is of another model: it lacks {shown}, or has other shapes")
    storage.read(checkpoint, tensors)


# -- rows ---------------------------------------------------------------------------------------------------------------------


def write_rows(store: TokenStore, job: ScoreJob, vocabulary: str) -> str:
    """Write a row for each document to the file of a job, which appears when it is complete. Return a line about all.

    Args:
        store: the tokens, with their scores.
        job: names the file.
        vocabulary: digest of the vocabulary, by which a reader knows that ids mean the same.
    """
    temporary = job.out.with_name(f".{job.out.name}.tmp")
    totals = np.zeros(2)
    if job.out.suffix == ".parquet":
        _write_table(temporary, _rows(store, job, vocabulary, totals), _columns(store, top=bool(job.top_k)))
    else:
        with temporary.open("w", encoding="utf-8") as file:
            for row in _rows(store, job, vocabulary, totals):
                file.write(json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False) + "\n")
    temporary.replace(job.out)
    mean = math.exp(min(-totals[0] / max(totals[1], 1), 700.0))
    documents = number_of(store.index.documents, "document" if store.seconds is None else "pair")
    return f"perplexity {mean:.4f} of {number_of(int(totals[1]), 'token')} to be learned, {documents} -> {job.out}"


def _rows(store: TokenStore, job: ScoreJob, vocabulary: str, totals: npt.NDArray[np.float64]) -> Iterator[dict[str, Any]]:
    """Yield the row of each document; add the log-probabilities of what is learned, and their number, to ``totals``."""
    with job.sources.open(encoding="utf-8") as sources:
        for number, (source, begin, end) in enumerate(zip(sources, store.offsets[:-1], store.offsets[1:], strict=True)):
            row: dict[str, Any] = {"source": json.loads(source), "tokenizer": vocabulary}
            ids = store.tokens[begin:end].astype(np.int64)
            learned = np.ones(end - begin, np.bool_) if store.loss_mask is None else np.array(store.loss_mask[begin:end])
            first = None if store.seconds is None else int(store.seconds[number])
            for name, part in (("chosen", slice(None, first)), ("rejected", slice(first, None))) if first else ():
                row |= {f"{name}_ids": ids[part], f"{name}_mask": learned[part].astype(np.int8)}
            if first is None:
                row["input_ids"] = ids
                row |= {} if store.loss_mask is None else {"loss_mask": learned.astype(np.int8)}
            for name in (LOG_PROBS, *((TOP_IDS, TOP_LOG_PROBS) if job.top_k else ())):
                row[name] = store.values[name][begin:end]
            found = row[LOG_PROBS][1:][learned[1:]].astype(np.float64)
            totals += (found.sum(), len(found))
            yield {**row, "tokens": len(found), "perplexity": math.exp(min(-found.mean(), 700.0))}


def _plain(value: Any) -> Any:
    """Return a value for JSON. A number of float32 has as many digits as say which one it is."""
    if not isinstance(value, np.ndarray):
        return value
    return value.astype(str).astype(np.float64).tolist() if value.dtype == np.float32 else value.tolist()


def _columns(store: TokenStore, *, top: bool) -> dict[str, Any]:
    """Return the columns of a table, by name, as arrow has them."""
    import pyarrow

    ids, mask = pyarrow.list_(pyarrow.int64()), pyarrow.list_(pyarrow.int8())
    if store.seconds is not None:
        tokens = {f"{name}_{kind}": of for name in ("chosen", "rejected") for kind, of in (("ids", ids), ("mask", mask))}
    else:
        tokens = {"input_ids": ids, **({} if store.loss_mask is None else {"loss_mask": mask})}
    words = {TOP_IDS: pyarrow.list_(ids), TOP_LOG_PROBS: pyarrow.list_(pyarrow.list_(pyarrow.float32()))}
    return {
        "source": pyarrow.string(),
        "tokenizer": pyarrow.string(),
        **tokens,
        LOG_PROBS: pyarrow.list_(pyarrow.float32()),
        **(words if top else {}),
        "tokens": pyarrow.int64(),
        "perplexity": pyarrow.float64(),
    }


def _write_table(file: Path, rows: Iterator[dict[str, Any]], kinds: Mapping[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    schema, waiting = pyarrow.schema(list(kinds.items())), list[dict[str, Any]]()
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:

        def write() -> None:
            columns = {name: [_listed(row[name]) for row in waiting] for name in kinds}
            writer.write_table(pyarrow.table(columns, schema=schema))
            waiting.clear()

        for row in rows:
            waiting.append(row)
            if len(waiting) == TOGETHER:
                write()
        if waiting:
            write()


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, np.ndarray) and value.ndim > 1 else value
