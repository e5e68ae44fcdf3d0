"""Files of a checkpoint that are not what was written: named, set aside, and the run goes on from the one before."""

import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint import checksums
from meshwright.checkpoint.directory import damage, damage_in_brief, latest
from meshwright.checkpoint.export import export_checkpoint
from meshwright.errors import CheckpointError
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.resume import changes, checkpoint_to_resume, verified
from meshwright.train.start.run_files import Paths
from tests.harness import RankError, run_ranks
from tests.train.runs import checkpoints, losses, tiny_run, train, trainer_on_rank

Tiny = Callable[..., RunConfig]
EVERY = ("checkpoint.every=2", "checkpoint.keep=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunConfig:
    """An undisturbed run on two ranks, with checkpoints of steps 4 and 6."""
    config = tiny_run(tmp_path_factory.mktemp("whole"), corpus, *EVERY)
    train(config, 2)
    return config


@pytest.fixture
def copy(whole: RunConfig, tiny: Tiny) -> RunConfig:
    config = tiny(*EVERY)
    shutil.copytree(whole.directory, config.directory)
    return config


def last(config: RunConfig) -> Path:
    return Paths(config.directory).checkpoints / "step-00000006"


def flip(path: Path) -> None:
    """Change four bytes in the middle of a file."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4] = bytes(byte ^ 0xFF for byte in content[middle : middle + 4])
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_every_file_has_its_sum_as_sha256sum_checks_it(whole: RunConfig) -> None:
    checkpoint = last(whole)
    held = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    sums = checksums.listed(checkpoint)
    assert sums.keys() == held - {checksums.NAME}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "meta.json", "tokenizer/tokenizer.json"} <= sums.keys()
    assert all(hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == value for name, value in sums.items())
    done = subprocess.run(["sha256sum", "--check", "--quiet", checksums.NAME], cwd=checkpoint, capture_output=True)
    assert done.returncode == 0, done.stderr


SEEN_BY_RANKS = {"__1_0.distcp": flip, "__0_0.distcp": cut}
SEEN_BEFORE = {
    "meta.json": flip,
    ".metadata": flip,
    "tokenizer/tokenizer.json": flip,
    checksums.NAME: flip,
    "__0_0.distcp": Path.unlink,
}


def _verify(rank: int, config: RunConfig, store: Path) -> tuple[str | None, list[str]]:
    said: list[str] = []
    found = verified(config, checkpoint_to_resume(config), said.append)
    trainer_on_rank(config, store).run()
    return found and found.name, said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SEEN_BY_RANKS)
def test_damaged_tensors_are_found_by_all_ranks_together(whole: RunConfig, copy: RunConfig, name: str) -> None:
    SEEN_BY_RANKS[name](last(copy) / name)
    store = prepare_run(copy, 2)[2]  # one process does not read the tensors of all
    assert checkpoint_to_resume(copy) == last(copy)
    outcomes = run_ranks(_verify, 2, copy, store.directory)
    assert [found for found, _ in outcomes] == ["step-00000004"] * 2
    assert outcomes[1][1] == []
    (said,) = outcomes[0][1]
    assert f"step-00000006 is damaged: {name} is not what was written" in said
    assert "It is now step-00000006.damaged; the run goes on from step-00000004" in said
    # Set aside, and not counted by checkpoint.keep.
    assert checkpoints(copy) == ["step-00000004", "step-00000006", "step-00000006.damaged"]
    assert losses(copy) == losses(whole)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SEEN_BEFORE)
def test_other_damage_is_found_before_there_are_ranks(
    whole: RunConfig, copy: RunConfig, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    SEEN_BEFORE[name](last(copy) / name)
    store = prepare_run(copy, 2)[2]
    said = capsys.readouterr().out
    assert "step-00000006 is damaged: " in said
    assert (name in said) or name == checksums.NAME  # of which one line is wrong, whichever
    assert checkpoint_to_resume(copy) == last(copy).with_name("step-00000004")
    run_ranks(_verify, 2, copy, store.directory)
    assert losses(copy) == losses(whole)


@pytest.mark.parametrize("seen", ["before", "by the ranks"])
def test_the_only_one_that_is_left_is_refused_and_stays(copy: RunConfig, seen: str) -> None:
    """Weeks of work are not begun anew without a word of the user's."""
    for name in ("step-00000004", "step-00000006"):
        flip(last(copy).with_name(name) / ("meta.json" if seen == "before" else "__1_0.distcp"))
    with pytest.raises((CheckpointError, RankError), match=r"step-00000004 is damaged: .*There is no other checkpoint"):
        run_ranks(_verify, 2, copy, prepare_run(copy, 2)[2].directory)
    assert checkpoints(copy) == ["step-00000004", "step-00000006.damaged"]


def _cannot_read(rank: int, config: RunConfig) -> str:
    """One rank whose mount is broken."""
    if rank == 1:
        checksums.sum_of = _stale
    try:
        verified(config, checkpoint_to_resume(config), print)
    except CheckpointError as error:
        return str(error)
    return ""


def _stale(path: Path) -> str:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))


def test_what_cannot_be_read_is_refused_by_all_and_not_called_damaged(copy: RunConfig) -> None:
    prepare_run(copy, 2)
    before = checkpoints(copy)
    messages = run_ranks(_cannot_read, 2, copy)
    assert messages[0] == messages[1]
    assert "cannot be read: Stale file handle; whether it is damaged is not known" in messages[0]
    assert checkpoints(copy) == before


def test_one_that_was_asked_for_is_refused_and_left_where_it_is(copy: RunConfig, tiny: Tiny) -> None:
    asked = tiny(*EVERY, f"checkpoint.resume={last(copy)}", name="other")
    flip(last(copy) / "__1_0.distcp")
    store = prepare_run(asked, 2)[2]
    with pytest.raises(RankError, match=r"CheckpointError.*step-00000006 is damaged: __1_0.distcp is not what was written"):
        run_ranks(_verify_asked, 2, asked, last(copy), store.directory)
    (last(copy) / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000006 is damaged: __1_0.distcp is missing"):
        prepare_run(asked, 2)
    assert last(copy).is_dir()


def _verify_asked(rank: int, config: RunConfig, checkpoint: Path, store: Path) -> None:
    verified(config, checkpoint, print)


def test_a_damaged_one_is_not_exported(copy: RunConfig, tmp_path: Path) -> None:
    flip(last(copy) / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"step-00000006: is damaged: __0_0.distcp"):
        export_checkpoint(last(copy), tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_checkpoint_from_before_checksums_is_read(copy: RunConfig) -> None:
    (last(copy) / checksums.NAME).unlink()
    assert damage_in_brief(last(copy)) == [f"{checksums.NAME} is missing"]
    meta = last(copy) / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 2', '"format": 1'))
    assert damage_in_brief(last(copy)) == damage(last(copy)) == []
    assert latest(last(copy).parent) == last(copy)


@pytest.mark.parametrize("line", ["", "0" * 64, f"{'0' * 64}  /etc/passwd", f"{'0' * 64}  ../x", f"{'g' * 64}  meta.json", "é"])
def test_a_list_that_is_none(copy: RunConfig, line: str) -> None:
    with (last(copy) / checksums.NAME).open("a") as file:
        file.write(f"{line}\n")
    (found,) = damage_in_brief(last(copy))
    assert found.startswith(f"{checksums.NAME} cannot be read: line ")


def test_shares_cover_each_file_once_with_about_as_many_bytes(tmp_path: Path) -> None:
    sizes = [700, 300, 300, 200, 100, 1, 0]
    for index, size in enumerate(sizes):
        (tmp_path / str(index)).write_bytes(os.urandom(size))
    names = [str(index) for index in range(len(sizes))] + ["missing"]
    shares = [checksums.share(checksums.sizes(tmp_path, names), rank, 3) for rank in range(3)]
    assert sorted(name for part in shares for name in part) == sorted(names)
    assert max(sum(sizes[int(name)] for name in part if name != "missing") for part in shares) == 700


def test_what_differs_from_the_checkpoint_is_told() -> None:
    before = {"optimizer": {"lr": 0.01, "betas": [0.9, 0.95]}, "schedule": {"kind": "cosine"}, "training": {"steps": 6}}
    now = {"optimizer": {"lr": 0.02, "betas": [0.9, 0.95], "new": 1}, "schedule": {"kind": "linear"}, "training": {"steps": 6}}
    assert changes(before, now) == [
        "optimizer.lr: 0.01 in the checkpoint, 0.02 now",
        "schedule.kind: cosine in the checkpoint, linear now",
    ]
    assert changes(before, before) == []
    before, now = ({"data": {"eval_files": files, "files": files}} for files in ([], ["a.jsonl"]))
    assert changes(before, now) == ["data.eval_files: [] in the checkpoint, ['a.jsonl'] now"]
