"""What an objective wants of rows: their formats, and how they become documents."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.data.rows.columns import FORMATS, PLAIN, TensorColumn
from meshwright.errors import Problems

__all__ = ["Labels", "Wanted"]


@dataclass(frozen=True)
class Labels:
    """What labels of texts are."""

    kind: str
    """``single_label_classification``, ``multi_label_classification`` or ``regression``, as in transformers."""
    count: int
    """How many there are."""
    names: tuple[str, ...] = ()
    """Their names, if they have some."""

    @property
    def column(self) -> TensorColumn:
        """How a label reaches the batch."""
        if self.kind == "single_label_classification":
            return TensorColumn(per="document", dtype="int64")
        one = self.kind == "regression" and self.count == 1
        return TensorColumn(per="document", width=None if one else self.count)


@dataclass(frozen=True)
class Wanted:
    """What an objective wants of rows.

    Attributes:
        objective: its name.
        formats: the formats that it reads.
        unpairs: whether it learns each answer of a pair by itself.
        whole: whether all tokens of a row count, and not only answers.
        scales: whether advantages that come of rewards are divided by the standard deviation of those of their group.
        labels: what labels of texts are; ``None``: unknown.
    """

    objective: str = "of the model"
    formats: tuple[str, ...] = PLAIN
    unpairs: bool = False
    whole: bool = False
    labels: Labels | None = None
    scales: bool = True

    def values(self, formats: tuple[str, ...]) -> dict[str, TensorColumn]:
        """Return the columns of some formats that reach the batch."""
        label = {"label": self.labels.column} if "labeled" in formats and self.labels else {}
        return {name: one for key in formats for name, one in FORMATS[key].values.items()} | label

    def problems(
        self,
        format: str,
        formats: tuple[str, ...],
        corpus: str | None,
        long_documents: str,
        tensors: Mapping[str, TensorColumn],
    ) -> Problems:
        """Return why it cannot have rows so.

        Args:
            format: ``data.format``.
            formats: the formats that rows may have, by it, kind and columns.
            corpus: ``data.corpus``, unless its texts become rows of another kind.
            long_documents: ``data.long_documents``.
            tensors: ``data.tensors``.
        """
        problems, read = Problems(), ", ".join(self.formats)
        if format not in ("auto", *self.formats):
            problems.add(
                "data.format", f"data.format={format!r}: objective {self.objective} reads {read}; legal is one of them"
            )
        elif not formats:
            problems.add(
                "data.format", f"data.kind and data.columns: objective {self.objective} reads no format that is so: {read}"
            )
        if corpus and not {*formats} & {*PLAIN}:
            problems.add(
                "data.format", f"data.corpus={corpus!r}: has no rows of {read}, which objective {self.objective} reads"
            )
        if long_documents == "split" and (self.whole or any(FORMATS[name].whole for name in formats)):
            legal = "legal are 'auto', 'truncate', 'drop', 'error'"
            problems.add(
                "data.long_documents", f"data.long_documents='split': objective {self.objective} reads whole rows; {legal}"
            )
        if {"labeled", "labeled_words"} & {*formats} and self.labels is None:
            problems.add(
                "model.head",
                f"data.format={formats[0]!r}: nothing says what labels are; set model.head with num_labels or labels",
            )
        taken = {*self.values(formats), *(("label",) if "labeled" in formats else ())}
        for name in tensors.keys() & taken:
            problems.add("data.tensors", f"data.tensors.{name}: the format has this column itself; leave it out")
        return problems
