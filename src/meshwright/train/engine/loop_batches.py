"""The microbatches of a loop of one's own: completed, padded, as many on each rank, or drawn from a data set of tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from meshwright.data.loader import TrainLoader
from meshwright.data.preparation import write_documents
from meshwright.data.rows.columns import ROUTED_EXPERTS
from meshwright.errors import ConfigError, DataError
from meshwright.models.objective import Batch
from meshwright.models.token_loss import IGNORE

__all__ = ["OwnData", "as_many", "completed", "padded"]


def _refuse(where: str, said: str) -> ConfigError:
    return ConfigError("engine.batch", f"{where}: {said}")


def completed(batch: Mapping[str, torch.Tensor], where: str, *, packed: bool) -> Batch:
    """Return a batch with labels and positions, and without a mask.

    Args:
        batch: ``input_ids`` [B, S] on the host. ``labels`` [B, S]: the token that each position is to say, -100 for none;
            without them, each position says the next one of its document. ``position_ids`` [B, S] begin anew with each
            document; without them, a row is one. ``attention_mask`` [B, S] may mask padding at the end. Others are [B, S] or
            [B, S, width].
        where: what it is, for messages.
        packed: whether rows may hold several documents.

    Raises:
        ConfigError: what is wrong with it.
    """
    given = {name: torch.as_tensor(tensor) for name, tensor in batch.items() if tensor is not None}
    ids = given.get("input_ids")
    if ids is None or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        found = "none" if ids is None else f"{ids.dtype} {list(ids.shape)}"
        raise _refuse(where, f"input_ids: legal are whole numbers [rows, length], found {found}")
    if elsewhere := [name for name, tensor in given.items() if tensor.device.type != "cpu"]:
        raise _refuse(where, f"{', '.join(elsewhere)}: on a device; give batches on the host, the engine moves its part")
    ids = ids.long()
    rows, length = ids.shape
    for name in ("labels", "position_ids", "attention_mask"):
        if name in given and (given[name].shape != ids.shape or given[name].is_floating_point()):
            raise _refuse(
                where,
                f"{name}: {given[name].dtype} {list(given[name].shape)}; legal are whole numbers {[rows, length]}",
            )
    for name, tensor in given.items():
        if tensor.shape[:2] != ids.shape or tensor.ndim > 3:
            raise _refuse(where, f"{name}: {list(tensor.shape)}; legal are [{rows}, {length}] and [{rows}, {length}, width]")
    mask = given.pop("attention_mask", torch.ones_like(ids)) != 0
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        said = "masks more than padding at the end; pad at the right, and give documents by position_ids that begin anew"
        raise _refuse(where, f"attention_mask: {said}")
    positions = given.get("position_ids", torch.arange(length).expand(rows, length)).long().contiguous()
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if not packed and bool((begins & mask[:, 1:]).any()):
        said = "begin anew inside a row, so rows hold several documents; make the engine with packing='pack'"
        raise _refuse(where, f"position_ids: {said}")
    following = torch.full_like(ids, IGNORE)
    following[:, :-1] = ids[:, 1:].masked_fill(begins | ~mask[:, 1:], IGNORE)
    labels = given.get("labels", following).long()
    valid = labels != IGNORE
    own, right = (torch.equal(labels[valid], other[valid]) for other in (ids, following))
    if own and not right:
        said = "are equal to input_ids, so each position would say itself; shift them by one to the left, or leave them out"
        raise _refuse(where, f"labels: {said}")
    return {**given, "input_ids": ids, "labels": labels.masked_fill(~mask, IGNORE), "position_ids": positions}


def padded(batch: Batch, rows: int, length: int, *, packed: bool) -> Batch:
    """Return a batch with more rows, and with longer ones. What is added has no labels."""
    has, was = batch["input_ids"].shape
    found = {}
    for name, tensor in batch.items():
        if tensor.ndim < 2 or tensor.shape[:2] != (has, was):
            found[name] = tensor if tensor.ndim == 0 or len(tensor) != has else _rows(tensor, rows)
            continue
        filler = tensor.new_zeros((has, length - was, *tensor.shape[2:]))
        if name == "labels":
            filler.fill_(IGNORE)
        elif name == ROUTED_EXPERTS:
            filler.fill_(-1)
        elif name == "position_ids":
            filler += torch.arange(length - was) + (0 if packed else was)
        found[name] = _rows(torch.cat([tensor, filler], 1), rows)
    found["labels"][has:] = IGNORE
    return found


def _rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat the first row: one of zeros might be masked whole, and would then be NaN."""
    return torch.cat([tensor, tensor[:1].expand(rows - len(tensor), *tensor.shape[1:])]) if rows > len(tensor) else tensor


def as_many(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return as many microbatches as every rank has; what is missing is the last one again, without labels."""
    if not 0 < len(batches) <= count:
        said = f"{len(batches)} batches; the engine was made for 1 to {count} in a step (microbatches), on each data rank"
        raise _refuse("Engine", said)
    last = batches[-1]
    empty = {**last, "labels": torch.full_like(last["labels"], IGNORE)}
    return [*batches, *([empty] * (count - len(batches)))]


class OwnData:
    """The microbatches of this data rank from a data set of tokens, from a step on.

    The order is a function of the seed, so that other ranks and microbatches read the same sequences in a step. The tokens are
    written to a temporary directory of this process.

    Args:
        dataset: rows: token ids, or a mapping with ``input_ids`` and maybe ``loss_mask``, which tokens are learned.
        options: keywords of :class:`~meshwright.data.loader.TrainLoader`.
        epochs: how often it is read.
        done: returns the number of steps that are done, after which it begins.

    Raises:
        DataError: a row is none of these; it is named by its number.
    """

    def __init__(self, dataset: Sequence[Any], options: Mapping[str, Any], epochs: float, done: Callable[[], int]) -> None:
        tokens, masks = [], []
        for number, row in enumerate(dataset):
            ids, mask = _row(row, number)
            tokens.append(ids)
            masks.append(mask)
        if not tokens:
            raise DataError("data.empty", "Engine.share: the data set has no rows")
        learned = [np.ones(len(ids), np.bool_) if mask is None else mask for ids, mask in zip(tokens, masks, strict=True)]
        chats = any(mask is not None for mask in masks)
        length = options["sequence_length"]
        if chats and (long := next((number for number, ids in enumerate(tokens) if len(ids) > length), None)) is not None:
            said = f"has {len(tokens[long])} tokens and a loss_mask; legal are at most sequence_length={length}"
            raise DataError("data.row", f"Engine.share: row {long}: {said}")
        self._folder = TemporaryDirectory(prefix="meshwright-tokens-")
        store = write_documents(Path(self._folder.name), tokens, learned if chats else None, sequence_length=length)
        self.loader = TrainLoader(store, **options)
        self.steps, self._done = self.loader.steps(epochs), done

    def __len__(self) -> int:
        """Return the number of optimizer steps."""
        return self.steps

    def __iter__(self) -> Iterator[list[Batch]]:
        for number in range(self._done(), self.steps):
            yield self.loader.microbatches(number)


def _row(row: Any, number: int) -> tuple[Any, Any]:
    content = row if isinstance(row, Mapping) else {"input_ids": row}
    if further := sorted(content.keys() - {"input_ids", "loss_mask"}):
        said = f"has {', '.join(further)}, which nothing reads; legal are input_ids and loss_mask"
        raise DataError("data.row", f"Engine.share: row {number}: {said}")
    try:
        ids = np.asarray(content["input_ids"])
        mask = None if content.get("loss_mask") is None else np.asarray(content["loss_mask"]).astype(np.bool_)
    except (KeyError, ValueError, TypeError) as error:
        raise DataError("data.row", f"Engine.share: row {number}: is no row of token ids ({error!r})") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) < 2 or (mask is not None and mask.shape != ids.shape):
        shapes = f"input_ids {ids.dtype} {list(ids.shape)}" + ("" if mask is None else f", loss_mask {list(mask.shape)}")
        raise DataError("data.row", f"Engine.share: row {number}: {shapes}; legal are at least two ids, and a mask as long")
    return ids.astype(np.int64), mask
