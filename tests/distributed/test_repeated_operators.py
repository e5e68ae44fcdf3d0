"""Results that are made again are those that torch finds: shape, strides, dtype, memory that is shared, and whole traces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from maintain.cells import LAYOUTS
from meshwright.distributed._torch_compat.fake import FakeTensors
from meshwright.distributed._torch_compat.repeated_operators import RepeatedOperators
from meshwright.models.reading.model_traces import ModelTraces
from meshwright.trace.step import trace_step
from tests.harness import run_ranks
from tests.trace.test_memory import setup_of

aten = torch.ops.aten

OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "broadcast": lambda x, y: aten.mul.Tensor(x, y[:, :1]),
    "promoted": lambda x, y: aten.add.Tensor(x, y.double()),
    "scalar": lambda x, y: aten.mul.Scalar(x, 2),
    "another scalar": lambda x, y: aten.mul.Scalar(x.long(), 2.0),
    "strided": lambda x, y: aten.clone.default(x.t()),
    "view": lambda x, y: aten.view.default(x, [2, 2, 6]),
    "unsafe view": lambda x, y: aten._unsafe_view.default(x, [24]),
    "slice": lambda x, y: aten.slice.Tensor(x, 1, 1, 4),
    "slice of a slice": lambda x, y: aten.slice.Tensor(x[1:], 0, 1, 2),
    "transpose": lambda x, y: aten.transpose.int(x, 0, 1),
    "cat": lambda x, y: aten.cat.default([x, y], 1),
    "mean": lambda x, y: aten.mean.dim(x, [1], True),
    "product": lambda x, y: aten.mm.default(x, y.t()),
    "cast": lambda x, y: aten._to_copy.default(x, dtype=torch.bfloat16),
    "like": lambda x, y: aten.empty_like.default(x, memory_format=torch.contiguous_format),
    "two results": lambda x, y: aten.topk.default(x, 2)[0],
    "write": lambda x, y: aten.add_.Tensor(x, y),
}


def kind_of(tensor: torch.Tensor, *read: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    shared = [one.untyped_storage()._cdata == storage._cdata for one in read]
    form = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
    return *form, storage.nbytes(), shared, type(tensor)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_result_that_is_made_again_is_the_one_of_torch(name: str) -> None:
    with FakeTensors():
        x, y = torch.empty(4, 6), torch.empty(4, 6)
        first, again = (OPERATORS[name](x, y) for _ in range(2))
        assert kind_of(first, x, y) == kind_of(again, x, y)
        real = OPERATORS[name](*(torch.empty(4, 6, device="meta") for _ in range(2)))
        assert kind_of(again)[:4] == kind_of(real)[:4]


def test_numbers_keep_their_part_in_the_dtype_of_a_result() -> None:
    """A number leaves the dtype of a tensor, and a tensor with one entry decides it."""
    with FakeTensors():
        half = torch.empty(3, dtype=torch.bfloat16)
        for _ in range(2):
            assert (half * torch.tensor(2.0)).dtype is torch.bfloat16
            assert (half * torch.ones(1)).dtype is torch.float32
            assert (half.long() * 2).dtype is torch.int64
            assert (half.long() * 2.0).dtype is torch.float32


def test_tensors_with_values_are_computed_with() -> None:
    operators, add = RepeatedOperators((torch.Tensor,)), aten.add.Tensor
    for value in (1.0, 2.0):
        given = torch.full((2,), value)
        assert operators.run(add, (given, given), {}, add).tolist() == [2 * value, 2 * value]
        assert operators.run(aten.arange.default, (3,), {}, aten.arange.default).tolist() == [0, 1, 2]


def test_only_what_differs_runs() -> None:
    ran: list[tuple[int, ...]] = []

    def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ran.append(tuple(one.shape))
        return one + other

    operators = RepeatedOperators((torch.Tensor,))
    for size in (2, 3, 2, 3):
        given = torch.empty(size, device="meta")
        assert operators.run(aten.add.Tensor, (given, given), {}, add).shape == (size,)
    assert ran == [(2,), (3,)]


def anew(self: Any, function: Any, args: Any, kwargs: Any, make: Any) -> Any:
    return make(*args, **kwargs)


PLACES = {place.label: place for place in LAYOUTS}
CASES = [
    *((label, family) for label in ("shard 2", "tp 2 seq", "cp 2") for family in ("llama", "gemma3_text", "gpt2", "olmo2")),
    *((label, family) for label in ("shard 2", "tp 2", "ep 2") for family in ("qwen3_moe", "deepseek_v3")),
    *(("shard 2", family) for family in ("gemma3n_text", "nemotron_h")),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
@pytest.mark.parametrize(("label", "family"), CASES)
def test_a_trace_is_the_one_that_asks_torch_each_time(
    label: str, family: str, recomputed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PLACES[label]
    parallel = {
        "sequence_parallel": place.sequence_parallel, "loss_parallel": False, "activation_checkpointing": recomputed
    }  # fmt: skip

    def found() -> Any:
        setup = setup_of(place.world_size, family, layout=dict(place.sizes), parallel=parallel)
        traces = ModelTraces(setup.model, setup.spec.experts)
        read = traces.attentions, traces.pairs(setup.plan.layers), traces.regions(setup.plan.layers), traces.head
        return repr(read), trace_step(setup)

    (repeated,) = run_ranks(lambda _: found(), 1, group=False)
    monkeypatch.setattr(RepeatedOperators, "run", anew)
    (asked,) = run_ranks(lambda _: found(), 1, group=False)
    assert repeated == asked
