"""Audits of mixers whose heads the ranks of `cp` divide; and bugs of such exchanges, planted on the ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maintain.cells import LAYOUTS, Variant, family_case
from maintain.coverage import run_of
from meshwright.audit.case import Case
from meshwright.audit.causes.findings import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.data import draw_documents
from meshwright.audit.ranks import RankTrainer
from meshwright.audit.ready import make_ready
from meshwright.distributed.context import share_heads as heads
from meshwright.distributed.context import take_before
from meshwright.plan.given.closed_choices import ContextBalance, SyncPolicy
from meshwright.plan.result.context.before_action import TakeTokensBefore
from meshwright.plan.result.context.heads_action import ShareHeads
from meshwright.shrink.run import shrink

MIXER = "model.layers.0.mixer"
PLACES = {place.label: place for place in LAYOUTS}
VARIANT = Variant(SyncPolicy.REDUCE_EACH, "float64", 2, False, False)


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    with Auditor() as auditor:
        yield auditor


@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("cp 2", {}),
        *(
            pytest.param(label, options, marks=pytest.mark.thorough)
            for label, options in (
                ("cp 4", {}),
                ("cp 2", {"context_balance": "contiguous", "activation_checkpointing": "full"}),
                ("cp 2 x shard 2", {}),
                ("cp 2 x tp 2", {}),
                ("cp 2 x ep 2", {}),
                ("pp 2 x cp 2", {}),
            )
        ),
    ],
    ids=str,
)
def test_heads_of_mixers_over_ranks(auditor: Auditor, tmp_path: Path, label: str, options: dict[str, Any]) -> None:
    place = PLACES[label]
    case = family_case("nemotron_h", place, VARIANT, tmp_path, packing="pad", **options)
    report = auditor.audit(case, place.world_size)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12


def shared_otherwise(trainer: RankTrainer, change: Callable[[ShareHeads], ShareHeads]) -> None:
    """Mixers do something else than their actions say."""
    for action in trainer.setup.plan.program:
        if isinstance(action, ShareHeads):
            del trainer.model.get_submodule(action.module).forward  # the class's own comes back
            heads.share_heads(trainer.model, change(action), trainer.mesh)


def columns_of_heads_swapped(trainer: RankTrainer) -> None:
    """B and C of all groups are taken for one piece: a rank has B of each group, and another one C."""

    def change(action: ShareHeads) -> ShareHeads:
        ((name, (gate, values, keys, queries, steps)),) = action.row.openings
        together = (keys[0] + queries[0], 1)
        return replace(action, row=replace(action.row, openings=((name, (gate, values, together, steps)),)))

    shared_otherwise(trainer, change)


def groups_of_one_rank_alone(trainer: RankTrainer) -> None:
    """B and C go to all ranks that need them, and the gradients of one of them come back."""

    def copied(blocks: torch.Tensor, copies: int) -> torch.Tensor:
        return torch.stack([blocks, *[blocks.detach()] * (copies - 1)], 3).flatten(2, 3)

    heads._copied = copied


def tokens_in_the_order_of_ranks(trainer: RankTrainer) -> None:
    """The state goes through the tokens in the order in which ranks have them, and not in that of the sequence."""
    shared_otherwise(trainer, lambda action: replace(action, balance=ContextBalance.CONTIGUOUS))


def state_of_the_row_before(trainer: RankTrainer) -> None:
    """The last tokens of a row reach the first of the next one, as where documents are packed and nobody tells the mixer."""
    mixer = trainer.model.get_submodule(MIXER)
    inner = mixer.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = inner(hidden, *args, **kwargs)
        return output + 0.1 * output.roll(1, 0)

    mixer.forward = forward


def small_case(tmp_path: Path, model_type: str, label: str = "cp 2") -> Case:
    """Return the audit of the smallest model of a type, on padded rows."""
    run, _, _ = shrink(run_of(model_type, PLACES[label], tmp_path, "pad"), PLACES[label].world_size)
    ready, _ = make_ready(run, "float64", 1, tmp_path)
    draw_documents(ready.model.config["vocab_size"], ready.data.sequence_length, 40, 0, tmp_path / "documents")
    return Case(ready, tmp_path / "documents", 1)


def a_token_less_before(trainer: RankTrainer) -> None:
    """A module gets one token less than it needs before those of a rank."""
    for action in trainer.setup.plan.program:
        if isinstance(action, TakeTokensBefore) and action.module.endswith(BEFORE):
            module = trainer.model.get_submodule(action.module)
            del module.forward
            if action.tokens > 1:
                take_before.take_tokens_before(trainer.model, replace(action, tokens=action.tokens - 1), trainer.mesh)


BEFORE = ("blocks.1.feed_forward", "layers.1.self_attn.qkv_proj")
"""The modules of which :func:`a_token_less_before` changes what they get."""


def state_that_no_rank_passes(trainer: RankTrainer) -> None:
    """A mixer runs as it is written, on the rank's tokens, with a state that begins at zero on each rank."""
    for action in trainer.setup.plan.program:
        if isinstance(action, ShareHeads) and ".1." in action.module:
            del trainer.model.get_submodule(action.module).forward


def documents_that_do_not_begin(trainer: RankTrainer) -> None:
    """A recurrence that begins again at position 0 gets positions under which no document begins."""
    heads._Mixer._all = lambda self, positions, pieces: positions.repeat(1, self.ranks) + 1  # type: ignore[method-assign]


def gradients_of_tokens_before_lost(trainer: RankTrainer) -> None:
    """What a module gives for its first token tells the rank before nothing in backward."""
    before = take_before.tokens_before
    take_before.tokens_before = lambda *args: [own.detach() for own in before(*args)]


@pytest.mark.parametrize(
    ("plant", "model_type", "kind", "words"),
    [
        (
            a_token_less_before,
            "rwkv",
            Kind.FORWARD,
            "forward diverges in rwkv.blocks.1.feed_forward: its inputs agree, its output is off by",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (
                    a_token_less_before,
                    "zaya",
                    Kind.FORWARD,
                    "forward diverges in model.layers.1.self_attn: its inputs agree, its output",
                ),
                (
                    gradients_of_tokens_before_lost,
                    "zaya",
                    Kind.BACKWARD,
                    "backward diverges in model.layers.1.self_attn: the gradient of its output agrees",
                ),
                *(
                    (state_that_no_rank_passes, model_type, Kind.FORWARD, f"forward diverges in {mixer}: its inputs agree, its")
                    for model_type, mixer in (
                        ("rwkv", "rwkv.blocks.1.attention"),
                        ("xlstm", "backbone.blocks.1.mlstm_layer"),
                        ("minimax", "model.layers.1.self_attn"),
                        ("recurrent_gemma", "model.layers.1.temporal_block"),
                    )
                ),
                (
                    documents_that_do_not_begin,
                    "recurrent_gemma",
                    Kind.FORWARD,
                    "forward diverges in model.layers.0.temporal_block: its inputs agree, its output",
                ),
            )
        ),
    ],
)
def test_a_state_or_tokens_that_are_not_passed_are_named(
    auditor: Auditor, tmp_path: Path, plant: Callable[..., None], model_type: str, kind: Kind, words: str
) -> None:
    report = auditor.audit(small_case(tmp_path, model_type), 2, plants=[plant])
    assert not report.passed
    assert (report.findings[0].kind, words in report.findings[0].message) == (kind, True), report.verdict


STATES = ("rwkv", "xlstm", "minimax", "recurrent_gemma", "zaya")
CELLS = [(model_type, label) for model_type in STATES for label in ("cp 2", "cp 4", "cp 2 x tp 2 seq")]
CELLS += [("zamba", "cp 2"), ("zamba", "cp 2 x tp 2")]  # it has two heads, and a stream that sequence parallel refuses


@pytest.mark.thorough
@pytest.mark.parametrize(("model_type", "label"), CELLS)
def test_families_of_states_over_ranks(auditor: Auditor, tmp_path: Path, model_type: str, label: str) -> None:
    report = auditor.audit(small_case(tmp_path, model_type, label), PLACES[label].world_size)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12


def sums_of_forward_alone(trainer: RankTrainer) -> None:
    """What a matrix between gives is summed over ranks, and the gradients that come back to it are not."""
    heads.enter = lambda whole, group: whole


def test_a_sum_that_backward_lacks_is_named(auditor: Auditor, tmp_path: Path) -> None:
    report = auditor.audit(small_case(tmp_path, "falcon_mamba"), 2, plants=[sums_of_forward_alone])
    assert not report.passed
    assert report.findings[0].kind is Kind.BACKWARD
    assert "backward diverges in backbone.layers.1.mixer" in report.findings[0].message, report.verdict


@pytest.mark.parametrize(
    ("plant", "model", "kind", "words"),
    [
        (columns_of_heads_swapped, {}, Kind.FORWARD, f"forward diverges in {MIXER}: its inputs agree, its output is off by"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (
                    groups_of_one_rank_alone,
                    {"n_groups": 1},
                    Kind.BACKWARD,
                    f"backward diverges in {MIXER}: the gradient of its",
                ),
                (tokens_in_the_order_of_ranks, {}, Kind.FORWARD, f"forward diverges in {MIXER}: its inputs agree, its output"),
                (state_of_the_row_before, {}, Kind.FORWARD, f"forward diverges in {MIXER}: its inputs agree, its output"),
            )
        ),
    ],
)
def test_bugs_are_named_with_their_layer(
    auditor: Auditor, tmp_path: Path, plant: Callable[..., None], model: dict[str, Any], kind: Kind, words: str
) -> None:
    case = family_case("nemotron_h", PLACES["cp 2"], VARIANT, tmp_path, packing="pad", model=model, context_balance="zigzag")
    report = auditor.audit(case, 2, plants=[plant])
    assert not report.passed
    assert (report.findings[0].kind, words in report.findings[0].message) == (kind, True), report.verdict
