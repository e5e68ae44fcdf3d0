"""Bytes that ranks really hold, against the plan's."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.distributed import _torch_compat
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.models.token_loss import forward_loss
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import FAMILIES, SPARSE, batches, make, needs_norm_of_groups, summed_loss


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def holds(unit: torch.nn.Module) -> bool:
    """Whether a unit is gathered, or being gathered ahead of its use."""
    groups = _torch_compat.param_groups(unit)
    return any(group.is_unsharded or group._all_gather_result is not None for group in groups)


def test_shards_gradients_and_optimizer_state_are_what_was_planned() -> None:
    """On rank 0, which holds the most: 29 rows over 4 ranks are 8, 8, 8 and 5."""

    def on_rank(rank: int) -> None:
        for layout in (Layout(), Layout(dp_replicate=2), Layout(dp_replicate=4)):
            model, spec = make("plain")
            plan = resolve(spec, model, layout, ParallelOptions(freeze=("blocks.1.**",)), world_size=4)
            parallelize(model, plan, build_mesh(plan.layout, "cpu"))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            summed_loss(model, batches(1)[0]).backward()
            optimizer.step()
            found, planned = list(model.parameters()), totals(plan)
            if rank == 0:
                assert sum(size(p.to_local()) for p in found) == planned.parameter_bytes
                assert sum(size(p.grad.to_local()) for p in found if p.grad is not None) == planned.gradient_bytes
                states = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
                assert sum(size(s.to_local()) for s in states) == planned.optimizer_bytes

    run_ranks(on_rank, 4)


def test_gathered_parameters_at_the_peak_are_at_most_what_was_planned() -> None:
    def on_rank(rank: int) -> None:
        for policy in SyncPolicy:
            for param_dtype in ("bfloat16", "float32"):
                model, spec = make("plain", blocks=6)
                options = ParallelOptions(param_dtype=param_dtype, sync=policy, microbatches=2)
                plan = resolve(spec, model, Layout(), options, world_size=2)
                parallelize(model, plan, build_mesh(plan.layout, "cpu"))
                units = fsdp_units(model)
                gathered = {
                    unit.name: sum(row.gathered_bytes for row in plan.parameters if row.unit == unit.name)
                    for unit in plan.units
                }
                peak = 0

                def look(*_: object, units=units, gathered=gathered) -> None:
                    nonlocal peak
                    held = sum(gathered[name] for name, unit in units.items() if holds(unit))
                    peak = max(peak, held)

                for block in model.blocks:
                    block[0].register_forward_hook(look)
                    block[2].register_full_backward_hook(look)
                for _, batch in GradSync.from_plan(model, plan).microbatches(batches(2)):
                    summed_loss(model, batch).backward()
                planned = totals(plan).gathered_peak_bytes
                if policy is SyncPolicy.DEFER:
                    assert peak == planned == sum(gathered.values())
                else:
                    assert 0.5 * planned <= peak <= planned, (policy, peak, planned)

    run_ranks(on_rank, 2)


BY_DEFAULT = ("qwen2", "gpt2", "qwen3_moe", "nemotron_h")
"""A tied head, weights [in, out], experts, experts on a latent."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.thorough) for name in FAMILIES]
)
def test_the_bytes_of_every_collective_over_tp_are_those_of_the_plan(family: str) -> None:
    assert min(run_ranks(partial(compare_bytes, family), 2)) >= 2


SIZES: dict[str, dict[str, Any]] = {
    "bitnet": {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mamba": {"state_size": 4, "use_bias": True},
    "falcon_mamba": {"state_size": 4},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
}
"""What of a model runs between matrices that `tp` slices, and sends something itself: norms over features, mixers."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "mamba2" else pytest.mark.thorough) for kind in SIZES])
def test_so_are_those_of_what_runs_between_slices(kind: str) -> None:
    needs_norm_of_groups(kind)
    assert min(run_ranks(partial(compare_bytes, kind), 2)) >= 2


def made(family: str) -> tuple[torch.nn.Module, ParallelSpec]:
    if family not in SIZES:
        return make(family)
    config = AutoConfig.for_model(family, vocab_size=29, hidden_size=32, num_hidden_layers=2, **SIZES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    return model, spec_of(model)


def compare_bytes(family: str, rank: int) -> int:
    """Return on how many layouts the calls and bytes over `tp` of this rank are those of its plan."""
    compared, others = 0, 1 if family in SIZES else 2
    (batch,) = batches(1)
    positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    for sequence_parallel, loss_parallel, chunks in product((False, True), (None, False)[:others], (0, 2)[:others]):
        model, spec = made(family)
        options = ParallelOptions(
            param_dtype=None, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel, loss_chunks=chunks,
            tokens=batch["input_ids"].numel(), experts_of_token=2 if family in SPARSE else None,
        )  # fmt: skip
        try:
            plan = resolve(spec, model, Layout(tp=2, dp_shard=1), options)
        except PlanError:
            assert sequence_parallel or chunks  # no family is refused without
            continue
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        with CommCounter() as counter:
            forward_loss(model, {**batch, "position_ids": positions}).backward()
        planned = {item.kind: (item.calls, item.size) for item in activation_traffic(plan)}
        counts, sizes = counter.counts_of[0, 1], counter.bytes_of[0, 1]
        assert {kind: (counts[kind], sizes[kind]) for kind in counts} == planned, (options.sequence_parallel, plan.loss)
        compared += 1
    return compared
