"""Tries an objective on a small model in place of the run's, before any process starts.

The model is a function of single tokens. So what the sums of an objective must have in common on all layouts can be compared:
that they add up over rows, over parts of a sequence and over documents, that counts do, and that nothing is kept between calls.
What an objective calls is noted, so that the run gives it that and no more.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.data.rows.columns import MEMBER
from meshwright.errors import ConfigError, PartError, Problems, Refusal
from meshwright.models.added_modules import ADDED, added_modules
from meshwright.models.heads import is_other_task
from meshwright.models.objective import Batch, Column, Objective, RunFacts
from meshwright.models.token_loss import IGNORE, forward_arguments
from meshwright.models.weights.initial_values import initialize
from meshwright.objectives.call import calling, evaluate_batch, named, passes_before
from meshwright.objectives.documents import EXISTS, number_documents
from meshwright.objectives.invented import REFERENCE, invented, spread_of
from meshwright.objectives.running import OF_LOGITS, Running, running

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


class _Head(nn.Module):
    """Logits of a hidden state: a few of its features matter."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cos(torch.arange(words, dtype=torch.float64)[:, None] * torch.tensor([0.7, 1.3, 2.9])))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[..., :3] @ self.weight.T


class _StandIn(nn.Module):
    """A causal language model whose outputs depend on one token each, in fp64."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.config, text = model.config, model.config.get_text_config()
        self.width, self.scale = int(getattr(text, "hidden_size", 16)), nn.Parameter(torch.ones((), dtype=torch.float64))
        self.lm_head = _Head(model.config.num_labels if is_other_task(model) else text.vocab_size)
        self.calls: list[dict[str, Any]] = []

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_input_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, **arguments: Any) -> SimpleNamespace:
        self.calls.append(arguments)
        features = torch.arange(1, max(3, self.width) + 1, dtype=torch.float64)
        hidden = self.scale * torch.sin(0.37 * features * arguments["input_ids"].double()[..., None])
        return SimpleNamespace(logits=self.lm_head(hidden))


def _with_values(objective: Objective) -> nn.ModuleDict:
    """Return copies of the modules that an objective adds, with their first values, in fp64."""
    added = nn.ModuleDict(copy.deepcopy(dict(objective.added))).to("meta", torch.float64)
    with calling(objective, "reset_parameters of its modules"):
        initialize(added, torch.device("cpu"), 0)
    return added


class _Trial:
    """An objective, its model, and what was noted."""

    def __init__(self, objective: Objective, model: "PreTrainedModel", columns: Mapping[str, Column]) -> None:
        self.objective, self.model, self.call, self.read = objective, _StandIn(model), Running(), set[str]()
        self.columns, self.runs = columns, Counter[tuple[str, bool]]()
        if objective.added:
            self.model.add_module(ADDED, added := _with_values(objective))
            for name, module in added.items():
                module.register_forward_hook(lambda *_, name=name: self.runs.update([(name, torch.is_grad_enabled())]))
        self.words = model.config.get_text_config().vocab_size

    def rows(self) -> "_Noting":
        """Return rows with different numbers of labels, the last with none, and the columns of the data."""
        ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7919 % max(1, min(self.words, 10_007))
        labels = ids.roll(-1, 1)
        labels[:, -1] = IGNORE
        for row in range(ROWS):
            labels[row, : row * LENGTH // (ROWS - 1)] = IGNORE
        positions = torch.arange(LENGTH).expand(ROWS, -1).contiguous()
        if MEMBER in self.columns:  # each row is a pair
            positions[:, LENGTH // 2 :] -= LENGTH // 2
            labels[:, LENGTH // 2 - 1] = IGNORE
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return _Noting({**batch, **invented(self.columns, batch)}, self.read)

    def prepared(self, batch: Batch) -> _Noting:
        """Return a batch as a run prepares it."""
        with calling(self.objective, "training"):
            found = self.objective.training([batch], [range(len(batch["input_ids"]))])[0]
        reference = torch.sin(batch["input_ids"].double()).masked_fill(batch["labels"] == IGNORE, 0.0)
        numbered = number_documents(dict(found), spread=spread_of(self.columns))
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
    problems = _unused(trial) if sums.requires_grad else Problems()
    _compare(trial, whole, sums, counts, problems)
    if not problems and objective.shares is None:
        objective.shares = not _parts_differ(trial, whole, sums)
    if not problems and objective.packs is None and run.packing == "pack":
        objective.packs = not _documents_differ(trial)
    if problems:
        raise ConfigError(problems)


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
