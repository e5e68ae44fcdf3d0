"""The parts of a step in words, and by which of them one step is longer than another."""

from collections.abc import Mapping

from meshwright.plan.show.summary import seconds_text

__all__ = ["longer_in", "words_of"]

_WORDS: Mapping[str, str] = {
    "elementwise": "operators beside products",
    "launches": "starting operators",
    "update": "the update",
    "host": "copies to and from the host",
    "bubble": "waits for other stages",
    "beyond": "what is not modelled",
    "products": "products",
    "attention": "attention",
    "teacher": "the pass of the teacher",
}


def words_of(part: str) -> str:
    """Return what a part of a step is, in words; those that are not told here are communication over an axis."""
    return _WORDS.get(part, f"communication over {part}")


def longer_in(parts: Mapping[str, float], others: Mapping[str, float], comparison: str) -> str:
    """Say which two parts of a step make it longer than another one most; empty: none does, by a thousandth of the step.

    Args:
        parts: seconds of the longer step.
        others: seconds of the other one.
        comparison: ``more`` or ``less``: of which of the two steps it is said.
    """
    longer = {name: parts.get(name, 0.0) - others.get(name, 0.0) for name in {**parts, **others}}
    least = sum(parts.values()) / 1000  # also above what is left of equal numbers
    most = sorted(((seconds, name) for name, seconds in longer.items() if seconds > least), reverse=True)[:2]
    return ", ".join(f"{seconds_text(seconds, 2)} {comparison} in {words_of(name)}" for seconds, name in most)
