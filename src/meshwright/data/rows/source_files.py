"""The files that a configuration names: which ones a pattern stands for, and what is wrong with them, without reading them."""

import glob
import os
from pathlib import Path
from typing import Literal

from meshwright.errors import Problems

__all__ = ["EXTENSIONS", "ROW_EXTENSIONS", "TEXT_EXTENSIONS", "expand_files", "file_problems", "saved"]

TEXT_EXTENSIONS = (".txt", ".md", ".py")
"""Extensions of files that are one text document each."""

ROW_EXTENSIONS = (".jsonl", ".json", ".parquet")
"""Extensions of files that have a document in every row."""

EXTENSIONS = TEXT_EXTENSIONS + ROW_EXTENSIONS


def expand_files(patterns: list[str]) -> list[Path]:
    """Return the files that patterns name: sorted within a pattern, patterns in their order, each file once.

    A pattern that is itself an existing file stands for this file, not for a glob. A folder of `datasets.save_to_disk` is like
    a file. A pattern that matches nothing adds nothing here; :func:`file_problems` reports it.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        names = [expanded] if os.path.isfile(expanded) else sorted(glob.glob(expanded, recursive=True))
        files.update(dict.fromkeys(Path(name) for name in names if os.path.isfile(name) or saved(Path(name))))
    return list(files)


def saved(folder: Path) -> Literal["Dataset", "DatasetDict"] | None:
    """Return what `datasets.save_to_disk` has written to a folder; ``None``: nothing."""
    if (folder / "dataset_dict.json").is_file():
        return "DatasetDict"
    return "Dataset" if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file() else None


def file_problems(knob: str, patterns: list[str]) -> Problems:
    """Return what is wrong with a list of files, as far as names and sizes show."""
    problems = Problems()
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded) and not saved(Path(expanded)):
            problems.add(
                "data.files",
                f"data.{knob}: {pattern!r} is a directory, and not one of save_to_disk; give files or a glob, such as "
                f"{pattern}/*.jsonl",
            )
            continue
        matches = expand_files([pattern])
        if not matches:
            kind = "glob matches no file" if glob.has_magic(expanded) else "no such file"
            problems.add("data.files", f"data.{knob}: {pattern!r}: {kind} (working directory {os.getcwd()})")
        for path in matches:
            if folder := saved(path):
                if folder == "DatasetDict" and knob == "eval_files":
                    problems.add(
                        "data.files",
                        f"data.eval_files: {str(path)!r} has several splits; give one of them, such as {path}/test",
                    )
            elif path.suffix not in EXTENSIONS:
                problems.add("data.files", f"data.{knob}: {str(path)!r}: readable extensions are {', '.join(EXTENSIONS)}")
            elif not os.access(path, os.R_OK):
                problems.add("data.unreadable", f"data.{knob}: {str(path)!r} cannot be read (permissions)")
            elif path.stat().st_size == 0:
                problems.add("data.empty", f"data.{knob}: {str(path)!r} is empty")
    return problems
