"""What parallelize() and GradSync do to a model besides gradients: dtypes, ties, offload, recomputation, compilation."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from meshwright.distributed import _torch_compat
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.parallelizer import apply_fsdp2_sharding_recursively, unshard_fsdp2_model
from meshwright.errors import LayoutError, PlanError
from meshwright.layout import Layout
from meshwright.plan.given.closed_choices import ActivationCheckpointing, SyncPolicy
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.harness import refuses, run_ranks
from tests.tiny import PLAIN_SPEC, Plain, batches, logits_of, make, summed_loss, whole


def build(
    family: str, layout: Layout | None = None, spec: ParallelSpec | None = None, world: int = 2, **options
) -> tuple[nn.Module, ShardingPlan]:
    model, derived = make(family)
    layout = layout or Layout()
    plan = resolve(spec or derived, model, layout, ParallelOptions(**options), world_size=world)
    return parallelize(model, plan, build_mesh(plan.layout, "cpu")), plan


def all_sharded(model: nn.Module) -> bool:
    return not any(_torch_compat.is_unsharded(unit) for unit in fsdp_units(model).values())


def test_a_whole_model_is_not_taken_for_a_stage() -> None:
    def on_rank(rank: int) -> None:
        model, spec = make("llama", meta=True)
        layout = Layout(pp=2, dp_shard=1)
        plan = resolve(spec, model, layout, ParallelOptions(microbatches=2))
        with pytest.raises(PlanError, match="the plan is that of a whole model with stages"):
            parallelize(model, plan, build_mesh(layout, "cpu"))
        assert not fsdp_units(model)

    run_ranks(on_rank, 2)


def test_a_plan_of_another_model_or_mesh_is_refused() -> None:
    def on_rank(rank: int) -> None:
        model, spec = make("plain", meta=True)
        plan = resolve(spec, model, Layout(), world_size=2)
        mesh = build_mesh(Layout(), "cpu")
        other, _ = make("plain", meta=True, blocks=3, vocab=31)
        with pytest.raises(PlanError) as error:
            parallelize(other, plan, mesh)
        assert "parameter 'blocks.3.0.bias' is in the plan but not in the model" in error.value.problems
        assert "parameter 'embed.weight' has shape (31, 16) in the model and (29, 16) in the plan" in error.value.problems
        with refuses(PlanError, "plan.mesh"):
            parallelize(model, plan, build_mesh(Layout(dp_replicate=2), "cpu"))
        parallelize(model, plan, mesh)
        with refuses(PlanError, "fsdp.already"):
            parallelize(model, plan, mesh)

    run_ranks(on_rank, 2)


def test_dtypes_of_units() -> None:
    def on_rank(rank: int) -> None:
        spec = ParallelSpec("plain", layers=("blocks.*",), fp32=("norm", "blocks.1.0"))
        model, plan = build("plain", spec=spec, output_dtype="float32")
        seen: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {}

        def watch(name: str):
            def hook(module, inputs, output) -> None:
                weight = next(module.parameters())
                seen[name] = (inputs[0].dtype, weight.dtype, output.dtype)

            return hook

        for name in ("blocks.0.0", "blocks.1.0", "norm", "head"):
            model.get_submodule(name).register_forward_hook(watch(name), prepend=True)
        output = model(batches(1)[0]["input_ids"])
        bf16, fp32 = torch.bfloat16, torch.float32
        assert seen["blocks.0.0"] == (bf16, bf16, bf16)
        assert seen["blocks.1.0"] == (fp32, fp32, fp32)
        assert seen["norm"] == (fp32, fp32, fp32)
        assert seen["head"] == (bf16, bf16, bf16)
        assert output.dtype == fp32
        assert {unit.name for unit in plan.units if unit.kind == "fp32"} == {"norm", "blocks.1.0"}

    for world in (1, 2):
        run_ranks(lambda rank, world=world: on_rank(rank) if world == 2 else dtypes_alone(), world)


def dtypes_alone() -> None:
    """World size 1 keeps every policy."""
    model, _ = build("plain", world=1, activation_checkpointing="full")
    seen = []
    model.blocks[0][0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model.train()
    summed_loss(model, batches(1)[0]).backward()
    assert seen == [torch.bfloat16] * 2  # the forward, and its recomputation
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert len(fsdp_units(model)) == 5


def test_tied_embeddings_stay_tied_through_steps() -> None:
    def on_rank(rank: int) -> None:
        for layout in (Layout(), Layout(dp_replicate=2)):
            model, plan = build("gemma3_text", layout, param_dtype="float32", microbatches=2)
            sync = GradSync.from_plan(model, plan)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            before = whole(model.lm_head.weight.detach()).clone()
            for _ in range(2):
                for _, batch in sync.microbatches(batches(2)):
                    summed_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert model.lm_head.weight is model.model.embed_tokens.weight
            assert not torch.equal(before, whole(model.lm_head.weight))
            assert sum(1 for name, _ in model.named_parameters() if "embed" in name or "lm_head" in name) == 1

    run_ranks(on_rank, 2)


def test_mean_reduction_is_the_average_over_data_ranks() -> None:
    def on_rank(rank: int) -> None:
        expected, _ = make("plain")
        for batch in batches(4):
            summed_loss(expected, batch).backward()
        for layout in (Layout(), Layout(dp_replicate=2)):
            for mode, factor in (("sum", 1.0), ("mean", 4.0)):
                options = ParallelOptions(param_dtype="float32", gradient_reduction=mode)
                model, spec = make("plain")
                plan = resolve(spec, model, layout, options, world_size=4)
                parallelize(model, plan, build_mesh(plan.layout, "cpu"))
                for _, batch in GradSync.from_plan(model, plan).microbatches(batches(4)[rank : rank + 1]):
                    summed_loss(model, batch).backward()
                for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(whole(ours.grad) * factor, theirs.grad, rtol=1e-4, atol=1e-5)

    run_ranks(on_rank, 4)


def test_full_checkpointing_recomputes_each_layer_once() -> None:
    def on_rank(rank: int) -> None:
        for mode, expected in (("none", 1), ("full", 2)):
            model, _ = build("plain", activation_checkpointing=mode)
            calls = []
            model.blocks[2][0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
            model.train()
            summed_loss(model, batches(1)[0]).backward()
            assert len(calls) == expected
            assert "blocks.2.0.weight" in dict(model.named_parameters())  # names are as without

    run_ranks(on_rank, 2)


@pytest.mark.thorough
def test_compiled_layers_compute_the_same() -> None:
    def on_rank(rank: int) -> None:
        data = batches(1)[0]
        outputs = []
        for compiled in (False, True):
            model, plan = build("plain", param_dtype="float32", compile=compiled, compile_backend="aot_eager")
            assert plan.unit("blocks.0").compile is compiled
            loss = summed_loss(model, data)
            loss.backward()
            outputs.append((loss.detach(), [whole(p.grad) for p in model.parameters()]))
        (loss, gradients), (compiled_loss, compiled_gradients) = outputs
        torch.testing.assert_close(loss, compiled_loss)
        for ours, theirs in zip(gradients, compiled_gradients, strict=True):
            torch.testing.assert_close(ours, theirs)

    run_ranks(on_rank, 2)


def fail_after_one_microbatch(model: nn.Module, sync: GradSync) -> None:
    for index, batch in sync.microbatches(batches(2)):
        summed_loss(model, batch).backward()
        if index == 0:
            raise KeyError


def test_everything_is_resharded_after_a_step_an_evaluation_and_a_failure() -> None:
    def on_rank(rank: int) -> None:
        for policy in SyncPolicy:
            model, plan = build("plain", param_dtype="float32", sync=policy, microbatches=2, freeze=("blocks.0.**",))
            sync = GradSync.from_plan(model, plan)
            for _, batch in sync.microbatches(batches(2)):
                summed_loss(model, batch).backward()
            assert all_sharded(model)
            gradients = [p.grad.to_local().clone() for p in model.parameters() if p.requires_grad]
            with torch.no_grad(), sync.forward_only():
                summed_loss(model, batches(1)[0])
            assert all_sharded(model)

            model.zero_grad()
            with pytest.raises(KeyError):
                fail_after_one_microbatch(model, sync)
            assert all_sharded(model)
            # The failed step left nothing behind: the next one is as the first.
            model.zero_grad()
            for _, batch in sync.microbatches(batches(2)):
                summed_loss(model, batch).backward()
            again = [p.grad.to_local() for p in model.parameters() if p.requires_grad]
            for ours, theirs in zip(gradients, again, strict=True):
                assert torch.equal(ours, theirs), policy

    run_ranks(on_rank, 2)


def test_a_unit_that_never_runs_does_no_harm() -> None:
    class WithSpare(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.ModuleList([nn.Linear(4, 4)])

    def on_rank(rank: int) -> None:
        model = WithSpare()
        spec = ParallelSpec("spare", layers=("blocks.*", "spare.*"))
        plan = resolve(spec, model, Layout(), ParallelOptions(param_dtype="float32", microbatches=2), world_size=2)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        for _, batch in GradSync.from_plan(model, plan).microbatches(batches(2)):
            summed_loss(model, batch).backward()
        assert model.spare[0].weight.grad is None
        assert model.blocks[0][0].weight.grad is not None
        assert all_sharded(model)

    run_ranks(on_rank, 2)


def test_grad_sync_on_a_model_that_is_no_unit_itself() -> None:
    def on_rank(rank: int) -> None:
        model = Plain()
        mesh = build_mesh(Layout(), "cpu")
        apply_fsdp2_sharding_recursively(model, mesh.fsdp(), MixedPrecisionPolicy())
        assert not isinstance(model, FSDPModule)
        sync = GradSync(model, {"blocks.1": SyncPolicy.REDUCE_EACH})
        with CommCounter() as counter:
            for _, batch in sync.microbatches(batches(3)):
                summed_loss(model, batch).backward()
        # Without a common root every unit is its own; the policies hold all the same.
        assert counter.counts["reduce_scatter"] == 3 + 3
        assert all_sharded(model)
        with pytest.raises(PlanError, match=r"'blocks\.9' is no FSDP unit; units are 'blocks\.0'"):
            GradSync(model, {"blocks.9": SyncPolicy.DEFER})

    run_ranks(on_rank, 2)


class Nested(nn.Module):
    """A list, a list of lists, and a dict of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.lists = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.other = nn.Linear(4, 4)


def test_container_rule() -> None:
    def on_rank(rank: int) -> None:
        mesh = build_mesh(Layout(), "cpu").fsdp()
        for explicit in (None, True, False):
            model = Nested()
            apply_fsdp2_sharding_recursively(model, mesh, None, reshard_after_forward=explicit)
            units = fsdp_units(model)
            last = {"flat.2", "lists.0.1", "lists.1.1", "named.b"}
            rest = {"flat.0", "flat.1", "lists.0.0", "lists.1.0", "named.a"}
            assert set(units) == last | rest
            for name, unit in units.items():
                expected = name not in last if explicit is None else explicit
                assert _torch_compat.reshards_after_forward(unit, is_root=False) is expected, name
            assert not isinstance(model.other.weight, DTensor)
            state = _torch_compat.fsdp_state(units["flat.0"])
            assert state._mp_policy.param_dtype == torch.bfloat16  # the default of None

    run_ranks(on_rank, 2)


def test_unshard_context_nests_and_survives_an_exception() -> None:
    def on_rank(rank: int) -> None:
        model, _ = build("plain", param_dtype="float32")
        expected = logits_of(Plain_alone(), batches(1)[0]["input_ids"])
        torch.testing.assert_close(model(batches(1)[0]["input_ids"]), expected)
        with unshard_fsdp2_model(model):
            with CommCounter() as counter, torch.no_grad():
                torch.testing.assert_close(model(batches(1)[0]["input_ids"]), expected)
            assert counter.counts["all_gather"] == 0
            assert not isinstance(model.head.weight, DTensor)
            with unshard_fsdp2_model(model):
                pass
            assert not isinstance(model.head.weight, DTensor)
        assert all_sharded(model)
        with pytest.raises(KeyError), unshard_fsdp2_model(model):
            raise KeyError
        assert all_sharded(model)

    run_ranks(on_rank, 2)


def Plain_alone() -> nn.Module:
    model, _ = make("plain")
    return model


def test_manager_builds_the_mesh_and_shards() -> None:
    def on_rank(rank: int) -> None:
        for sizes in ({}, {"dp_replicate_size": 2}, {"dp_size": 4, "dp_replicate_size": 2}):
            manager = FSDP2Manager(mp_policy=MixedPrecisionPolicy(), activation_checkpointing=True, **sizes)
            assert manager.device_mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
            model = manager.parallelize(make("llama")[0])
            assert len(fsdp_units(model)) == 3
            assert manager.plan is not None
            assert manager.plan.unit("model.layers.0").activation_checkpointing is ActivationCheckpointing.FULL
            data = batches(4)
            summed_loss(model, data[rank]).backward()
            # torch's default: the average over data ranks of each rank's own loss
            alone, _ = make("llama")
            (sum(summed_loss(alone, batch) for batch in data) / 4).backward()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-6)
        with pytest.raises(LayoutError, match="dp_replicate_size=3: must divide dp_size=4"):
            FSDP2Manager(dp_size=4, dp_replicate_size=3)
        assert (FSDP2Manager(pp_size=2).dp_size, FSDP2Manager(pp_size=2).pp_size) == (2, 2)

    run_ranks(on_rank, 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"ep_size": 2}),
        (4, {"ep_size": 2}),
        (4, {"ep_size": 2, "dp_replicate_size": 2}),
        (4, {"ep_size": 4, "tp_size": 2}),
        (4, {"ep_size": 2, "tp_size": 2, "dp_size": 2, "dp_replicate_size": 2}),  # nothing is sharded
        (8, {"ep_size": 2, "tp_size": 4, "dp_size": 2, "dp_replicate_size": 2}),  # experts alone are, over ranks of tp
    ],
    ids=str,
)
def test_manager_averages_over_data_ranks_with_experts_shared_out(world: int, sizes: dict[str, int]) -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(mp_policy=MixedPrecisionPolicy(), **sizes)
        model = manager.parallelize(make("mixtral")[0])
        readers = world // sizes.get("tp_size", 1)
        data = batches(readers)
        summed_loss(model, data[manager.mesh.rank("dp")]).backward()
        alone, _ = make("mixtral")
        (sum(summed_loss(alone, batch) for batch in data) / readers).backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text
            )

    run_ranks(on_rank, world)


def test_a_tied_weight_across_units_is_refused_before_anything_is_sharded() -> None:
    model = Plain()
    model.head.weight = model.embed.weight
    spec = ParallelSpec("plain", layers=("blocks.*", "head"))
    with pytest.raises(PlanError, match="claimed twice"):
        resolve(spec, model, Layout(), world_size=2)


def test_the_counter_sees_collectives_of_dtensors() -> None:
    def on_rank(rank: int) -> None:
        model, _ = build("plain", param_dtype="float32")
        with CommCounter() as counter:
            model.head.weight.full_tensor()
            (model.head.weight.detach() ** 2).sum().full_tensor()
        assert dict(counter.counts) == {"all_gather": 1, "all_reduce": 1}
        # 29 rows over two ranks are padded to 15 each
        assert counter.bytes["all_gather"] == 30 * 16 * 4

    run_ranks(on_rank, 2)


class Skipping(Plain):
    """Leaves its second block out of some forwards."""

    skip = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if not (self.skip and index == 1):
                hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def test_a_unit_that_only_some_microbatches_use() -> None:
    """Its gradient is the sum over those that do."""

    def on_rank(rank: int) -> None:
        data = batches(8)
        for layout in (Layout(), Layout(dp_replicate=2)):
            for policy in SyncPolicy:
                for once in (True, False):
                    model = Skipping()
                    torch.manual_seed(0)
                    for parameter in model.parameters():
                        nn.init.normal_(parameter, std=0.2)
                    options = ParallelOptions(param_dtype="float32", sync=policy, microbatches=2, all_reduce_once=once)
                    alone = Skipping()
                    alone.load_state_dict(model.state_dict())
                    plan = resolve(PLAIN_SPEC, model, layout, options, world_size=4)
                    parallelize(model, plan, build_mesh(plan.layout, "cpu"))
                    sync = GradSync.from_plan(model, plan)
                    for index, batch in sync.microbatches(data[2 * rank : 2 * rank + 2]):
                        model.skip = index == 1
                        summed_loss(model, batch).backward()
                    assert all_sharded(model)
                    for index, batch in enumerate(data):
                        alone.skip = index % 2 == 1
                        summed_loss(alone, batch).backward()
                    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-4)

    run_ranks(on_rank, 4)


def test_a_step_that_fails_inside_a_layers_forward_leaves_nothing_gathered() -> None:
    def on_rank(rank: int) -> None:
        for policy in SyncPolicy:
            model, plan = build("plain", param_dtype="float32", sync=policy, microbatches=2)
            sync = GradSync.from_plan(model, plan)

            def step(model=model, sync=sync) -> list[torch.Tensor]:
                for _, batch in sync.microbatches(batches(2)):
                    summed_loss(model, batch).backward()
                found = [p.grad.to_local().clone() for p in model.parameters()]
                model.zero_grad()
                return found

            expected = step()
            for where in (0, 2):

                def fail(*_: object) -> None:
                    raise KeyError

                handle = model.blocks[where][1].register_forward_hook(fail)
                with pytest.raises(KeyError):
                    step()
                handle.remove()
                assert all_sharded(model)
                assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
                model.zero_grad()
                assert all(torch.equal(a, b) for a, b in zip(expected, step(), strict=True)), (policy, where)

    run_ranks(on_rank, 2)


def test_a_step_that_fails_inside_backward_leaves_no_reduction_under_way() -> None:
    """Later layers were reduced by then: over shards, and across replicas. The next step does not wait for them."""

    def on_rank(rank: int) -> None:
        for layout in (Layout(), Layout(dp_replicate=2)):
            model, plan = build("plain", layout, world=4, param_dtype="float32", sync=SyncPolicy.REDUCE_EACH, microbatches=2)
            sync = GradSync.from_plan(model, plan)

            def step(model=model, sync=sync) -> list[torch.Tensor]:
                for _, batch in sync.microbatches(batches(2)):
                    summed_loss(model, batch).backward()
                found = [p.grad.to_local().clone() for p in model.parameters()]
                model.zero_grad()
                return found

            def fail(*_: object) -> None:
                raise KeyError

            expected = step()
            handle = model.blocks[0][1].register_full_backward_hook(fail)
            with pytest.raises(KeyError):
                step()
            handle.remove()
            assert not _torch_compat.open_reductions(model)
            groups = [group for unit in fsdp_units(model).values() for group in _torch_compat.param_groups(unit)]
            assert all(group._all_reduce_state is None and group._partial_reduce_output is None for group in groups)
            assert all_sharded(model)
            model.zero_grad()
            assert all(torch.equal(a, b) for a, b in zip(expected, step(), strict=True)), layout

    run_ranks(on_rank, 4)
