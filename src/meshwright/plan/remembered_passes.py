"""What passes of the resolver found, with what they read: another plan repeats only those that read something else.

A pass reads sizes, options, and what passes before it found. What it reads next depends on what it has read. So its reads are a
tree, and what it found are the leaves. The draft that a pass gets notes what is read. Sizes and options are compared by value.
What passes found is compared by identity, because a pass that is not repeated gives the same object again.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from meshwright.layout import Layout
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.inspection import Inspection
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec

__all__ = ["Pass", "RememberedPasses"]

Pass = Callable[[Draft], Found[Any]]

Question = tuple[str, str]
"""What is read: ``layout`` (an attribute), ``size`` (of an axis), ``options`` or ``draft``, and its name."""

MOST = 64
"""How much of a pass is remembered. Beyond that, all of it is forgotten, because some passes find a row for each parameter."""


@dataclass
class _Node:
    """A place in the tree of a pass.

    Attributes:
        question: what is read here; ``None``: nothing more, or it is not known yet.
        next: the place after each answer.
        found: what the pass found, if nothing more is read.
        kept: answers that are compared by identity, so that no other object gets theirs.
    """

    question: Question | None = None
    next: "dict[Hashable, _Node]" = field(default_factory=dict)
    found: Found[Any] | None = None
    kept: list[Any] = field(default_factory=list)


class RememberedPasses:
    """What passes found in the plans of one model with one spec; it is forgotten when another one comes."""

    def __init__(self) -> None:
        self._of: tuple[ParallelSpec, Inspection] | None = None
        self._trees: dict[Pass, _Node] = {}
        self._leaves: dict[Pass, int] = {}

    def __reduce__(self) -> tuple[type["RememberedPasses"], tuple[()]]:
        """A copy knows nothing: what it has would have other identities."""
        return RememberedPasses, ()

    def find(self, find: Pass, draft: Draft) -> Found[Any]:
        """Return what a pass finds. It is called only if no earlier draft had all that it reads in common with this one."""
        if self._of is None or self._of[0] is not draft.spec or self._of[1] is not draft.model:
            self._of, self._trees, self._leaves = (draft.spec, draft.model), {}, {}
        node: _Node | None = self._trees.get(find)
        while node is not None and node.question is not None:
            node = node.next.get(_key(node.question, _answer(draft, node.question)))
        if node is not None and node.found is not None:
            return node.found
        reads: dict[Question, Any] = {}
        found = find(_noting_draft(draft, reads))
        self._keep(find, draft, reads, found)
        return found

    def _keep(self, find: Pass, draft: Draft, reads: Iterable[Question], found: Found[Any]) -> None:
        if self._leaves.get(find, 0) == MOST:
            del self._trees[find], self._leaves[find]
        node = self._trees.setdefault(find, _Node())
        self._leaves[find] = self._leaves.get(find, 0) + 1
        left = list(reads)
        while node.question is not None or left:
            if node.question is None:
                node.question = left[0]
            # The order of reads may differ: the order of a set depends on what was in it before.
            left = [question for question in left if question != node.question]
            answer = _answer(draft, node.question)
            key = _key(node.question, answer)
            if key not in node.next:
                node.kept.append(answer)
            node = node.next.setdefault(key, _Node())
        node.found = found


def _answer(draft: Draft, question: Question) -> Any:
    source, name = question
    if source == "size":
        return draft.layout.size(name)
    return getattr(draft if source == "draft" else getattr(draft, source), name)


def _key(question: Question, answer: Any) -> Hashable:
    if question[0] == "draft":
        return id(answer)
    try:
        hash(answer)
    except TypeError:  # a mapping, or a tuple with one
        return repr(answer)
    return answer


class _Noting:
    """Something whose attributes are noted when they are read.

    Args:
        whole: a layout, options or a draft.
        source: its name in questions.
        reads: gets what is read, in this order.
    """

    _whole: Any
    _source: str
    _reads: dict[Question, Any]

    def __init__(self, whole: Any, source: str, reads: dict[Question, Any]) -> None:
        vars(self).update(_whole=whole, _source=source, _reads=reads)

    def _note(self, name: str) -> Any:
        return self._reads.setdefault((self._source, name), getattr(self._whole, name))


class _Noted:
    """An attribute that is noted when it is first read; later reads find it in the instance."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: _Noting | None, owner: type) -> Any:
        if instance is None:
            return self
        value = vars(instance)[self.name] = instance._note(self.name)
        return value


class _Sizes(_Noting, Layout):
    """A layout whose sizes are noted."""

    def size(self, axis: str) -> int:
        return self._reads.setdefault(("size", axis), self._whole.size(axis))


class _Options(_Noting, ParallelOptions):
    """Options that are noted."""


class _Draft(_Noting, Draft):
    """A draft of which is noted what passes found."""


_GIVEN = {"spec", "model", "layout", "options"}
"""Fields of a draft that are noted otherwise, or are the same in all drafts of a model and its spec."""

for _kind, _names in (
    (_Sizes, {item.name for item in fields(Layout)} | {"ep_shard", "replicated", "world_size"}),
    (_Options, {item.name for item in fields(ParallelOptions)}),
    (_Draft, {item.name for item in fields(Draft)} - _GIVEN),
):
    for _name in _names:
        setattr(_kind, _name, _Noted(_name))


def _noting_draft(draft: Draft, reads: dict[Question, Any]) -> Draft:
    noting = _Draft(draft, "draft", reads)
    vars(noting).update({name: getattr(draft, name) for name in _GIVEN})
    vars(noting).update(layout=_Sizes(draft.layout, "layout", reads), options=_Options(draft.options, "options", reads))
    return noting
