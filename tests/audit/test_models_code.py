"""Audits of models whose own code counts positions, or computes attention; and bugs of what `cp` does for them, planted."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from maintain import coverage
from maintain.cells import LAYOUTS
from meshwright.audit.causes.findings import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.ranks import RankTrainer
from meshwright.distributed.context import attend, cache_door, count_positions
from meshwright.distributed.context.sequences import Sequences
from meshwright.errors import WorkerError
from meshwright.models.specs import registry
from meshwright.models.specs.derived import DefaultParallelizationStrategy
from meshwright.plan.axes.context.sharing import positions_of
from meshwright.plan.given.closed_choices import ContextBalance
from meshwright.plan.given.spec import ParallelSpec, UnitRule
from meshwright.plan.result.context.count_action import CountPositions
from tests.harness import refuses

PLACES = {place.label: place for place in LAYOUTS}


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    with Auditor() as auditor:
        yield auditor


def test_workers_without_a_strategy_of_the_caller_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is registered when the workers have started, as in a notebook's cell that only new processes would not have."""

    class Own(DefaultParallelizationStrategy):
        def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
            spec = super().spec(model, param_dtype)
            return replace(spec, units=(*spec.units, UnitRule("transformer.wte")))

    case = coverage.case_of("gptj", PLACES["shard 2"], tmp_path, "pack", "float64")
    with Auditor() as auditor:
        assert auditor.audit(case, 2).passed
        monkeypatch.setitem(registry._REGISTRY, "GPTJForCausalLM", Own())
        with refuses(WorkerError, "audit.plan"):
            auditor.audit(case, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model_type", "packing", "label"),
    [
        ("bart", "pad", "cp 2"),  # counts positions
        ("gpt_bigcode", "pack", "cp 2"),  # tells its attentions no positions
        ("gptj", "pack", "cp 2"),  # computes attention
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("diffllama", "pack", "cp 2"),  # attends twice in a run
                ("hrm_text", "pack", "cp 2"),  # attentions that run twice
                ("bloom", "pad", "cp 2"),  # a bias by the place of a key
                ("mpt", "pad", "cp 2"),  # the same, from the end of the longest sequence
                ("gpt_neo", "pad", "cp 2"),  # rows of a causal table
                ("deepseek_v32", "pack", "cp 2"),  # chooses keys by an indexer
                ("llama4_text", "pack", "cp 2"),  # chunks, and positions that it counts
                ("llama4_text", "pack", "cp 4"),
                ("gpt_neo", "pad", "cp 4"),
                ("bart", "pad", "cp 2 x shard 2"),
                ("gptj", "pack", "cp 2 x tp 2"),
                ("persimmon", "pack", "cp 2 x tp 2 seq"),
                ("deepseek_v32", "pack", "cp 2 x ep 2"),
                ("bart", "pad", "pp 2 x cp 2"),
                ("gptj", "pack", "pp 2 x cp 2"),
            )
        ),
    ],
)
def test_over_ranks(auditor: Auditor, tmp_path: Path, model_type: str, packing: str, label: str) -> None:
    place = PLACES[label]
    report = auditor.audit(coverage.case_of(model_type, place, tmp_path, packing, "float64"), place.world_size)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "packing"), [("persimmon", "pack"), ("hrm_text", "pack"), ("gptj", "pack"), ("llama4_text", "pack")]
)
def test_layers_that_run_again_in_backward(auditor: Auditor, tmp_path: Path, model_type: str, packing: str) -> None:
    case = coverage.case_of(model_type, PLACES["cp 2"], tmp_path, packing, "float64", activation_checkpointing="full")
    report = auditor.audit(case, 2)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12


def counts_those_of_other_ranks(trainer: RankTrainer) -> None:
    """A module counts positions of one piece, where ranks have two."""
    for action in trainer.setup.plan.program:
        if isinstance(action, CountPositions):
            del trainer.model.get_submodule(action.module).forward  # the class's own comes back
            count_positions.count_positions(trainer.model, replace(action, balance=ContextBalance.CONTIGUOUS), trainer.mesh)


def one_document(trainer: RankTrainer) -> None:
    """An attention that is told no positions takes each row for one document."""

    def sequences() -> Sequences:
        return Sequences.of(torch.arange(coverage.SEQUENCE_LENGTH)[None])

    attend.running_sequences = sequences


def keys_in_the_order_of_ranks(trainer: RankTrainer) -> None:
    """The cache returns keys in the order in which ranks have them, and not in that of the sequence."""
    gathered = cache_door._gathered
    pieces = [positions_of(coverage.SEQUENCE_LENGTH, 2, ContextBalance.CONTIGUOUS, rank) for rank in range(2)]
    cache_door._gathered = lambda _, group, own: gathered(pieces, group, own)


def keys_without_gradient(trainer: RankTrainer) -> None:
    """What other ranks compute with keys and values has no gradient for them."""
    gathered = cache_door._gathered
    cache_door._gathered = lambda pieces, group, own: gathered(pieces, group, [tensor.detach() for tensor in own])


def masks_of_the_first_queries(trainer: RankTrainer) -> None:
    """Each rank has masks of the first positions, as from a cache that is empty."""
    rows = cache_door._Rows
    cache_door._Rows = lambda model, places, sequences: rows(model, torch.arange(len(places)), sequences)  # type: ignore[misc]


GPTJ, BIGCODE = "transformer.h.0.attn", "transformer.h.0.attn"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("plant", "model_type", "packing", "kind", "words"),
    [
        (counts_those_of_other_ranks, "bart", "pad", Kind.FORWARD, "forward diverges in model.decoder.embed_positions"),
        (one_document, "gpt_bigcode", "pack", Kind.FORWARD, f"forward diverges in {BIGCODE}: its inputs agree, its output"),
        (keys_in_the_order_of_ranks, "gptj", "pack", Kind.FORWARD, f"forward diverges in {GPTJ}: its inputs agree, its output"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (masks_of_the_first_queries, "gptj", "pack", Kind.FORWARD, f"forward diverges in {GPTJ}: its inputs agree"),
                (keys_without_gradient, "gptj", "pack", Kind.BACKWARD, "backward diverges in transformer.h.1.attn"),
            )
        ),
    ],
)
def test_bugs_are_named(
    tmp_path: Path,
    plant: Callable[[RankTrainer], None],
    model_type: str,
    packing: str,
    kind: Kind,
    words: str,
) -> None:
    case = coverage.case_of(model_type, PLACES["cp 2"], tmp_path, packing, "float64")
    with Auditor() as auditor:  # processes of its own: a bug of a function stays in those that it is planted in
        report = auditor.audit(case, 2, plants=[plant])
    assert not report.passed
    assert (report.findings[0].kind, words in report.findings[0].message) == (kind, True), report.verdict
