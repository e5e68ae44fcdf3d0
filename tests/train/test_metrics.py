"""Where the numbers of a run go, and that only rank 0 sends any."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.data.loader import TrainLoader
from meshwright.errors import CheckpointError
from meshwright.train.config import RunConfig
from meshwright.train.metrics import Jsonl, kept_id
from meshwright.train.start.data_lines import describe_data
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.run_files import Paths, source_facts
from tests.harness import refuses
from tests.train.runs import losses, rows, train

Tiny = Callable[..., RunConfig]
OF_A_STEP = {
    "step", "loss", "gradient_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "epoch",
    "memory_bytes", "skipped", "model_tflops",
}  # fmt: skip


def test_a_row_a_step(tiny: Tiny) -> None:
    config = tiny("training.eval_every=4", "optimizer.lr=0.01", "schedule.warmup_steps=2")
    train(config, 2)
    found = rows(config)
    steps = [row for row in found if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row.keys() == OF_A_STEP for row in steps)
    assert [row["learning_rate"] for row in steps[:3]] == pytest.approx([0.005, 0.01, 0.01])
    for row in steps:
        assert 0 < row["tokens"] <= 8 * 32
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["step_seconds"])
        assert row["memory_bytes"] > 2**20
        assert row["gradient_norm"] > 0
    evaluations = [row for row in found if "eval/loss" in row]
    assert [row["step"] for row in evaluations] == [0, 4, 6]
    assert all(row.keys() == {"step", "eval/loss", "eval/perplexity", "eval/tokens"} for row in evaluations)
    assert len({row["eval/tokens"] for row in evaluations}) == 1


def test_log_every(tiny: Tiny) -> None:
    config = tiny("training.log_every=4")
    train(config, 2)
    assert [row["step"] for row in rows(config) if "loss" in row] == [1, 4, 6]


def test_epochs_are_counted(tiny: Tiny) -> None:
    config = tiny("training.global_batch_size=64", "training.microbatch_size=32", "training.steps=4")
    train(config, 2)
    found = [row["epoch"] for row in rows(config) if "loss" in row]
    store = prepare_run(config, 1)[2]
    loader = TrainLoader(store, sequence_length=32, global_batch_size=64, microbatch_size=1)
    assert found[0] == pytest.approx(64 / loader.sequences(1), abs=1e-6)
    assert found == sorted(found)
    assert found == pytest.approx([loader.epochs(step) for step in (1, 2, 3, 4)], abs=1e-6)
    assert found[-1] > 1
    assert "4 steps of 64 are" in describe_data(config, store)


@pytest.mark.thorough
def test_tensorboard_holds_the_losses_once_also_after_resuming(tiny: Tiny) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = tiny("metrics.tensorboard=true", "training.steps=4", "schedule.kind=constant", "checkpoint.every=4")
    train(first, 2)
    longer = tiny("metrics.tensorboard=true", "training.steps=6", "schedule.kind=constant")
    train(longer, 2)
    files = list((longer.directory / "tensorboard").iterdir())
    assert len(files) == 2  # one a run, from rank 0 alone
    events = EventAccumulator(str(longer.directory / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("loss")
    assert [item.step for item in scalars] == [1, 2, 3, 4, 5, 6]
    assert [item.value for item in scalars] == pytest.approx(losses(longer), rel=1e-6)
    assert "eval/loss" in events.Tags()["scalars"]


def test_no_sinks(tiny: Tiny) -> None:
    from meshwright.train.start.prepare import prepare_run
    from tests.harness import run_ranks
    from tests.train.runs import train_on_rank

    config = tiny("metrics.jsonl=false")
    _, _, store = prepare_run(config, 2)
    run_ranks(train_on_rank, 2, config, store.directory)
    names = {path.name for path in config.directory.iterdir()}
    assert names == {"checkpoints", "config.yaml", "source.json", "tokenizer", "tokens"}


def test_lines_after_the_checkpoint_and_broken_ones_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\nnull\n{"no": 1}\n{"step": 3')
    file = Jsonl(path, resumed_step=2)
    file.write(3, {"a": 30})
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 3, "a": 30}
    ]  # fmt: skip
    beside = tmp_path / "metrics.jsonl.broken"
    assert file.moved == f"{path}: 2 lines cannot be read, now in metrics.jsonl.broken"
    assert beside.read_text() == 'null\n{"no": 1}\n'  # the last line was cut off by a crash
    path.write_bytes(b'{"step": 1}\n\xff\n' + b"[" * 100_000 + b'\n{"step": 2}')
    file = Jsonl(path, resumed_step=2)
    file.write(3, {})
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert beside.read_bytes().count(b"\n") == 4
    Jsonl(path, resumed_step=0).close()
    assert path.read_text() == ""


def test_the_id_of_a_record_elsewhere_is_kept_or_named(tmp_path: Path) -> None:
    file = tmp_path / "wandb-id"
    assert kept_id(file) == kept_id(file)
    for content in (b"", b"\xff", b"0123"):
        file.write_bytes(content)
        with refuses(CheckpointError, "run.id"):
            kept_id(file)


def test_facts_of_the_source_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for content in (b"", b'{"a"', b"[]", b"\xff", b"[" * 100_000):
        (tmp_path / "source.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"source.json: cannot be read .*start the run again"):
            source_facts(Paths(tmp_path))
