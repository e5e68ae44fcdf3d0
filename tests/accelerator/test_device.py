"""The simulated device alone, rule by rule. Each rule that reports has a twin in order, which reports nothing."""

import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.accelerator.workers import in_workers, module_of, reports, waits

MOST = 1 << 20
"""Elements of tensors whose bytes are counted."""


# ---------------------------------------------------------------- values
@in_workers(1)
def test_values_are_those_of_the_cpu(device: torch.device) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 9), torch.nn.Dropout(0.0))
    tokens = torch.tensor([[1, 2, 3, 8]])

    def trained(place: torch.device) -> list[torch.Tensor]:
        copy = deepcopy(model).to(place)
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            optimizer = torch.optim.AdamW(copy.parameters(), lr=0.1, **options)
            F.cross_entropy(copy(tokens.to(place)).flatten(0, 1), tokens.to(place).flatten()).backward()
            torch.nn.utils.clip_grad_norm_(copy.parameters(), 0.1)
            optimizer.step()
        assert all(parameter.grad.device.type == place.type for parameter in copy.parameters())
        return [parameter.detach().cpu() for parameter in copy.parameters()]

    for ours, theirs in zip(trained(device), trained(torch.device("cpu")), strict=True):
        assert torch.equal(ours, theirs)


@in_workers(1)
@pytest.mark.parametrize("masked", [None, "causal", "bool", "grouped"])
def test_attention_is_the_kernel_of_the_cpu(device: torch.device, masked: str | None) -> None:
    """Gradients are equal bit by bit. With torch's plain form on the device they were not."""
    torch.manual_seed(0)
    grouped = masked == "grouped"
    given = [torch.randn(2, 4 if head == 0 or not grouped else 2, 33, 16) for head in range(3)]
    options = {"is_causal": masked == "causal", "enable_gqa": grouped}
    mask = torch.randn(33, 33) > 0 if masked == "bool" else None

    def gradients(place: torch.device) -> list[torch.Tensor]:
        inputs = [tensor.to(place).requires_grad_() for tensor in given]
        out = F.scaled_dot_product_attention(*inputs, attn_mask=None if mask is None else mask.to(place), **options)
        out.square().sum().backward()
        return [out.detach().cpu(), *(tensor.grad.cpu() for tensor in inputs)]

    for ours, theirs in zip(gradients(device), gradients(torch.device("cpu")), strict=True):
        assert torch.equal(ours, theirs)
    query = torch.randn(1, 2, 8, 4, device=device)
    module_of(device).reset_counts()
    F.scaled_dot_product_attention(query, query, query)
    assert module_of(device).counts()["launches"] == 1


@in_workers(1)
@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64"])
def test_dtypes(device: torch.device, name: str) -> None:
    dtype = getattr(torch, name)
    given = (torch.arange(12).view(3, 4) % 3).to(dtype)
    ours = given.to(device)
    assert ours.dtype == dtype
    assert torch.equal(ours.cpu(), given)
    assert torch.equal((ours == ours).cpu(), torch.ones(3, 4, dtype=torch.bool))
    assert torch.equal(torch.cat([ours, ours.flip(0)]).cpu(), torch.cat([given, given.flip(0)]))
    assert torch.equal(ours.t()[1:].cpu(), given.t()[1:])
    if dtype.is_floating_point:
        assert torch.equal((ours @ ours.t()).cpu(), given @ given.t())
    if dtype.is_complex:
        assert torch.equal((ours.conj() * 2j).cpu(), given.conj() * 2j)


@in_workers(1)
def test_the_generator_has_a_seed_and_an_offset(device: torch.device) -> None:
    def draw() -> torch.Tensor:
        return torch.cat([torch.rand(3, device=device), F.dropout(torch.ones(9, device=device)), torch.randn(2, device=device)])

    torch.manual_seed(1)
    first = draw()
    assert not torch.equal(first.cpu(), draw().cpu())
    torch.manual_seed(1)
    assert torch.equal(first.cpu(), draw().cpu())
    module = module_of(device)
    state = module.get_rng_state()
    assert state.view(torch.int64).tolist() == [1, 12]  # four for each kernel, as Philox
    second = draw()
    module.set_rng_state(state)
    assert torch.equal(second.cpu(), draw().cpu())
    own = torch.Generator(device).manual_seed(5)
    again = torch.rand(3, device=device, generator=own)
    assert torch.equal(again.cpu(), torch.rand(3, device=device, generator=own.manual_seed(5)).cpu())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=device, generator=torch.Generator())
    with torch.random.fork_rng([device], device_type=device.type):
        torch.manual_seed(9)
    assert module.initial_seed() == 1


@in_workers(1)
def test_memory_can_be_resized(device: torch.device) -> None:
    tensor = torch.ones(3, device=device)
    tensor.untyped_storage().resize_(0)
    assert module_of(device).memory_allocated(device) == 0
    tensor.untyped_storage().resize_(12)
    assert tensor.isnan().all().item()  # poison
    tensor.untyped_storage().resize_(24)
    out = torch.empty(0, device=device)
    torch.add(torch.ones(4, 5, device=device), 1, out=out)
    assert out.shape == (4, 5)
    assert torch.empty(0, device=device).resize_(3).fill_(1).sum().item() == 3


@in_workers(1)
def test_the_peak_of_memory_is_exact(device: torch.device) -> None:
    module = module_of(device)
    a = torch.ones(MOST, device=device)
    module.reset_peak_memory_stats(device)
    assert module.memory_allocated(device) == torch.accelerator.memory_allocated(device) == 4 * MOST
    b = a * 2 + 1  # a product, and its sum
    assert module.memory_allocated(device) == 8 * MOST
    del b
    assert module.max_memory_allocated(device) == torch.accelerator.max_memory_allocated(device) == 12 * MOST
    assert module.memory_stats(device)["allocated_bytes.all.peak"] == 12 * MOST
    module.reset_peak_memory_stats(device)
    a.add_(1)
    torch.add(a, 1, out=a)
    a.view(2, -1).t()
    assert module.max_memory_allocated(device) == 4 * MOST


@in_workers(1)
def test_one_call_for_many_tensors_is_one_launch(device: torch.device) -> None:
    module = module_of(device)
    tensors = [torch.ones(3, device=device) for _ in range(7)]
    module.reset_counts()
    torch._foreach_add_(tensors, 1)
    norms = torch._foreach_norm(tensors)
    torch._foreach_copy_(tensors, [tensor * 2 for tensor in tensors])
    assert module.counts()["launches"] == 3 + 7
    assert norms[0].device == device
    torch._foreach_copy_(tensors, [torch.zeros(3) for _ in tensors])
    assert module.counts()["copy h2d"] == 7
    assert not reports(device)


@in_workers(1)
def test_tied_parameters_stay_tied(device: torch.device) -> None:
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "inner": torch.nn.ModuleDict({"last": torch.nn.Linear(4, 4)})})
    model.inner.last.weight = model.first.weight
    model.to(device)
    assert model.first.weight is model.inner.last.weight
    assert model.first.weight.device == device
    assert model.first.bias is not model.inner.last.bias
    assert len(list(model.to("cpu").parameters())) == 3


@in_workers(1)
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gpt2", "gemma3n_text", "mixtral", "nemotron_h"))],
)
def test_gradients_of_a_model_are_those_of_the_cpu(device: torch.device, family: str) -> None:
    """Bit by bit. With torch's composites in place of kernels of the CPU (silu, norms, attention) they differed by 2e-6."""
    from tests.tiny import batches, make, summed_loss

    alone, _ = make(family)
    there = deepcopy(alone).to(device)
    for batch in batches(2):
        summed_loss(alone, batch).backward()
        summed_loss(there, {name: tensor.to(device) for name, tensor in batch.items()}).backward()
    for ours, theirs in zip(there.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad.cpu(), theirs.grad)


# ---------------------------------------------------------------- order of streams
@in_workers(1)
@pytest.mark.parametrize("ordered", ["", "wait_stream", "event", "synchronize", "event.synchronize", "query"])
@pytest.mark.parametrize("conflict", ["write then read", "read then write", "write then write"])
def test_races(device: torch.device, conflict: str, ordered: str) -> None:
    module = module_of(device)
    side, main, tensor = module.Stream(device), module.current_stream(device), torch.ones(9, device=device)
    first, _, second = conflict.partition(" then ")
    side.wait_stream(main)

    def access(kind: str) -> torch.Tensor:
        return tensor.fill_(1) if kind == "write" else tensor * 2

    with module.stream(side):
        access(first)
        event = side.record_event()
    if ordered == "wait_stream":
        main.wait_stream(side)
    elif ordered == "event":
        main.wait_event(event)
    elif ordered == "synchronize":
        side.synchronize()
    elif ordered == "event.synchronize":
        event.synchronize()
    elif ordered == "query":
        assert event.query()
    access(second)
    found = reports(device)
    if ordered:
        assert not found
    else:
        assert len(found) == 1
        assert found[0].kind == "race"
        assert f"{second} by aten::" in found[0].text
        assert f"not ordered after the {first} by aten::" in found[0].text
        assert found[0].text.count("test_device.py:") == 2  # both places
        main.wait_stream(side)


@in_workers(1)
def test_what_is_no_race(device: torch.device) -> None:
    module = module_of(device)
    side, third, main = module.Stream(device), module.Stream(device), module.current_stream(device)
    tensor = torch.ones(2, 9, device=device)
    side.wait_stream(main)
    with module.stream(side):
        _read, _other_half = tensor * 2, tensor[0].mul_(2)
        tensor[1] * 2
    tensor[1] * 2  # two that read
    third.wait_stream(side)
    main.wait_stream(third)  # through a third stream
    tensor.mul_(2)
    assert not reports(device)


@in_workers(1)
def test_an_event_orders_only_what_came_before_it(device: torch.device) -> None:
    module = module_of(device)
    side, main, tensor = module.Stream(device), module.current_stream(device), torch.ones(9, device=device)
    side.wait_stream(main)
    event = side.record_event()
    with module.stream(side):
        tensor.add_(1)
    main.wait_event(event)
    _ = tensor + 1
    assert [report.kind for report in reports(device)] == ["race"]
    main.wait_stream(side)


@in_workers(1)
def test_the_backward_is_ordered_and_named(device: torch.device) -> None:
    module = module_of(device)
    side, main = module.Stream(device), module.current_stream(device)
    weight = torch.ones(9, device=device, requires_grad=True)
    side.wait_stream(main)
    with module.stream(side):
        loss = (weight * 2).exp().sum()
    main.wait_stream(side)
    loss.backward()
    assert not reports(device)
    with module.stream(module.Stream(device)):
        _ = weight.grad * 2
    (found,) = reports(device)
    assert "[backward MulBackward0]" in found.text
    module.synchronize(device)


# ---------------------------------------------------------------- memory that is used again
@in_workers(1)
@pytest.mark.parametrize("guarded", ["", "record_stream", "wait_stream", "synchronize", "kept"])
def test_memory_used_again_early(device: torch.device, guarded: str) -> None:
    module = module_of(device)
    side, main, tensor = module.Stream(device), module.current_stream(device), torch.ones(9, device=device)
    side.wait_stream(main)
    with module.stream(side):
        _result = tensor + 1
    if guarded == "record_stream":
        tensor.record_stream(side)
    kept = tensor if guarded == "kept" else None
    del tensor
    if guarded == "wait_stream":
        main.wait_stream(side)
    elif guarded == "synchronize":
        module.synchronize(device)
    torch.empty(9, device=device).fill_(1)
    found = reports(device)
    if guarded:
        assert not found
    else:
        assert [report.kind for report in found] == ["race"]
        assert "reuse of memory: write by aten::fill_" in found[0].text
        assert found[0].text.count("test_device.py:") == 3  # of both accesses, and of the allocation
    del kept
    main.wait_stream(side)


# ---------------------------------------------------------------- devices that are mixed
_TABLE = {
    "add": lambda a, b: a + b,
    "index_select": lambda a, b: torch.index_select(a, 0, torch.zeros(1, dtype=torch.int64, device=b.device)),
    "embedding": lambda a, b: F.embedding(torch.zeros(1, dtype=torch.int64, device=b.device), a),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "matmul": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "gather": lambda a, b: a.gather(0, torch.zeros(4, 4, dtype=torch.int64, device=b.device)),
    "scatter_add_": lambda a, b: a.scatter_add_(0, torch.zeros(4, 4, dtype=torch.int64, device=a.device), b),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
    "foreach": lambda a, b: torch._foreach_add([a, a], [b, b]),
    "cross_entropy": lambda a, b: F.cross_entropy(a, torch.zeros(4, dtype=torch.int64, device=b.device)),
}


@in_workers(1)
@pytest.mark.parametrize("operator", _TABLE)
def test_mixed_devices_raise(device: torch.device, operator: str) -> None:
    here = torch.ones(4, 4, device=device)
    _TABLE[operator](here, torch.ones(4, 4, device=device))
    for other in ("cpu", torch.device(device.type, 1)):
        with pytest.raises(RuntimeError, match=r"same device|on the same|device"):
            _TABLE[operator](here, torch.ones(4, 4, device=other))
    kinds = {report.kind for report in reports(device)}
    assert kinds == (set() if operator in ("add", "attention") else {"mixed"})  # those two are torch's own to refuse


@in_workers(1)
def test_what_devices_take_from_the_host(device: torch.device) -> None:
    here = torch.arange(16.0, device=device).view(4, 4)
    assert torch.equal((here + torch.tensor(1.0)).cpu(), here.cpu() + 1)
    assert torch.equal(here[torch.tensor([1, 2])].cpu(), here.cpu()[1:3])
    here[torch.tensor([0])] = 5.0
    torch._foreach_mul_([here], torch.tensor(2.0))
    assert not reports(device)


# ---------------------------------------------------------------- waits of the host
_WAITING = {
    "item": (lambda a: a.sum().item(), "aten::_local_scalar_dense"),
    "bool": (lambda a: bool(a.any()), "aten::_local_scalar_dense"),
    "nonzero": (lambda a: a.nonzero(), "aten::nonzero"),
    "mask": (lambda a: a[a > 0], "aten::nonzero"),
    "masked_select": (lambda a: a.masked_select(a > 0), "aten::masked_select"),
    "assign by a mask": (lambda a: a.__setitem__(a > 0, torch.ones_like(a).view(-1)), "aten::_index_put_impl_"),
    "assign by a host index": (lambda a: a.__setitem__(torch.tensor([1]), 1.0), "copy h2d"),
    "unique": (lambda a: a.unique(), "aten::_unique2"),
    "equal": (lambda a: torch.equal(a, a), "aten::equal"),
    "repeat": (lambda a: a.repeat_interleave(torch.ones(4, dtype=torch.int64, device=a.device), 0), "aten::repeat_interleave"),
    "cpu": (lambda a: a.cpu(), "copy d2h"),
    "list": (lambda a: a.tolist(), "copy d2h"),
    "to": (lambda a: torch.ones(3).to(a.device), "copy h2d"),
    "constant": (lambda a: torch.tensor([1.0], device=a.device), "copy h2d"),
    "host index": (lambda a: a[torch.tensor([1])], "copy h2d"),
    "not pinned": (lambda a: torch.ones(3).to(a.device, non_blocking=True), "copy h2d of memory that is not pinned"),
    "to not pinned": (lambda a: torch.ones(4, 4).copy_(a, non_blocking=True), "copy d2h of memory that is not pinned"),
    "synchronize": (lambda a: torch.accelerator.synchronize(a.device), "synchronize"),
    "stream": (lambda a: torch.accelerator.current_stream(a.device).synchronize(), "stream.synchronize"),
}


@in_workers(1)
@pytest.mark.parametrize("operation", _WAITING)
def test_waits_of_the_host(device: torch.device, operation: str) -> None:
    function, name = _WAITING[operation]
    given = torch.ones(4, 4, device=device)
    module_of(device).reports.take()
    function(given)
    found = waits(device)
    assert name in {wait.text for wait in found}
    assert all("test_device.py:" in wait.place and "<lambda>" in wait.place for wait in found)
    assert any("test_device.py:" in frame for frame in found[0].stack)
    assert len(found) == 1


@in_workers(1)
def test_an_event_is_waited_for_alone_or_while_the_device_has_work_or_not_at_all(device: torch.device) -> None:
    module, a = module_of(device), torch.ones(4, 4, device=device)

    def after_work() -> Any:
        a.add_(1)
        return module.current_stream(device).record_event()

    def kinds(event: Any) -> list[str]:
        event.synchronize()
        return [report.kind for report in module.reports.take("wait", "behind")]

    assert kinds(after_work()) == ["wait"]
    event, later = after_work(), after_work()
    assert kinds(event) == ["behind"]
    assert kinds(event) == []
    assert kinds(later) == ["wait"]
    event = after_work()
    module.synchronize(device)
    module.reports.take()
    assert kinds(event) == []


@in_workers(1)
def test_what_does_not_wait(device: torch.device) -> None:
    module_of(device).reports.take()
    a = torch.ones(4, 4, device=device)
    a[1:, 2].fill_(3)
    a[a > 5] = 0.0
    a.repeat_interleave(torch.ones(4, dtype=torch.int64, device=device), 0, output_size=4)
    torch.where(a > 0, a, 0)
    torch.arange(4, device=device)
    a.to(torch.bfloat16).sum()
    F.cross_entropy(a, torch.zeros(4, dtype=torch.int64, device=device))
    a.to(torch.device(device.type, 1))
    assert not waits(device)


# ---------------------------------------------------------------- copies that the host does not wait for
@in_workers(1)
@pytest.mark.parametrize("waited", [False, True])
def test_a_pinned_buffer_filled_too_early(device: torch.device, waited: bool) -> None:
    pinned = torch.ones(8).pin_memory()
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert not torch.ones(8).is_pinned()
    there = pinned.to(device, non_blocking=True)
    assert not waits(device)
    if waited:
        module_of(device).current_stream(device).synchronize()
    pinned.fill_(2)
    module_of(device).synchronize(device)
    found = reports(device)
    assert [report.kind for report in found] == ([] if waited else ["reuse"])
    assert waited or "test_device.py:" in found[0].text
    assert there.sum().item() == 8


@in_workers(1)
@pytest.mark.parametrize("strided", [False, True])
def test_a_copy_to_the_host_holds_poison_until_it_is_waited_for(device: torch.device, strided: bool) -> None:
    there = torch.ones(8, device=device)
    early = torch.zeros(16 if strided else 8).pin_memory()[:: 2 if strided else 1]
    early.copy_(there, non_blocking=True)
    later = there.to("cpu", non_blocking=True)
    assert not waits(device)
    assert later.is_pinned()
    assert early.isnan().all()
    assert later.isnan().all()
    event = module_of(device).current_stream(device).record_event()
    there.fill_(3)  # after the copies, which have the values of before
    event.synchronize()
    assert torch.equal(early, torch.ones(8))
    assert torch.equal(later, torch.ones(8))


@in_workers(1)
def test_copies_between_devices_are_ordered_by_both_streams(device: torch.device) -> None:
    module, other = module_of(device), torch.device(device.type, 1)
    here = torch.ones(8, device=device)
    there = here.to(other)
    assert there.device == other
    here.fill_(2)
    with module.device(other):
        assert torch.empty(1, device=device.type).device == other
        assert there.sum().item() == 8
    assert not reports(device)
    side = module.Stream(device)
    with module.stream(side):
        there.copy_(here)
    assert [report.kind for report in reports(device)] == ["race"]
    module.synchronize(device)


@in_workers(1)
def test_tensors_are_freed(device: torch.device) -> None:
    pinned = torch.ones(8).pin_memory()
    there = pinned.to(device, non_blocking=True)
    gone = weakref.ref(there)
    del there
    assert gone() is None
    assert module_of(device).memory_allocated(device) == 0
