"""The engine for a loop of one's own on the simulated accelerator: no wait in a step, and the device lent and taken back."""

import gc
from typing import Any

import pytest
import torch

import meshwright as mw
from tests.accelerator.module import WAITS
from tests.accelerator.workers import in_workers, module_of
from tests.tiny import tiny_model


def batches(engine: mw.Engine, step: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 300, (4, 2, 16), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": one} for one in ids[engine.data_rank :: engine.data_ranks]]


def homes(engine: mw.Engine) -> list[torch.device]:
    return [value.device for state in engine.optimizer.state.values() for value in state.values()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "fused", "others"),
    [
        ("dp_shard=2", None, {}),
        ("tp=2", False, {}),
        ("pp=2", False, {}),
        ("dp_shard=2", None, {"kind": "muon"}),
        ("dp_shard=2", False, {"kind": "adamw8bit", "with": {"block_size": 32}}),
    ],
)
@in_workers(2)
def test_a_step_does_not_wait_and_goes_on_after_the_device_was_lent(
    device: torch.device, layout: str, fused: bool | None, others: dict[str, Any]
) -> None:
    simulated, losses = module_of(device), {}
    for lent in (False, True):
        model = tiny_model("llama", seed=7, vocab_size=300)
        optimizer = {"lr": 1e-2, **others} if others else {"lr": 1e-2, "fused": fused}
        engine = mw.Engine(model, layout, microbatches=4, optimizer=optimizer, device="accelerator")
        found = [engine.step(batches(engine, 0))]
        simulated.synchronize()
        simulated.reports.take(*WAITS)
        found.append(engine.step(batches(engine, 1)))
        if fused is None:  # other optimizers ask on the host whether a step is finite
            assert not simulated.reports.take(*WAITS)
            assert found[0].loss > 0
            assert simulated.reports.take(*WAITS)
        engine.forward_backward(batches(engine, 2))
        if lent:
            gc.collect()
            held, were = simulated.memory_allocated(), homes(engine)
            assert (torch.device("cpu") in were) == (fused is False)
            engine.offload()
            gc.collect()
            assert simulated.memory_allocated() < held / 20  # stages keep buffers of activations
            engine.onload()
            assert homes(engine) == were
        engine.optim_step()
        losses[lent] = [one.loss for one in (*found, engine.step(batches(engine, 3)))]
        del engine
    assert losses[True] == losses[False]
