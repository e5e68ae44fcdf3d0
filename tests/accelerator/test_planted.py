"""Bugs that a CPU cannot show, planted in the trainer: each is found. And a step that is skipped, on the device alone."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.errors import NonFiniteError, WorkerError
from meshwright.models import moved_batch
from meshwright.ranks.pool import Pool
from meshwright.train.config import RunConfig
from meshwright.train.trainer import Trainer
from tests.accelerator.runs import train_with
from tests.accelerator.workers import Workers
from tests.tiny import tiny_model
from tests.train.runs import losses, rows

Tiny = Callable[..., RunConfig]
RUN = ("training.steps=3", "training.log_every=1", "data.eval_fraction=0", "checkpoint.every=0", "training.microbatch_size=1")
LOGGED, LATE = Counter({"device.py wait": 1}), Counter({"device.py wait": 2})


def ask_for_the_norm(trainer: Trainer) -> None:
    clip = trainer.clip

    def asked() -> torch.Tensor:
        norm = clip()
        assert norm.item() > 0
        return norm

    trainer.clip = asked  # type: ignore[method-assign]


def fill_one_buffer_again(trainer: Trainer) -> None:
    """Every batch goes to the device through the same pinned memory."""
    buffers: dict[object, torch.Tensor] = {}

    def shared(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        buffer = buffers.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor).pin_memory())
        return buffer.copy_(tensor)

    moved_batch.pinned = shared
    trainer.batches.to_device = _restored(trainer.batches.to_device)  # type: ignore[method-assign]


def _restored(to_device: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    """Leave no trace in the worker, which has other tests to run: the first batches of the run are enough."""
    left = [8]

    def counted(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        left[0] -= 1
        if left[0] == 0:
            from meshwright.device import pinned

            moved_batch.pinned = pinned
        return to_device(batch)

    return counted


def leave_labels_on_the_host(trainer: Trainer) -> None:
    to_device = trainer.batches.to_device

    def left(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**to_device(batch), **({"labels": batch["labels"]} if "labels" in batch else {})}

    trainer.batches.to_device = left  # type: ignore[method-assign]


def use_the_device_of_the_other_rank(trainer: Trainer) -> None:
    clip = trainer.clip
    other = torch.device(trainer.device.type, 1 - (trainer.device.index or 0))
    trainer.clip = lambda: clip() * torch.ones(1, device=other)  # type: ignore[method-assign]


def spoil_the_second_loss(trainer: Trainer) -> None:
    clip = trainer.clip
    trainer.clip = lambda: clip() * (torch.nan if trainer.step == 1 else 1.0)  # type: ignore[method-assign]


def fail_in_the_third_step(trainer: Trainer) -> None:
    clip = trainer.clip

    def failed() -> torch.Tensor:
        if trainer.step == 2:
            raise MemoryError("planted")
        return clip()

    trainer.clip = failed  # type: ignore[method-assign]


def test_a_value_that_is_asked_for_in_the_step(tiny: Tiny, two: Workers) -> None:
    for rank in train_with(two, tiny(*RUN), ask_for_the_norm):
        assert rank.waits == LOGGED + Counter({"train/engine/steps.py update": 3})
        assert not rank.faults


def test_a_pinned_buffer_that_is_filled_again_too_early(tiny: Tiny, two: Workers) -> None:
    for rank in train_with(two, tiny(*RUN), fill_one_buffer_again):
        assert any(fault.startswith("reuse: ") for fault in rank.faults)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plant", [leave_labels_on_the_host, use_the_device_of_the_other_rank])
def test_a_tensor_of_another_device(tiny: Tiny, two: Workers, plant: Callable[[Trainer], None]) -> None:
    with pytest.raises(WorkerError, match="Expected all tensors to be on the same device"):
        train_with(two, tiny(*RUN), plant)


def test_a_step_that_is_skipped_is_skipped_on_the_device(tiny: Tiny, tmp_path: Path, two: Workers, cpu_pool: Pool) -> None:
    _write(tmp_path / "weights")
    options = (*RUN, "training.on_nonfinite=skip", f"model={{path: '{tmp_path / 'weights'}'}}")
    on_cpu, on_device = tiny(*options, name="cpu"), tiny(*options, name="device")
    train_with(cpu_pool, on_cpu, spoil_the_second_loss)
    for rank in train_with(two, on_device, spoil_the_second_loss):
        assert (rank.waits, rank.behind) == (LOGGED, LATE)
    assert losses(on_device) == losses(on_cpu)
    assert [row["skipped"] for row in rows(on_device) if "loss" in row] == [0, 1, 0]


def test_a_run_that_fails_has_the_line_of_the_step_before(tiny: Tiny, two: Workers) -> None:
    config = tiny(*RUN)
    with pytest.raises(WorkerError, match="planted"):
        train_with(two, config, fail_in_the_third_step)
    assert [row["step"] for row in rows(config)] == [1, 2]


def test_a_step_that_is_not_finite_ends_the_run_a_step_later_and_nothing_is_saved(tiny: Tiny, two: Workers) -> None:
    config = tiny(*RUN, "checkpoint.every=3")
    with pytest.raises(NonFiniteError, match=r"step 2: loss .*, gradient norm nan"):
        train_with(two, config, spoil_the_second_loss)
    assert [row["step"] for row in rows(config)] == [1]
    assert not list((config.directory / "checkpoints").glob("*"))


@pytest.mark.thorough
def test_no_name_of_a_device_is_built_in(tiny: Tiny, tmp_path: Path, accelerator: Path, cpu_pool: Pool) -> None:
    _write(tmp_path / "weights")
    options = (*RUN, f"model={{path: '{tmp_path / 'weights'}'}}", "launch.device=auto")
    on_cpu, on_device = tiny(*options, name="cpu"), tiny(*options, name="device")
    train_with(cpu_pool, on_cpu)
    with Workers(2, accelerator, "other") as workers:
        for rank in train_with(workers, on_device):
            assert rank.waits == LOGGED
            assert not rank.faults
    assert losses(on_device) == losses(on_cpu)


def _write(folder: Path) -> None:
    tiny_model("llama", seed=7, vocab_size=300).save_pretrained(folder)
