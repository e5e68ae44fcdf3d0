"""Pairs of answers from the chats of this folder: the answer to a question, and the answer to another one."""

import json
from collections.abc import Iterator
from pathlib import Path

CHATS = Path(__file__).parents[1] / "chats.jsonl"


def rows(shift: int = 7) -> Iterator[dict[str, str]]:
    """Yield rows of prompt, chosen and rejected; ``shift`` is how many chats further the rejected answer is."""
    chats = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]
    for number, (question, answer) in enumerate(chats):
        other = chats[(number + shift) % len(chats)][1]
        yield {"prompt": question["content"], "chosen": answer["content"], "rejected": other["content"]}
