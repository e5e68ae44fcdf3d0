"""Makes a token store of documents, or finds the one that is there."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from meshwright.data.data_config import DataConfig
from meshwright.data.identity import TRAINED, fingerprint_of, parts_of, trained_digest
from meshwright.data.index import FORMAT_VERSION, INDEX, DamagedStoreError, StoreIndex, write_index
from meshwright.data.order import stable_choice
from meshwright.data.rows.bad_rows import BadRows, judge
from meshwright.data.rows.columns import TensorColumn
from meshwright.data.rows.corpora import documents, eval_documents, source_digests
from meshwright.data.rows.document import Document
from meshwright.data.rows.row_values import Values, file_of, stored, write_values
from meshwright.data.store import SECONDS, TokenStore
from meshwright.data.sums import FileSums, SummedFile
from meshwright.data.writer import Writer
from meshwright.errors import ConfigError, DataError, Refusal
from meshwright.files import honour_umask, put_in_place

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["prepare", "write_documents"]

_HOLD_OUT = 1  # the purpose of a hash, see order.py


def prepare(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    directory: str | Path,
    seed: int,
    *,
    fast: bool = False,
    say: Callable[[str], None] = lambda line: None,
    noted: Callable[[str], None] | None = None,
) -> TokenStore:
    """Tokenize the documents into a store under `directory`, or open the existing one.

    An existing store is read and compared with its digests. One that is damaged, or of another version, is made again.

    One process prepares; the others open `TokenStore.directory` of the result. Two processes may prepare at once: each writes
    under a name of its own, and the first to finish wins.

    Args:
        config: the source, and what happens to long documents.
        tokenizer: its ids are stored; texts end with its end-of-sequence token.
        directory: parent of the stores, and of the cache of `datasets`.
        seed: decides which documents are held out.
        fast: compare only a sample of a large existing store.
        say: called with a line about each problem of an existing store, and about a sample.
        noted: called with the origin of each document of a new store, in their order; ``None``: nobody asks.

    Raises:
        ConfigError: the configuration does not fit the documents or the tokenizer.
        DataError: documents that cannot be read or used, or none left to train on; or a store that cannot be read, or is
            damaged and cannot be made again.
    """
    directory = Path(directory)
    cache_dir = directory / "datasets-cache"
    trained, everything = source_digests(config, cache_dir)
    fingerprint = fingerprint_of(config, tokenizer, everything, seed)
    final = directory / fingerprint[:16]
    problems: list[str] = []
    if final.exists():
        try:
            store = TokenStore._open(final)
            problems, sampled = store.damage(fast=fast)
        except DamagedStoreError as error:
            problems, sampled = [str(error)], ""
        if sampled:
            say(sampled)
        if not problems:
            # The contents of a store do not depend on whether bad rows are allowed. So the bad rows of an existing one are
            # judged again.
            judge(config, store.index.rows, store.index.bad, store.index.too_long, store.index.bad_rows)
            return store
        for line in problems:
            say(f"{line}; the tokens are made again")
    directory.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=directory))
    try:
        _write(config, tokenizer, temporary, cache_dir, fingerprint, trained, seed, noted)
        honour_umask(temporary)  # mkdtemp makes it private; a store is often shared
        if problems:
            put_in_place(temporary, final, temporary.with_name(f"{temporary.name}-damaged"))
        else:
            try:
                temporary.rename(final)
            except OSError:
                if not (final / INDEX).is_file():
                    raise  # it was not another process that was faster
    except DataError as error:
        if not problems:
            raise
        damages = [Refusal("data.store.damaged", f"{line}, and cannot be made again") for line in problems]
        raise DataError([*damages, *error.problems]) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return TokenStore.open(final)


def _write(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    directory: Path,
    cache_dir: Path,
    fingerprint: str,
    source: str,
    seed: int,
    noted: Callable[[str], None] | None,
) -> None:
    bad = BadRows()
    stream = documents(config, cache_dir, bad)
    first = next(stream)  # there is one: an empty source raises an error of its own
    kind, policy = first.kind, config.long_documents
    if policy == "auto":
        policy = "split" if kind == "text" and not config.whole else "error"
    if kind == "chat" and policy == "split":
        raise ConfigError(
            "data.long_documents",
            f"data.long_documents='split': {first.source} is a chat, which cannot be split; "
            "legal for chat: 'auto', 'truncate', 'drop', 'error'",
        )
    writer = Writer(
        directory, tokenizer, kind, policy, config.sequence_length, bad, config.values, pairs=config.pairs, whole=config.whole
    )
    writer.noted = noted or writer.noted
    with writer:
        writer.add_all(chain([first], stream))
        trainable, sums = len(writer.lengths), writer.sums
        writer.add_all(_same_kind(eval_documents(config, cache_dir, bad), first))
    bad.too_long, bad.long_line = len(writer.too_long), writer.long_line(bad.rows)
    bad.judge(config)
    held_out = np.arange(len(writer.lengths)) >= trainable
    if config.held_out:
        together = writer.prompts[:trainable] if config.unpairs else range(trainable)
        held_out[:trainable] = stable_choice(config.held_out, together, seed, _HOLD_OUT)
    if trainable == 0:
        raise DataError(
            "data.split",
            f"data: no document is left to train on: {writer.dropped} dropped as longer than "
            f"sequence_length={config.sequence_length}, {writer.empty} with nothing to learn, {bad.bad} bad rows",
        )
    lengths, padding = np.array(writer.lengths, dtype=np.int64), _pad_token_id(tokenizer)
    seconds = np.array(writer.seconds, dtype=np.int64) if config.pairs else None
    paired = () if seconds is None else (seconds[:trainable],)
    trained = trained_digest(sums, np.concatenate([lengths[:trainable], *paired]), held_out[:trainable], padding)
    _write_table(
        directory,
        lengths,
        held_out,
        seconds,
        writer.sums,
        parts=parts_of(config, tokenizer, source, trained),
        fingerprint=fingerprint,
        kind=kind,
        long_documents=policy,
        sequence_length=config.sequence_length,
        token_dtype=writer.token_dtype,
        pad_token_id=padding,
        split=writer.split,
        truncated=writer.truncated,
        dropped=writer.dropped,
        empty=writer.empty,
        rows=bad.rows,
        bad=bad.bad,
        bad_rows=bad.lines,
        too_long=bad.too_long,
        given=dict(sorted(writer.given.items())),
        unwritten=dict(sorted(writer.unwritten.items())),
        unlearned=writer.unlearned,
        unread_columns=[_printable(column) for column in bad.unread],
        unread_keys=[_printable(key) for key in writer.unread_keys],
        mapped_away=bad.mapped_away,
        tensors=stored(config.values),
        alike=bad.alike,
        pairs=config.pairs,
    )


def _printable(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 40 else f"{name!a:.40}"


def _write_table(
    directory: Path,
    lengths: npt.NDArray[np.int64],
    held_out: npt.NDArray[np.bool_],
    seconds: npt.NDArray[np.int64] | None,
    written: Mapping[str, FileSums],
    **facts: Any,
) -> None:
    """Write what makes tokens on disk a store: where each document begins, which ones are held out, and the index."""
    sums = dict(written)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    arrays: dict[str, npt.NDArray[Any]] = {"offsets.npy": offsets, "held_out.npy": held_out}
    for name, array in (arrays | ({} if seconds is None else {SECONDS: seconds})).items():
        with SummedFile(directory / name) as file:
            np.save(file, array)
        sums[name] = file.sums
    index = StoreIndex(
        format_version=FORMAT_VERSION,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        train_documents=int((~held_out).sum()),
        train_tokens=int(lengths[~held_out].sum()),
        eval_documents=int(held_out.sum()),
        eval_tokens=int(lengths[held_out].sum()),
        files=sums,
        **facts,
    )
    write_index(directory, index)


def write_documents(
    directory: Path,
    tokens: Sequence[npt.NDArray[np.int64]],
    masks: Sequence[npt.NDArray[np.bool_]] | None,
    *,
    sequence_length: int,
    pad_token_id: int = 0,
    tensors: Mapping[str, TensorColumn] | None = None,
    values: Sequence[Values] = (),
    seconds: Sequence[int] | None = None,
) -> TokenStore:
    """Write a store of documents that are tokens already, all of them to train on.

    Args:
        directory: directory of the store; created if it does not exist.
        tokens: ids of each document, at least two.
        masks: for chats, which tokens are to be learned; ``None`` for texts.
        sequence_length: length of a sequence. A longer text continues in the next one; no chat may be longer.
        pad_token_id: id of the padding at the ends of sequences.
        tensors: the columns of the documents, if they have some.
        values: their values, for each document.
        seconds: of pairs, how many tokens of each belong to the first of its two documents. Each needs a label.
    """
    directory.mkdir(parents=True, exist_ok=True)
    flat = np.concatenate(list(tokens)).astype(np.uint32)
    content = {"tokens.bin": flat}
    if masks is not None:
        content["loss_mask.bin"] = np.concatenate(list(masks)).astype(np.bool_)
    columns = tensors or {}
    files = {name: SummedFile(directory / name) for name in (*content, *map(file_of, columns))}
    for name, array in content.items():
        files[name].write(array.tobytes())
    for one in values:
        write_values(files, columns, one)
    for file in files.values():
        file.close()
    sums = {name: file.sums for name, file in files.items()}
    lengths = np.array([len(ids) for ids in tokens], dtype=np.int64)
    facts = json.dumps([sums[file_of(name)] for name in columns]) if columns else ""
    fingerprint = hashlib.sha256(flat.tobytes() + lengths.tobytes() + facts.encode()).hexdigest()
    _write_table(
        directory,
        lengths,
        np.zeros(len(lengths), dtype=np.bool_),
        None if seconds is None else np.array(seconds, dtype=np.int64),
        sums,
        parts={TRAINED: fingerprint},
        fingerprint=fingerprint,
        kind="text" if masks is None else "chat",
        long_documents="split" if masks is None and seconds is None else "error",
        sequence_length=sequence_length,
        token_dtype="uint32",
        pad_token_id=pad_token_id,
        split=int((lengths > sequence_length).sum()),
        truncated=0,
        dropped=0,
        empty=0,
        tensors=stored(columns),
        pairs=seconds is not None,
    )
    return TokenStore.open(directory)


def _same_kind(stream: Iterable[Document], first: Document) -> Iterator[Document]:
    for document in stream:
        if document.kind != first.kind:
            text = f"data.eval_files: {document.source} and {first.source} are not both texts or both chats"
            raise DataError("data.kind", text)
        yield document


def _pad_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the id of padding. Any valid id is possible: no token attends to padding, and it has no label."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(candidate) for candidate in candidates if candidate is not None)
