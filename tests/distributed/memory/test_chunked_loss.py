"""A loss in chunks is the loss, its gradient is the gradient, and only the logits of a chunk exist at a time."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.memory import chunked_loss
from meshwright.distributed.memory.chunked_loss import VALUES, DeferredLogits, chunk_loss, chunks_its_loss
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import UnsupportedError
from meshwright.layout import Layout
from meshwright.models.reading.output_layer import trace_head
from meshwright.models.specs.registry import spec_of
from meshwright.models.token_loss import IGNORE, forward_logits, forward_loss, token_log_probs, token_loss_sum
from meshwright.plan.axes.tensor.traffic import tensor_parallel_counts
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.program import ChunkLoss
from meshwright.plan.result.rows import LossRow
from tests.harness import run_ranks
from tests.tiny import tiny_model

WORDS = 67

SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def made(family: str) -> nn.Module:
    """A model; its logits are scaled or capped, if they can be."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    for name, value in (("logits_scaling", 2.0), ("final_logit_softcapping", 2.0), ("logit_scale", 0.5)):
        if hasattr(config, name):
            setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)


def batch_of(rows: int = 2, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, WORDS, (rows, length), generator=generator)
    labels[0, :5] = IGNORE
    tokens = torch.randint(3, WORDS, (rows, length), generator=generator)
    return {"input_ids": tokens, "position_ids": torch.arange(length).expand(rows, -1), "labels": labels}


def chunked(model: nn.Module, chunks: int) -> nn.Module:
    model = copy.deepcopy(model)
    chunk_loss(model, ChunkLoss(LossRow("lm_head", WORDS, chunks)), None)  # type: ignore[arg-type]  # no axis takes part
    return model


def gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = forward_loss(model, batch)
    (loss / 7).backward()
    return loss.detach(), {name: own.grad for name, own in model.named_parameters() if own.grad is not None}


def chunked_values(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-probabilities of labels."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    return model(**given, **{VALUES: (batch["labels"].clamp(min=0), token_log_probs)})


@pytest.mark.parametrize("chunks", [2, 5, 24, 100])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])  # soft cap, quotient, factor; some are tied
def test_gradients_are_those_of_all_logits_at_once(family: str, chunks: int) -> None:
    model = made(family).double()
    batch = batch_of()
    loss, expected = gradients(model, batch)
    model.zero_grad()
    again, found = gradients(chunked(model, chunks), batch)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(again, loss, rtol=1e-13, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-14)


def test_without_labels_the_model_is_as_it_was() -> None:
    model, batch = tiny_model("llama"), batch_of()
    other = chunked(model, 3)
    assert (chunks_its_loss(model), chunks_its_loss(other)) == (False, True)
    assert torch.equal(forward_logits(other, batch), forward_logits(model, batch))
    with torch.no_grad():
        loss = forward_loss(other, batch)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, forward_loss(model, batch))


def test_a_frozen_head_gets_no_gradient() -> None:
    model, batch = tiny_model("llama").double(), batch_of()
    model.lm_head.requires_grad_(False)
    _, expected = gradients(model, batch)
    model.zero_grad()
    _, found = gradients(chunked(model, 4), batch)
    assert "lm_head.weight" not in found
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-14)


def test_many_chunks_lose_nothing_in_bf16() -> None:
    """Added up in bf16, the gradient of the head would be off by more than one rounding."""
    torch.manual_seed(0)
    model, batch = tiny_model("llama"), batch_of(4, 64)
    _, exact = gradients(model.double(), batch)
    truth = exact["lm_head.weight"].clone()
    _, found = gradients(chunked(model.bfloat16(), 64), batch)
    _, whole = gradients(model.bfloat16(), batch)
    errors = [float((own["lm_head.weight"].double() - truth).norm() / truth.norm()) for own in (found, whole)]
    assert errors[0] < 1.5 * errors[1]


class Largest(TorchDispatchMode):
    """The largest logits that an operator returns, in entries."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [item.numel() for item in tree_leaves(result) if isinstance(item, torch.Tensor) and item.shape[-1:] == (WORDS,)]
        self.entries = max([self.entries, *sizes])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_go_as_they_are_used(dtype: torch.dtype) -> None:
    """The loss lives until the backward of all layers is over, and so would they: one is as large as the head, in fp32."""
    model = chunked(made("llama").to(dtype), 3)
    alive = []
    model.model.layers[1].register_full_backward_hook(lambda *_: alive.extend(own() is not None for own in kept))
    loss = forward_loss(model, batch_of())
    kept = [weakref.ref(value.untyped_storage()) for value, _ in loss.grad_fn.gradients]  # type: ignore[union-attr, attr-defined]
    if dtype is torch.float32:  # then that of the head is the gradient itself
        del kept[1:]
    loss.backward()
    assert alive == [False] * len(kept)


def test_values_of_tokens_let_go_of_hidden_states() -> None:
    model, batch = chunked(made("llama"), 3), batch_of()
    alive = []
    model.model.layers[1].register_full_backward_hook(lambda *_: alive.append(hidden() is not None))
    values = chunked_values(model, batch)
    hidden = weakref.ref(values.grad_fn.next_functions[0][0].logits_of.__self__)  # type: ignore[union-attr]
    values.sum().backward()
    assert alive == [False]


@pytest.mark.parametrize("whole", [lambda *given: forward_loss(*given), lambda *given: chunked_values(*given).sum()])
def test_one_backward(whole: Callable[..., torch.Tensor]) -> None:
    model, batch = chunked(made("llama"), 3), batch_of()
    loss = whole(model, batch)
    loss.backward(retain_graph=True)
    for again in (loss, whole(model, batch)):  # a second one, and one that is to be differentiated again
        with pytest.raises(UnsupportedError, match="one backward, without create_graph"):
            torch.autograd.grad(again, model.lm_head.weight, create_graph=True)
    with pytest.raises(UnsupportedError, match="one backward"):
        loss.backward()


def test_only_the_logits_of_a_chunk_exist() -> None:
    model, batch = tiny_model("llama"), batch_of(8, 64)
    found = []
    for one in (model, chunked(model, 8)):
        with Largest() as largest:
            forward_loss(one, batch).backward()
        found.append(largest.entries)
    assert found == [8 * 64 * WORDS, 64 * WORDS]


CHANGES: list[tuple[Callable[[torch.Tensor, nn.Module], torch.Tensor], str]] = [
    (lambda logits, _: torch.tanh(logits / 3.0) * 3.0, ""),
    (lambda logits, _: logits.float().clamp(-1, 1), ""),
    (lambda logits, _: 2 * logits + torch.tensor(0.5), ""),
    (lambda logits, _: logits.mul_(0.5), ""),
    (lambda logits, _: logits[:, -3:], "the model calls __getitem__ on its logits"),
    (lambda logits, _: logits.softmax(-1), "the model calls softmax on its logits"),
    (lambda logits, head: logits * head.weight[0, 0], "the model calls mul on its logits"),
    (lambda logits, _: logits - logits.mean(), "the model calls mean on its logits"),
]


@pytest.mark.parametrize(("change", "problem"), CHANGES)
def test_what_a_model_does_to_its_logits(change: Callable[..., torch.Tensor], problem: str) -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(6, WORDS), torch.randn(2, 9, 6)
    deferred = DeferredLogits(hidden, WORDS, head)
    assert (deferred.shape, deferred.dtype, deferred.dim()) == ((2, 9, WORDS), torch.float32, 3)
    if problem:
        with pytest.raises(UnsupportedError, match=problem):
            change(deferred, head)
    else:
        changed = change(deferred, head)
        assert isinstance(changed, DeferredLogits)
        torch.testing.assert_close(changed.of(hidden[:, :4]), change(head(hidden), head)[:, :4])


def test_the_head_of_a_model() -> None:
    facts = trace_head(made("gemma2"))
    assert (facts.name, facts.vocabulary, facts.problem) == ("lm_head", WORDS, "")
    model = tiny_model("llama", meta=True)
    inner = model.forward

    def last_tokens(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        output.logits = output.logits[:, -1:]
        return output

    model.forward = last_tokens
    assert trace_head(model).problem == "the model calls __getitem__ on its logits"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("loss_parallel", "sequence_parallel"), [(True, False), (False, False), (True, True)])
def test_collectives_over_tp_are_those_of_the_plan(loss_parallel: bool, sequence_parallel: bool) -> None:
    def on_rank(rank: int) -> None:
        model = tiny_model("llama")
        truth, batch = copy.deepcopy(model), batch_of()
        options = ParallelOptions(
            param_dtype=None, loss_chunks=3, loss_parallel=loss_parallel, sequence_parallel=sequence_parallel
        )
        layout = Layout(tp=2, dp_shard=1)
        plan = resolve(spec_of(model), model, layout, options)
        parallelize(model, plan, build_mesh(layout, "cpu"))
        sync = GradSync.from_plan(model, plan)
        with CommCounter() as counter:
            for _, microbatch in sync.microbatches([batch]):
                forward_loss(model, microbatch).backward()
        expected = tensor_parallel_counts(plan)
        assert {kind: counter.counts[kind] for kind in expected} == dict(expected)
        token_loss_sum(forward_logits(truth, batch), batch["labels"]).backward()
        for name, parameter in model.named_parameters():
            found = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            torch.testing.assert_close(found, truth.get_parameter(name).grad, rtol=1e-4, atol=1e-5)

    run_ranks(on_rank, 2)


class Head(nn.Module):
    """A head with two matrices, and one that it does not use."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.delta = nn.Parameter(weight), nn.Parameter(torch.zeros_like(weight))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight + self.delta)


def test_a_head_of_several_parameters() -> None:
    model, batch = tiny_model("llama").double(), batch_of()
    model.lm_head = Head(model.lm_head.weight.detach().clone())
    _, expected = gradients(model, batch)
    model.zero_grad()
    _, found = gradients(chunked(model, 5), batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-14)
    assert "lm_head.unused" not in found


def test_a_sum_that_is_too_large_for_its_dtype_is_divided_first() -> None:
    head = nn.Linear(4, 5, bias=False).half()
    hidden = torch.full((1, 4096, 4), 24.0, dtype=torch.float16, requires_grad=True)
    deferred = DeferredLogits(hidden, 5, head)
    loss = chunked_loss._loss(deferred, torch.zeros(1, 4096, dtype=torch.long), token_loss_sum, 4, [head.weight])
    (loss / 4096).backward()
    assert torch.isfinite(head.weight.grad).all()  # type: ignore[arg-type]  # it is there
    assert float(head.weight.grad.abs().max()) > 1  # type: ignore[union-attr]


class Backward(TorchDispatchMode):
    """Counts the operators of a backward."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "backward" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_computes_no_gradient(without: Callable[[], Any]) -> None:
    model, batch = chunked(tiny_model("llama"), 3), batch_of()
    with without(), Backward() as backward:
        forward_loss(model, batch)
    assert backward.count == 0


def test_a_change_in_place_reaches_the_logits_that_it_was_made_of() -> None:
    head, hidden = nn.Linear(6, WORDS), torch.randn(2, 9, 6)
    logits = DeferredLogits(hidden, WORDS, head)
    logits.float().contiguous().mul_(0.5)
    torch.testing.assert_close(logits.of(hidden), 0.5 * head(hidden))
    logits = DeferredLogits(hidden, WORDS, head)
    logits.double().mul_(0.5)  # a copy
    torch.testing.assert_close(logits.of(hidden), head(hidden))


def test_a_learned_scale_of_logits_is_found_at_plan_time() -> None:
    model = tiny_model("llama", meta=True)
    model.scale = nn.Parameter(torch.ones((), device="meta"))
    inner = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        output.logits = output.logits * model.scale
        return output

    model.forward = scaled
    assert trace_head(model).problem == "the model calls mul on its logits"


def test_a_head_that_uses_a_parameter_of_another_module_is_refused() -> None:
    """Its gradient would be lost."""
    model = tiny_model("llama")
    scale = nn.Parameter(torch.ones(()))
    inner = model.lm_head.forward
    model.lm_head.forward = lambda hidden: inner(hidden * scale)
    other = copy.deepcopy(model)
    chunk_loss(other, ChunkLoss(LossRow("lm_head", WORDS, 3)), None)  # type: ignore[arg-type]  # no axis takes part
    with pytest.raises(UnsupportedError, match="uses a trained parameter that is not its own; the legal value is 0"):
        forward_loss(other, batch_of())
