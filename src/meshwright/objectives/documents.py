"""Sums over documents, of which several may be packed into a row, and which ranks of `cp` may share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.data.rows.columns import MEMBER
from meshwright.errors import UnsupportedError
from meshwright.models.objective import Batch, Objective
from meshwright.models.token_loss import IGNORE
from meshwright.objectives.running import call_of

__all__ = [
    "BEGIN",
    "END",
    "EXISTS",
    "document_count",
    "document_sum",
    "first_of_pairs",
    "most_documents",
    "number_documents",
    "pair_count",
    "per_document",
    "per_token",
    "pooled",
    "second_of_pairs",
]

EXISTS = "document_exists"
"""Key of which documents a row has, bool [B, D]."""

BEGIN, END = 1, 2
"""Bits of ``document_marks``: the first and the last token of a document."""


def per_document(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return sums over the tokens of each document [B, D, ...]; the same on all ranks of `cp`, which share the documents.

    D is the largest number of documents in a row; ``batch["document_exists"]`` [B, D] says which exist. A document ends with
    the target of its last label; one without a label, such as padding, is left out. What is computed from the result counts
    once if it is summed by :func:`document_sum`.

    Args:
        values: [B, S, ...].
        batch: the batch; the objective has ``documents = True``.
    """
    call = call_of("per_document")
    if "documents" not in batch:
        raise UnsupportedError("objective.documents", "given.per_document: the batch names no documents; set documents = True")
    numbers, shape = batch["documents"], (*batch[EXISTS].shape, *values.shape[2:])
    inside = (numbers >= 0).view(*numbers.shape, *(1,) * (values.ndim - 2))
    index = numbers.clamp(min=0).long().view_as(inside).expand_as(values)
    found = values.new_zeros(shape).scatter_add(1, index, torch.where(inside, values, 0))
    if call.mesh is not None and call.size("cp") > 1:
        return _SumOverRanks.apply(found, call.mesh["cp"].get_group())
    if found.requires_grad:
        found.register_hook(lambda gradient: call.asked.update(["per_document's gradient"]))
    return found


class _SumOverRanks(torch.autograd.Function):
    """Sums over ranks. What each computes with the sum has a gradient of its own, and all of these are added."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=context.group)
        return total, None


def document_sum(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum of values of documents [B, D], as a scalar that counts each document once over the ranks of `cp`."""
    call = call_of("document_sum")
    total = torch.where(batch[EXISTS], values, 0).sum()
    return _CountOnce.apply(total, call.mesh is None or call.mesh.rank("cp") == 0)


class _CountOnce(torch.autograd.Function):
    """A number that several ranks have: it is kept on one, and 0 on the others. So is its gradient.

    What lies between a sum over ranks and this, such as a head, gets its gradient on one of them.
    """

    @staticmethod
    def forward(context: Any, value: torch.Tensor, here: bool) -> torch.Tensor:
        context.here = here
        return value.clone() if here else torch.zeros_like(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient if context.here else torch.zeros_like(gradient), None


def document_count(batches: Sequence[Batch]) -> int:
    """Return the number of documents in some batches, on the host, for :meth:`~meshwright.objectives.Objective.counts`.

    Of a document that ranks of `cp` share, the rank with its first token counts it.
    """
    return sum(int(((batch["document_marks"] & BEGIN) > 0).sum()) for batch in batches)


def first_of_pairs(batch: Batch) -> torch.Tensor:
    """Return which documents are the first of a pair that is whole, bool [B, D]: the next document is its second.

    Args:
        batch: the batch; its data have pairs.
    """
    call_of("first_of_pairs")
    return _first_of_pairs(batch)


def _first_of_pairs(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    first = (batch[MEMBER] == 1) & batch[EXISTS]
    return first & second_of_pairs((batch[MEMBER] == 2) & batch[EXISTS])


def second_of_pairs(values: torch.Tensor) -> torch.Tensor:
    """Return for each document the value of the next one, [B, D, ...]; 0 for the last of a row."""
    return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)


def pair_count(batches: Sequence[Batch]) -> int:
    """Return the number of whole pairs in some batches, on the host, for :meth:`~meshwright.objectives.Objective.counts`.

    Of a pair that ranks of `cp` share, the rank with its first token counts it.
    """
    total = 0
    for batch in batches:
        numbers, first = batch["documents"], _first_of_pairs(batch)
        begins = (batch["document_marks"] & BEGIN) > 0
        total += int((begins & first.gather(1, numbers.clamp(min=0).long())).sum())
    return total


def per_token(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return for each token the value of its document [B, S, ...]; 0 outside of documents. Nothing is communicated.

    Args:
        values: [B, D, ...], such as a column of the data that has a value for each document.
        batch: the batch; the objective has ``documents = True``.
    """
    call_of("per_token")
    numbers = batch["documents"]
    inside = (numbers >= 0).view(*numbers.shape, *(1,) * (values.ndim - 2))
    index = numbers.clamp(min=0).long().view_as(inside).expand(*numbers.shape, *values.shape[2:])
    return torch.where(inside, values.gather(1, index), 0)


def number_documents(batch: Mapping[str, torch.Tensor], columns: int | None = None, spread: Iterable[str] = ()) -> Batch:
    """Return what batches say of documents, from whole sequences on the host.

    Args:
        batch: the sequences.
        columns: D; ``None``: the largest number of documents in a row of this batch.
        spread: names of tensors [B, S, ...] of the batch that have at each token the value of its document.

    Returns:
        ``documents`` int32 [B, S], the number of a token's document in its row, -1 outside; ``document_marks`` int32 [B, S] of
        :data:`BEGIN` and :data:`END`; ``document_exists`` bool [B, D]; of what is spread, the values of documents [B, D, ...].
    """
    labelled = batch["labels"] != IGNORE
    first = torch.ones_like(labelled)
    first[:, 1:] = batch["position_ids"].diff(dim=1) != 1
    number = first.long().cumsum(1) - 1
    places = torch.arange(labelled.shape[1]).expand_as(number)
    none = torch.full_like(number, -1)
    last_label = none.scatter_reduce(1, number, torch.where(labelled, places, -1), "amax")
    end = torch.minimum(last_label + 1, none.scatter_reduce(1, number, places, "amax"))  # its target, if it is in this row
    has = last_label >= 0
    new = has.long().cumsum(1) - 1
    inside = has.gather(1, number) & (places <= end.gather(1, number))
    documents = torch.where(inside, new.gather(1, number), -1)
    marks = torch.where(inside, BEGIN * first.int() + END * (places == end.gather(1, number)).int(), 0)
    count = columns or max(1, int(documents.max()) + 1)
    exists = torch.arange(count)[None] <= documents.amax(1, keepdim=True)
    found = {"documents": documents.int(), "document_marks": marks.int(), EXISTS: exists}
    rows, begins = torch.nonzero((marks & BEGIN) > 0, as_tuple=True)
    for name in spread:
        values = batch[name]
        found[name] = values.new_zeros(len(values), count, *values.shape[2:])
        found[name][rows, documents[rows, begins]] = values[rows, begins]
    return found


def most_documents(objective: Objective, packing: str, length: int) -> int | None:
    """Return D for all batches of an objective that gathers, since what is gathered has one shape on all ranks; ``None``: any.

    Args:
        objective: the objective.
        packing: ``data.packing``.
        length: tokens of a sequence. Each document has at least a token and its target.
    """
    if not objective.gathers:
        return None
    return (2 if MEMBER in objective.reads else 1) if packing == "pad" else max(1, length // 2)


def pooled(states: torch.Tensor, batch: Batch, how: str = "mean") -> torch.Tensor:
    """Return one vector for each document [B, D, H]: the mean over its tokens, or that of its last token.

    Args:
        states: [B, S, H], see :func:`hidden`.
        batch: the batch; the objective has ``documents = True``.
        how: ``mean`` or ``last``.
    """
    if how not in ("mean", "last"):
        raise ValueError(f"how={how!r}: legal are mean and last")
    if how == "last":
        return per_document(states * ((batch["document_marks"] & END) > 0).unsqueeze(-1), batch)
    lengths = per_document(torch.ones_like(batch["documents"], dtype=states.dtype), batch)
    return per_document(states, batch) / lengths.clamp(min=1).unsqueeze(-1)
