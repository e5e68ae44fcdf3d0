"""Mixers over ranks that share sequences, against one process: outputs, and the gradient of each parameter."""

import io
import itertools
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import PERFORMERS
from meshwright.distributed.context.sequences import context_parallel as shared
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.slices import whole_tensor
from meshwright.errors import PlanError, UnsupportedError
from meshwright.layout import Layout
from meshwright.models.specs.registry import get_parallelization_strategy, spec_of
from meshwright.plan.axes.context.mixers import mixer_actions
from meshwright.plan.axes.context.sharing import attention_program
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.given.closed_choices import ActivationCheckpointing, ContextBalance
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.explain import explain
from tests.harness import refuses, run_ranks

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "bamba": {**SIZES, **MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        **{key: value for key, value in SIZES.items() if key != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "full_attention", "mlp"], "ssm_state_size": 8, "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16,
    },
    "bamba of one group": {**SIZES, **MAMBA, "mamba_n_groups": 1, "attn_layer_indices": [1]},  # a norm over all heads
    "falcon_h1": {**SIZES, **MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": False, "num_hidden_layers": 1},
    "qwen3_next": {**SIZES, **DELTA, **EXPERTS},
    "qwen3_5_text": {**SIZES, **DELTA},
    "olmo_hybrid": {**SIZES, **DELTA, "linear_num_key_heads": 8},
    "kimi_linear": {
        **SIZES, **EXPERTS, "linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4, "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_local_experts": 4, "first_k_dense_replace": 2,
    },
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},  # a short convolution
    "rwkv": {
        "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64, "bos_token_id": 1, "eos_token_id": 2,
    },  # a shift by one token before each recurrence, by channels
    "xlstm": {
        "vocab_size": 67, "hidden_size": 32, "embedding_dim": 32, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4,
        "chunk_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },  # its config has the number of heads
    "minimax": {
        **SIZES, "layer_types": ["linear_attention", "full_attention"], "block_size": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },  # buffers say which tokens see which
    "recurrent_gemma": {
        **SIZES, "num_key_value_heads": 1, "lru_width": 32, "conv1d_width": 4, "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },  # its recurrence begins again where positions do
    "zaya": {
        **SIZES, "num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 16, "num_experts_per_tok": 1,
    },  # a module with convolutions, between the hidden state and the attention
    "mamba2": {
        "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2,
        "state_size": 8, "conv_kernel": 4, "chunk_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },  # no attention
    "falcon_mamba": {
        "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "conv_kernel": 4, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    },  # Mamba-1: a matrix mixes channels between convolution and scan
    "jamba with a bias": {
        **SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 2, "num_experts_per_tok": 1,
    },
}  # fmt: skip

SLICED = {"model.layers.0.self_attn.g_a_proj": "colwise", "model.layers.0.self_attn.g_b_proj": "rowwise"}


def hybrid(name: str, *, meta: bool = False, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name.split()[0], **{**MODELS[name], **changes})
    with torch.device("meta" if meta else "cpu"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
        for module in model.modules() if "bias" in name else ():
            if isinstance(projection := getattr(module, "x_proj", None), nn.Linear):
                projection.bias = nn.Parameter(torch.rand(projection.out_features, dtype=torch.float64))
    model.config.use_cache = False
    return model


def planned(model: Any, layout: Layout, **options: Any) -> ShardingPlan:
    return resolve(spec_of(model, None), model, layout, ParallelOptions(param_dtype=None, reduce_dtype=None, **options))


def in_float64(patch: pytest.MonkeyPatch) -> None:
    """Scans and norms compute in float32 whatever the model does, so sums over heads would differ by their order."""
    to = torch.Tensor.to

    def wide(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(torch.float64 if item is torch.float32 else item for item in args)
        return to(tensor, *args, **{key: torch.float64 if item is torch.float32 else item for key, item in kwargs.items()})

    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    patch.setattr(torch.Tensor, "to", wide)


def batch_of(kind: str, length: int = 32) -> dict[str, torch.Tensor]:
    """Rows of one document, of several, or padded at their ends; of more tokens than a chunk of a scan, and a convolution."""
    ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(2))
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = -100
    positions = torch.arange(length).expand(2, -1).contiguous()
    if kind == "padded":
        ids[0, -5:], labels[0, -6:] = 0, -100
    if kind == "packed":  # one document begins where ranks are cut
        positions = torch.stack([torch.cat([torch.arange(8), torch.arange(length - 8)]), torch.arange(length)])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def worst_of(model: Any, reference: Any) -> tuple[float, str]:
    truth = dict(reference.named_parameters())
    errors = []
    for name, parameter in model.named_parameters():
        due = truth[name].grad
        if due is not None:
            gradient = whole_tensor(parameter.grad)
            errors.append((float((gradient - due).abs().max() / due.abs().max().clamp(min=1e-30)), name))
    return max(errors)


def parity(rank: int, name: str, plan: ShardingPlan, kind: str) -> tuple[float, str]:
    with pytest.MonkeyPatch.context() as patch:
        in_float64(patch)
        batch, reference = batch_of(kind), hybrid(name)
        loss_of(reference, batch).backward()
        model = hybrid(name)
        mesh = build_mesh(plan.layout, "cpu")
        get_parallelization_strategy(model).carry_out(model, plan, mesh)
        rows = batch
        if plan.layout.size("dp_shard") > 1:
            own = mesh["dp_shard"].get_local_rank()
            rows = {key: value[own : own + 1] for key, value in batch.items()}
        with shared(plan, mesh, rows) as shard:
            loss_of(model, shard).backward()
        return worst_of(model, reference)


LAYOUTS = ({"dp_shard": 1, "cp": 2}, {"dp_shard": 1, "cp": 4}, {"dp_shard": 1, "cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2})
CASES = itertools.product(MODELS, LAYOUTS, ("whole", "padded", "packed"), ContextBalance)
ALL = [case for case in CASES if not (case[0] in ("mamba2", "falcon_mamba") and "tp" in case[1])]  # there are no styles
BY_DEFAULT = [
    ("nemotron_h", LAYOUTS[1], "padded", ContextBalance.ZIGZAG),  # fewer groups than ranks
    ("bamba of one group", LAYOUTS[0], "packed", ContextBalance.ZIGZAG),
    ("qwen3_next", LAYOUTS[0], "whole", ContextBalance.CONTIGUOUS),
    ("jamba with a bias", LAYOUTS[0], "padded", ContextBalance.ZIGZAG),
    ("rwkv", LAYOUTS[0], "whole", ContextBalance.ZIGZAG),
    ("xlstm", LAYOUTS[0], "padded", ContextBalance.CONTIGUOUS),
    ("recurrent_gemma", LAYOUTS[0], "packed", ContextBalance.ZIGZAG),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "layout", "kind", "balance"),
    [*BY_DEFAULT, *(pytest.param(*case, marks=pytest.mark.thorough) for case in ALL if case not in BY_DEFAULT)],
    ids=str,
)
def test_gradients_are_those_of_one_process(name: str, layout: dict[str, int], kind: str, balance: ContextBalance) -> None:
    plan = planned(hybrid(name, meta=True), Layout(**layout), context_balance=balance)
    assert plan.mixers
    worst = max(run_ranks(parity, plan.layout.world_size, name, plan, kind))
    assert worst[0] < 1e-12, worst


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("nemotron_h", {"all_to_all": 4}),
        ("falcon_mamba", {"all_to_all": 8, "all_reduce": 4}),
        # In each of two layers two shifts by one token; the recurrence between is by channels.
        ("rwkv", {"all_to_all": 8, "all_gather": 4, "reduce_scatter": 4}),
        # Positions of one mixer, and keys and values of one attention.
        pytest.param("recurrent_gemma", {"all_to_all": 4, "all_gather": 2, "reduce_scatter": 1}, marks=pytest.mark.thorough),
    ],
)
def test_collectives_and_bytes_are_those_of_the_plan(name: str, kinds: dict[str, int]) -> None:
    plan = planned(hybrid(name, meta=True), Layout(dp_shard=1, cp=4), tokens=2 * 32 // 4, sequences=2)

    def on_rank(rank: int) -> None:
        model = hybrid(name)
        mesh = build_mesh(plan.layout, "cpu")
        for action in (*mixer_actions(plan), *attention_program(plan)):  # without units, whose ranks are the same
            PERFORMERS[type(action)](model, action, mesh)
        with shared(plan, mesh, batch_of("whole")) as shard, CommCounter() as counter:
            loss_of(model, shard).backward()
        due = {item.kind: (item.calls, item.size) for item in activation_traffic(plan) if item.axis == "cp"}
        assert {kind: (counter.counts[kind], counter.bytes[kind]) for kind in counter.counts} == due
        assert {kind: due[kind][0] for kind in kinds} == kinds

    run_ranks(on_rank, 4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["falcon_h1", "bamba", "qwen3_next", "falcon_mamba"])
def test_a_recomputed_layer_exchanges_again(name: str) -> None:
    full = ActivationCheckpointing.FULL
    plan = planned(hybrid(name, meta=True), Layout(dp_shard=1, cp=2), activation_checkpointing=full)
    assert max(run_ranks(parity, 2, name, plan, "whole"))[0] < 1e-12


def test_the_plan_says_what_crosses() -> None:
    model = hybrid("bamba of one group", meta=True)
    plan = planned(model, Layout(dp_shard=1, cp=4), tokens=8)
    (row,) = plan.mixers
    # gate, values, B and C of the one group, steps: all ranks need B and C. The norm over all heads runs after.
    assert row.openings == (("in_proj", ((64, 1), (64, 1), (16, 4), (8, 1))),)
    assert (row.closing, row.features) == ("norm", (64, 64))
    assert dict(row.values) == {"intermediate_size": 16, "conv_dim": 32, "num_heads": 2}
    assert ShardingPlan.from_json(plan.to_json()) == plan
    text = page_of(plan)
    assert "heads of mixers, for all tokens" in text
    assert "in_proj" in text


def page_of(plan: ShardingPlan) -> str:
    page = Console(width=200, file=io.StringIO())
    page.print(explain(plan))
    text: str = page.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_plan_says_which_tokens_before_a_module_gets() -> None:
    plan = planned(hybrid("rwkv", meta=True), Layout(dp_shard=1, cp=2), tokens=32, sequences=2)
    recurrence, feed_forward, *_ = plan.mixers
    assert recurrence.shifts == (("time_shift", 1, 32, (0, "input")),)
    assert [name for name, _ in recurrence.openings] == ["key", "value", "receptance"]
    assert (feed_forward.before, feed_forward.width, feed_forward.openings) == (1, 32, ())
    assert ShardingPlan.from_json(plan.to_json()) == plan
    text = page_of(plan)
    assert "the tokens before those of a rank" in text
    # 2 sequences, of 2 pieces on 2 ranks each, 32 features
    assert re.search(r"attention \(2\) +1 token in time_shift +256", text)
    assert re.search(r"feed_forward \(2\) +1 token +256", text)
    # 4 modules gather in forward and scatter in backward, 256 numbers of 8 bytes each
    assert "8.0 KiB in all-gather, 8.0 KiB in reduce-scatter" in text


def test_numbers_buffers_and_positions_of_a_mixer_are_found() -> None:
    (xlstm, *_) = planned(hybrid("xlstm", meta=True), Layout(dp_shard=1, cp=4)).mixers
    assert dict(xlstm.values) == {"config.num_heads": 1, "v_dim": 8, "multihead_norm.num_heads": 1}
    (minimax,) = planned(hybrid("minimax", meta=True), Layout(dp_shard=1, cp=2)).mixers
    # The buffers say how fast the tokens of a head decay, and which ones see which.
    assert {name: dim for name, dim, _ in minimax.slices} == {
        "slope_rate": 0, "query_decay": 0, "key_decay": 0, "diagonal_decay": 1,
    }  # fmt: skip
    (gemma,) = planned(hybrid("recurrent_gemma", meta=True), Layout(dp_shard=1, cp=2)).mixers
    assert gemma.positions == (1, "position_ids")
    (lfm2,) = planned(hybrid("lfm2", meta=True), Layout(dp_shard=1, cp=2)).mixers
    assert (lfm2.before, lfm2.width) == (2, 32)


def test_what_cannot_be_divided_is_refused_with_what_can() -> None:
    for name, ranks, legal in (("nemotron_h", 3, "1, 2, 4, 8"), ("qwen3_next", 8, "1, 2, 4")):
        with refuses(PlanError, "cp.heads") as caught:
            planned(hybrid(name, meta=True), Layout(dp_shard=1, cp=ranks))
        assert f"legal values of cp are {legal}" in str(caught.value)
    with pytest.raises(PlanError, match="is split over tp"):
        planned(hybrid("kimi_linear", meta=True), Layout(dp_shard=1, cp=2, tp=2), tp_plan=SLICED)


def test_documents_that_a_mixer_would_be_told_of_in_parts_are_refused() -> None:
    plan = planned(hybrid("bamba", meta=True), Layout(dp_shard=1, cp=2))

    def on_rank(rank: int) -> None:
        model = hybrid("bamba")
        mesh = build_mesh(plan.layout, "cpu")
        get_parallelization_strategy(model).carry_out(model, plan, mesh)
        batch = {**batch_of("packed"), "seq_idx": torch.zeros(2, 32, dtype=torch.int32)}
        with shared(plan, mesh, batch) as shard, refuses(UnsupportedError, "cp.argument"):
            model(**{name: shard[name] for name in ("input_ids", "position_ids", "seq_idx")}, use_cache=False)

    run_ranks(on_rank, 2)
