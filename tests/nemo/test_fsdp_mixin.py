"""The sync mixin: accumulation in a loop of one's own, and in the schedules of torch's pipelines."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

from meshwright.distributed import _torch_compat
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.errors import PlanError
from meshwright.moe.fsdp_mixin import (
    MoEFSDPSyncMixin,
    _configure_fsdp_module,
    _disable_fsdp_for_moe_module,
    _iter_fsdp_modules,
    _run_post_backward_for_moe_module,
    _run_post_backward_hooks,
    patch_stage,
    patched_backward_maybe_with_nosync,
)
from tests.harness import run_ranks
from tests.tiny import whole

WIDTH = 8


class Layer(nn.Module):
    """What attends, and what would be experts, under names that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.specialists = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.specialists(self.first(hidden).tanh()).tanh()


class Net(MoEFSDPSyncMixin, nn.Module):
    def __init__(self, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tower = nn.ModuleDict({f"floor {index}": Layer() for index in range(layers)})
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.roof = nn.Linear(WIDTH, 3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.tower.values():
            hidden = layer(hidden)
        return self.roof(hidden)


class WithSpecialists(Net):
    fsdp_sync_policies: ClassVar = {"**.specialists": "reduce_each"}


def sharded(model: Any, mesh: DeviceMesh, *, root: bool = False) -> Any:
    """Units of every layer, its specialists, and what is beside the layers; sums, no means."""
    parts = [*(layer.specialists for layer in model.tower.values()), *model.tower.values(), model.spare, model.roof]
    for part in [*parts, *([model] if root else [])]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    return model


def sharded_now(model: nn.Module) -> dict[str, bool]:
    return {name: not _torch_compat.is_unsharded(unit) for name, unit in fsdp_units(model).items()}


def inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(4, WIDTH) for _ in range(count)]


def loss_of(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return model(hidden).square().sum()


def expected_of(count: int, **options: Any) -> dict[str, torch.Tensor | None]:
    model = Net(**options)
    for hidden in inputs(count):
        loss_of(model, hidden).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor | None], prefix: str = "") -> None:
    for name, parameter in model.named_parameters():
        truth = expected[prefix + name]
        assert (parameter.grad is None) == (truth is None), name
        if truth is not None:
            torch.testing.assert_close(whole(parameter.grad), truth, rtol=1e-5, atol=1e-6)


# -- a loop of one's own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [False, True])
def test_an_accumulation_reduces_once_and_ends_sharded(root: bool) -> None:
    def on_rank(rank: int) -> None:
        expected = expected_of(6)
        model = sharded(Net(), init_device_mesh("cpu", (2,)), root=root)
        assert isinstance(model, FSDPModule) is root
        assert list(_iter_fsdp_modules(model)) == [m for m in model.modules() if isinstance(m, FSDPModule)]
        for _ in range(2):  # a second step is as the first
            mine = inputs(6)[rank::2]
            with CommCounter() as counter:
                model.prepare_for_grad_accumulation()
                for index, hidden in enumerate(mine):
                    if index == 2:
                        model.prepare_for_final_backward()
                    loss_of(model, hidden).backward()
                    if index < 2:
                        ran = {name for name, now in sharded_now(model).items() if not now}
                        assert ran >= {"tower.floor 0", "tower.floor 0.specialists", "roof"}
            assert counter.counts["reduce_scatter"] == 5  # two layers, their specialists, the roof
            assert counter.counts["all_gather"] == 5
            assert all(sharded_now(model).values())
            assert_gradients(model, expected)
            # And it is as it was before: evaluation reshards after forward.
            with torch.no_grad():
                model(mine[0])
            assert all(now for name, now in sharded_now(model).items() if name)
            model.zero_grad()

    run_ranks(on_rank, 2)


def test_the_final_call_may_come_between_forward_and_backward() -> None:
    def on_rank(rank: int) -> None:
        model = sharded(Net(), init_device_mesh("cpu", (2,)))
        model.prepare_for_grad_accumulation()
        first, second = inputs(4)[rank::2]
        loss_of(model, first).backward()
        loss = loss_of(model, second)
        model.prepare_for_final_backward()
        loss.backward()
        assert all(sharded_now(model).values())
        assert_gradients(model, expected_of(4))

    run_ranks(on_rank, 2)


def test_experts_reduce_each_time_while_the_rest_defers() -> None:
    """One line of the class."""

    def on_rank(rank: int) -> None:
        model = sharded(WithSpecialists(), init_device_mesh("cpu", (2,)), root=True)
        mine = inputs(6)[rank::2]
        reductions = []
        model.prepare_for_grad_accumulation()
        for index, hidden in enumerate(mine):
            if index == 2:
                model.prepare_for_final_backward()
            with CommCounter() as counter:
                loss_of(model, hidden).backward()
            reductions.append((counter.counts["all_gather"], counter.counts["reduce_scatter"]))
            if index == 0:
                now = sharded_now(model)
                assert {name for name in now if name.startswith("tower") and now[name]} == {
                    "tower.floor 0.specialists",
                    "tower.floor 1.specialists",
                }
        # Specialists are gathered in forward and again in backward; the rest (two layers, the roof) once in all.
        assert reductions == [(3 + 4, 2), (4, 2), (4, 2 + 3)]
        assert all(sharded_now(model).values())
        assert_gradients(model, expected_of(6))

    run_ranks(on_rank, 2)


def test_a_policy_for_units_that_there_are_not_is_refused() -> None:
    class Wrong(Net):
        fsdp_sync_policies: ClassVar = {"layers.*.experts": "reduce_each"}

    def on_rank(rank: int) -> None:
        model = sharded(Wrong(), init_device_mesh("cpu", (1,)))
        with pytest.raises(PlanError, match=r"'layers\.\*\.experts' of Wrong matches no FSDP unit; units are 'tower\.floor 0'"):
            model.prepare_for_grad_accumulation()

    run_ranks(on_rank, 1)


def test_without_units_nothing_happens() -> None:
    def on_rank(rank: int) -> None:
        model = Net()
        model.prepare_for_grad_accumulation()
        model.prepare_for_final_backward()
        model.prepare_for_final_backward(pp_enabled=True)
        _disable_fsdp_for_moe_module(model)
        _run_post_backward_for_moe_module(model)
        assert list(_iter_fsdp_modules(model)) == []
        loss_of(model, inputs(1)[0]).backward()
        assert_gradients(model, expected_of(1))

    run_ranks(on_rank, 1, group=False)


def test_a_unit_without_a_gradient_in_the_last_microbatch_does_not_keep_old_weights() -> None:
    """No root tells it that the backward ended; it would compute with what the optimizer has changed since."""

    def on_rank(rank: int) -> None:
        model = sharded(Net(), init_device_mesh("cpu", (2,)))
        model.prepare_for_grad_accumulation()
        (loss_of(model, inputs(1)[0]) + model.spare(inputs(1)[0]).sum()).backward()
        assert not sharded_now(model)["spare"]
        model.prepare_for_final_backward()
        loss_of(model, inputs(2)[1]).backward()
        assert all(sharded_now(model).values())

    run_ranks(on_rank, 2)


def test_functions_for_units() -> None:
    def on_rank(rank: int) -> None:
        model = sharded(Net(), init_device_mesh("cpu", (2,)), root=True)
        hidden = inputs(2)[rank]
        _disable_fsdp_for_moe_module(model)
        with CommCounter() as counter:
            loss_of(model, hidden).backward()
        assert counter.counts["reduce_scatter"] == 0
        # One unit, and none inside it.
        _configure_fsdp_module(model.tower["floor 0"], True, True, True)
        with CommCounter() as counter:
            end = _run_post_backward_hooks(model.tower["floor 0"])
            _run_post_backward_hooks(model.tower["floor 0"].specialists)
        assert counter.counts["reduce_scatter"] == 1
        assert sharded_now(model)["tower.floor 0"]
        assert not sharded_now(model)["tower.floor 0.specialists"]
        end()
        with CommCounter() as counter:
            _run_post_backward_for_moe_module(model)
        assert counter.counts["reduce_scatter"] == 4
        assert all(sharded_now(model).values())
        assert_gradients(model, expected_of(2))

    run_ranks(on_rank, 2)


def test_an_unknown_kind_of_backward() -> None:
    with pytest.raises(RuntimeError, match="Unknown backward type: sideways"):
        patched_backward_maybe_with_nosync(SimpleNamespace(submod=Net()), "sideways", {})


# -- pipelines ---------------------------------------------------------------------------------------------------------------


class Stage(MoEFSDPSyncMixin, nn.Module):
    """Half of a net of four layers; it is no unit itself."""

    def __init__(self, net: Net, which: int, stages: int = 2) -> None:
        super().__init__()
        names = list(net.tower)
        share = len(names) // stages
        self.tower = nn.ModuleDict({name: net.tower[name] for name in names[which * share : (which + 1) * share]})
        self.spare = net.spare
        self.roof = net.roof if which == stages - 1 else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.tower.values():
            hidden = layer(hidden)
        return self.roof(hidden)


class StageWithSpecialists(Stage):
    fsdp_sync_policies: ClassVar = {"**.specialists": "reduce_each"}


def sharded_stage(stage: Any, mesh: DeviceMesh, root: bool) -> Any:
    parts = [*(layer.specialists for layer in stage.tower.values()), *stage.tower.values(), stage.spare]
    parts += [stage.roof] if isinstance(stage.roof, nn.Linear) else []
    for part in [*parts, *([stage] if root else [])]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    return stage


def run_pipeline(
    rank: int, schedule_type: Callable[..., Any], steps: int, *, kind: type[Stage] = Stage, root: bool = False, each: int = 1
) -> list[tuple[int, int]]:
    """Two pipeline ranks of two data ranks; (all-gathers, reduce-scatters) of each ``schedule.step()`` on this rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    microbatches = 2 * each
    expected = expected_of(2 * microbatches * steps, layers=4)
    example, between = inputs(1)[0], inputs(1)[0].requires_grad_()
    stages = []
    for index in range(each):
        which = pp + 2 * index
        module = sharded_stage(kind(Net(layers=4), which, 2 * each), mesh["dp"], root)
        last = which == 2 * each - 1
        stage = PipelineStage(
            module,
            which,
            2 * each,
            torch.device("cpu"),
            input_args=(between if which else example,),
            output_args=(torch.zeros(4, 3, requires_grad=True) if last else between,),
            group=mesh["pp"].get_group(),
        )
        stages.append(patch_stage(stage))
    schedule = schedule_type(
        stages if each > 1 else stages[0],
        microbatches,
        loss_fn=lambda output, _: output.square().sum(),
        scale_grads=False,
    )
    data = inputs(2 * microbatches * steps)[dp::2]
    traffic = []
    for step in range(steps):
        for stage in stages:
            if step == steps - 1:
                stage.submod.prepare_for_final_backward(pp_enabled=True)
            else:
                stage.submod.prepare_for_grad_accumulation(pp_enabled=True)
        batch = torch.cat(data[step * microbatches : (step + 1) * microbatches])
        target = torch.zeros(len(batch), 3)
        with CommCounter() as counter:
            schedule.step(*([batch] if pp == 0 else []), target=target, **({"losses": []} if pp == 1 else {}))
        traffic.append((counter.counts["all_gather"], counter.counts["reduce_scatter"]))
    for stage in stages:
        assert all(sharded_now(stage.submod).values())
        assert_gradients(stage.submod, expected)
    return traffic


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("root", [False, True])
def test_two_stages_reduce_once_in_an_optimizer_step(schedule: Any, root: bool) -> None:
    """Over two schedules: nothing in the first, each unit that ran once in the second."""

    def on_rank(rank: int) -> list[tuple[int, int]]:
        return run_pipeline(rank, schedule, 2, root=root)

    for rank, traffic in enumerate(run_ranks(on_rank, 4)):
        assert [reductions for _, reductions in traffic] == [0, 4 + (rank >= 2)], traffic


def test_experts_of_a_stage_reduce_in_each_microbatch() -> None:
    def on_rank(rank: int) -> list[tuple[int, int]]:
        return run_pipeline(rank, Schedule1F1B, 2, kind=StageWithSpecialists)

    for rank, traffic in enumerate(run_ranks(on_rank, 4)):
        # Two microbatches in each schedule, two layers of specialists; the rest at the end.
        assert [reductions for _, reductions in traffic] == [4, 4 + 2 + (rank >= 2)], traffic


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Stage, StageWithSpecialists])
@pytest.mark.parametrize("root", [False, True])
def test_split_backwards(kind: type[Stage], root: bool) -> None:
    """Inputs first, weights later: units that resharded in between would get no gradients."""

    def on_rank(rank: int) -> None:
        run_pipeline(rank, ScheduleInterleavedZeroBubble, 2, kind=kind, root=root, each=2)

    run_ranks(on_rank, 4)


def test_a_stage_without_units_is_torchs_own() -> None:
    def on_rank(rank: int) -> None:
        expected = expected_of(2, layers=2)
        net = Net()
        stage = patch_stage(PipelineStage(Stage(net, rank), rank, 2, torch.device("cpu")))
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, _: output.square().sum(), scale_grads=False)
        batch = torch.cat(inputs(2))
        schedule.step(*([batch] if rank == 0 else []), target=torch.zeros(8, 3))
        dist.barrier()
        assert_gradients(stage.submod, expected)

    run_ranks(on_rank, 2)
