"""Resuming: as if nothing had happened, on the same and on other numbers of ranks, saved in the background or not."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import storage
from meshwright.errors import CheckpointError
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.resume import checkpoint_to_resume
from meshwright.train.start.run_files import Paths
from tests.diffusion_gemma import RUN as DIFFUSION_GEMMA
from tests.train.runs import GPT2_WITH_DROPOUT, checkpoints, eval_losses, losses, rows, tiny_run, train

Tiny = Callable[..., RunConfig]
EVERY = ("checkpoint.every=3", "checkpoint.keep=null", "training.eval_every=2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunConfig:
    """An uninterrupted run on two ranks, with checkpoints at steps 3 and 6."""
    config = tiny_run(tmp_path_factory.mktemp("llama"), corpus, *EVERY)
    train(config, 2)
    return config


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunConfig:
    """The same with a model whose dropout draws random numbers in every step."""
    config = tiny_run(tmp_path_factory.mktemp("gpt2"), corpus, GPT2_WITH_DROPOUT, *EVERY)
    train(config, 2)
    return config


def cut_off(run: RunConfig, tiny: Tiny, *overrides: str) -> RunConfig:
    """A copy of a finished run as if it had been killed at step 4: metrics on, checkpoint of step 3 the last."""
    copy = tiny(*overrides)
    shutil.copytree(run.directory, copy.directory)
    shutil.rmtree(Paths(copy.directory).checkpoints / "step-00000006")
    lines = Paths(copy.directory).metrics.read_text().splitlines(keepends=True)
    kept = [line for line, row in zip(lines, rows(run), strict=True) if row["step"] <= 4]
    Paths(copy.directory).metrics.write_text("".join(kept) + lines[-1][:20])  # the last line was cut off
    return copy


def tensors(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, whole."""
    directory = Paths(config.directory).checkpoints / f"step-{step:08d}"
    found = {
        name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in storage.contents(directory).items()
    }
    storage.read(directory, found)
    return found


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_same_ranks_continue_exactly(gpt2: RunConfig, tiny: Tiny) -> None:
    copy = cut_off(gpt2, tiny, GPT2_WITH_DROPOUT, *EVERY)
    assert train(copy, 2) == losses(gpt2)
    assert eval_losses(copy) == eval_losses(gpt2)
    assert_equal(tensors(copy, 6), tensors(gpt2, 6))
    # Had the generators not been put back, the losses would not be these.
    drawn = {name: value for name, value in tensors(gpt2, 3).items() if name.startswith("rng.")}
    assert len(drawn) == 2
    assert not torch.equal(drawn["rng.0.cpu"], drawn["rng.1.cpu"])


def test_metrics_have_each_step_once_after_resuming(llama: RunConfig, tiny: Tiny) -> None:
    copy = cut_off(llama, tiny, *EVERY)
    train(copy, 2)
    assert [row["step"] for row in rows(copy) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(copy) if "eval/loss" in row] == [0, 2, 4, 6]
    train(copy, 2)  # nothing is left to do, and nothing is added
    assert [row["step"] for row in rows(copy)] == [row["step"] for row in rows(llama)]
    assert checkpoints(copy) == ["step-00000003", "step-00000006"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ()),
        (4, ("layout.dp_replicate=2",)),
        (2, ("layout.dp_replicate=2",)),
        (4, ("training.microbatch_size=1", "parallel.sync=reduce_each")),
        (2, ("parallel.cpu_offload=true",)),
        (2, ("layout.dp_shard=1", "layout.tp=2")),
        (4, ("layout.tp=2",)),
    ],
)
def test_other_layouts_continue_to_rounding(llama: RunConfig, tiny: Tiny, ranks: int, overrides: tuple[str, ...]) -> None:
    copy = cut_off(llama, tiny, *EVERY, *overrides)
    assert train(copy, ranks) == pytest.approx(losses(llama), rel=1e-5)
    assert [row["step"] for row in rows(copy) if "loss" in row] == [1, 2, 3, 4, 5, 6]


LAYOUTS = {
    "one process": (1, ()),
    "shard 4": (4, ()),
    "tp 2": (2, ("layout.dp_shard=1", "layout.tp=2")),
    "tp 4": (4, ("layout.dp_shard=1", "layout.tp=4", "parallel.sequence_parallel=true")),
    "tp 2 x shard 2": (4, ("layout.tp=2", "parallel.sequence_parallel=true")),
    "cp 4": (4, ("layout.dp_shard=1", "layout.cp=4")),
    "pp 2": (2, ("layout.dp_shard=1", "layout.pp=2")),
    "pp 2 x shard 2": (4, ("layout.pp=2", "training.microbatch_size=1")),
}


@pytest.fixture(scope="module")
def begun_on(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], RunConfig]:
    """A run on each layout, with a checkpoint at step 3, made once."""

    @functools.cache
    def begun(layout: str) -> RunConfig:
        ranks, overrides = LAYOUTS[layout]
        config = tiny_run(tmp_path_factory.mktemp("begun"), corpus, *EVERY, *overrides)
        train(config, ranks)
        return config

    return begun


def go_on(begun: RunConfig, copy: RunConfig, ranks: int) -> list[float]:
    """The losses of a copy that resumes from step 3 of another run, all six."""
    shutil.copytree(begun.directory, copy.directory)
    shutil.rmtree(Paths(copy.directory).checkpoints / "step-00000006")
    return train(copy, ranks)


PAIRS = [(first, second) for at, first in enumerate(LAYOUTS) for second in (list(LAYOUTS) * 2)[at : at + 6 : 5]]
"""Each layout to itself and to one other. More pairs would show little: files hold whole tensors, and a rank reads its part."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_from_each_layout_to_another(
    llama: RunConfig, tiny: Tiny, begun_on: Callable[[str], RunConfig], first: str, second: str
) -> None:
    ranks, overrides = LAYOUTS[second]
    copy = tiny(*EVERY, *overrides, name="copy")
    assert go_on(begun_on(first), copy, ranks) == pytest.approx(losses(llama), rel=1e-5)


@pytest.mark.thorough
def test_from_four_stages_to_two_to_one_process_and_back(tiny: Tiny) -> None:
    deep = ("model.config.num_hidden_layers=4", "data.packing=pad", *EVERY)
    four = (*deep, "layout.dp_shard=1", "layout.pp=4")
    two = (*deep, "layout.dp_shard=1", "layout.pp=2", "parallel.pipeline.schedule=zbv")
    alone = tiny(*deep, name="alone")
    expected = pytest.approx(train(alone, 1), rel=1e-5)
    begun = tiny(*four, name="begun")
    assert train(begun, 4) == expected
    for name, source, ranks, overrides in (("two", begun, 2, two), ("one", begun, 1, deep), ("back", alone, 4, four)):
        copy = tiny(*overrides, name=name)
        assert go_on(source, copy, ranks) == expected, name
        if name == "two":  # its own checkpoint, of step 6, is that of the whole run
            ours, theirs = tensors(copy, 6), tensors(begun, 6)
            assert {key for key in ours if not key.startswith("rng.")} == {key for key in theirs if not key.startswith("rng.")}


MIXTRAL = (
    "model.config={model_type: mixtral, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, num_local_experts: 4}"
)
PHI3 = (
    "model.config={model_type: phi3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, pad_token_id: 0}"
)

QWEN3_MOE_OF_3 = (
    "model.config={model_type: qwen3_moe, hidden_size: 32, moe_intermediate_size: 24, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, num_experts: 3, num_experts_per_tok: 2}"
)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [MIXTRAL, PHI3], ids=["mixtral", "phi3"])
def test_packed_matrices_from_tensor_parallel_to_one_rank_and_back(tiny: Tiny, model: str) -> None:
    """DCP cannot describe a slice of each of two matrices that are stored as one; and phi3's are sharded by columns too."""
    parallel = (model, "layout.tp=2", *EVERY)
    begun = tiny(*parallel, name="begun")
    expected = train(begun, 4)
    alone = tiny(model, *EVERY, name="alone")
    assert train(alone, 1) == pytest.approx(expected, rel=1e-5)
    for name, source, ranks, overrides in (
        ("one", begun, 1, (model, *EVERY)),
        ("four", begun, 4, parallel),
        ("up", alone, 4, parallel),
    ):
        assert go_on(source, tiny(*overrides, name=name), ranks) == pytest.approx(expected, rel=1e-5)


@pytest.mark.thorough
def test_a_stack_that_runs_twice_from_twins_to_one_rank_and_back(tiny: Tiny) -> None:
    twins = (*DIFFUSION_GEMMA, "layout.ep=2", "parallel.twin_units=true", *EVERY)
    alone, four = tiny(*DIFFUSION_GEMMA, *EVERY, name="alone"), tiny(*twins, name="four")
    expected = train(alone, 1)
    assert train(four, 4) == pytest.approx(expected, rel=1e-5)
    shared = (*DIFFUSION_GEMMA, "parallel.twin_units=false", *EVERY)
    for name, source, ranks, overrides in (("down", four, 2, shared), ("up", alone, 4, twins)):
        assert go_on(source, tiny(*overrides, name=name), ranks) == pytest.approx(expected, rel=1e-5)


def test_from_one_rank_to_two(llama: RunConfig, tiny: Tiny) -> None:
    alone = tiny(*EVERY, name="alone")
    train(alone, 1)
    directory = Path(alone.output).parent.with_name("two")
    directory.mkdir()
    copy = tiny(*EVERY, name="two")
    shutil.copytree(alone.directory, copy.directory)
    shutil.rmtree(Paths(copy.directory).checkpoints / "step-00000006")
    assert train(copy, 2) == pytest.approx(losses(llama), rel=1e-5)


def test_resume_from_a_path_leaves_the_other_run_alone(llama: RunConfig, tiny: Tiny) -> None:
    start = Paths(llama.directory).checkpoints / "step-00000003"
    before = sorted(str(path) for path in llama.directory.rglob("*"))
    branch = tiny(*EVERY, f"checkpoint.resume={start}")
    assert train(branch, 2) == losses(llama)[3:]
    assert checkpoints(branch) == ["step-00000006"]
    assert sorted(str(path) for path in llama.directory.rglob("*")) == before


def test_resume_never_and_from_before_what_is_there(llama: RunConfig, tiny: Tiny) -> None:
    def refused(wish: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            checkpoint_to_resume(tiny(f"checkpoint.resume={wish}", f"output={llama.output}"))
        return str(caught.value)

    assert "checkpoint.resume=never" in refused("never")
    assert "step-00000006" in refused("never")
    start = Paths(llama.directory).checkpoints / "step-00000003"
    assert "holds the later step-00000006" in refused(start)
    assert "no such directory" in refused(llama.directory / "nowhere")


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_background_saving_writes_the_same_checkpoints(tiny: Tiny, ranks: int) -> None:
    overrides = ("checkpoint.every=1", "checkpoint.keep=null", "training.steps=4")
    plain = tiny(*overrides, name="plain")
    background = tiny(*overrides, "checkpoint.asynchronous=true", name="background")
    assert train(background, ranks) == train(plain, ranks)
    assert checkpoints(background) == checkpoints(plain) == [f"step-0000000{step}" for step in range(1, 5)]
    for step in range(1, 5):
        assert_equal(tensors(background, step), tensors(plain, step))
    assert not torch.equal(tensors(plain, 1)["model.model.norm.weight"], tensors(plain, 2)["model.model.norm.weight"])


def test_keep_and_leftovers(tiny: Tiny) -> None:
    config = tiny("checkpoint.every=1", "checkpoint.keep=2")
    left = Paths(config.directory).checkpoints / "step-00000009.tmp"
    left.mkdir(parents=True)
    (left / "meta.json").write_text("{}")  # however complete it looks
    assert checkpoint_to_resume(config) is None
    train(config, 2)
    assert checkpoints(config) == ["step-00000005", "step-00000006"]


def test_last_step_is_saved_though_no_interval_ends_there(tiny: Tiny) -> None:
    config = tiny("checkpoint.every=4", "checkpoint.keep=null")
    train(config)
    assert checkpoints(config) == ["step-00000004", "step-00000006"]


def test_more_steps_than_the_finished_run(llama: RunConfig, tiny: Tiny) -> None:
    longer = tiny(*EVERY, "training.steps=8", "schedule.kind=constant", name="longer")
    shutil.copytree(llama.directory, longer.directory)
    found = train(longer, 2)
    assert found[:6] == losses(llama)
    assert len(found) == 8


def test_other_data_or_order_is_refused(llama: RunConfig, tiny: Tiny) -> None:
    for override, part in (
        ("data.eval_fraction=0.2", "data.eval_fraction: 0.1 in the checkpoint, 0.2 now"),
        ("training.seed=1", "seed"),
        ("training.global_batch_size=4", "training.global_batch_size=8, this run has training.global_batch_size=4"),
        ("data.packing=pad", "packing"),
    ):
        with pytest.raises(CheckpointError, match=part):
            prepare_run(tiny(*EVERY, override, f"output={llama.output}"), 2)


EXPERTS = {
    "one process": (1, ()),
    "shard 4": (4, ()),
    "ep 2 x ep_shard 2": (4, ("layout.ep=2",)),
    "ep 4": (4, ("layout.ep=4",)),
    "2 x ep 2": (4, ("layout.dp_replicate=2", "layout.ep=2")),
    "ep 4 with tp 2": (4, ("layout.tp=2", "layout.ep=4")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("model", [MIXTRAL, QWEN3_MOE_OF_3], ids=["mixtral", "qwen3_moe"])
def test_experts_from_every_layout_to_two_others(tiny: Tiny, model: str) -> None:
    """Each layout resumes what the next one and the one after it began; three experts are no multiple of the shards."""
    layouts = [name for name in EXPERTS if model is MIXTRAL or "ep" not in name]
    begun = {}
    for index, name in enumerate(layouts):
        ranks, overrides = EXPERTS[name]
        begun[name] = tiny(model, *EVERY, *overrides, name=f"begun-{index}")
        train(begun[name], ranks)
    expected = losses(begun["one process"])
    for index, name in enumerate(layouts):
        ranks, overrides = EXPERTS[name]
        assert losses(begun[name]) == pytest.approx(expected, rel=1e-5), name
        for ahead in (1, 2):
            source = layouts[(index + ahead) % len(layouts)]
            copy = tiny(model, *EVERY, *overrides, name=f"from-{index}-{ahead}")
            assert go_on(begun[source], copy, ranks) == pytest.approx(expected, rel=1e-5), (source, name)
