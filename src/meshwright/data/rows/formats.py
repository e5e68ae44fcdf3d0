"""What a row means: a text, tokens, or a chat in the format of messages, ShareGPT, Alpaca, or prompt and completion.

Every chat becomes a list of messages with `role` and `content`; `chat.py` decides whether it can be learned.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.data.data_config import DataConfig
from meshwright.data.rows.columns import FORMATS, Format
from meshwright.data.rows.document import Document
from meshwright.data.rows.extras import template_arguments
from meshwright.data.rows.labels import label_of
from meshwright.data.rows.preferences import answer, check_label, preference, unpaired
from meshwright.data.rows.rollouts import rollout
from meshwright.data.rows.row_files import Row, names_of, refuse_duplicates
from meshwright.data.rows.row_values import read_values
from meshwright.data.rows.token_rows import pair_of, tokens_of
from meshwright.data.rows.turns import call_of_text, check_sound, exchange, field_of, message_of, text_of
from meshwright.data.rows.word_labels import words_of
from meshwright.errors import DataError, Refusal

__all__ = ["SPEAKERS", "RowReader", "check_columns"]

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Name of a speaker in ShareGPT to role."""


def check_columns(config: DataConfig, seen: dict[str, None], name: str) -> None:
    """Refuse a mapped column that no row had, after all rows were read.

    Args:
        config: its `columns` are checked.
        seen: the columns of all rows; if it is empty, nothing is refused.
        name: name of the source.

    Raises:
        DataError: names the existing columns.
    """
    within = {key for layout in config.formats for key in FORMATS[layout].within}
    mapped = [(key, column) for key, column in config.columns.items() if column is not None]
    missing = [(key, column) for key, column in mapped if column not in seen and key not in within]
    if seen and missing:
        there = f"its columns are {names_of(seen)}"
        raise DataError(
            Refusal("data.columns", f"data.columns: {name} has no column {column!a} (for {key!r}); {there}")
            for key, column in missing
        )


class RowReader:
    """Makes documents of the rows of one file or data set, all of one format.

    The format is `data.format`, or the only one that has the mapped columns and the kind. Otherwise the first row that has the
    columns of exactly one format decides.

    Args:
        config: format, columns and kind.
        seen: collects the columns of the rows.
        unread: collects those that are not read.
    """

    def __init__(self, config: DataConfig, seen: dict[str, None], unread: dict[str, None] | None = None) -> None:
        mapped = {key: column for key, column in config.columns.items() if column is not None}
        self.columns = {"text": config.text_field, "messages": config.messages_field, **mapped}
        self.left_out = config.columns.keys() - mapped.keys()
        self.candidates = config.formats
        self.seen, self.tensors, self.unpairs, self.labels = seen, config.tensors, config.unpairs, config.labels
        self.unread: dict[str, None] = {} if unread is None else unread

    def documents(self, row: Row) -> list[Document]:
        """Return the documents of a row: one, or both of a pair of which each is learned by itself.

        Raises:
            DataError: the row does not have its format; names file, line and reason.
        """
        document = self.document(row)
        return unpaired(document) if self.unpairs and document.second is not None else [document]

    def document(self, row: Row) -> Document:
        """Return the document of a row, with the second one of a pair.

        Raises:
            DataError: the row does not have its format; names file, line and reason.
        """
        if len(self.seen) < 1000:  # names for a message
            self.seen.update(dict.fromkeys(row.values))
        name = self._format(row)
        layout = FORMATS[name]
        made = name in ("rollout", "labeled_words")  # their columns are made of several fields
        tensors = {**self.tensors, **({} if made else layout.columns(self._column))}
        read = (key for key in layout.required + layout.optional + layout.extra if key not in self.left_out)
        used = [*map(self._column, read), *(column.column or name for name, column in tensors.items())]
        for key in layout.required:
            if key in layout.values:
                field_of(row, self._column(key), "columns")
        values = read_values(tensors, row) if tensors else {}
        refuse_duplicates(row)
        check_sound([row.values.get(column) for column in used], row.source)
        document = Document(None, None, row.source, self._arguments(layout, row), values)
        if name == "tokens":
            document = replace(document, tokens=tokens_of(row, self._column_there))
        elif name == "token_pairs":
            document = replace(document, tokens=pair_of(row, self._column_there))
        elif name == "rollout":
            document = rollout(document, row, self._column_there)
        elif name == "text":
            document = replace(document, text=text_of(row, self._column("text")))
        elif name == "preference":
            prompt, chosen, rejected = preference(
                row, self._column, None if "prompt" in self.left_out else self._column("prompt")
            )
            prompt = [*self._system(row), *prompt]
            document = replace(document, messages=prompt + chosen, second=prompt + rejected, answer=len(prompt))
        elif name == "unpaired_preference":
            check_label(values["label"], f"{row.source}: field {self._column('label')!a}")
            prompt, said = answer(row, self._column)
            prompt = [*self._system(row), *prompt]
            document = replace(document, messages=prompt + said, answer=len(prompt))
        elif name == "labeled_words":
            assert self.labels is not None
            words = words_of(row, self._column("words"), self._column("labels"), self.labels)
            document = replace(document, words=words)
        elif layout.whole:
            document = self._whole(document, name, row)
        else:
            document = replace(document, messages=getattr(self, f"_{name}")(row))
        if len(self.unread) < 1000:
            self.unread.update(dict.fromkeys(column for column in row.values if column not in used))
        return document

    def _whole(self, document: Document, name: str, row: Row) -> Document:
        """Return the document that a row has numbers for: its messages, its prompt with the answer, or its text."""
        possible = [key for key in ("messages", "prompt", "text") if key in FORMATS[name].optional and key not in self.left_out]
        given = {key for key in possible if row.values.get(self._column(key)) is not None}
        if len(given) != 1:
            legal = " and ".join(repr(self._column(key)) for key in possible)
            raise DataError(
                "data.format",
                f"{row.source}: has {'several' if given else 'none'} of the fields {legal}; a row of {name} has one of them; "
                f"its fields are {names_of(row.values)}; set data.columns",
            )
        if name == "labeled":
            assert self.labels is not None
            document = replace(document, values={**document.values, "label": label_of(row, self._column("label"), self.labels)})
        if "text" in given:
            return replace(document, text=text_of(row, self._column("text")))
        if "messages" in given:
            return replace(document, messages=[*self._system(row), *self._messages(row)])
        prompt, said = answer(row, self._column)
        return replace(document, messages=[*self._system(row), *prompt, *said])

    def _arguments(self, layout: Format, row: Row) -> dict[str, Any]:
        """Return the arguments of the chat template that a row gives."""
        columns = {key: self._column(key) for key in layout.extra if key not in self.left_out}
        arguments = template_arguments({key: row.values.get(columns[key]) for key in columns}, columns, row.source)
        check_sound(arguments, row.source)
        return arguments

    def _column_there(self, key: str) -> str | None:
        return None if key in self.left_out else self._column(key)

    def _column(self, key: str) -> str:
        return self.columns.get(key, key)

    def _format(self, row: Row) -> str:
        if len(self.candidates) == 1:
            return self.candidates[0]
        needed = {name: [self._column(key) for key in FORMATS[name].required] for name in self.candidates}
        matching = [name for name, columns in needed.items() if all(column in row.values for column in columns)]
        if len(matching) > 1:  # what a row of another format became is no second format
            matching = [name for name in matching if name != "tokens"]
        if len(matching) == 1:
            self.candidates = (matching[0],)
            return matching[0]
        shown = [f"{' and '.join(map(repr, needed[name]))} ({name})" for name in matching or needed]
        which = (
            f"fields of several formats, {', '.join(shown)}"
            if matching
            else f"no fields of a format: neither {', '.join(shown)}"
        )
        there = f"its fields are {names_of(row.values)}"
        raise DataError("data.format", f"{row.source}: {which}; {there}; set data.format, data.kind or data.columns")

    # ---- chats -----------------------------------------------------------------------------------------------------------

    def _messages(self, row: Row) -> list[dict[str, Any]]:
        keys = self._column("role"), self._column("content"), self._column("weight")
        return [message_of(message, *keys, f"{row.source}: message {n}") for n, message in self._turns(row, "messages")]

    def _sharegpt(self, row: Row) -> list[dict[str, Any]]:
        from_key, value_key, weight_key = self._column("from"), self._column("value"), self._column("weight")
        messages = self._system(row)
        for number, message in self._turns(row, "conversations"):
            where = f"{row.source}: message {number}"
            if from_key not in message and "role" in message:  # conversations with the keys of messages
                messages.append(message_of(message, "role", "content", weight_key, where))
                continue
            turn = message_of(message, from_key, value_key, weight_key, where)
            if turn["role"] not in SPEAKERS:
                raise DataError("data.chat.role", f"{where} is from {turn['role']!a:.40}; legal are {', '.join(SPEAKERS)}")
            if turn["role"] == "function_call" and "content" in turn:
                turn |= {"content": "", "tool_calls": [call_of_text(turn["content"], where)]}
            messages.append(turn | {"role": SPEAKERS[turn["role"]]})
        return messages

    def _alpaca(self, row: Row) -> list[dict[str, Any]]:
        # The blank line is from Alpaca's own prompt. The other words of that prompt are left to the template.
        asked = "\n\n".join(part for part in (text_of(row, self._column("instruction")), self._optional(row, "input")) if part)
        return [*self._system(row), *exchange(asked, row, self._column("output"))]

    def _prompt_completion(self, row: Row) -> list[dict[str, Any]]:
        asked = text_of(row, self._column("prompt"))
        return [*self._system(row), *exchange(asked, row, self._column("completion"))]

    def _turns(self, row: Row, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the messages of a row with their numbers, without the None values that arrow adds to make all rows alike."""
        column = self._column(key)
        knob = "messages_field or data.columns" if key == "messages" else "columns"
        value = field_of(row, column, knob)
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise DataError("data.chat.messages", f"{row.source}: field {column!a} is not a list of messages")
        for number, message in enumerate(value, start=1):
            yield number, {name: part for name, part in message.items() if part is not None}

    def _system(self, row: Row) -> list[dict[str, Any]]:
        said = self._optional(row, "system")
        return [{"role": "system", "content": said}] if said else []

    def _optional(self, row: Row, key: str) -> str:
        given = key not in self.left_out and row.values.get(self._column(key)) is not None
        return text_of(row, self._column(key)) if given else ""
