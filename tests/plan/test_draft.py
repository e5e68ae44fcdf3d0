"""Every pass of the resolver returns what it found, and changes nothing."""

import pickle
from typing import Any

import pytest

from meshwright.layout import Layout
from meshwright.plan import resolver
from meshwright.plan.draft import Draft
from meshwright.plan.given.inspection import inspect_model
from meshwright.plan.given.options import ParallelOptions
from tests.tiny import make

CASES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "slices and experts": ("mixtral", Layout(dp_shard=2, tp=2, ep=2), {"sequence_parallel": True, "compile": True}),
    "stages": ("llama", Layout(dp_shard=2, pp=2), {"microbatches": 2}),
    "twins": ("diffusion_gemma", Layout(dp_shard=4), {"twin_units": True}),
    "problems": ("mixtral", Layout(dp_shard=4), {"exclude_units": ("nothing",), "freeze": ("no.such",), "tp_plan": "a.plan"}),
}


@pytest.mark.parametrize(("family", "layout", "options"), CASES.values(), ids=CASES)
def test_a_pass_changes_nothing(family: str, layout: Layout, options: dict[str, Any]) -> None:
    model, spec = make(family, meta=True)
    facts = inspect_model(spec, model)
    draft = Draft(spec, facts, layout.resolve(4, facts.sizes), ParallelOptions(**options))

    def fields() -> dict[str, bytes]:
        return {
            name: pickle.dumps(value)
            for name, value in vars(draft).items()
            if name not in ("spec", "model", "traced_pairs", "_answers")
        }

    for group in resolver._PASSES if "freeze" not in options else resolver._PASSES[:1]:
        for name, find in group:
            before = fields()
            found = find(draft)
            assert fields() == before
            assert find(draft) == found
            draft = draft.extended(name, found)
    assert bool(draft.problems) == ("freeze" in options)
