"""A step under fake tensors, in a world that is not there: it holds what a real one does, and goes through experts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.experts.dispatch import static_splits
from meshwright.distributed.mesh import build_mesh
from meshwright.layout import Layout
from meshwright.plan.axes.experts import expert_parallel_counts
from meshwright.plan.cost.price import totals
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.diffusion_gemma import CONFIG, TEXT, TOKENS
from tests.harness import run_ranks
from tests.tiny import make

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")

RUN = {
    "output": ".",
    "model": {"config": {**CONFIG, "text_config": {**TEXT, **TOKENS}}},
    "parallel": {"param_dtype": "float32"},
    "data": {"corpus": "python-stdlib", "sequence_length": 24, "packing": "pad"},
    "training": {"steps": 1},
}


@contextmanager
def benchmarks() -> Iterator[None]:
    """Its modules are scripts beside one another."""
    sys.path.insert(0, BENCHMARKS)
    try:
        yield
    finally:
        sys.path.remove(BENCHMARKS)


@pytest.mark.thorough
@pytest.mark.parametrize(("twin", "sync"), [(True, "defer"), (True, "reduce_each"), (False, "reduce_each")])
def test_fake_tensors_hold_what_real_ones_do(twin: bool, sync: str) -> None:
    """To the byte, with units of experts, in a step of two microbatches."""
    with benchmarks():
        from diffusion_case import Case, measure_fake, measure_real, planned

    case = Case(RUN, 2, experts=True, twin=twin, sync=sync, microbatches=2)
    (fake,) = run_ranks(lambda rank: measure_fake(case), 1, group=False)
    real = run_ranks(lambda rank: measure_real(case), 2)[0]
    promised = totals(planned(case).plan)
    traffic = promised.traffic
    for found in (fake, real):
        kinds = ("all_gather", "reduce_scatter", "all_reduce")  # the last: flags of use
        assert found.counts == {kind: getattr(traffic, f"{kind}s") for kind in kinds}
        assert found.sent == {kind: getattr(traffic, f"{kind}_bytes") for kind in kinds}
    assert fake.state == real.state > 0
    assert fake.gathered == real.gathered == promised.gathered_peak_bytes > 0
    assert fake.gradients == real.gradients > 0
    # Of the root, which is little elsewhere, the plan counts all as waiting all through backward.
    assert 0.7 < fake.gradients / promised.unsharded_gradient_peak_bytes < 1.03
    assert fake.peak == real.peak > fake.state + fake.gathered


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", [{"ep": 4}, {"ep": 4, "dp_replicate": 2}], ids=str)
def test_experts_take_part_in_a_fake_world(axes: dict[str, int]) -> None:
    """In bf16: torch's shape function of grouped products knows nothing else. Tokens are shared out evenly."""

    def on_rank(_: int) -> Any:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
        model, spec = make("qwen3_moe", meta=True)
        plan = resolve(spec, model, Layout(**axes), ParallelOptions(), world_size=64)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, static_splits():
            model.to_empty(device="cpu")
            sync = GradSync.from_plan(model, plan)
            batches = [mode.from_tensor(torch.zeros(2, 16, dtype=torch.long))]
            with CommCounter() as counter:
                for _, batch in sync.microbatches(batches):
                    model(input_ids=batch, use_cache=False).logits.float().sum().backward()
        return counter.counts, plan

    ((counts, plan),) = run_ranks(on_rank, 1, group=False)
    traffic = totals(plan).traffic
    assert counts["all_to_all"] > 0
    assert (counts["all_gather"], counts["reduce_scatter"]) == (traffic.all_gathers, traffic.reduce_scatters)
    # Where splits are static, nobody has to say how many tokens he sends: one exchange a mixture less.
    planned = expert_parallel_counts(plan)["ep"]["all_to_all"]
    assert counts["all_to_all"] == planned - len(plan.experts)
