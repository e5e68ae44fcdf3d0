"""A digest of Meshwright's own code that carries a plan out: a proof holds for the code that was audited, and for no other.

What a run does not pass through does not count: the modules of an axis that is 1, adapters of a run without one, other
families, and what only prints, prices or starts. So a change of context parallelism leaves the proofs of tensor parallelism
as they are.
"""

import hashlib
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import meshwright

__all__ = ["code_digest", "files_that_count", "package_digest"]

_COUNTS = (
    "layout.py",
    "once.py",
    "data/loader.py",
    "data/order.py",
    "data/packing.py",
    "distributed/",
    "models/",
    "plan/",
    "train/",
)
"""Beginnings of the paths of files that may carry a plan out."""

_DOES_NOT_COUNT = (
    "plan/cost/", "plan/show/", "train/proofs/", "train/schema/", "train/start/", "train/config.py", "train/forecast.py",
    "train/journal.py", "train/callbacks/early_stopping.py", "train/callbacks/best_checkpoint.py",
    "train/callbacks/samples.py", "train/callbacks/continuation.py", "train/callbacks/profiles.py",
    "models/weights/bars.py", "distributed/comm_counter.py", "distributed/fsdp2.py",
    "distributed/parallelizer.py", "distributed/_torch_compat/joint_graph.py", "models/pipeline_by_hand.py",
)  # fmt: skip
"""Of these, beginnings of the paths of files that only print, price, start or check, or that a run of `train` does not use."""

_CONCERNS = {
    "tensor": ("tp", "ep"), "context": ("cp",), "pipeline": ("pp",), "pipelined": ("pp",), "experts": ("experts",),
    "adapters": ("adapter",), "with_adapters": ("adapter",), "mixer_shares": ("cp", "tp"), "canvas_facts": ("cp",),
}  # fmt: skip
"""Name of a module or folder to what a run must have, one of them, so that it counts. What is not here always counts."""

_ALWAYS = ("distributed/context/sequences.py", "distributed/pipeline/stage_parts.py")
"""Paths of files that runs without the axis use too."""


_OF_MIXERS = {
    "tp": ("models/reading/context/",), "cp": ("distributed/tensor/mixer_numbers.py", "distributed/tensor/moves.py"),
}  # fmt: skip
"""Axis to beginnings of the paths of files of another axis by which it, too, divides the heads of mixers."""


def files_that_count(concerns: Collection[str], strategy: str) -> Iterator[str]:
    """Yield the paths, in the package, of the files that carry a plan out.

    Args:
        concerns: names of the mesh axes above 1; also ``experts`` if the model has experts, and ``adapter`` if one is trained.
        strategy: name of the module of the model's strategy.
    """
    own = strategy.removeprefix("meshwright.").replace(".", "/")
    family_folders = {path.removesuffix("/declared.py") for path in _digests() if path.endswith("/declared.py")}
    for path in sorted(_digests()):
        parts = Path(path).with_suffix("").parts
        if not path.startswith(_COUNTS) or path.startswith(_DOES_NOT_COUNT):
            continue
        needed = [_CONCERNS[part] for part in parts if part in _CONCERNS]
        known = path in _ALWAYS or any(axis in concerns and path.startswith(some) for axis, some in _OF_MIXERS.items())
        if not known and any(not set(some) & set(concerns) for some in needed):
            continue
        is_family = parts[:2] == ("models", "families") and parts[-1] not in ("family", "listed")
        if is_family and "/".join(parts) != own:
            continue
        folder = "/".join(parts[:-1])
        if folder in family_folders and parts[-1] != "declared" and not own.startswith(f"{folder}/"):
            continue
        yield path


def code_digest(concerns: Collection[str], strategy: str) -> str:
    """Return the digest of the files of :func:`files_that_count`."""
    known = _digests()
    text = "\n".join(f"{path} {known[path]}" for path in files_that_count(concerns, strategy))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def package_digest(*more: str) -> str:
    """Return the digest of all files that carry some plan out, and of those whose paths begin with one of ``more``."""
    begins = (*_COUNTS, *more)
    text = "\n".join(f"{path} {digest}" for path, digest in sorted(_digests().items()) if path.startswith(begins))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@cache
def _digests() -> dict[str, str]:
    """Path in the package of each of its files to a digest of its text, without comments and empty lines."""
    root = Path(meshwright.__file__).parent
    digests = {}
    for file in root.rglob("*.py"):
        lines = [line.rstrip() for line in file.read_text().splitlines()]
        code = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
        digests[file.relative_to(root).as_posix()] = hashlib.sha256(code.encode()).hexdigest()
    return digests
