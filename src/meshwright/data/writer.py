"""Writes documents as tokens to disk, and decides what happens to documents that are long, empty or bad."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from meshwright.data.chat import check_chat_tokenizer, encode_chat, encode_whole_chat, unwritten
from meshwright.data.rows.bad_rows import BadRows
from meshwright.data.rows.columns import TensorColumn
from meshwright.data.rows.document import Document, Tokens, Words
from meshwright.data.rows.row_values import check_lengths, cut, file_of, write_values
from meshwright.data.rows.token_rows import check_tokens
from meshwright.data.rows.word_labels import tokens_of_words
from meshwright.data.sums import FileSums, SummedFile
from meshwright.data.tokenizer import vocabulary_digest
from meshwright.errors import ConfigError, DataError, number_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Writer"]

# A batch for the tokenizer: enough documents to occupy its threads, few enough characters to bound memory.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4_000_000

TRIES = 8
"""Chats in which a key of messages is examined, whether the template reads it."""

SHARE = 95
"""Percent of the documents that a sequence length in a message would keep, besides the one that keeps all."""


class Writer:
    """Tokenizes documents and appends them to the files of a store; long documents are handled by a policy."""

    def __init__(
        self,
        directory: Path,
        tokenizer: "PreTrainedTokenizerBase",
        kind: Literal["text", "chat"],
        policy: Literal["split", "truncate", "drop", "error"],
        sequence_length: int,
        bad: BadRows,
        tensors: Mapping[str, TensorColumn],
        *,
        pairs: bool = False,
        whole: bool = False,
    ) -> None:
        self.tokenizer, self.policy, self.sequence_length, self.bad = tokenizer, policy, sequence_length, bad
        self.largest = max(tokenizer.get_vocab().values())
        self.token_dtype: Literal["uint16", "uint32"] = "uint16" if self.largest < 2**16 else "uint32"
        self._checked = set[str]()
        self.noted: Callable[[str], None] = lambda source: None  # called with the origin of each document that is appended
        names = ["tokens.bin", *(["loss_mask.bin"] if kind == "chat" else []), *map(file_of, tensors)]
        self.tensors = tensors
        self.files = {name: SummedFile(directory / name) for name in names}
        self.kind, self.whole = kind, whole
        self.lengths: list[int] = []
        self.pairs, self.seconds = pairs, list[int]()  # tokens of the first of two
        self.prompts: list[bytes] = []  # of answers, a digest of the prompt of each; of other documents, of nothing
        self.too_long: list[int] = []  # tokens of each document that the policy refuses
        self.longest = (0, "")
        self.given: Counter[str] = Counter()  # chats with an argument of the template, such as tools
        self.unwritten: Counter[str] = Counter()  # those of which the template writes nothing of it
        self.unlearned = 0  # answers with weight 0
        self._tried: Counter[str] = Counter()
        self.read_keys: set[str] = set()
        self.split = self.truncated = self.dropped = self.empty = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            file.close()

    @property
    def sums(self) -> dict[str, FileSums]:
        """Digests of what was written so far."""
        return {name: file.sums for name, file in self.files.items()}

    def add_all(self, stream: Iterable[Document]) -> None:
        """Append documents. Documents without anything to learn, dropped ones and bad ones are only counted."""
        batch: list[Document] = []
        characters = 0
        for document in stream:
            if document.tokens is not None:
                self._add_tokens(document, document.tokens)
                continue
            if document.words is not None:
                self._add_words(document, document.words)
                continue
            self._check_tokenizer(document)
            if document.messages is not None:
                self._add_chat(document, document.messages)
                continue
            batch.append(document)
            characters += len(document.text or "")
            if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
                self._add_texts(batch)
                batch, characters = [], 0
        self._add_texts(batch)

    def _check_tokenizer(self, document: Document) -> None:
        """Refuse a tokenizer that cannot write such documents."""
        if document.kind in self._checked:
            return
        self._checked.add(document.kind)
        if document.kind == "chat":
            check_chat_tokenizer(self.tokenizer)
        elif not self.whole and self.tokenizer.eos_token_id is None:
            raise ConfigError(
                "tokenizer.eos_token", "tokenizer: it has no eos_token, which ends every text; give a tokenizer that has one"
            )

    def _add_tokens(self, document: Document, tokens: Tokens) -> None:
        try:
            check_tokens(tokens, document.source, self.largest, self._vocabulary)
        except DataError as error:
            self.bad.add(error)
        else:
            if tokens.first and tokens.mask is not None:
                parts = slice(None, tokens.first), slice(tokens.first, None)
                self._add_pair(document, [(tokens.ids[part], tokens.mask[part]) for part in parts])
            else:
                self._add(document, tokens.ids, tokens.mask)

    def _add_words(self, document: Document, words: Words) -> None:
        try:
            tokens, values = tokens_of_words(self.tokenizer, words, document.source)
        except DataError as error:
            self.bad.add(error)
        else:
            self._add(replace(document, values={**document.values, **values}), tokens.ids, None)

    @cached_property
    def _vocabulary(self) -> str:
        return vocabulary_digest(self.tokenizer)

    def _add_chat(self, document: Document, messages: list[dict[str, Any]]) -> None:
        members = [messages] if document.second is None else [messages, document.second]
        try:
            found = [self._encoded(one, document) for one in members]
        except DataError as error:
            self.bad.add(error)
            return
        keys = {key for message in messages for key in message} - {"role", "content", "weight"}
        keys = {key for key in keys if key not in self.read_keys and self._tried[key] < TRIES}
        self._tried.update(keys)
        if keys or document.arguments:
            arguments, unread = unwritten(self.tokenizer, messages, document.source, document.arguments, keys)
            self.given.update(list(document.arguments))
            self.unwritten.update(arguments)
            self.read_keys |= keys - set(unread)
        self.unlearned += sum(message["role"] == "assistant" and message.get("weight") == 0 for message in messages)
        if document.second is None:
            self._add(document, *found[0])
        else:
            self._add_pair(document, found)

    def _encoded(self, messages: list[dict[str, Any]], document: Document) -> tuple[list[int], list[bool]]:
        """Return the tokens of a chat, and which count."""
        if not self.whole:
            return encode_chat(self.tokenizer, messages, document.source, document.arguments)
        ids = encode_whole_chat(self.tokenizer, messages, document.source, document.arguments)
        return ids, [True] * len(ids)

    @property
    def unread_keys(self) -> list[str]:
        """Keys of messages that the chat template makes nothing of."""
        return sorted(self._tried.keys() - self.read_keys)

    def _add_texts(self, batch: list[Document]) -> None:
        if not batch:
            return
        texts = [document.text or "" for document in batch]
        # Special tokens are those that the tokenizer adds by itself (a BOS, for most tokenizers that have one). verbose=False:
        # texts longer than the model's context are no mistake here, they are cut later.
        encoded = self.tokenizer(
            texts, add_special_tokens=True, padding=False, truncation=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        eos = self.tokenizer.eos_token_id
        for document, ids in zip(batch, encoded, strict=True):
            if not document.text:
                self.empty += 1
                continue
            self._add(document, ids if self.whole or ids[-1:] == [eos] else [*ids, eos], None)

    def _add_pair(self, document: Document, members: list[tuple[list[int], list[bool]]]) -> None:
        """Append the tokens of a pair. If it is too long, both members are cut.

        It is left out if one has no answer then, or both have the same.
        """
        first, second = (len(ids) for ids, _ in members)
        room = self.sequence_length
        begin = min(first, max(room - second, room // 2))
        kept = (begin, min(second, room - begin))
        shown = [any(mask[1:count]) for (_, mask), count in zip(members, kept, strict=True)]
        if self.whole and first + second > room:  # no mask says where answers begin: they do where the members differ
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*(ids for ids, _ in members), strict=False)))
            shown = [count > alike for count in kept]
        first_left, second_left = (ids[:count] for (ids, _), count in zip(members, kept, strict=True))
        differ = first + second <= room or first_left != second_left
        ids = [token for tokens, _ in members for token in tokens]
        mask = [mark and place > 0 for _, marks in members for place, mark in enumerate(marks)]
        places = [*range(kept[0]), *range(first, first + kept[1])]
        self._add(document, ids, mask, places if all(shown) and differ else [], kept[0])

    def _add(
        self, document: Document, ids: list[int], mask: list[bool] | None, places: Sequence[int] | None = None, second: int = 0
    ) -> None:
        """Append the tokens of a document.

        Args:
            document: the document.
            ids: its tokens.
            mask: which are learned; ``None``: all.
            places: which tokens are kept if it is too long and is cut; ``None``: the first; none: nothing to learn is left.
            second: of a pair, how many of its tokens are those of the first member.
        """
        try:
            check_lengths(self.tensors, document.values, len(ids), document.source)
        except DataError as error:
            self.bad.add(error)
            return
        long = len(ids) > self.sequence_length
        if long and self.policy == "error":
            self.bad.bad += 1
            self.longest = max(self.longest, (len(ids), document.source), key=lambda item: item[0])
            self.too_long.append(len(ids))
            return
        places = range(min(len(ids), self.sequence_length)) if places is None else places
        if long and self.policy != "split":
            # The first token is no target.
            if self.policy == "drop" or not places or (mask is not None and not any(mask[place] for place in places[1:])):
                self.dropped += 1
                return
            self.truncated += 1
        elif long:
            self.split += 1
            places = range(len(ids))
        if len(places) < 2 or (mask is not None and not any(mask[place] for place in places[1:])):
            self.empty += 1
            return
        kept = np.asarray(places)
        self.files["tokens.bin"].write(np.array(ids, dtype=self.token_dtype)[kept].tobytes())
        if mask is not None:
            self.files["loss_mask.bin"].write(np.array(mask, dtype=np.bool_)[kept].tobytes())
        write_values(self.files, self.tensors, cut(self.tensors, document.values, kept))
        self.lengths.append(len(kept))
        self.seconds.append(second)
        if self.pairs:
            self.prompts.append(_digest((document.messages or [])[: document.answer]))
        self.noted(document.source)

    def long_line(self, rows: int) -> str:
        """Return how many documents the policy refuses, and what would keep them; empty if there are none.

        Args:
            rows: number of rows that were read.
        """
        if not self.too_long:
            return ""
        every = np.sort(np.array(self.lengths + self.too_long))
        most = int(every[-(-SHARE * len(every) // 100) - 1])
        longest, source = self.longest
        keeps = f"{longest} would keep all"
        if self.sequence_length < most < longest:
            keeps = f"{most} would keep {SHARE} % of the documents, {longest} all"
        count, split = len(self.too_long), ", or 'split'" if self.kind == "text" else ""
        return (
            f"data: {count:,} of {number_of(rows, 'row')} {'is' if count == 1 else 'are'} longer than "
            f"data.sequence_length={self.sequence_length} (the longest, {source}, has {longest:,} tokens); {keeps}; or set "
            f"data.long_documents to 'truncate' or 'drop'{split}"
        )


def _digest(messages: list[dict[str, Any]]) -> bytes:
    """Return a digest of messages."""
    return hashlib.sha256(json.dumps(messages, sort_keys=True, default=str).encode()).digest()
