"""Recomputation changes what is kept, and nothing else: not a bit of loss or gradient, no collective, no random number."""

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.memory.activation_checkpointing import find_operators, is_checkpointed
from meshwright.distributed.memory.kept_results import Choice
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.parallelizer import get_lm_ac_layers
from meshwright.errors import ModelError, PlanError
from meshwright.layout import Layout
from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import ActivationCheckpointing, SyncPolicy
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec, UnitRule
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.recompute import checkpoint_layer, parts_of
from tests.tiny import FAMILIES, Plain, batches, make, summed_loss, tiny_model, whole

NONE, FULL, SUBMODULE, SELECTIVE = ActivationCheckpointing
MODES = (FULL, SUBMODULE, SELECTIVE)
Result = tuple[list[float], list[torch.Tensor | None]]


class Watch(TorchDispatchMode):
    """Counts operators, and knows which memory that they made is still held. That of a model does not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self.calls: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.name()] += 1
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor):
                storage = item.untyped_storage()
                if storage._cdata not in self.model:
                    self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def held(self) -> int:
        """Bytes."""
        return sum(size for reference, size in self.made.values() if not reference.expired())

    @property
    def products(self) -> int:
        return self.calls["aten::mm"] + self.calls["aten::addmm"]


def alone(function: Callable[[], Any]) -> Any:
    """The result of a function in a process of its own: one that ran backward cannot be forked well."""
    return run_ranks(lambda rank: function(), 1, group=False)[0]


def checkpointed(model: nn.Module, layers: list[nn.Module], mode: ActivationCheckpointing, *save: str) -> nn.Module:
    for layer in layers:
        checkpoint_layer(layer, mode, save)
    return model.train()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else whole(p.grad).clone() for p in model.parameters()]


def same(one: Result, other: Result) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(a is b is None or torch.equal(a, b) for a, b in pairs)


# -- one process ----------------------------------------------------------------------------------------------------------


def measured(family: str, mode: ActivationCheckpointing, **changes: Any) -> tuple[Result, dict[str, int]]:
    """Loss and gradients of three microbatches; of the first: bytes that autograd was given to save, that were held after
    forward, that were held after backward; matrix products of forward and of backward.
    """
    model, _ = make(family, **changes)
    checkpointed(model, get_lm_ac_layers(model), mode)
    parameters = Watch(model).model
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    losses, found = [], {}
    for index, batch in enumerate(batches(3, rows=4, length=24)):
        gc.disable()  # what is held must be freed without it
        with Watch(model) as watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = summed_loss(model, batch)
        held, forward = watch.held, watch.products
        with watch:
            loss.backward()
        losses.append(loss.item())
        del loss
        gc.enable()
        if index == 0:
            left = watch.held - sum(p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None)
            found = {"saved": sum(saved.values()), "held": held, "left": left}
            found |= {"forward": forward, "backward": watch.products - forward}
    return (losses, gradients(model)), found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma3_text"])
def test_the_same_bits_with_fewer_bytes(family: str) -> None:
    def check() -> dict[ActivationCheckpointing, dict[str, int]]:
        expected, plain = measured(family, NONE)
        numbers = {NONE: plain}
        for mode in MODES:
            result, numbers[mode] = measured(family, mode)
            assert same(result, expected), mode
        return numbers

    found = alone(check)
    held = {mode: numbers["held"] for mode, numbers in found.items()}
    assert held[NONE] > held[SUBMODULE] > held[FULL]
    assert held[NONE] > held[SELECTIVE] > held[FULL]
    # Hooks of autograd see what it saves, so not what selective keeps besides.
    saved = {mode: numbers["saved"] for mode, numbers in found.items()}
    assert saved[NONE] > saved[SUBMODULE] > saved[FULL] == saved[SELECTIVE]
    assert {numbers["left"] for numbers in found.values()} == {found[NONE]["left"]}
    # Every second product of a layer is not computed again, and never the last one, because nothing needs its result.
    again = {mode: found[mode]["backward"] - found[NONE]["backward"] for mode in MODES}
    assert {numbers["forward"] for numbers in found.values()} == {found[NONE]["forward"]}
    assert 0 < again[SELECTIVE] <= -(-again[FULL] // 2)


def test_what_one_layer_more_holds() -> None:
    """To the byte, for a Llama: none > selective > submodule > full. At a larger size: `benchmarks/activation_bytes.py`."""
    hidden, middle, heads, groups, tokens = 64, 176, 8, 4, 4 * 24
    sizes = {"hidden_size": hidden, "intermediate_size": middle, "num_attention_heads": heads, "num_key_value_heads": groups}

    def check() -> dict[ActivationCheckpointing, int]:
        def held(mode: ActivationCheckpointing, layers: int) -> int:
            return measured("llama", mode, **sizes, head_dim=hidden // heads, num_hidden_layers=layers)[1]["held"]

        return {mode: held(mode, 3) - held(mode, 2) for mode in ActivationCheckpointing}

    found = alone(check)
    assert found[NONE] > found[SELECTIVE] > found[SUBMODULE] > found[FULL]
    assert found[FULL] == 4 * tokens * hidden
    assert found[SUBMODULE] == 4 * 4 * tokens * hidden  # the inputs of two norms, attention and MLP
    # Its input; the result of attention and its normalizers; of the products the 1st, 3rd, 5th and 7th: q, v, gate, down.
    products = hidden + hidden * groups // heads + middle + hidden
    assert found[SELECTIVE] == 4 * tokens * (hidden + hidden + heads + products)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_in_every_mode(family: str) -> None:
    """Also those that overwrite what was kept: the weights of Mixtral's router, products of experts that have a bias."""

    def check() -> None:
        expected, _ = measured(family, NONE)
        for mode in MODES:
            assert same(measured(family, mode)[0], expected), mode

    alone(check)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.1}),
        ("llama", {"attention_dropout": 0.4}),
        ("phi3", {"resid_pdrop": 0.3, "attention_dropout": 0.2}),
    ],
)
def test_dropout_draws_the_same_masks(family: str, changes: dict[str, float]) -> None:
    def result(mode: ActivationCheckpointing, seed: int) -> tuple[Result, list[int]]:
        model, _ = make(family, **changes)
        checkpointed(model, get_lm_ac_layers(model), mode)
        torch.manual_seed(seed)
        losses = [summed_loss(model, batch) for batch in batches(2)]
        for loss in losses:
            loss.backward()
        return ([loss.item() for loss in losses], gradients(model)), torch.get_rng_state().tolist()

    def check() -> None:
        expected, state = result(NONE, 5)
        assert not same(result(NONE, 6)[0], expected)  # it does draw
        for mode in MODES:
            found, after = result(mode, 5)
            assert same(found, expected), mode
            assert after == state  # later draws are the same too

    alone(check)


def test_evaluation_runs_as_before() -> None:
    def check() -> None:
        for mode in ActivationCheckpointing:
            model, _ = make("llama")
            checkpointed(model, get_lm_ac_layers(model), mode).eval()
            with Watch(model) as watch:
                loss = summed_loss(model, batches(1)[0])
            found = watch.held
            forward = watch.products
            with watch:
                loss.backward()
            if mode is NONE:
                expected = (found, watch.products - forward, gradients(model))
            else:
                assert (found, watch.products - forward) == expected[:2]
                assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected[2], strict=True))

    alone(check)


def test_what_was_kept_is_freed_with_a_loss_that_is_never_used() -> None:
    def check() -> None:
        for mode in ActivationCheckpointing:
            model, _ = make("llama")
            checkpointed(model, get_lm_ac_layers(model), mode)
            gc.disable()
            with Watch(model) as watch:
                loss = summed_loss(model, batches(1)[0])
            before = watch.held
            del loss
            assert watch.held == 0 < before, mode
            gc.enable()

    alone(check)


# -- selective: order of calls --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Three matrix products, so that a count that was carried on would keep the other ones; the first result is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.c(self.b(self.a(x).add_(1.0)).sin()).tanh()


class Energy(Block):
    """Computes a gradient in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = self.b(self.a(x).tanh()).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + self.c(slope).tanh()


class Shared(Block):
    """Runs its products twice, with another of the same mode between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner(super().forward(x)))


class Nested(Shared):
    """Holds a part that is checkpointed by itself."""

    def __init__(self) -> None:
        super().__init__()
        checkpoint_layer(self.inner, SELECTIVE)


def in_order(model: nn.Module, losses: list[torch.Tensor]) -> None:
    for loss in losses:
        loss.backward()


def last_first(model: nn.Module, losses: list[torch.Tensor]) -> None:
    for loss in reversed(losses):
        loss.backward()


def twice(model: nn.Module, losses: list[torch.Tensor]) -> None:
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()


def together(model: nn.Module, losses: list[torch.Tensor]) -> None:
    sum(losses).backward()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backward", [in_order, last_first, twice, together])
@pytest.mark.parametrize("kind", [Block, Energy, Shared, Nested])
def test_several_forwards_before_backward(kind: type[Block], backward: Callable[..., None]) -> None:
    def result(mode: ActivationCheckpointing, *save: str) -> Result:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), kind(), kind(), nn.Linear(16, 1))
        checkpointed(model, [model[1], model[2]], mode, *save)
        inputs = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
        losses = [model(x).square().sum() for x in inputs]
        backward(model, losses)
        return [loss.item() for loss in losses], gradients(model)

    def check() -> None:
        expected = result(NONE)
        for mode in MODES:
            assert same(result(mode), expected), mode
        for save in (
            ["aten.addmm.default"],
            ["aten.tanh.default", "aten.sin.default"],
            ["aten.t.default", "aten.add.Tensor"],
        ):
            assert same(result(SELECTIVE, *save), expected), save

    alone(check)


def test_every_second_product_is_computed_again() -> None:
    def result(mode: ActivationCheckpointing, *save: str) -> int:
        torch.manual_seed(0)
        block = nn.Sequential(*(layer for _ in range(7) for layer in (nn.Linear(16, 16), nn.Tanh())))
        checkpointed(block, [block], mode, *save)
        loss = block(torch.randn(5, 16)).sum()
        with Watch(block) as watch:
            loss.backward()
        return watch.products

    def check() -> None:
        plain = result(NONE)
        assert result(FULL) - plain == 7
        assert result(SELECTIVE) - plain == 3  # the second, the fourth and the sixth
        assert result(SELECTIVE, "aten.addmm.default") == plain
        assert result(SELECTIVE, "aten.tanh.default") - plain == 7

    alone(check)


def test_attention_that_draws_random_numbers_runs_again() -> None:
    """On GPUs attention kernels drop out by themselves; skipped, they would leave the generator where it was."""
    choice = Choice(frozenset())
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_flash_attention_forward"):
        operator = getattr(torch.ops.aten, name).default
        place = [argument.name for argument in operator._schema.arguments].index("dropout_p")
        assert choice(operator, (), {})
        assert choice(operator, (None,) * place + (0.0,), {})
        assert choice(operator, (), {"dropout_p": 0.0})
        assert not choice(operator, (None,) * place + (0.1,), {})
        assert not choice(operator, (), {"dropout_p": 0.1})
    with pytest.raises(PlanError, match="draws random numbers"):
        find_operators(["aten.native_dropout.default"])


def test_a_layer_that_does_something_else_the_second_time_is_refused() -> None:
    class Fickle(Block):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return self.c((x if self.runs > 1 else x.sort().values) @ self.b.weight).tanh()

    def check() -> None:
        block = Fickle()
        checkpointed(block, [block], SELECTIVE)
        loss = block(torch.randn(5, 16, requires_grad=True)).sum()
        with pytest.raises(NotImplementedError, match=r"runs aten\.mm\.default where its forward ran aten\.sort"):
            loss.backward()

    alone(check)


# -- with other ranks -----------------------------------------------------------------------------------------------------


def step(
    family: str, mode: ActivationCheckpointing, spec: ParallelSpec | None = None, *, counted: bool = True, **options: Any
) -> tuple[Result, Counter[str], Counter[str]]:
    """Losses, gradients, collectives and planned collectives of a step of two microbatches."""
    model, derived = make(family)
    settings = ParallelOptions(microbatches=2, activation_checkpointing=mode, **options)
    plan = resolve(spec or derived, model, Layout(), settings, world_size=dist.get_world_size())
    parallelize(model, plan, build_mesh(plan.layout, "cpu")).train()
    losses, counter = [], CommCounter()
    with counter if counted else nullcontext():
        for _, batch in GradSync.from_plan(model, plan).microbatches(batches(4)[2 * dist.get_rank() :][:2]):
            loss = summed_loss(model, batch)
            loss.backward()
            losses.append(loss.item())
    traffic = totals(plan).traffic
    planned = Counter(all_gather=traffic.all_gathers, reduce_scatter=traffic.reduce_scatters, all_reduce=traffic.all_reduces)
    return (losses, gradients(model)), counter.counts, planned


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma3_text"])
def test_sharded_the_same_bits_and_the_same_collectives(family: str) -> None:
    def on_rank(rank: int) -> None:
        for sync in SyncPolicy:
            expected, counts, planned = step(family, NONE, param_dtype="float32", sync=sync)
            assert counts == planned
            for mode in MODES:
                found, again, _ = step(family, mode, param_dtype="float32", sync=sync)
                assert same(found, expected), (sync, mode)
                assert again == counts, (sync, mode)

    run_ranks(on_rank, 2)


UNITS = {
    "first of a layer": ParallelSpec("plain", layers=("blocks.*",), units=(UnitRule("blocks.*.0"),)),
    "last of a layer": ParallelSpec("plain", layers=("blocks.*",), units=(UnitRule("blocks.*.2"),)),
    "both, gathered until backward": ParallelSpec(
        "plain",
        layers=("blocks.*",),
        units=tuple(UnitRule(f"blocks.*.{index}", reshard_after_forward=False) for index in (0, 2)),
    ),
    "fp32": ParallelSpec("plain", layers=("blocks.*",), fp32=("blocks.1.0", "blocks.2.2")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", UNITS)
def test_units_inside_layers(name: str) -> None:
    """Forward and backward gather them inside what is recomputed."""
    spec = UNITS[name]

    def on_rank(rank: int) -> None:
        for sync in SyncPolicy:
            expected, counts, planned = step("plain", NONE, spec=spec, sync=sync)
            assert counts == planned
            for mode in MODES:
                found, again, _ = step("plain", mode, spec=spec, sync=sync)
                assert same(found, expected), (sync, mode)
                assert again == counts, (sync, mode)

    run_ranks(on_rank, 2)


class Summed(torch.autograd.Function):
    """Adds over ranks, and returns the sum."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        operators = torch.ops._c10d_functional
        return operators.wait_tensor(operators.all_reduce(x, "sum", dist.group.WORLD.group_name))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class SummedInPlace(Summed):
    """Adds over ranks into its input, as torch.distributed does."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x.view_as(x)


@pytest.mark.parametrize(("function", "kept"), [(Summed, True), (SummedInPlace, False)])
def test_communication_inside_a_layer(function: type[Summed], kept: bool) -> None:
    """What a collective returns is kept. One that writes into its input runs again, on what the input was before."""

    class Talking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.c(function.apply(self.a(x)).tanh()).tanh()

    def result(mode: ActivationCheckpointing) -> tuple[Result, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Talking(), Talking())
        checkpointed(model, [model[1], model[2]], mode)
        with CommCounter() as counter:
            loss = model(torch.randn(5, 16)).square().sum()
            loss.backward()
        return ([loss.item()], gradients(model)), counter.counts["all_reduce"]

    def on_rank(rank: int) -> None:
        expected, plain = result(NONE)
        assert plain == 2
        for mode, again in ((FULL, 2), (SUBMODULE, 0), (SELECTIVE, 0 if kept else 2)):
            found, calls = result(mode)
            assert same(found, expected), mode
            assert calls == plain + again, mode

    run_ranks(on_rank, 2)


@pytest.mark.thorough
def test_compiled_layers() -> None:
    """The compiler does not look at code that a dispatch mode watches, so one of the two runs is compiled, and one is not."""

    def on_rank(rank: int) -> None:
        for family in ("llama", "mixtral"):
            expected, counts, _ = step(family, NONE, param_dtype="float32")
            for mode in MODES:
                if family == "mixtral" and mode is SELECTIVE:
                    with pytest.raises(PlanError, match=r"has experts and is compiled in parts.*legal for it are none, full"):
                        step(family, mode, compile=True)
                    continue
                for counted in (True, False):
                    torch._dynamo.reset()
                    seen = torch._dynamo.utils.counters["stats"]
                    seen.clear()
                    options = {"compile": True, "compile_backend": "aot_eager", "counted": counted}
                    found, again, _ = step(family, mode, param_dtype="float32", **options)
                    assert (seen["unique_graphs"] == 0) is counted
                    for ours, theirs in zip(found[1], expected[1], strict=True):
                        torch.testing.assert_close(ours, theirs)
                    if counted:
                        assert again == counts

    run_ranks(on_rank, 2)


def test_layers_with_modes_of_their_own() -> None:
    def on_rank(rank: int) -> None:
        layers = {"blocks.*": "full", "blocks.2": "none", "blocks.3": "submodule"}
        model, spec = make("plain")
        options = ParallelOptions(param_dtype="float32", activation_checkpointing_layers=layers)
        plan = resolve(spec, model, Layout(), options, world_size=2)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        assert [is_checkpointed(block) for block in model.blocks] == [True, True, False, False]
        assert [is_checkpointed(part) for part in model.blocks[3]] == [True, False, True]
        assert "blocks.3.0.weight" in dict(model.named_parameters())  # names are as without

    run_ranks(on_rank, 2)


def test_the_manager_takes_a_mode_and_a_model_with_a_cache() -> None:
    def on_rank(rank: int) -> None:
        for chosen, mode in ((True, FULL), (False, NONE), ("selective", SELECTIVE), (SUBMODULE, SUBMODULE)):
            manager = FSDP2Manager(activation_checkpointing=chosen)
            model, _ = make("llama")
            model.config.use_cache = True  # as transformers leave it
            manager.parallelize(model).train()
            assert manager.plan is not None
            assert {unit.activation_checkpointing for unit in manager.plan.units if unit.kind == "layer"} == {mode}
            assert model.config.use_cache is (mode is NONE)
            summed_loss(model, batches(1)[0]).backward()
        with pytest.raises(PlanError, match="activation_checkpointing='some': legal are none, full, submodule, selective"):
            FSDP2Manager(activation_checkpointing="some").parallelize(make("llama")[0])

    run_ranks(on_rank, 2)


# -- names ----------------------------------------------------------------------------------------------------------------


def test_layers_of_a_language_model() -> None:
    model = tiny_model("llama", meta=True)
    assert get_lm_ac_layers(model) == list(model.model.layers)
    plain = Plain()
    assert get_lm_ac_layers(plain) == list(plain.blocks)
    with pytest.raises(ModelError, match="Sequential: has no layers"):
        get_lm_ac_layers(plain.blocks[0])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parts_of_a_layer_are_its_attention_its_mlp_and_its_norms(family: str) -> None:
    model = tiny_model(family, meta=True)
    for layer in get_lm_ac_layers(model):
        parts = parts_of(layer)
        names = {name for name, module in layer.named_children() if module in parts}
        assert len(parts) == len(names) >= (2 if family == "nemotron_h" else 4)  # a block of its is a norm and one mixer
        words = ("attn", "mlp", "fc", "norm", "ln_", "mixer", "router", "experts", "altup", "laurel", "per_layer")
        assert all(any(word in name for word in words) for name in names), names
        held = {id(p) for part in parts for p in part.parameters()}
        assert held == {id(p) for p in layer.parameters()}


def test_parts_that_stand_in_a_list() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Dropout(), nn.ModuleDict({"a": nn.LayerNorm(2)})])
            self.act = nn.GELU()

    layer = Listed()
    assert parts_of(layer) == [layer.parts[0], layer.parts[2]["a"]]


def test_operators_to_keep() -> None:
    assert find_operators([]) == frozenset()
    aten = torch.ops.aten
    assert find_operators(["aten.mm.default", "aten._softmax.default"]) == {aten.mm.default, aten._softmax.default}
    with pytest.raises(PlanError) as error:
        find_operators(
            [
                "aten.mm",
                "aten.mmm.default",
                "aten.linear.default",
                "aten.add_.Tensor",
                "aten.bernoulli.p",
                "mm",
                "aten.mm.default",
            ]
        )
    for line, parts in zip(
        error.value.problems,
        (
            ("'aten.mm': is no operator", "did you mean", "aten.mm.default"),
            ("'aten.mmm.default': is no operator", "did you mean", "aten.mm.default"),
            ("'aten.linear.default': is decomposed into other operators",),
            ("'aten.add_.Tensor': writes into its inputs", "aten.add.Tensor"),
            ("'aten.bernoulli.p': draws random numbers",),
            ("'mm': is no operator", "did you mean", "aten.mm.default"),
        ),
        strict=True,
    ):
        assert line.startswith("activation_checkpointing_save=")
        assert all(part in line for part in parts), line
