"""A loss that is not finite on one rank: all ranks stop with the step and the batch, or all leave the step out."""

import json
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from meshwright.audit.case import local_part
from meshwright.checkpoint import state
from meshwright.errors import NonFiniteError
from meshwright.models import token_loss as loss_module
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from tests.distributed.experts.test_balance import DEEPSEEK
from tests.harness import run_ranks
from tests.train.runs import checkpoints, losses, rows, train, trainer_on_rank

Tiny = Callable[..., RunConfig]
STEP = 3
"""The step, counted from 1, whose loss is not finite on rank 1."""


def _train(rank: int, config: RunConfig, store: Path, value: float) -> str:
    trainer = trainer_on_rank(config, store)
    plain = loss_module.token_loss_sum

    def poisoned(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = plain(logits, labels)
        return loss * value if rank == 1 and trainer.step == STEP - 1 and trainer.model.training else loss

    loss_module.token_loss_sum = poisoned
    try:
        trainer.run()
    except NonFiniteError as error:
        return str(error)
    return ""


def run(config: RunConfig, value: float) -> list[str]:
    _, _, store = prepare_run(config, 2)
    return run_ranks(_train, 2, config, store.directory, value)


def _train_on_nothing(rank: int, config: RunConfig, store: Path) -> str:
    """From step 3 on, no loss is finite."""
    trainer = trainer_on_rank(config, store)
    plain = loss_module.token_loss_sum
    loss_module.token_loss_sum = lambda *given: plain(*given) * (math.nan if trainer.step >= STEP - 1 else 1)
    try:
        trainer.run()
    except NonFiniteError as error:
        return str(error)
    return ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("every", "kept"), [(0, "no checkpoint was saved before it"), (1, "the last good checkpoint is ")])
def test_too_many_skipped_in_a_row_end_the_run(tiny: Tiny, every: int, kept: str) -> None:
    config = tiny("training.on_nonfinite=skip", "training.max_skipped=2", f"checkpoint.every={every}")
    store = prepare_run(config, 2)[2].directory
    messages = run_ranks(_train_on_nothing, 2, config, store)
    assert messages[0] == messages[1]
    assert messages[0].startswith("step 4: loss nan")
    for part in ("2 steps in a row skipped", kept, "training.max_skipped=2 is the limit"):
        assert part in messages[0]
    without = tiny("training.on_nonfinite=skip", "training.max_skipped=null", name="without")
    assert run_ranks(_train_on_nothing, 1, without, prepare_run(without, 1)[2].directory) == [""]


def test_skipped_steps_that_are_not_in_a_row_are_not_too_many(tiny: Tiny) -> None:
    assert run(tiny("training.on_nonfinite=skip", "training.max_skipped=2"), math.nan) == ["", ""]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("value", "options"), [(math.nan, []), (math.inf, []), (math.nan, ["optimizer.fused=false"])])
def test_stop(tiny: Tiny, value: float, options: list[str]) -> None:
    config = tiny("checkpoint.every=1", "checkpoint.keep=2", *options)
    messages = run(config, value)
    for message in messages:
        assert f"step 3: loss {value}, gradient norm nan; sequences 16 to 23" in message
        assert "training.on_nonfinite=skip" in message
    assert messages[0] == messages[1]
    assert checkpoints(config) == ["step-00000001", "step-00000002"]
    assert len(losses(config)) == 2
    batches = [load_file(config.directory / "nonfinite-step-3" / f"batch-rank-{rank}.safetensors") for rank in range(2)]
    assert all(batch["input_ids"].shape == (4, 32) for batch in batches)
    assert not torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])
    assert {"input_ids", "labels", "position_ids"} <= batches[0].keys()


def _weights(rank: int, config: RunConfig, store: Path, poisoned: bool) -> tuple[str, dict[str, bytes]]:
    """The error of a run, whose loss in step 3 may not be finite, and the weights and moments that it ends with."""
    trainer = trainer_on_rank(config, store)
    plain = loss_module.token_loss_sum
    loss_module.token_loss_sum = lambda *given: plain(*given) * (math.nan if poisoned and trainer.step == STEP - 1 else 1)
    error = ""
    try:
        trainer.run()
    except NonFiniteError as found:
        error = str(found)
    tensors = {**dict(trainer.model.named_parameters()), **state.optimizer_tensors(trainer.model, trainer.optimizer)}
    return error, {name: local_part(tensor.detach()).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fused", ["true", "false"])
def test_steps_after_it_change_nothing_until_the_host_looks(tiny: Tiny, fused: str) -> None:
    """The host looks at step 5, and the step that was bad is 3."""
    options = ("schedule.kind=constant", f"optimizer.fused={fused}")
    late, early = (tiny(f"training.log_every={every}", *options, name=str(every)) for every in (5, 1))
    two = tiny("training.steps=2", *options, name="two")
    found = [
        run_ranks(_weights, 2, config, prepare_run(config, 2)[2].directory, config is not two) for config in (late, early, two)
    ]
    assert [row["step"] for row in rows(late) if "loss" in row] == [1]
    for (error, ours), _, (_, expected) in zip(*found, strict=True):
        assert error.startswith("step 3: loss nan")
        assert ours == expected
    batches = [load_file(run.directory / "nonfinite-step-3" / "batch-rank-1.safetensors") for run in (late, early)]
    assert batches[0].keys() == batches[1].keys()
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])


def test_too_many_skipped_are_counted_where_the_host_does_not_look(tiny: Tiny) -> None:
    config = tiny("training.on_nonfinite=skip", "training.max_skipped=2", "training.log_every=6")
    messages = run_ranks(_train_on_nothing, 2, config, prepare_run(config, 2)[2].directory)
    assert messages[0] == messages[1]
    assert messages[0].startswith("step 4: loss nan")


@pytest.mark.thorough
def test_metrics_are_of_all_steps_since_the_line_before(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    config, every = (tiny("training.on_nonfinite=skip", f"training.log_every={each}", name=str(each)) for each in (6, 1))
    assert run(config, math.nan) == ["", ""]
    assert "step 3: loss nan" in capfd.readouterr().out
    found = [row for row in rows(config) if "loss" in row]
    assert [(row["step"], row["skipped"]) for row in found] == [(1, 0), (6, 1)]
    run(every, math.nan)
    assert losses(every)[-1] == losses(config)[-1]


class _Waits(TorchFunctionMode):
    """Notes which functions of Meshwright ask a tensor for its value."""

    ASKS = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy"})

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.ASKS:
            frames = [frame for frame in traceback.extract_stack() if "/src/meshwright/" in frame.filename]
            self.found.add(f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "")
        return func(*args, **(kwargs or {}))


def _waits(rank: int, config: RunConfig, store: Path) -> tuple[set[str], set[str]]:
    """Who asks for values in a step that is not logged, once steps are under way; and who does when the metrics are read."""
    trainer = trainer_on_rank(config, store)
    for _ in range(2):
        trainer.train_step()
        trainer.step += 1
    with _Waits() as in_step:
        trainer.train_step()
    trainer.step += 1
    with _Waits() as in_metrics:
        trainer.metrics()
    trainer.recorder.close()
    return in_step.found, in_metrics.found


ELSEWHERE = {"token_loss.<genexpr>", "batches.<genexpr>", "moved_batch.answer", "unused_parameters._maximum"}
"""Values that the host has: tokens that are counted, positions that are asked about before they go to the device, flags of
use."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [(), ("optimizer.fused=false",), (DEEPSEEK, "moe.aux_loss=0.1", "moe.bias_update_rate=0.1")]
)
def test_the_host_waits_for_the_device_when_it_logs(tiny: Tiny, options: tuple[str, ...]) -> None:
    config = tiny("training.log_every=6", *options)
    for in_step, in_metrics in run_ranks(_waits, 2, config, prepare_run(config, 2)[2].directory):
        assert in_step - ELSEWHERE == ({"guard.step"} if "optimizer.fused=false" in options else set())
        assert in_metrics == {"journal.read_posted", "device.wait"}


@pytest.mark.thorough
def test_stopped_run_resumes_from_the_last_good_checkpoint(tiny: Tiny) -> None:
    whole = train(tiny(name="whole"), 2)
    config = tiny("checkpoint.every=2")
    run(config, math.nan)
    assert train(config, 2) == whole


def test_skip(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny("training.on_nonfinite=skip", "checkpoint.every=1", "checkpoint.keep=null")
    assert run(config, math.nan) == ["", ""]
    found = [row for row in rows(config) if "loss" in row]
    assert [row["skipped"] for row in found] == [0, 0, 1, 0, 0, 0]
    assert [row["loss"] is None for row in found] == [False, False, True, False, False, False]
    assert "step 3: loss nan" in capfd.readouterr().out
    assert found[-1]["loss"] < found[0]["loss"]
    # The step left no trace in the model: its checkpoint holds what the one before holds.
    from tests.checkpoint.test_resume import tensors

    before, after = tensors(config, 2), tensors(config, 3)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert json.loads((config.directory / "checkpoints" / "step-00000003" / "meta.json").read_text())["step"] == 3


def test_metrics_file_is_json_also_where_a_value_is_not_finite(tiny: Tiny) -> None:
    config = tiny("training.on_nonfinite=skip", "training.steps=3")
    run(config, math.nan)

    def refuse(name: str) -> None:
        raise ValueError(name)

    for line in (config.directory / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
