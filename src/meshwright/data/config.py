"""What to train on, as a schema. Light to import: pydantic only, no torch, no transformers."""

import glob
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.paths import PathText

__all__ = ["EXTENSIONS", "ROW_EXTENSIONS", "TEXT_EXTENSIONS", "DataConfig", "TokenizerConfig", "expand_files"]

TEXT_EXTENSIONS = (".txt", ".md", ".py")
"""Files that are one text document each."""

ROW_EXTENSIONS = (".jsonl", ".json", ".parquet")
"""Files that hold a document in every row."""

EXTENSIONS = TEXT_EXTENSIONS + ROW_EXTENSIONS

DEFAULT_EVAL_FRACTION = 0.05


def expand_files(patterns: list[str]) -> list[Path]:
    """Files that the patterns name: sorted within a pattern, patterns in their order, each file once.

    A pattern that is itself an existing file wins over its meaning as a glob. What matches nothing adds nothing here;
    :meth:`DataConfig.problems` reports it.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        names = [expanded] if os.path.isfile(expanded) else sorted(glob.glob(expanded, recursive=True))
        found.update(dict.fromkeys(Path(name) for name in names if os.path.isfile(name)))
    return list(found)


def _file_problems(knob: str, patterns: list[str]) -> list[str]:
    """What is wrong with a list of files, as far as names and sizes tell."""
    problems = []
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            problems.append(f"data.{knob}: {pattern!r} is a directory; give files or a glob, such as {pattern}/*.jsonl")
            continue
        matches = expand_files([pattern])
        if not matches:
            kind = "glob matches no file" if glob.has_magic(expanded) else "no such file"
            problems.append(f"data.{knob}: {pattern!r}: {kind} (working directory {os.getcwd()})")
        for path in matches:
            if path.suffix not in EXTENSIONS:
                problems.append(f"data.{knob}: {str(path)!r}: readable extensions are {', '.join(EXTENSIONS)}")
            elif not os.access(path, os.R_OK):
                problems.append(f"data.{knob}: {str(path)!r} cannot be read (permissions)")
            elif path.stat().st_size == 0:
                problems.append(f"data.{knob}: {str(path)!r} is empty")
    return problems


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
        "hold one document a row. A file that two patterns match is read once.",
    )
    hub: PathText | None = Field(
        default=None,
        description="Name (or local directory) of a data set for datasets.load_dataset. Scripts of a data set are never run.",
    )
    hub_config: str | None = Field(default=None, description="Configuration of the hub data set, where it has several.")
    hub_split: str | None = Field(default=None, description="Split of the hub data set to read; 'train' if not given.")
    kind: Literal["auto", "text", "chat"] = Field(
        default="auto",
        description="'text': loss on every token. 'chat': rows of messages, loss on the assistant's turns. "
        "'auto': by the fields of the first row.",
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
    eval_fraction: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Share of the documents held out for evaluation (at least one document if above 0), chosen by a "
        "hash of document number and seed. Default 0.05, or 0 where eval_files are given.",
    )
    eval_files: list[PathText] = Field(
        default=[],
        description="Paths or globs of documents to evaluate on, instead of a share of the training documents.",
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

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        problems = []
        given = [name for name, value in (("corpus", self.corpus), ("files", self.files), ("hub", self.hub)) if value]
        if len(given) != 1:
            empty = " (files is an empty list)" if "files" in self.model_fields_set and not self.files else ""
            found = " and ".join(given) or "none"
            problems.append(f"data: exactly one of corpus, files and hub names the source; found {found}{empty}")
        for name in ("hub_config", "hub_split"):
            if getattr(self, name) is not None and self.hub is None:
                problems.append(f"data.{name}={getattr(self, name)!r} needs data.hub")
        if self.kind == "chat" and self.corpus:
            problems.append(f"data.kind='chat': corpus {self.corpus!r} is text; legal: 'auto', 'text'")
        if self.kind == "chat" and self.long_documents == "split":
            problems.append(
                "data.long_documents='split': a chat cannot be split; legal for chat: 'auto', 'truncate', 'drop', 'error'"
            )
        if self.eval_files and self.eval_fraction:
            problems.append(
                f"data.eval_fraction={self.eval_fraction} and data.eval_files exclude each other; "
                "remove one, or set eval_fraction to 0"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def held_out(self) -> float:
        """Share of the documents held out, after defaults."""
        if self.eval_fraction is not None:
            return self.eval_fraction
        return 0.0 if self.eval_files else DEFAULT_EVAL_FRACTION

    def problems(self) -> list[str]:
        """What is wrong on this machine's disk: missing or empty files, globs without a match, unknown extensions.

        Looks at names and sizes only, so it is cheap and may run before any process exists. Empty if all is well.
        """
        problems = _file_problems("files", self.files) + _file_problems("eval_files", self.eval_files)
        if self.kind == "chat":
            for path in expand_files(self.files + self.eval_files):
                if path.suffix in TEXT_EXTENSIONS:
                    problems.append(f"data.kind='chat': {str(path)!r} is text; chats come from {', '.join(ROW_EXTENSIONS)}")
        return problems


class TokenizerConfig(BaseModel):
    """Which tokenizer, or how large a one to train."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    path: PathText | None = Field(
        default=None,
        description="Directory or hub name of a tokenizer. Not given: the model's own, if it has one, otherwise one "
        "is trained.",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=261,
        description="Train a byte-level BPE with this many tokens on the corpus. At least 261 (bytes, special tokens).",
    )
    chat_template: str | None = Field(
        default=None, description="Jinja template for chats, or a file that holds one. It replaces the tokenizer's own."
    )

    @model_validator(mode="after")
    def _check(self) -> "TokenizerConfig":
        if self.path is not None and self.vocab_size is not None:
            raise ValueError(
                f"tokenizer.path={self.path!r} and tokenizer.vocab_size={self.vocab_size} exclude each other: "
                "vocab_size trains a new tokenizer; remove one"
            )
        return self
