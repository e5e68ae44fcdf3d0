"""Which of Meshwright's own code a proof is a proof of."""

import inspect
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import meshwright
from maintain.cells import LAYOUTS, VARIANTS, family_case
from meshwright.audit.case import AuditTrainer, Case
from meshwright.ranks.pool import Pool
from meshwright.train.proofs import own_code
from meshwright.train.proofs.claim import claim_of
from meshwright.train.start.setup import make_setup

ROOT = Path(meshwright.__file__).parent


def files_that_run(device: torch.device, case: Case) -> set[str]:
    """Run the steps of a case on this rank, and return the files of the package whose functions were called."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):  # no import
            called.add(code.co_filename)

    before = sys.getprofile(), threading.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        trainer = AuditTrainer(case, device)
        for _ in range(case.steps):
            trainer.train_step()
            trainer.step += 1
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    return {Path(name).relative_to(ROOT).as_posix() for name in called if name.startswith(f"{ROOT}/")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "label"),
    [*(("qwen3_moe", label) for label in ("tp 2 seq", "cp 2", "ep 2", "pp 2")), ("nemotron_h", "cp 2")],
)
def test_what_carries_a_plan_out_counts(family: str, label: str, tmp_path: Path) -> None:
    place = next(place for place in LAYOUTS if place.label == label)
    case = family_case(family, place, VARIANTS[0], tmp_path, packing="pack" if family == "qwen3_moe" else "pad")
    with Pool(place.world_size) as pool:
        ran = set().union(*pool.run(files_that_run, case))
    axes = claim_of(make_setup(case.config, place.world_size)).axes
    strategy = "meshwright.models.families.nemotron_h" if family == "nemotron_h" else "meshwright.models.specs.derived"
    counted = set(own_code.files_that_count({*axes, "experts"}, strategy))
    performs = {path for path in ran if path.startswith(("distributed/", "models/", "train/", "layout"))}
    assert any(path.startswith("distributed/") for path in performs)
    # Decided and checked before a process starts, read, or printed.
    without = ("train/config.py", "train/schema/", "train/start/", "train/journal.py", "train/forecast.py")
    assert {path for path in performs - counted if not path.startswith(without)} == set()


def test_a_change_of_an_axis_expires_its_proofs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = "meshwright.models.specs.derived"
    runs: dict[str, tuple[set[str], str]] = {
        "dp": ({"dp_shard"}, strategy),
        "tp": ({"tp"}, strategy),
        "cp": ({"dp_shard", "cp"}, strategy),
        "ep": ({"dp_shard", "ep", "experts"}, strategy),
        "pp": ({"pp"}, strategy),
        "adapter": ({"adapter"}, strategy),
        "nemotron_h": (set(), "meshwright.models.families.nemotron_h"),
    }

    def digests() -> dict[str, str]:
        return {name: own_code.code_digest(*run) for name, run in runs.items()}

    before, known = digests(), own_code._digests()
    for path, changes in {
        "distributed/context/attend.py": {"cp"},
        "plan/axes/tensor/choose.py": {"tp", "ep"},
        "distributed/experts/dispatch.py": {"ep"},
        "train/engine/pipelined.py": {"pp"},
        "models/adapters/adapt.py": {"adapter"},
        "models/families/nemotron_h.py": {"nemotron_h"},
        "distributed/update/grad_clip.py": set(before),
        "plan/show/explain.py": set(),
        "cli/main.py": set(),
    }.items():
        assert path in known
        monkeypatch.setattr(own_code, "_digests", lambda path=path: {**known, path: "another"})
        assert {name for name, digest in digests().items() if digest != before[name]} == changes, path


def test_comments_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(own_code.meshwright, "__file__", str(tmp_path / "__init__.py"))
    digests = []
    for text in ("a = 1\n", "# why\n\na = 1  \n", "a = 2\n"):
        (tmp_path / "layout.py").write_text(text)
        digests.append(own_code._digests.__wrapped__()["layout.py"])
    assert digests[0] == digests[1] != digests[2]
