"""Checkpoints that are not taken: of another model, damaged, or made to run code."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint import checksums, storage
from meshwright.checkpoint.directory import read_meta
from meshwright.checkpoint.manager import check_same_model, check_writable
from meshwright.errors import CheckpointError
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.run_files import Paths
from tests.harness import RankError, run_ranks
from tests.train.runs import LLAMA, tiny_run, train, train_on_rank

Tiny = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunConfig:
    config = tiny_run(tmp_path_factory.mktemp("finished"), corpus, "training.steps=2")
    train(config, 2)
    return config


@pytest.fixture
def copy(finished: RunConfig, tiny: Tiny) -> RunConfig:
    """A copy of a finished run that has steps left, to be damaged."""
    config = tiny("training.steps=4")
    shutil.copytree(finished.directory, config.directory)
    return config


def checkpoint(config: RunConfig) -> Path:
    return Paths(config.directory).checkpoints / "step-00000002"


def seal(config: RunConfig) -> None:
    """Sums of what is there now: as whoever makes a bad checkpoint on purpose would."""
    (checkpoint(config) / checksums.NAME).unlink()
    found = [path for path in checkpoint(config).rglob("*") if path.is_file()]
    checksums.append(checkpoint(config), {str(path.relative_to(checkpoint(config))): checksums.sum_of(path) for path in found})


def files(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def refusal(config: RunConfig) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        prepare_run(config, 2)
    return caught.value.problems


# -- another model -----------------------------------------------------------------------------------------------------


def test_another_model_is_listed_and_nothing_is_overwritten(finished: RunConfig, tiny: Tiny) -> None:
    before = files(finished.directory)
    wider = {**LLAMA, "intermediate_size": 64, "num_hidden_layers": 3, "tie_word_embeddings": True}
    found = refusal(tiny(f"model.config={json.dumps(wider)}", f"output={finished.output}", "training.steps=4"))
    assert "step-00000002 is of another model; nothing was read or overwritten" in found[0]
    assert len(found) == 1
    text = found[0]
    assert "model.layers.0.mlp.up_proj.weight: (48, 32) in the checkpoint, (64, 32) in the model" in text
    assert "model.layers.2.self_attn.q_proj.weight (32, 32): not in the checkpoint" in text
    assert "lm_head.weight (300, 32): only in the checkpoint" in text
    assert "self_attn.q_proj.weight: (" not in text  # those that agree are not listed
    assert files(finished.directory) == before


def test_long_lists_are_cut(finished: RunConfig) -> None:
    expected = {f"layer.{index}": (index, 3) for index in range(30)}
    with pytest.raises(CheckpointError) as caught:
        check_same_model(checkpoint(finished), expected, limit=5)
    found = str(caught.value).split("\n  ")
    assert found.count("... and 25 more like these") == 1
    assert len(found) == 1 + 2 * 6  # absent and excess, five of each and the count of the rest


def test_other_parameters_trained(copy: RunConfig, tiny: Tiny) -> None:
    """A parameter that was frozen has no state to go on from."""
    frozen = tiny("training.steps=2", "parallel.freeze=['lm_head.weight']", name="frozen")
    train(frozen, 2)
    thawed = tiny("training.steps=4", f"output={frozen.output}", name="frozen")
    _, _, store = prepare_run(thawed, 2)
    with pytest.raises(RankError, match=r"CheckpointError.*lacks optimizer\.lm_head\.weight\.exp_avg.*parallel\.freeze"):
        run_ranks(train_on_rank, 2, thawed, store.directory)


# -- damaged -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_truncated_tensors(copy: RunConfig, ranks: int) -> None:
    path = checkpoint(copy) / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    seal(copy)
    _, _, store = prepare_run(copy, ranks)
    with pytest.raises(RankError) as caught:
        run_ranks(train_on_rank, ranks, copy, store.directory)
    last = str(caught.value).strip().splitlines()[-1]
    assert "meshwright.errors.CheckpointError" in last
    assert "step-00000002: cannot be read: rank 0: " in last


@pytest.mark.parametrize("name", ["__1_0.distcp", "__0_0.distcp"])
def test_missing_tensors(copy: RunConfig, name: str) -> None:
    (checkpoint(copy) / name).unlink()
    found = {key: torch.empty(shape) for key, (shape, _) in storage.contents(checkpoint(copy)).items() if "rng" not in key}
    with pytest.raises(CheckpointError, match=rf"cannot be read: .*{name}"):
        storage.read(checkpoint(copy), found)


@pytest.mark.parametrize(
    "content",
    [b"", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(None), pickle.dumps(print)[:-3]],
    ids=["empty", "text", "a dict", "none", "cut off"],
)
def test_damaged_table_of_contents(copy: RunConfig, content: bytes) -> None:
    (checkpoint(copy) / ".metadata").write_bytes(content)
    seal(copy)
    assert "table of contents" in refusal(copy)[0]


def test_truncated_table_of_contents(copy: RunConfig) -> None:
    path = checkpoint(copy) / ".metadata"
    whole = path.read_bytes()
    for share in (0.1, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        seal(copy)
        assert "table of contents" in refusal(copy)[0]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 3}', '{"format": null}'])
def test_meta_that_is_none_of_ours(copy: RunConfig, content: str) -> None:
    (checkpoint(copy) / "meta.json").write_text(content)
    seal(copy)
    with pytest.raises(CheckpointError, match=r"step-00000002: (not a|has format)"):
        read_meta(checkpoint(copy))
    assert refusal(copy)


# -- code --------------------------------------------------------------------------------------------------------------


class Bomb:
    """Pickled, it is a call of ``os.mkdir(path)`` when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_pickle_in_the_table_of_contents_does_not_run(copy: RunConfig, tmp_path: Path) -> None:
    sign = tmp_path / "it-ran"
    bomb = pickle.dumps(Bomb(sign))
    pickle.loads(bomb)
    assert sign.exists()  # it would
    sign.rmdir()
    (checkpoint(copy) / ".metadata").write_bytes(bomb)
    seal(copy)
    assert "refers to posix.mkdir, so it is not read" in refusal(copy)[0]
    assert not sign.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.hub.load", "torch._utils._rebuild_tensor_v2"])
def test_only_classes_of_a_table_are_named(copy: RunConfig, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (checkpoint(copy) / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    seal(copy)
    assert f"refers to {name}" in refusal(copy)[0]


def test_members_of_enums_are_read_as_python_3_11_0_wrote_them_and_no_other_attributes(copy: RunConfig) -> None:
    """By ``getattr``, which must not be one."""
    table = checkpoint(copy) / ".metadata"
    kind = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    assert (
        storage._TableUnpickler(io.BytesIO(b"cbuiltins\ngetattr\n(" + kind + b"VTORCH_CONTIGUOUS_FORMAT\ntR.")).load().value
        == 0
    )
    for name in (b"__class__", b"mro"):
        table.write_bytes(b"cbuiltins\ngetattr\n(" + kind + b"V" + name + b"\ntR.")
        seal(copy)
        assert f"refers to {name.decode()} of" in refusal(copy)[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_paths_of_another_python_are_read(module: bytes) -> None:
    """Python 3.13 pickles them under a module that no other one has."""
    table = b"c" + module + b"\nPosixPath\n(Vstep\ntR."
    assert storage._TableUnpickler(io.BytesIO(table)).load() == Path("step")


def test_pickle_in_place_of_a_tensor_does_not_run(tmp_path: Path) -> None:
    """DCP unpickles what its table calls bytes, whatever the reader wanted there."""
    sign = tmp_path / "it-ran"
    dcp.save({"weight": Bomb(sign), "bias": torch.ones(2)}, checkpoint_id=tmp_path / "bomb", no_dist=True)
    assert not sign.exists()
    with pytest.raises(CheckpointError, match="holds no tensor weight"):
        storage.read(tmp_path / "bomb", {"weight": torch.zeros(2), "bias": torch.zeros(2)})
    assert not sign.exists()
    dcp.load({"weight": torch.zeros(2)}, checkpoint_id=tmp_path / "bomb", no_dist=True)
    assert sign.exists()  # torch's own way


def test_pickle_in_a_file_of_tensors_does_not_run(copy: RunConfig, tmp_path: Path) -> None:
    sign = tmp_path / "it-ran"
    held = storage.contents(checkpoint(copy))
    bomb = io.BytesIO()
    torch.save(Bomb(sign), bomb)
    for path in checkpoint(copy).glob("*.distcp"):
        path.write_bytes(bomb.getvalue().ljust(path.stat().st_size, b"\0"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        storage.read(checkpoint(copy), {"model.lm_head.weight": torch.empty(held["model.lm_head.weight"][0])})
    assert not sign.exists()


# -- no room -----------------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/below: cannot be written"):
        check_writable(tmp_path / "file" / "below")


def test_a_disk_without_room(tmp_path: Path) -> None:
    check_writable(tmp_path / "made", needed=1)
    with pytest.raises(CheckpointError, match=r"checkpoints need 1048576.00 GiB and .* GiB are free.*checkpoint\.keep"):
        check_writable(tmp_path / "made", needed=2**50)
    assert list((tmp_path / "made").iterdir()) == []
