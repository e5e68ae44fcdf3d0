"""Sources and maps as a user writes them: some that are right, and some with one bug each."""

from collections.abc import Iterator
from typing import Any

from .conftest import sentences


def rows(count: int = 12, fails_at: int | None = None) -> Iterator[Any]:
    for number, text in enumerate(sentences(count)):
        if number == fails_at:
            raise ValueError("the server is gone")
        yield {"text": text} if number % 2 else text


def endless() -> Iterator[Any]:
    while True:
        yield from rows()


class Sequence:
    """A data set by number, which never raises an IndexError."""

    def __init__(self, words: int) -> None:
        self.words = words

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> dict[str, str]:
        return {"prompt": f"word {number % 6}", "completion": " ".join(["fox"] * self.words)}


def mixed() -> list[Any]:
    return [*rows(8), 7, {"txt": "no text"}, {3: "text"}, *rows(2)]


def wrong() -> list[Any]:
    return [{"txt": "no text"}] * 3


def nothing() -> list[Any]:
    return []


def a_number() -> int:
    return 3


def fails_at_once() -> list[Any]:
    raise OSError("no such server")


def asked(row: dict[str, Any], question: str = "what is said?") -> dict[str, str]:
    return {"prompt": question, "completion": row["text"]}


def twice(row: dict[str, Any]) -> Iterator[Any]:
    yield row
    yield row["text"].upper()


class Long:
    """Leaves out what is short, and fails at one word."""

    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, row: dict[str, Any]) -> dict[str, Any] | None:
        if row["text"].startswith("wizards"):
            raise KeyError("wizards")
        return row if len(row["text"].split()) >= self.least else None


class NoCall:
    pass


def no_row() -> None:
    return None


def three(row: dict[str, Any]) -> int:
    return 3


def length(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "length": len(row["text"])}
