"""Routers and experts that a layer calls itself, and models with several stacks: what a trace of the stream finds."""

from typing import Any

import pytest
import torch

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.reading.tensor.regions import trace_regions
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.diffusion_gemma import tiny_diffusion_gemma
from tests.tiny import tiny_model

TP2 = Layout(tp=2, dp_shard=1)
LAYERS = ("model.layers.0", "model.layers.1")


def test_experts_take_tokens_of_a_slice_and_its_router_chooses_for_them() -> None:
    model = tiny_model("gemma4_moe", meta=True)
    found = trace_regions(model, LAYERS, spec_of(model).experts)
    assert (found.problem, found.problem_in_stages, found.spans, found.tokenwise) == ("", "", (), ("model.norm",))
    assert found.regions == tuple(f"{layer}.{part}" for layer in LAYERS for part in ("self_attn", "mlp"))
    assert found.mixtures == tuple(f"{layer}.experts" for layer in LAYERS)


@pytest.mark.thorough
def test_a_router_that_mixes_tokens_is_refused() -> None:
    model = tiny_model("gemma4_moe", meta=True)
    router = model.model.layers[1].router
    inner = router.forward
    router.forward = lambda hidden: inner(hidden.cumsum(0))
    found = trace_regions(model, LAYERS, spec_of(model).experts)
    assert "an operator mixes the tokens of a slice (aten.cumsum.default)" in found.problem


def rows_of(model: Any, **options: Any) -> dict[str, Any]:
    plan = resolve(spec_of(model), model, TP2, ParallelOptions(param_dtype=None, sequence_parallel=True, **options))
    return {row.module: row for row in plan.tensor_parallel}


def test_each_stack_is_sliced_from_its_first_layer_to_its_norm() -> None:
    with torch.device("meta"):
        rows = rows_of(tiny_diffusion_gemma())
    for stack in ("model.encoder.language_model", "model.decoder"):
        assert rows[f"{stack}.layers.0"].entry is Move.SPLIT_SEQUENCE
        assert rows[f"{stack}.norm"].exit is Move.GATHER_SEQUENCE_WHOLE
        assert rows[f"{stack}.layers.1.router"].sums == ("scale", "per_expert_scale")
        experts = rows[f"{stack}.layers.1.experts"]
        assert (experts.entry, experts.exit, experts.flat) == (Move.GATHER_TOKENS, Move.SCATTER_SEQUENCE, True)


def test_experts_on_slices_that_nothing_distributes_are_refused() -> None:
    """Each rank would have a part of the gradient of all experts."""
    styles = {"self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise"}
    whole = {f"model.layers.*.{name}": style for name, style in {**styles, "self_attn.o_proj": "rowwise"}.items()}
    whole |= {f"model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
    with pytest.raises(PlanError, match=r"'model.layers.0.experts' takes slices of the stream, and neither tp slices it nor"):
        rows_of(tiny_model("gemma4_moe", meta=True), tp_plan=whole)
