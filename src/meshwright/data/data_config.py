"""The data to train on, as a schema. It is light to import: pydantic only, no torch, no transformers."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from meshwright.data.rows.columns import FORMATS, ROUTED_EXPERTS, TAKEN, TensorColumn
from meshwright.data.rows.source_files import (
    EXTENSIONS,
    ROW_EXTENSIONS,
    TEXT_EXTENSIONS,
    expand_files,
    file_problems,
    saved,
)
from meshwright.data.rows.wanted import Labels, Wanted
from meshwright.errors import Problems, Refusal
from meshwright.paths import PathText, no_directory, possible_hub_name
from meshwright.user_code import PartName

__all__ = ["DataConfig"]

_ON_HUB = re.compile("hf://|buckets/")
"""The names of the hub, for datasets.load_dataset, that are longer than `owner/name`."""

REFERENCE = "reference_log_probs"
"""The column that stands for the log-probabilities of a reference."""

DEFAULT_EVAL_FRACTION = 0.05
DEFAULT_BAD_ROWS_LIMIT = 0.1


class DataConfig(BaseModel):
    """Where the documents come from, and how they become sequences of one length."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    corpus: Literal["python-stdlib"] | None = Field(
        default=None,
        description="A corpus that is on every machine: 'python-stdlib' is the source of Python's own library (some "
        "10 MB). For trials and benchmarks without a download.",
    )
    files: list[PathText] = Field(
        default=[],
        description="Paths or globs. .txt, .md and .py files are one document each; .jsonl, .json and .parquet files "
        "hold one document a row, and so do folders of datasets.save_to_disk. A file that two patterns match is read once.",
    )
    hub: PathText | None = Field(
        default=None,
        description="Name (or local directory) of a data set for datasets.load_dataset, or a folder of datasets.save_to_disk. "
        "Scripts of a data set are never run.",
    )
    hub_config: str | None = Field(default=None, description="Configuration of the hub data set, where it has several.")
    hub_split: str | None = Field(
        default=None,
        description="Split to read of the hub data set, or of a DatasetDict of save_to_disk; 'train' if not given.",
    )
    source: PartName | None = Field(
        default=None,
        description="Rows by code of your own, as `module:Name` or `{use: module:Name, with: {...}}`: a function or a class "
        "that returns an iterable or a sequence of rows, which are objects as in files, or texts (docs/data.md).",
    )
    map: PartName | None = Field(
        default=None,
        description="A function of your own that gets each row of data and eval_files before its format is read, and returns "
        "a row, several, or None to leave it out. A file that is one text is a row with this text (docs/data.md).",
    )
    kind: Literal["auto", "text", "chat"] = Field(
        default="auto",
        description="'text': loss on every token. 'chat': rows of messages, loss on the assistant's turns. "
        "'auto': by the format.",
    )
    format: Literal[
        "auto",
        "text",
        "messages",
        "sharegpt",
        "alpaca",
        "prompt_completion",
        "tokens",
        "preference",
        "token_pairs",
        "unpaired_preference",
        "labeled",
        "labeled_words",
        "scored",
        "rollout",
    ] = Field(
        default="auto",
        description="What the rows are: 'text'; or chats as 'messages' (role, content), 'sharegpt' (conversations of from and "
        "value), 'alpaca' (instruction, input, output) or 'prompt_completion'; or 'tokens' (input_ids, loss_mask); or what an "
        "objective reads: 'preference' (prompt, chosen, rejected), 'token_pairs' (chosen_ids, rejected_ids and their "
        "masks), 'unpaired_preference' (prompt, completion, label), 'labeled' (text or messages, label), 'labeled_words' "
        "(words, labels), 'scored' (messages, or prompt and completion; score), 'rollout' (prompt_ids, completion_ids, "
        "old_log_probs; advantages, or reward and group). 'auto': of those that the objective reads, the one whose "
        "columns the first row of a file has.",
    )
    columns: dict[str, str | None] = Field(
        default={},
        description="Columns that have other names than the format's, as in {messages: dialog} or {prompt: question, "
        "completion: answer}; role and content, from and value are keys of a message. All formats of chats but messages may "
        "have a column system; all may have tools, documents and chat_template_kwargs, and the messages of a list weight. "
        "null leaves a column out that rows need not have, as in {tools: null}.",
    )
    tensors: dict[str, TensorColumn] = Field(
        default={},
        description="Columns of numbers that reach the batch as tensors, by their name there, as in {reward: {per: document}, "
        "teacher: {per: token, width: 64, dtype: int64}}. per: token, input or document; width: of a list of so many numbers "
        "each; dtype: float32 or int64; column: its name in the row, if it is another (docs/data.md).",
    )
    text_field: str = Field(default="text", description="Field of a row that holds the text.")
    messages_field: str = Field(
        default="messages", description="Field of a row that holds the list of messages, each with role and content."
    )
    sequence_length: int = Field(ge=2, description="Tokens in a sequence, as the model sees it. At least 2.")
    packing: Literal["pack", "pad"] = Field(
        default="pack",
        description="'pack': several documents share a sequence; attention and positions stay within a document. "
        "'pad': one document a sequence, padded on the right (wasteful; for models that cannot tell documents apart).",
    )
    long_documents: Literal["auto", "split", "truncate", "drop", "error"] = Field(
        default="auto",
        description="A document longer than a sequence is 'split' over several, 'truncate'd (the rest is lost), "
        "'drop'ped, or an 'error'. 'auto': split for text, error for chat. Chat cannot be split: a reply would lose "
        "its question.",
    )
    bad_rows: Literal["stop", "skip"] = Field(
        default="stop",
        description="Rows that cannot be used (malformed, not of their format, without an answer, longer than a sequence where "
        "long_documents is 'error'): 'stop' after all are read, with a list; or 'skip' and count them.",
    )
    bad_rows_limit: float = Field(
        default=DEFAULT_BAD_ROWS_LIMIT,
        ge=0,
        le=1,
        description="Share of all rows that bad_rows='skip' leaves out at most; beyond it the run stops with a list.",
    )
    eval_fraction: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Share of the documents held out for evaluation (at least one document if above 0), chosen by a "
        "hash of document number and seed. Default 0.05, or 0 where eval_files are given.",
    )
    eval_files: list[PathText] = Field(
        default=[],
        description="Paths or globs of documents to evaluate on, instead of a share of the training documents; beside it, if "
        "eval_fraction is given too. A run that resumes may have others.",
    )
    max_documents: int | None = Field(
        default=None,
        ge=1,
        description="Read no more than this many documents of the source (eval_files are not counted).",
    )
    shuffle: bool = Field(
        default=True,
        description="Shuffle documents and packed sequences, anew in each epoch, by seed and epoch. "
        "False keeps the order of the source.",
    )

    _wanted: Wanted = PrivateAttr(Wanted())

    def read_as(self, wanted: Wanted) -> Problems:
        """Say what the objective wants of rows. Return what is wrong."""
        self._wanted, corpus = wanted, self.corpus if self.map is None else None
        return wanted.problems(self.format, self.formats, corpus, self.long_documents, self.tensors)

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        problems = Problems()
        sources = [name for name in ("corpus", "files", "hub", "source") if getattr(self, name)]
        if len(sources) != 1:
            empty = " (files is an empty list)" if "files" in self.model_fields_set and not self.files else ""
            shown = " and ".join(sources) or "none"
            problems.add(
                "data.source", f"data: exactly one of corpus, files, hub and source must be set; set here: {shown}{empty}"
            )
        folders = any(not pattern.endswith(EXTENSIONS) for pattern in self.files)  # they may be those of save_to_disk
        for name, possible in (("hub_config", False), ("hub_split", folders)):
            if getattr(self, name) is not None and self.hub is None and not possible:
                problems.add("data.source", f"data.{name}={getattr(self, name)!r} needs data.hub")
        if self.kind == "chat" and self.corpus and self.map is None:
            problems.add("data.kind", f"data.kind='chat': corpus {self.corpus!r} is text; legal: 'auto', 'text'")
        if self.wants_chat and self.long_documents == "split":
            problems.add(
                "data.long_documents",
                "data.long_documents='split': a chat cannot be split; legal for chat: 'auto', 'truncate', 'drop', 'error'",
            )
        problems.extend(self._format_problems())
        problems.extend(self._tensor_problems())
        if self.bad_rows == "stop" and self.bad_rows_limit != DEFAULT_BAD_ROWS_LIMIT:
            problems.add(
                "data.bad_rows",
                f"data.bad_rows_limit={self.bad_rows_limit} needs data.bad_rows='skip'; 'stop' lets no row pass",
            )
        if problems:
            raise ValueError(Refusal(problems[0].code, "; ".join(problems)))
        return self

    def _format_problems(self) -> Problems:
        """Return the contradictions between format, kind and columns."""
        problems, possible = Problems(), self._possible(FORMATS)
        said = f"data.format={self.format!r}"
        if self.corpus and self.map is None and (self.format not in ("auto", "text") or self.columns):
            problems.add(
                "data.columns", f"{said}, data.columns={self.columns}: corpus {self.corpus!r} has no rows; remove them"
            )
        elif self.kind != "auto" and self.format != "auto" and not self._has_kind(self.format):
            problems.add(
                "data.kind", f"{said} and data.kind={self.kind!r} exclude each other; format says the kind: remove data.kind"
            )
        elif not possible:
            names = FORMATS if self.format == "auto" else (self.format,)
            legal = [f"{', '.join(FORMATS[name].names)} ({name})" for name in names]
            problems.add(
                "data.columns",
                f"data.columns: no format has all of {', '.join(self.columns)}; legal together: {'; '.join(legal)}",
            )
        left_out = [key for key, column in self.columns.items() if column is None]
        dispensable = dict.fromkeys(key for name in possible for key in FORMATS[name].dispensable)
        for key in left_out if possible else ():
            if not all(key in FORMATS[name].dispensable for name in possible):
                problems.add(
                    "data.columns",
                    f"data.columns.{key}=null: rows need it; legal to leave out: {', '.join(dispensable) or 'none'}",
                )
        for key, default in (("text", "text"), ("messages", "messages")):
            if key in self.columns and getattr(self, f"{key}_field") != default:
                problems.add("data.columns", f"data.{key}_field and data.columns.{key} say the same; remove one")
        return problems

    def _tensor_problems(self) -> Problems:
        """Return what is wrong with the columns that reach the batch."""
        problems = Problems()
        if self.tensors and self.corpus and self.map is None:
            problems.add(
                "data.tensors", f"data.tensors: corpus {self.corpus!r} has no columns; remove {', '.join(self.tensors)}"
            )
        for name, column in self.tensors.items():
            if not name.isidentifier() or name in TAKEN:
                problems.add(
                    "data.tensors", f"data.tensors.{name}: legal is a name as in code, and none of {', '.join(sorted(TAKEN))}"
                )
            routing = TensorColumn(per="input", width=column.width, dtype="int64", column=column.column)
            if name == ROUTED_EXPERTS and (column != routing or column.width is None):
                legal = "per: input, width: the routers times the experts of a token, dtype: int64"
                problems.add("data.tensors", f"data.tensors.{name}: legal is {legal}")
            if name == REFERENCE and column != TensorColumn(per="token", column=column.column):
                problems.add("data.tensors", f"data.tensors.{name}: legal is per: token, float32, without width")
        return problems

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats that rows may have, by objective, format, kind and mapped columns."""
        return self._possible(self._wanted.formats)

    def _possible(self, formats: Iterable[str]) -> tuple[str, ...]:
        names = formats if self.format == "auto" else (self.format,)
        return tuple(name for name in names if set(self.columns) <= set(FORMATS[name].names) and self._has_kind(name))

    def _has_kind(self, name: str) -> bool:
        return self.kind == "auto" or (name != "tokens" and (self.kind == "text") == (name == "text"))

    @property
    def pairs(self) -> bool:
        """Whether each row is two documents, which stay together."""
        return any(FORMATS[name].pairs for name in self.formats)

    @property
    def packed(self) -> bool:
        """Whether several documents share a sequence."""
        return self.packing == "pack" or self.pairs

    @property
    def unpairs(self) -> bool:
        """Whether each answer of a pair is learned by itself, beside an answer of another row."""
        return self._wanted.unpairs

    @property
    def whole(self) -> bool:
        """Whether all tokens of a row count, up to the last of the text or chat as it stands, and not only answers."""
        return self._wanted.whole or any(FORMATS[name].whole for name in self.formats)

    @property
    def scales(self) -> bool:
        """Whether advantages that come of rewards are divided by the standard deviation of those of their group."""
        return self._wanted.scales

    @property
    def labels(self) -> Labels | None:
        """What labels of texts are; ``None``: unknown."""
        return self._wanted.labels

    @property
    def values(self) -> dict[str, TensorColumn]:
        """The columns that reach the batch: those of the formats, and `tensors`."""
        return {**self._wanted.values(self.formats), **self.tensors}

    @property
    def wants_chat(self) -> bool:
        """Whether kind, format or columns say that rows are chats."""
        return not {"text", "tokens"} & set(self.formats)

    @property
    def text_column(self) -> str:
        """The column of a row that holds the text."""
        return self.columns.get("text") or self.text_field

    @property
    def held_out(self) -> float:
        """Share of the documents that is held out, after defaults."""
        if self.eval_fraction is not None:
            return self.eval_fraction
        return 0.0 if self.eval_files else DEFAULT_EVAL_FRACTION

    def problems(self) -> Problems:
        """Return what is wrong with the sources, as far as this machine's disk shows.

        That is: missing or empty files, a missing folder, globs without a match, unknown extensions.

        Only names and sizes are read, so this is cheap and may run before any process is started. Empty if all is well.
        """
        problems = Problems([*file_problems("files", self.files), *file_problems("eval_files", self.eval_files)])
        if self.hub is not None and not _ON_HUB.match(self.hub):
            elsewhere = possible_hub_name(self.hub) and not Path(self.hub).is_file()  # on the hub, which is not asked
            if not elsewhere and (absent := no_directory("data.hub", self.hub, hub=False)):
                problems.append(absent)
        found = [path for path in expand_files(self.files) if saved(path) == "DatasetDict"]
        if self.files and self.hub_split is not None and not found:
            problems.add(
                "data.source",
                f"data.hub_split={self.hub_split!r}: data.files has no folder of a DatasetDict; remove one of them",
            )
        texts = [
            path for path in expand_files(self.files + self.eval_files) if path.suffix in TEXT_EXTENSIONS and not saved(path)
        ]
        if self.tensors and self.map is None:
            for path in texts:
                problems.add("data.tensors", f"data.tensors: {str(path)!r} is one text, and has no columns")
        if self.wants_chat and self.map is None:
            for path in texts:
                problems.add(
                    "data.kind",
                    f"data.kind={self.kind!r}, data.format={self.format!r}: {str(path)!r} is text; chats come from "
                    f"{', '.join(ROW_EXTENSIONS)}",
                )
        return problems
