"""A plan with what passes found before is the plan without it, and most passes are not made again."""

import copy
import itertools
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.errors import MeshwrightError, PlanError
from meshwright.layout import Layout
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.inspection import inspect_model
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.remembered_passes import MOST, RememberedPasses
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.tiny import make

CHOICES: dict[str, tuple[Any, ...]] = {
    "sync": (None, "defer", "reshard_each", "reduce_each"),
    "activation_checkpointing": ("none", "full", "selective", "submodule"),
    "activation_checkpointing_layers": ({}, {"model.layers.0": "full"}, {"no.such": "full"}),
    "sync_units": ({}, {"model.layers.*": "defer"}),
    "sequence_parallel": (False, True),
    "loss_parallel": (None, True, False),
    "loss_chunks": (None, 0, 4),
    "compile": (False, True),
    "cpu_offload": (False, True),
    "context_parallel": ("gather", "ulysses"),
    "pipeline_schedule": ("gpipe", "1f1b", "interleaved_1f1b", "zbv"),
    "stages_per_rank": (None, 1, 2),
    "microbatches": (1, 4, 8),
    "tokens": (None, 128),
    "reshard_after_forward": (None, True, False),
    "freeze": ((), ("model.embed_tokens.weight",)),
    "groups": ((), (("model.layers.*", 0.5, 0.9, None, ()),), (("lm_head", 1.0, None, 0.0, ()),)),
    "param_dtype": ("bfloat16", None),
}
PLACES = [
    Layout(pp, replicas, shard, cp, tp, ep)
    for pp, replicas, shard, cp, tp in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 2))
    for ep in (1, 2)
]


def done(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function returns, or what it refuses."""
    try:
        return function(*arguments, **named)
    except MeshwrightError as error:
        return list(map(str, error.problems))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3_text", "diffusion_gemma", "nemotron_h"])
def test_the_plan_is_the_same_after_any_others(family: str) -> None:
    model, spec = make(family, meta=True)
    facts, drawn, remembered = inspect_model(spec, model), random.Random(family), RememberedPasses()
    kinds = {ShardingPlan: 0, list: 0}
    for _ in range(60):
        layout = drawn.choice(PLACES)
        # A few changes each time, so that some of what was found before is found again.
        chosen = {name: drawn.choice(CHOICES[name]) for name in drawn.sample(sorted(CHOICES), drawn.randrange(4))}
        options = done(ParallelOptions, **chosen)
        if isinstance(options, list):
            continue
        plain, again = (done(resolve, spec, facts, layout, options, remembered=known) for known in (None, remembered))
        assert plain == again
        assert not isinstance(plain, ShardingPlan) or plain.to_dict() == again.to_dict()
        kinds[type(plain)] += 1
    assert min(kinds.values()) > 3, kinds


def counted(calls: list[str], *names: str) -> Any:
    def find(draft: Draft) -> Found[int]:
        calls.append("")
        return Found(sum(draft.layout.size(name) for name in names) + draft.options.microbatches)

    return find


MODEL, SPEC = make("llama", meta=True)
FACTS = inspect_model(SPEC, MODEL)


def draft_of(layout: Layout, **options: Any) -> Draft:
    return Draft(SPEC, FACTS, layout, ParallelOptions(**options))


def test_finds_of_another_model_are_forgotten() -> None:
    calls: list[str] = []
    find, remembered, draft = counted(calls, "tp"), RememberedPasses(), draft_of(Layout(dp_shard=2))
    remembered.find(find, draft)
    remembered.find(find, replace(draft, spec=replace(SPEC, tied=())))
    remembered.find(find, draft)
    assert len(calls) == 3


def test_a_pass_is_made_once_for_all_that_it_reads() -> None:
    calls: list[str] = []
    find, remembered = counted(calls, "tp"), RememberedPasses()
    one, other = draft_of(Layout(dp_shard=2, tp=2)), draft_of(Layout(dp_shard=8, tp=2), sync="defer")
    assert remembered.find(find, one).value == remembered.find(find, other).value == 3
    assert len(calls) == 1
    assert remembered.find(find, draft_of(Layout(dp_shard=2, tp=4))).value == 5
    assert remembered.find(find, draft_of(Layout(dp_shard=2, tp=2), microbatches=2)).value == 4
    assert len(calls) == 3


def test_what_a_pass_reads_may_depend_on_what_it_has_read() -> None:
    remembered, calls = RememberedPasses(), []

    def find(draft: Draft) -> Found[Any]:
        calls.append(1)
        return Found(draft.options.sync_units if draft.layout.size("tp") == 1 else draft.layout.ep)

    assert remembered.find(find, draft_of(Layout(dp_shard=2))).value == {}
    assert remembered.find(find, draft_of(Layout(dp_shard=2), sync_units={"*": "defer"})).value == {"*": "defer"}
    assert remembered.find(find, draft_of(Layout(dp_shard=2, tp=2), sync_units={"*": "defer"})).value == 1
    assert remembered.find(find, draft_of(Layout(dp_shard=4, tp=2))).value == 1
    assert len(calls) == 3


def test_a_copy_knows_nothing() -> None:
    calls: list[str] = []
    find, remembered, draft = counted(calls, "tp"), RememberedPasses(), draft_of(Layout(dp_shard=2))
    remembered.find(find, draft)
    for other in (copy.deepcopy(remembered), pickle.loads(pickle.dumps(remembered))):
        other.find(find, draft)
    remembered.find(find, draft)
    assert len(calls) == 3


def test_an_error_is_no_find() -> None:
    remembered = RememberedPasses()

    def find(draft: Draft) -> Found[Any]:
        if draft.layout.size("tp") == 2:
            raise PlanError("plan.option", "refused")
        return Found(1)

    for _ in range(2):
        with pytest.raises(PlanError):
            remembered.find(find, draft_of(Layout(dp_shard=1, tp=2)))
    assert remembered.find(find, draft_of(Layout(dp_shard=1, tp=4))).value == 1


def test_too_many_finds_are_forgotten() -> None:
    calls: list[str] = []
    find, remembered, draft = counted(calls, "dp_shard"), RememberedPasses(), draft_of(Layout(dp_shard=1))
    for shards in range(1, MOST + 2):
        remembered.find(find, draft_of(Layout(dp_shard=shards)))
    remembered.find(find, draft)
    assert len(calls) == MOST + 2
    remembered.find(find, draft)
    assert len(calls) == MOST + 2


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_model_is_not_sliced_again_for_other_shards_or_replicas(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is packed, so `tp` does not depend on what FSDP shards. Rows of parameters depend on shards."""
    model, spec = make(family, meta=True)
    facts, remembered, repeated = inspect_model(spec, model), RememberedPasses(), list[str]()
    keep = RememberedPasses._keep

    def noted(self: RememberedPasses, find: Any, *rest: Any) -> None:
        repeated.append(find.__name__)
        keep(self, find, *rest)

    monkeypatch.setattr(RememberedPasses, "_keep", noted)

    def passes_of(replicas: int, shards: int) -> set[str]:
        repeated.clear()
        layout = Layout(dp_replicate=replicas, dp_shard=shards, tp=2, ep=2 if family == "mixtral" else 1)
        resolve(spec, facts, layout, ParallelOptions(), remembered=remembered)
        return {*repeated}

    assert {"resolve_tensor_parallel", "resolve_experts", "arrange_parameters", "parameter_rows"} < passes_of(2, 2)
    assert passes_of(4, 2) == set()
    assert passes_of(2, 4) == {"check_prefetch", "parameter_rows", "choose_twins", "complete_units"}
