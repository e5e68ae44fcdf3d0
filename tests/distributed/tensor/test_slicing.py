"""What tensor parallel refuses, and what it makes of odd sizes. Its gradients are rows of tests/audit/test_parity.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.tensor.styles import STYLES as CARRIED_OUT
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.harness import run_ranks
from tests.tiny import make, whole

FP32 = ParallelOptions(param_dtype="float32")


class Odd(nn.Module):
    """Widths and a vocabulary that two and three ranks do not divide, biases everywhere, and a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5, padding_idx=1)
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(5, 7), "down": nn.Linear(7, 5)}) for _ in range(2)])
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block["down"](torch.tanh(block["up"](hidden)))
        return self.head(self.norm(hidden))


STYLES = {"embed": "embedding_rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output"}
SPEC = ParallelSpec("odd", layers=("blocks.*.up", "blocks.*.down"), tp_styles=STYLES)


def odd(styles: dict[str, str], ranks: int, **sizes: int) -> tuple[nn.Module, ShardingPlan]:
    torch.manual_seed(0)
    model = Odd()
    layout = Layout(tp=ranks // sizes.get("dp_shard", 1), **{"dp_shard": 1, **sizes})
    return model, resolve(replace(SPEC, tp_styles=styles), model, layout, FP32)


def check_against_one_process(styles: dict[str, str], ranks: int, **sizes: int) -> None:
    def on_rank(rank: int) -> None:
        model, plan = odd(styles, ranks, **sizes)
        alone = odd(styles, ranks, **sizes)[0]
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        ids = torch.tensor([[0, 1, 5, 10, 7, 3], [2, 1, 1, 9, 8, 4]])
        outputs = [found(ids) for found in (model, alone)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            (output**2).sum().backward()
        scale = plan.layout.size("dp_shard")  # every data rank has the same batch here, and gradients are summed
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), scale * theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
        assert not whole(model.embed.weight.grad)[1].any()  # the padding row

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize(("ranks", "sizes"), [(2, {}), (3, {}), (4, {"dp_shard": 2})], ids=str)
def test_sizes_that_tp_does_not_divide_biases_and_padding(ranks: int, sizes: dict[str, int]) -> None:
    check_against_one_process(STYLES, ranks, **sizes)


@pytest.mark.parametrize(
    "changes",
    [
        {"embed": "embedding_colwise"},
        {"blocks.*.up": "colwise_gather_output", "blocks.*.down": "rowwise_split_input"},
        {"blocks.*.up": "colwise_rep", "blocks.*.down": "rowwise_rep", "head": "colwise_rep"},
        {"head": "replicate", "embed": "replicate"},
    ],
    ids=str,
)
def test_every_style(changes: dict[str, str]) -> None:
    check_against_one_process({**STYLES, **changes}, 2)


def refused(styles: dict[str, str], tp: int) -> str:
    with pytest.raises(PlanError) as error:
        resolve(replace(SPEC, tp_styles=styles), Odd(), Layout(tp=tp, dp_shard=1), FP32)
    return str(error.value)


def test_styles_that_are_not_carried_out_are_refused_by_name() -> None:
    text = refused({**STYLES, "norm": "all_reduce"}, 2)
    assert "tp=2: the style 'all_reduce' of 'norm' is not supported; legal are " in text
    assert all(style in text for style in CARRIED_OUT)


def test_patterns_without_a_match_and_ranks_without_a_slice_are_refused() -> None:
    assert "tp_styles pattern 'nowhere' matches no parameter" in refused({**STYLES, "nowhere": "colwise"}, 2)
    assert "tp=6: 'blocks.0.up.weight' has 7 entries to slice, too few for each rank" in refused(STYLES, 6)


def test_a_model_that_declares_no_styles_is_refused() -> None:
    with torch.device("meta"):
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", n_groups=1, **sizes))
    with pytest.raises(PlanError, match=r"no styles; .*Mamba2ForCausalLM declares no.*the legal value of tp is 1"):
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1))


def test_the_plan_says_what_each_rank_holds() -> None:
    def on_rank(rank: int) -> dict[str, Any]:
        model, spec = make("mixtral")
        plan = resolve(spec, model, Layout(tp=2, dp_shard=2), FP32)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        for name, parameter in model.named_parameters():
            row = plan.parameter(name)
            assert tuple(parameter.shape) == row.shape
            if rank == 0:
                assert tuple(parameter.to_local().shape) == row.local_shape, name
        assert ShardingPlan.from_json(plan.to_json()) == plan
        return {row.module: row.style for row in plan.tensor_parallel if row.module.startswith("model.layers.0")}

    found = run_ranks(on_rank, 4)[0]
    assert found["model.layers.0.mlp.experts"] == "moe_tp_experts"
    assert found["model.layers.0.self_attn.o_proj"] == "rowwise"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_auxiliary_loss_of_a_router_is_counted_once(family: str, sequence_parallel: bool) -> None:
    """Its gradient is whole on every rank, and meets parts of that of the other loss in the router."""

    def on_rank(rank: int) -> None:
        model, spec = make(family)
        alone, _ = make(family)
        plan = resolve(spec, model, Layout(tp=2, dp_shard=1), replace(FP32, sequence_parallel=sequence_parallel))
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        ids = torch.arange(24).reshape(2, 12)
        for found in (model, alone):
            output = found(ids, output_router_logits=True)
            (output.logits.square().mean() + 5 * output.aux_loss).backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(on_rank, 2)
