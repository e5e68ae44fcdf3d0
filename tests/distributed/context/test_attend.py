"""Attention over sequences that ranks share, against attention over whole ones; and models against one process."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import PERFORMERS
from meshwright.distributed.context import attention_kernels as kernels
from meshwright.distributed.context import ring
from meshwright.distributed.context.attend import attend, attend_over_ranks
from meshwright.distributed.context.sequences import Sequences, sequences_of, share_batch
from meshwright.distributed.context.sequences import context_parallel as shared
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.slices import whole_tensor
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.layout import Layout
from meshwright.models.specs.registry import get_parallelization_strategy, spec_of
from meshwright.plan.axes.context.sharing import attention_program
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.given.closed_choices import ActivationCheckpointing, ContextBalance, ContextMethod
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.program import Attend
from meshwright.plan.result.rows import AttentionRow
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.harness import refuses, run_ranks
from tests.tiny import tiny_model

METHODS = tuple(ContextMethod)


def positions_of_documents(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])


CASES: dict[str, dict[str, Any]] = {
    "one document": {"documents": ((32,), (32,))},
    "documents": {"documents": ((11, 21), (7, 13, 12))},
    "a document over three ranks of four": {"documents": ((5, 22, 5), (32,))},
    "documents of one token": {"documents": ((1,) * 32, (3, *(1,) * 8, 21))},
    "a rank with only padding": {"documents": ((8, 24), (8, 24))},
    "a window longer than the part of a rank": {"documents": ((32,), (9, 23)), "window": 19},
    "a short window": {"documents": ((32,), (9, 23)), "window": 3},
    "no causal mask": {"documents": ((32,), (9, 23)), "causal": False},
    "a prefix that sees itself": {"documents": ((32,), (9, 23)), "prefix": True},
    "fewer heads of keys than ranks": {"documents": ((11, 21), (32,)), "kv_heads": 1},
    "as many heads of keys": {"documents": ((11, 21), (32,)), "kv_heads": 4},
    "values of another width": {"documents": ((11, 21), (32,)), "value_size": 3},
    "sinks": {"documents": ((11, 21), (32,)), "sinks": True, "kernel": "eager"},
    "sinks under sdpa": {"documents": ((11, 21), (32,)), "sinks": True, "window": 5},
    "a softcap": {"documents": ((11, 21), (32,)), "softcap": 0.7},
    "eager": {"documents": ((11, 21), (32,)), "kernel": "eager"},
}  # fmt: skip


def drawn(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Queries, keys, values and sinks of whole sequences, in fp64."""
    generator = torch.Generator().manual_seed(0)
    kv_heads, value_size = case.get("kv_heads", 2), case.get("value_size", 6)
    shapes = {"query": (2, 4, 32, 6), "key": (2, kv_heads, 32, 6), "value": (2, kv_heads, 32, value_size), "sinks": (4,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def written_out(case: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Attention over whole sequences, with a mask that is made position by position."""
    positions = positions_of_documents(*case["documents"])
    documents = (torch.cat([torch.ones_like(positions[:, :1]), positions.diff(dim=1)], dim=1) != 1).cumsum(1)
    place = torch.arange(32)
    seen = (place[None] <= place[:, None]) if case.get("causal", True) else torch.ones(32, 32, dtype=torch.bool)
    if "window" in case:
        seen = seen & (place[:, None] - place[None] < case["window"])
    seen = seen[None].expand(2, -1, -1)
    if case.get("prefix"):
        prefix = positions < 6
        seen = seen | (prefix[:, :, None] & prefix[:, None])
    seen = seen & (documents[:, :, None] == documents[:, None])
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    key, value = (item.repeat_interleave(4 // item.shape[1], dim=1) for item in (key, value))
    scores = query @ key.transpose(2, 3) * 0.3
    if "softcap" in case:
        scores = torch.tanh(scores / case["softcap"]) * case["softcap"]
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if case.get("sinks"):
        scores = torch.cat([scores, tensors["sinks"].view(1, 4, 1, 1).expand(2, -1, 32, 1)], dim=-1)
    return (scores.softmax(-1)[..., :32] @ value).transpose(1, 2)


def whole(parts: torch.Tensor, order: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    gathered = [torch.empty_like(parts) for _ in range(ranks)]
    dist.all_gather(gathered, parts.contiguous())
    joined = torch.cat(gathered, dim=dim)
    return torch.empty_like(joined).index_copy_(dim, order, joined)


def check_cases(rank: int, ranks: int, method: ContextMethod) -> list[str]:
    mesh = build_mesh(Layout(dp_shard=1, cp=ranks), "cpu")
    wrong = []
    for (name, case), balance, recompute in itertools.product(CASES.items(), ContextBalance, (False, True)):
        if recompute and name not in ("documents", "sinks"):
            continue
        tensors = drawn(case)
        leaves = {key: value.clone().requires_grad_() for key, value in tensors.items()}
        truth = written_out(case, leaves)
        weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        truth.backward(weights)
        options = ParallelOptions(context_parallel=method, context_balance=balance)
        kernel, causal, window = case.get("kernel", "sdpa"), case.get("causal", True), case.get("window")
        row = AttentionRow("", method, kernel, 4, 2, 6, 6, causal, window, False, recompute)
        plan = ShardingPlan("", mesh.layout, options, (), (), (), attentions=(row,))
        batch = {
            "input_ids": torch.arange(32).expand(2, 32),
            "position_ids": positions_of_documents(*case["documents"]),
            **({"prefix": positions_of_documents(*case["documents"]) < 6} if case.get("prefix") else {}),
        }
        shard = share_batch(plan, rank, batch)
        own = shard["input_ids"][0]
        module = nn.Module()
        attend_over_ranks(module, Attend(row, balance), mesh)
        parts = {
            key: (value if key == "sinks" else value[:, :, own]).clone().requires_grad_() for key, value in tensors.items()
        }
        output, _ = attend(
            module, parts["query"], parts["key"], parts["value"], None, scaling=0.3, softcap=case.get("softcap"),
            s_aux=parts["sinks"] if case.get("sinks") else None, position_ids=shard["position_ids"],
        )  # fmt: skip
        output.backward(weights[:, own])
        orders = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(orders, own.contiguous())
        order = torch.cat(orders)
        pairs = {"output": (whole(output.detach(), order, 1, ranks), truth.detach())}
        for key in ("query", "key", "value"):
            pairs[key] = (whole(parts[key].grad, order, 2, ranks), leaves[key].grad)
        if case.get("sinks"):
            summed = parts["sinks"].grad.clone()
            dist.all_reduce(summed)
            pairs["sinks"] = (summed, leaves["sinks"].grad)
        for key, (mine, reference) in pairs.items():
            error = float((mine - reference).abs().max())
            if not error < 1e-12:
                wrong.append(f"{name}, {balance}, recompute {recompute}: {key} is off by {error:.1e}")
    return wrong


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_attention_and_its_gradients_are_those_of_whole_sequences(method: ContextMethod, ranks: int) -> None:
    assert run_ranks(check_cases, ranks, ranks, method)[0] == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", METHODS)
def test_block_by_block(method: ContextMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and scores of a few queries at a time."""
    monkeypatch.setattr(kernels, "MOST_ENTRIES", 2 * 32 * 3)
    monkeypatch.setattr(kernels, "LEAST_QUERIES", 1)
    monkeypatch.setattr(kernels, "MOST_SCORES", 2 * 32 * 4 * 3)
    monkeypatch.setattr(kernels, "LEAST_ROWS", 1)
    monkeypatch.setattr(ring, "MOST_SCORES", 2 * 4 * 8 * 3)
    monkeypatch.setattr(ring, "LEAST_QUERIES", 1)
    assert run_ranks(check_cases, 2, 2, method)[0] == []


def test_keys_that_no_query_of_a_block_sees_are_left_out() -> None:
    sequences = Sequences.of(positions_of_documents((8, 24), (8, 24)))
    assert sequences.keys(range(4, 8), True, None) == range(8)
    assert sequences.keys(range(12, 16), True, None) == range(8, 16)
    assert sequences.keys(range(12, 16), False, None) == range(8, 32)
    assert sequences.keys(range(20, 24), True, 3) == range(18, 24)
    assert Sequences.of(positions_of_documents((32,))).mask(range(4, 5), range(5), True, None, torch.device("cpu")) is None


# -- models ------------------------------------------------------------------------------------------------------------------


def planned(model: Any, layout: Layout, **options: Any) -> ShardingPlan:
    return resolve(spec_of(model, None), model, layout, ParallelOptions(param_dtype=None, **options))


def packed_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (2, 32), generator=torch.Generator().manual_seed(2))
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions_of_documents((11, 21), (7, 13, 12))}


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def worst_gradient(model: Any, reference: Any) -> float:
    truth = dict(reference.named_parameters())
    errors = []
    for name, parameter in model.named_parameters():
        gradient, due = whole_tensor(parameter.grad), truth[name].grad
        errors.append(float((gradient - due).abs().max() / due.abs().max()))
    return max(errors)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_two_microbatches_at_once_in_a_loop_of_ones_own(method: ContextMethod, checkpointing: str) -> None:
    """Forward, forward, backward, backward, all of backward outside of the context: each finds its own documents."""

    def on_rank(rank: int) -> float:
        first, second = packed_batch(), packed_batch()
        second["position_ids"] = positions_of_documents((32,), (20, 12))
        reference = tiny_model("llama")
        (loss_of(reference, first) + loss_of(reference, second)).backward()
        model = tiny_model("llama")
        plan = planned(
            model, Layout(dp_shard=1, cp=2), context_parallel=method,
            activation_checkpointing=ActivationCheckpointing(checkpointing),
        )  # fmt: skip
        mesh = build_mesh(plan.layout, "cpu")
        get_parallelization_strategy(model).carry_out(model, plan, mesh)
        losses = []
        for batch in (first, second):
            with shared(plan, mesh, batch) as shard:
                losses.append(loss_of(model, shard))
        (losses[0] + losses[1]).backward()
        return worst_gradient(model, reference)

    assert max(run_ranks(on_rank, 2)) < 2e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_collectives_and_bytes_are_those_of_the_plan(method: ContextMethod, recompute: bool) -> None:
    def on_rank(rank: int) -> None:
        model = tiny_model("deepseek_v3")
        plan = planned(
            model, Layout(dp_shard=1, cp=4), context_parallel=method, context_recompute=recompute, tokens=2 * 32 // 4
        )  # fmt: skip
        mesh = build_mesh(plan.layout, "cpu")
        for action in attention_program(plan):  # without units, whose collectives are over the same ranks
            PERFORMERS[type(action)](model, action, mesh)
        with shared(plan, mesh, packed_batch()) as shard, CommCounter() as counter:
            loss_of(model, shard).backward()
        due = {item.kind: (item.calls, item.size) for item in activation_traffic(plan) if item.axis == "cp"}
        assert {kind: (counter.counts[kind], counter.bytes[kind]) for kind in counter.counts} == due

    run_ranks(on_rank, 4)


def test_what_a_forward_cannot_be_given() -> None:
    def on_rank(rank: int) -> None:
        model = tiny_model("llama")
        plan = planned(model, Layout(dp_shard=1, cp=2))
        mesh = build_mesh(plan.layout, "cpu")
        get_parallelization_strategy(model).carry_out(model, plan, mesh)
        batch = packed_batch()
        with refuses(UnsupportedError, "cp.positions"):
            loss_of(model, batch)
        with shared(plan, mesh, batch) as shard, pytest.raises(UnsupportedError, match="the argument 'cu_seq_lens_q'"):
            model(
                input_ids=shard["input_ids"], position_ids=shard["position_ids"], cu_seq_lens_q=torch.zeros(2), use_cache=False
            )
        with pytest.raises(ConfigError, match="multiple of 4"), shared(plan, mesh, {"input_ids": batch["input_ids"][:, :30]}):
            pass
        mask = torch.ones(2, 32)
        mask[:, -3:] = 0
        with shared(plan, mesh, {**batch, "attention_mask": mask}) as shard:
            assert "attention_mask" not in shard
            assert shard["input_ids"].shape == (2, 16)
        with shared(plan, mesh, {**batch, "attention_mask": mask.bool(), "position_ids": torch.arange(32)}) as shard:
            assert sequences_of(shard["position_ids"]).ends[28] == 29  # padding is a document of its own
        with pytest.raises(ConfigError, match="legal are"), shared(plan, mesh, {**batch, "position_ids": torch.zeros(3, 32)}):
            pass
        with pytest.raises(ConfigError, match="labels has 1 rows"), shared(plan, mesh, {**batch, "labels": torch.zeros(1, 32)}):
            pass
        with pytest.raises(ConfigError, match="needs input_ids"), shared(plan, mesh, {"labels": batch["labels"]}):
            pass
        with (
            pytest.raises(ConfigError, match="padding at the end"),
            shared(plan, mesh, {**batch, "attention_mask": mask.flip(1)}),
        ):
            pass

    run_ranks(on_rank, 2)


def test_without_context_parallel_a_batch_is_what_it_was() -> None:
    plan = planned(tiny_model("llama"), Layout(dp_shard=1, tp=1))
    batch = packed_batch()
    assert share_batch(plan, 0, batch) == batch


@pytest.mark.parametrize("layout", [{"dp_shard": 1}, {"dp_shard": 1, "cp": 2}, {"dp_shard": 1, "tp": 2}], ids=str)
def test_packed_documents_of_gpt_oss_are_those_computed_one_by_one(layout: dict[str, int]) -> None:
    """The masks of transformers' gpt_oss let packed documents see each other, so no packed reference of its own is right."""

    def on_rank(rank: int) -> float:
        batch = packed_batch()
        batch["labels"][:, [6, 10, 19]] = -100  # no label in another document
        reference = tiny_model("gpt_oss")
        for row, lengths in enumerate(((11, 21), (7, 13, 12))):
            begin = 0
            for length in lengths:
                part = {name: tensor[row : row + 1, begin : begin + length] for name, tensor in batch.items()}
                loss_of(reference, part).backward()
                begin += length
        model = tiny_model("gpt_oss")
        plan = planned(model, Layout(**layout), packed=True)
        assert len(plan.attentions) == 2
        mesh = build_mesh(plan.layout, "cpu")
        get_parallelization_strategy(model).carry_out(model, plan, mesh)
        with shared(plan, mesh, batch) as shard:
            loss = loss_of(model, shard)
        loss.backward()
        return worst_gradient(model, reference)

    world = Layout(**layout).world_size
    assert max(run_ranks(on_rank, world)) < 5e-6


def test_a_family_that_keeps_packed_documents_apart_keeps_its_own_attention() -> None:
    for family, packed, attentions in (("llama", True, 0), ("gpt_oss", True, 2), ("gpt_oss", False, 0)):
        assert len(planned(tiny_model(family, meta=True), Layout(dp_shard=1), packed=packed).attentions) == attentions


@pytest.mark.thorough
def test_a_manager_and_a_compiled_model() -> None:
    def on_rank(rank: int) -> None:
        batch, reference = packed_batch(), tiny_model("llama")
        loss_of(reference, batch).backward()
        manager = FSDP2Manager(cp_size=2, mp_policy=MixedPrecisionPolicy())
        model = manager.parallelize(tiny_model("llama"))
        with shared(manager.plan, manager.device_mesh, batch) as shard:
            (2 * loss_of(model, shard)).backward()  # a manager averages over ranks, as torch does
        assert worst_gradient(model, reference) < 2e-6
        model = tiny_model("llama")
        plan = planned(model, Layout(dp_shard=1, cp=2), compile=True, compile_backend="aot_eager")
        mesh = build_mesh(plan.layout, "cpu")
        get_parallelization_strategy(model).carry_out(model, plan, mesh)
        with shared(plan, mesh, batch) as shard:
            loss_of(model, shard).backward()
        assert worst_gradient(model, reference) < 2e-6

    run_ranks(on_rank, 2)
