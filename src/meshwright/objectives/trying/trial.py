"""Tries an objective on a small model in place of the run's, before any process starts.

The model is a function of single tokens. So what the sums of an objective must have in common on all layouts can be compared:
that they add up over rows, over parts of a sequence and over documents, that counts do, and that nothing is kept between calls.
What an objective calls is noted, so that the run gives it that and no more.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.data.rows.columns import MEMBER
from meshwright.errors import ConfigError, PartError, Problems, Refusal
from meshwright.models.added_modules import ADDED, added_modules
from meshwright.models.objective import Batch, Column, Objective, RunFacts
from meshwright.models.token_loss import IGNORE, forward_arguments
from meshwright.objectives.call import calling, evaluate_batch, named, passes_before
from meshwright.objectives.documents import EXISTS, number_documents
from meshwright.objectives.running import OF_LOGITS, Running, Seen, running
from meshwright.objectives.trying.gathered import Sizes, gathered_by
from meshwright.objectives.trying.invented import REFERENCE, invented, spread_of
from meshwright.objectives.trying.stand_in import StandIn, with_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["try_objective"]

ROWS, LENGTH = 4, 12
CLOSE = 1e-4
"""Relative difference of sums that may come from rounding: an objective may compute in fp32."""

_DOCUMENTS = {"documents", "document_marks", EXISTS}


class _AbsentError(KeyError):
    """A batch does not have what an objective reads of it."""


class _Noting(dict[str, torch.Tensor]):
    """A batch that notes which of its tensors are read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], read: set[str]) -> None:
        super().__init__(tensors)
        self.read = read

    def __getitem__(self, key: str) -> torch.Tensor:
        self.read.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> torch.Tensor:
        raise _AbsentError(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is `get`


class _Trial:
    """An objective, its model, and what was noted."""

    def __init__(
        self,
        objective: Objective,
        model: "PreTrainedModel",
        columns: Mapping[str, Column],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.objective, self.model, self.call, self.read = objective, StandIn(model).to(dtype), Running(), set[str]()
        self.dtype = torch.promote_types(dtype, torch.float32)  # of what computes in at least fp32
        self.columns, self.runs = columns, Counter[tuple[str, bool]]()
        if objective.added:
            self.model.add_module(ADDED, added := with_values(objective, self.dtype))
            for name, module in added.items():
                module.register_forward_pre_hook(self._cast)
                module.register_forward_hook(lambda *_, name=name: self.runs.update([(name, torch.is_grad_enabled())]))
        self.words = model.config.get_text_config().vocab_size

    def _cast(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cast what a module gets, as its unit does."""
        floats = [isinstance(one, torch.Tensor) and one.is_floating_point() for one in arguments]
        return tuple(one.to(self.dtype) if is_float else one for one, is_float in zip(arguments, floats, strict=True))

    def rows(self, count: int = ROWS, length: int = LENGTH) -> "_Noting":
        """Return rows with different numbers of labels, the last with none, and the columns of the data."""
        ids = torch.arange(count * length).view(count, length) * 7919 % max(1, min(self.words, 10_007))
        labels = ids.roll(-1, 1)
        labels[:, -1] = IGNORE
        for row in range(count):
            labels[row, : row * length // (count - 1)] = IGNORE
        positions = torch.arange(length).expand(count, -1).contiguous()
        if MEMBER in self.columns:  # each row is a pair
            positions[:, length // 2 :] -= length // 2
            labels[:, length // 2 - 1] = IGNORE
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return _Noting({**batch, **invented(self.columns, batch)}, self.read)

    def prepared(self, batch: Batch, documents: int | None = None) -> _Noting:
        """Return a batch as a run prepares it, with this number of documents in each row."""
        with calling(self.objective, "training"):
            found = self.objective.training([batch], [range(len(batch["input_ids"]))])[0]
        reference = torch.sin(batch["input_ids"].double()).masked_fill(batch["labels"] == IGNORE, 0.0).to(self.dtype)
        numbered = number_documents(dict(found), documents, spread_of(self.columns))
        made = _Noting({REFERENCE: reference, **found, **numbered}, self.read)
        for one in passes_before(self.objective):
            if one.adapted:
                with running(Running()), torch.no_grad():
                    one.add([made], [one.values(self.model, made)], lambda sums: sums)
                self.model.calls.clear()
        return made

    @property
    def part(self) -> str:
        return f"objective {named(self.objective)}"

    def sums(self, batch: Batch) -> torch.Tensor:
        """Return the terms of a batch [terms]."""
        terms, metrics = evaluate_batch(self.objective, self.model, batch, self.call)
        self.objective.metric_names = tuple(metrics)  # the first batch says them
        return torch.stack([term.double() for term in terms])

    def counts(self, batches: list[Batch]) -> list[int]:
        """Return the number of targets of some batches."""
        with calling(self.objective, "counts"):
            found = list(self.objective.counts(batches))
        if len(found) != len(self.objective.terms) or not all(isinstance(one, int) for one in found):
            terms = ", ".join(self.objective.terms)
            raise PartError("part.returned", f"{self.part}: counts returned {found}; legal is an int for each term: {terms}")
        return found


def try_objective(objective: Objective, model: "PreTrainedModel", run: RunFacts) -> None:
    """Try an objective of the user, and note on it what it does not say of itself.

    Args:
        objective: the objective, which has begun.
        model: the model of the run, on any device; its config is read.
        run: facts of the run.

    Raises:
        PartError: it raises something, or does not return what it should.
        ConfigError: it is not a sum over targets, or reads what a batch does not have.
    """
    try:
        _try(objective, model, run)
    except PartError as error:
        if not isinstance(error.__cause__, _AbsentError):
            raise
        legal = ", ".join(["input_ids", "labels", "position_ids", *run.columns, REFERENCE, *sorted(_DOCUMENTS)])
        raise ConfigError(
            "objective.batch",
            f"{error}\n{error.__cause__} is not in a batch; legal are {legal}; a column of the rows comes by data.tensors",
        ) from error


def _try(objective: Objective, model: "PreTrainedModel", run: RunFacts) -> None:
    trial = _Trial(objective, model, run.columns)
    whole = trial.prepared(trial.rows())
    with calling(objective, "held_out"):
        objective.held_out(trial.rows(), range(ROWS))
    trial.runs.clear()
    sums = trial.sums(whole)
    runs = trial.runs.copy()
    objective.module_runs = {name: (runs[name, True] + runs[name, False], runs[name, True]) for name in objective.added}
    if sums.requires_grad:
        with calling(objective, "the backward of sums"):
            sums.sum().backward(retain_graph=True)
    asked, calls = trial.call.asked.copy(), list(trial.model.calls)
    known = forward_arguments(whole)
    alike = [call.keys() == known.keys() and call["input_ids"] is dict.__getitem__(whole, "input_ids") for call in calls]
    counts = trial.counts([whole])
    given = not calls or all(alike)
    for name, found in (
        ("pipelines", given and len(calls) <= 1),
        ("chunks", given and "logits" not in asked),
    ):
        if getattr(objective, name) is None:
            setattr(objective, name, found)
    objective.reads = frozenset(trial.read & run.columns.keys())
    objective.documents |= bool(trial.read & {*_DOCUMENTS, *spread_of(run.columns)})
    objective.documents |= any(asked[name] for name in ("per_document", "per_token", "document_sum"))
    asks = REFERENCE in trial.read or bool(asked[REFERENCE])
    objective.reference = REFERENCE not in run.columns and (objective.reference or asks)
    objective.gathers |= "gather" in asked
    objective.whole_logits |= "logits" in asked
    objective.without_head = "hidden" in asked and not asked.keys() & OF_LOGITS
    objective.wanted = frozenset(asked.keys() & {"log_probs", "entropy"})
    sums_over_ranks = asked["per_document"] + asked["per_document's gradient"]
    objective.collectives = (asked["gather"], asked["gather's gradient"], sums_over_ranks)
    if objective.gathers:
        with suppress(PartError):  # of another shape or dtype it may raise something
            objective.gathered = None
            objective.gathered = gathered_by(lambda sizes, dtype: _gathers(objective, model, run, sizes, dtype))
    problems = _unused(trial) if sums.requires_grad else Problems()
    _compare(trial, whole, sums, counts, problems)
    if not problems and objective.shares is None:
        objective.shares = not _parts_differ(trial, whole, sums)
    if not problems and objective.packs is None and run.packing == "pack":
        objective.packs = not _documents_differ(trial)
    if problems:
        raise ConfigError(problems)


def _gathers(objective: Objective, model: "PreTrainedModel", run: RunFacts, sizes: Sizes, dtype: torch.dtype) -> list[Seen]:
    """Return what is gathered for a batch of some sizes, by a model that computes in a dtype."""
    trial = _Trial(objective, model, run.columns, dtype)
    sums = trial.sums(trial.prepared(trial.rows(sizes.rows, sizes.length), sizes.documents))
    if sums.requires_grad:
        with calling(objective, "the backward of sums"):
            sums.sum().backward()
    return trial.call.gathered


def _unused(trial: _Trial) -> Problems:
    """Return which of the added modules have no part in the loss, or have it without being called."""
    problems, objective = Problems(), trial.objective
    for name, module in (added_modules(trial.model) or nn.ModuleDict()).items():
        used = {own for own, parameter in module.named_parameters(prefix=name) if parameter.grad is not None}
        if used and not objective.module_runs[name][1]:
            problems.add(
                "objective.modules",
                f"{trial.part}: reads {min(used)} without calling its module; legal is given.module(model, {name!r})(...)",
            )
        problems += [
            Refusal("objective.modules", f"{trial.part}: its loss does not depend on {own}, which its modules() adds")
            for own, parameter in module.named_parameters(prefix=name)
            if own not in used and parameter.requires_grad
        ]
    return problems


def _compare(trial: _Trial, whole: _Noting, sums: torch.Tensor, counts: list[int], problems: Problems) -> None:
    """Add why the objective is not a sum over targets."""

    def wrong(text: str) -> None:
        problems.add("objective.sums", f"{trial.part} is not a sum over targets: {text}")

    if not bool(sums.isfinite().all()):
        wrong(f"sums are {_numbers(sums)} where some rows have no label; a sum over no targets is 0")
        return
    if not sums.requires_grad:
        wrong("it does not depend on the model, so there is no gradient")
        return
    if _differ(again := trial.sums(whole), sums):
        wrong(f"the same batch gives {_numbers(sums)}, and then {_numbers(again)}; an objective keeps nothing between batches")
        return
    rows = [_part(whole, slice(row, row + 1)) for row in range(ROWS)]
    if not trial.objective.gathers:
        apart = sum((trial.sums(row) for row in rows), torch.zeros(()))
        if not bool(apart.isfinite().all()):
            wrong(f"sums of a row without a label are {_numbers(trial.sums(rows[-1]))}; a sum over no targets is 0")
        elif _differ(apart, sums):
            wrong(
                f"{ROWS} rows together give {_numbers(sums)}, and one by one {_numbers(apart)}; do not divide by the number of "
                "tokens or rows: counts says what the sums of the step are divided by"
            )
    apart_counts = [sum(found) for found in zip(*(trial.counts([row]) for row in rows), strict=True)]
    listed = trial.counts(list(rows))
    if apart_counts != counts or listed != counts:
        wrong(
            f"counts of {ROWS} rows in one batch are {counts}, in a batch each {listed}, and one by one {apart_counts}; "
            "they must not depend on how rows are put into batches"
        )


def _parts_differ(trial: _Trial, whole: _Noting, sums: torch.Tensor) -> bool:
    """Whether the two halves of all sequences give other sums. Sums over documents are added over ranks: they are not tried."""
    if trial.objective.documents or trial.objective.gathers:
        return False
    halves = [_part(whole, slice(None), slice(*ends)) for ends in ((0, LENGTH // 2), (LENGTH // 2, LENGTH))]
    try:
        return _differ(sum((trial.sums(half) for half in halves), torch.zeros(())), sums)
    except PartError:
        return True


def _documents_differ(trial: _Trial) -> bool:
    """Whether two documents in one row give other sums than in a row each."""
    batch = trial.rows()
    first, second = (_part(batch, slice(row, row + 1)) for row in (0, 1))
    packed = {name: torch.cat([first[name], second[name]], 1) for name in batch}
    padded = {name: torch.cat([first[name], second[name]], 0) for name in batch}
    try:
        return _differ(trial.sums(trial.prepared(packed)), trial.sums(trial.prepared(padded)))
    except PartError:
        return True


def _part(batch: dict[str, torch.Tensor], rows: slice, places: slice = slice(None)) -> Any:
    """Return some rows of a batch, and of those some places."""
    shape = tuple(dict.__getitem__(batch, "input_ids").shape)

    def some(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape[:2]) == shape:
            return tensor[rows, places]
        return tensor[rows] if tensor.ndim and len(tensor) == shape[0] else tensor

    cut = {name: some(tensor) for name, tensor in batch.items()}
    return _Noting(cut, batch.read) if isinstance(batch, _Noting) else cut


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    size = torch.maximum(one.detach().abs(), other.detach().abs()).clamp(min=1e-3)
    return not bool(((one - other).detach().abs() <= CLOSE * size).all())


def _numbers(sums: torch.Tensor) -> str:
    return ", ".join(f"{value:.5g}" for value in sums.tolist())
