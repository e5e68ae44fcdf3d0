"""Adapters of peft inside tensor parallel layers: gradients of the small matrices against one process."""

from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import batches, summed_loss, tiny_model, whole

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(family: str, targets: list[str], **changes: Any) -> nn.Module:
    """A model whose adapters alone are trained, and whose low-rank matrices are drawn; ``lora_bias`` adds biases to them."""
    model = tiny_model(family)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, **changes)
    model = peft.inject_adapter_in_model(config, model)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_B" in name:  # drawn as zero, it would hide the gradient of lora_A
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("family", "targets", "sizes"),
    [
        ("llama", ["lm_head", "down_proj"], {"tp": 2}),  # an output that is gathered
        ("olmo2", ALL, {"tp": 2}),
        ("llama with biases", ALL, {"tp": 2}),  # of the low-rank matrices; behind a rowwise one it is added once
        ("llama", ALL, {"tp": 2}),
        ("llama with dora", ALL, {"tp": 2}),  # norms of rows that a rank has whole, and of rows that are cut
        ("llama with dora", ["lm_head", "down_proj"], {"tp": 2, "dp_shard": 2}),
        ("llama", ALL, {"tp": 4}),  # two ranks share a key/value head
        ("qwen2", ALL, {"tp": 2, "dp_shard": 2}),  # biases
        ("gpt_oss", ["q_proj", "o_proj"], {"tp": 2}),  # a bias behind a rowwise matrix
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], {"tp": 2}),  # fused and packed matrices
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_process(
    family: str, targets: list[str], sizes: dict[str, int], sequence_parallel: bool
) -> None:
    layout = Layout(**{"dp_shard": 1, **sizes})
    family, _, kind = family.partition(" with ")
    options_of_adapter = {"lora_bias": kind == "biases", "use_dora": kind == "dora"}

    def on_rank(rank: int) -> None:
        model, alone = (adapted(family, targets, **options_of_adapter) for _ in range(2))
        if double := family != "gpt_oss":  # its experts have no kernel for float64; norms compute in fp32 all the same
            model, alone = model.double(), alone.double()
        options = ParallelOptions(param_dtype=None, sequence_parallel=sequence_parallel)
        plan = resolve(spec_of(model), model, layout, options)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        (batch,) = batches(1, length=12)
        summed_loss(model, batch).backward()
        summed_loss(alone, batch).backward()
        scale = layout.dp_shard  # every data rank has the same batch here, and gradients are summed
        compared = 0
        assert sum(isinstance(p.data, DTensor) and "tp" in p.device_mesh.mesh_dim_names for p in model.parameters()) > 2 * len(
            targets
        )
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None) == ("lora_" not in name), name
            if theirs.grad is not None:
                error = (whole(ours.grad) - scale * theirs.grad).abs().max() / (scale * theirs.grad.abs().max())
                assert error < (1e-6 if double else 1e-5), (name, float(error))
                compared += 1
        layers = sum(1 if target == "lm_head" else 2 for target in targets)
        assert compared == layers * (3 if kind else 2)

    run_ranks(on_rank, layout.world_size)


def test_small_matrices_are_sliced_with_the_large_ones() -> None:
    model = adapted("llama", ALL)
    plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions())
    held = {row.name.removeprefix("model.layers.0."): dict(row.placements).get("tp") for row in plan.parameters}
    assert held["self_attn.q_proj.lora_A.default.weight"] is None
    assert held["self_attn.q_proj.lora_B.default.weight"] == "Shard(0)"
    assert held["self_attn.o_proj.lora_A.default.weight"] == "Shard(1)"
    assert held["self_attn.o_proj.lora_B.default.weight"] is None


def test_what_is_not_carried_out_is_refused_by_name() -> None:
    model = adapted("phi3", ["qkv_proj"], use_dora=True)
    words = r"self_attn.qkv_proj' has dora, and its style is fused_colwise; legal with dora are colwise, colwise_gather_output"
    with pytest.raises(PlanError, match=words):
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions())
    model = adapted("llama", ["embed_tokens"], use_dora=True)
    with pytest.raises(PlanError, match=r"model.embed_tokens' has dora"):
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions())


def test_the_small_matrices_of_an_embedding_stay_whole() -> None:
    model = adapted("llama", ["embed_tokens"])
    plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions())
    held = {row.name.removeprefix("model.embed_tokens."): dict(row.placements).get("tp") for row in plan.parameters}
    assert held["base_layer.weight"] == "Shard(0)"
    assert held["lora_embedding_A.default"] is None
    assert held["lora_embedding_B.default"] is None


def test_a_model_that_peft_wraps_has_the_same_plan_under_its_prefix() -> None:
    inner = resolve(spec_of(adapted("llama", ALL)), adapted("llama", ALL), Layout(tp=2, dp_shard=1), ParallelOptions())
    wrapped = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=3, target_modules=ALL))
    plan = resolve(spec_of(wrapped), wrapped, Layout(tp=2, dp_shard=1), ParallelOptions(sequence_parallel=True))
    assert [row.name for row in plan.parameters] == [f"base_model.model.{row.name}" for row in inner.parameters]
    assert [row.placements for row in plan.parameters] == [row.placements for row in inner.parameters]
    assert [row.trainable for row in plan.parameters] == [row.trainable for row in inner.parameters]


def test_adapters_of_what_is_no_linear_layer_are_refused() -> None:
    model = adapted("qwen3_moe", ["gate_proj", "up_proj", "down_proj"])
    with pytest.raises(PlanError, match=r"peft wraps 'model.layers.1.mlp.experts', which is no linear layer"):
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions())


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_expert_adapters() -> nn.Module:
    model = tiny_model("qwen3_moe")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=EXPERTS))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def test_adapters_of_fused_experts_are_gathered_around_their_outermost_wrapper() -> None:
    """The wrapper changes the weights before it calls the mixture: gathered inside, they would come too late."""

    def on_rank(rank: int) -> None:
        model, alone = with_expert_adapters(), with_expert_adapters()
        plan = resolve(spec_of(model), model, Layout(dp_shard=2), ParallelOptions(param_dtype=None))
        assert "base_model.model.model.layers.1.mlp.experts" in {unit.name for unit in plan.units}
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        optimizers = [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.01) for one in (model, alone)]
        for step in range(2):
            (batch,) = batches(1, length=12)
            summed_loss(model, batch).backward()
            (2 * summed_loss(alone, batch)).backward()  # both data ranks have it
            compared = 0
            for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None), name
                if theirs.grad is not None:
                    torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5, msg=f"{name}, step {step}")
                    compared += 1
            assert compared == 8
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(on_rank, 2)


def test_adapters_of_fused_experts_under_expert_parallel_are_refused_by_name() -> None:
    model = with_expert_adapters()
    with pytest.raises(PlanError, match=r"ep=2: peft wraps the experts '.*mlp\.experts'.* the legal value is 1"):
        resolve(spec_of(model), model, Layout(dp_shard=2, ep=2), ParallelOptions(param_dtype=None))
