"""Sequence and loss parallel: what moves, what no rank ever holds, what is refused. Gradients: tests/audit/test_parity.py."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.tensor.loss_parallel import cross_entropy_sum
from meshwright.errors import LayoutError, PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.tensor.traffic import tensor_parallel_counts
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.harness import run_ranks
from tests.tiny import batches, make, whole

TP2 = Layout(tp=2, dp_shard=1)
ALONE = Layout(dp_shard=1)


def built(
    family: str, layout: Layout = TP2, model: dict[str, Any] | None = None, **options: Any
) -> tuple[nn.Module, ShardingPlan]:
    found, spec = make(family, **(model or {}))
    plan = resolve(spec, found, layout, ParallelOptions(**{"param_dtype": None, "loss_parallel": None, **options}))
    return parallelize(found, plan, build_mesh(plan.layout, "cpu")), plan


def counted(family: str, layers: int, **options: Any) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Collectives over tp of a forward, of a backward, and what the plan says of both together."""
    model, plan = built(family, model={"num_hidden_layers": layers}, **options)
    (batch,) = batches(1)
    with CommCounter() as counter:
        loss = cross_entropy_sum(model(batch["input_ids"]).logits, batch["labels"])
        forward = Counter(counter.counts_of[0, 1])
        loss.backward()
    return forward, counter.counts_of[0, 1] - forward, tensor_parallel_counts(plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_collectives_of_a_layer_are_those_of_the_textbook(family: str) -> None:
    """Two gathers and two scatters forward, the same backward (Korthikanti et al. 2022, figure 5); and in backward an
    all-reduce of each weight that all ranks hold and use in part: the layer's norms, those of queries and keys, the router."""

    def on_rank(rank: int) -> Any:
        return [counted(family, layers, sequence_parallel=True) for layers in (2, 3)]

    for two, three in run_ranks(on_rank, 2):
        forward, backward, planned = (more - fewer for more, fewer in zip(three, two, strict=True))
        assert forward == {"all_gather": 2, "reduce_scatter": 2}
        shared = {"llama": 2, "qwen3": 4, "mixtral": 3}[family]
        assert backward == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": shared}
        assert planned == forward + backward
        assert two[2] == two[0] + two[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_without_it_a_layer_all_reduces_twice_each_way(family: str) -> None:
    def on_rank(rank: int) -> Any:
        return [counted(family, layers) for layers in (2, 3)]

    for two, three in run_ranks(on_rank, 2):
        forward, backward, planned = (more - fewer for more, fewer in zip(three, two, strict=True))
        assert forward == {"all_reduce": 2}
        assert backward == {"all_reduce": 2 + (family == "mixtral")}  # the router's weight
        assert planned == forward + backward


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.found.update(tuple(t.shape) for t in tree_iter(result) if isinstance(t, torch.Tensor))
        return result


def test_no_rank_holds_all_logits_or_the_whole_residual_stream() -> None:
    """With 67 words, which two ranks do not divide, and a residual stream of 12 tokens, of which each rank has six."""

    def shapes(**options: Any) -> tuple[Counter[tuple[int, ...]], list[tuple[int, ...]]]:
        model, _ = built("llama", **options)
        normed: list[tuple[int, ...]] = []
        for name, module in model.named_modules():
            if name.endswith("layernorm"):
                module.register_forward_hook(lambda _, args, output: normed.append(tuple(output.shape)))
        (batch,) = batches(1)
        with Shapes() as seen:
            cross_entropy = cross_entropy_sum if options.get("loss_parallel", True) else _plain
            cross_entropy(model(batch["input_ids"]).logits, batch["labels"]).backward()
        return seen.found, normed

    def on_rank(rank: int) -> None:
        words = dict.fromkeys((67, 68), True)
        found, normed = shapes(sequence_parallel=True)
        assert not [shape for shape in found if shape and shape[-1] in words]
        assert any(shape and shape[-1] == (34, 33)[rank] for shape in found)
        assert set(normed) == {(2, 6, 32)}
        found, normed = shapes(loss_parallel=False)
        assert [shape for shape in found if shape and shape[-1] in words]
        assert set(normed) == {(2, 12, 32)}

    run_ranks(on_rank, 2)


def _plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize(("words", "ranks"), [(67, 2), (67, 4), (10, 4), (64, 2)])
def test_the_sharded_cross_entropy_is_that_of_torch(words: int, ranks: int) -> None:
    """With logits far apart, tokens that do not count, and a batch in which none counts."""

    def on_rank(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        generator = torch.Generator().manual_seed(0)
        for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
            logits = (torch.randn(2, 5, words, generator=generator, dtype=torch.float64) * 40).to(dtype)
            labels = torch.randint(0, words, (2, 5), generator=generator)
            labels[0, 2] = -100
            for targets in (labels, torch.full_like(labels, -100)):
                alone = logits.clone().requires_grad_()
                shared = distribute_tensor(logits, mesh, [Shard(2)], src_data_rank=None).requires_grad_()
                truth, found = _plain(alone, targets), cross_entropy_sum(shared, targets)
                (truth / 3).backward()
                (found / 3).backward()
                torch.testing.assert_close(found, truth, rtol=tolerance, atol=tolerance)
                torch.testing.assert_close(whole(shared.grad), alone.grad, rtol=tolerance, atol=tolerance)

    run_ranks(on_rank, ranks)


def test_a_sequence_that_tp_does_not_divide_is_refused_by_the_model_by_name() -> None:
    def on_rank(rank: int) -> None:
        model, _ = built("llama", sequence_parallel=True)
        with pytest.raises(LayoutError, match="a sequence of 7 tokens cannot be shared by tp=2 ranks; pad it"):
            model(torch.ones(2, 7, dtype=torch.long))

    run_ranks(on_rank, 2)


def refused(family: str, layout: Layout = TP2, **options: Any) -> str:
    changes = options.pop("model", {})
    model, spec = make(family, meta=True, **changes)
    with pytest.raises((PlanError, LayoutError)) as error:
        resolve(spec, model, layout, ParallelOptions(**options))
    return str(error.value)


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    assert "sequence_parallel=True: needs tensor parallelism, but tp is 1" in refused("llama", ALONE, sequence_parallel=True)
    assert "loss_parallel=True: needs tensor parallelism, but tp is 1" in refused("llama", ALONE, loss_parallel=True)
    assert "tp_plan: needs tensor parallelism, but tp is 1" in refused("llama", ALONE, tp_plan={"lm_head": "colwise_rep"})
    with_embeddings = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 67}
    text = refused("gemma4_text", sequence_parallel=True, model=with_embeddings)
    assert "each layer adds an embedding of the whole sequence (hidden_size_per_layer_input); the legal value is False" in text
    plan = {"lm_head": "replicate", "model.layers.*.mlp.gate_proj": "colwise"}
    text = refused("llama", loss_parallel=True, tp_plan=plan)
    assert "loss_parallel=True: the style of the output head 'lm_head' is replicate" in text


def test_key_heads_are_shared_by_whole_groups_of_ranks_or_refused() -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 8}
    text = refused("llama", Layout(tp=3, dp_shard=1), model=sizes)
    assert "tp=3: 2 key/value heads cannot be divided by 3; legal are 1, 2, and multiples of 2, whose ranks share heads" in text
    assert "tp=4: 2 key/value heads cannot be divided by 4; legal are 1, 2" in refused("gemma4_text", Layout(tp=4, dp_shard=1))


def test_config_is_not_changed_where_an_attention_sees_the_heads_of_its_rank() -> None:
    def on_rank(rank: int) -> None:
        for family, sizes in (("phi3", {"tp": 2}), ("llama", {"tp": 4})):
            model, _ = make(family)
            before = model.config.to_dict()
            layout = Layout(dp_shard=4 // sizes["tp"], **sizes)
            spec = make(family, meta=True)[1]
            plan = resolve(spec, model, layout, ParallelOptions(param_dtype=None))
            parallelize(model, plan, build_mesh(layout, "cpu"))
            assert model.config.to_dict() == before
            assert model.model.layers[0].self_attn.num_key_value_groups == {"phi3": 2, "llama": 1}[family]

    run_ranks(on_rank, 4)


def test_the_last_logits_alone_and_the_last_hidden_state_are_those_of_one_process() -> None:
    def on_rank(rank: int) -> None:
        model, _ = built("llama", sequence_parallel=True, loss_parallel=False)
        alone, _ = make("llama")
        ids = batches(1)[0]["input_ids"]
        ours, theirs = (found(ids, logits_to_keep=4).logits for found in (model, alone))
        torch.testing.assert_close(ours, theirs)
        ours, theirs = (found.model(ids).last_hidden_state for found in (model, alone))
        torch.testing.assert_close(ours, theirs)

    run_ranks(on_rank, 2)


def test_logits_and_labels_that_are_not_what_they_should_be() -> None:
    def on_rank(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for placement in (Replicate(), Shard(1)):
            with pytest.raises(ValueError, match="legal is Shard of the last dimension, over one axis"):
                cross_entropy_sum(
                    distribute_tensor(torch.zeros(1, 2, 4), mesh, [placement]), torch.zeros(1, 2, dtype=torch.long)
                )
        sharded = distribute_tensor(torch.zeros(1, 2, 4), mesh, [Shard(2)])
        for wrong in (-1, 4):
            with pytest.raises(IndexError, match="labels must be -100, or at least 0 and below 4"):
                cross_entropy_sum(sharded, torch.full((1, 2), wrong))

    run_ranks(on_rank, 2)


def test_with_dropout_the_ranks_keep_the_same_gradients() -> None:
    """In spans that every rank computes whole, all drop the same; what both store whole gets the same gradient.

    The attention of Bloom is computed whole, and its MLP is a span.
    """
    sizes = {"vocab_size": 67, "hidden_size": 32, "n_layer": 2, "n_head": 4}

    def on_rank(rank: int) -> None:
        config = AutoConfig.for_model("bloom", **sizes, hidden_dropout=0.2, attention_dropout=0.2)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        plan = resolve(spec_of(model), model, TP2, ParallelOptions(param_dtype=None, sequence_parallel=True))
        assert {row.style for row in plan.tensor_parallel} >= {"whole_span", "sequence_parallel"}
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        model.train()
        (batch,) = batches(1)
        torch.manual_seed(7)
        _plain(model(batch["input_ids"], use_cache=False).logits, batch["labels"]).backward()
        alike = 0
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            if isinstance(gradient, DTensor):
                if any(
                    placement.is_shard() and gradient.device_mesh.size(dim) > 1
                    for dim, placement in enumerate(gradient.placements)
                ):
                    continue
                gradient = gradient.to_local()
            both = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(both, gradient.contiguous())
            torch.testing.assert_close(both[0], both[1], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
            alike += 1
        assert alike > 10

    run_ranks(on_rank, 2)
