"""Paths that a user writes: which can be one at all, which are directories, of what kind, and which are names of the hub."""

import difflib
import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from meshwright.errors import Refusal, described

__all__ = ["PathText", "mistaken", "nearby", "no_directory", "possible_hub_name"]

LONGEST_NAME, LONGEST_PATH = 255, 4096
"""Bytes of a file's name, and of a path: the limits of Linux."""

SECONDS = 10
"""How long the hub may take to answer whether it has a name."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def _possible(value: str) -> str:
    """Refuse what no call of the system takes as a path, so that no later call meets it."""
    problem = None
    if not value.strip():
        problem = "is empty"
    elif "\0" in value:
        problem = "contains a NUL character, which is illegal in a path"
    elif len(value.encode(errors="replace")) > LONGEST_PATH or any(
        len(name.encode(errors="replace")) > LONGEST_NAME for name in value.split("/")
    ):
        problem = f"is too long for a path; legal are {LONGEST_PATH} bytes, {LONGEST_NAME} of them in a name"
    else:
        try:
            value.encode()
            Path(value).expanduser()
        except (RuntimeError, UnicodeError):
            problem = "is no legal path: the user after ~ is unknown, or it is not valid Unicode"
    if problem is not None:
        raise PydanticCustomError("path", "{problem}", {"problem": problem})
    return value


PathText = Annotated[str, AfterValidator(_possible)]
"""Text that can be a path (or a glob, or a name of the hub): not empty, no longer than a path may be."""


def possible_hub_name(value: str) -> bool:
    """Whether a text may be a name of the hub, ``name`` or ``owner/name``. The hub is not asked."""
    return ".." not in value and _HUB_NAME.fullmatch(value) is not None


def no_directory(knob: str, value: str, *, hub: bool = True) -> Refusal | None:
    """The refusal of a value that should be a directory, and is none.

    A name that may be one of the hub is looked up there, unless it was loaded before: one request, without retries.

    Args:
        knob: what holds the value, such as ``model.path``.
        value: a directory or, with ``hub``, a name of the hub: ``name`` or ``owner/name``.
        hub: whether the value may be a name of the hub.

    Returns:
        ``None`` where it is a directory, or a name that the hub knows.
    """
    path = Path(value).expanduser()
    if path.is_dir():
        return None
    problem = f"{knob}={value!r}: {'is a file, not a directory' if path.exists() else 'no such directory'}"
    problem += f"{nearby(path)} (working directory {Path.cwd()})"
    if not hub or path.exists() or not possible_hub_name(value):
        return Refusal("config.directory", problem)
    unknown = _not_on_hub(value)
    return Refusal("config.directory", f"{problem}; as a name of the hub: {unknown}") if unknown else None


def nearby(path: Path) -> str:
    """What a path that does not exist may have been meant to be, as the end of a message; empty if nothing is like it."""
    missing = path
    try:
        while not missing.parent.is_dir():
            missing = missing.parent
        names = [entry.name for entry in missing.parent.iterdir()]
    except OSError:
        return ""
    rest, near = path.relative_to(missing), []
    for name in difflib.get_close_matches(missing.name, names, n=3):
        whole = missing.parent / name / rest
        near.append(whole if whole.exists() else missing.parent / name)
    return f"; did you mean {' or '.join(repr(str(one)) for one in near)}?" if near else ""


def mistaken(
    path: str | Path,
    wanted: Literal["model", "adapter", "checkpoint"],
    model: str = "model.path",
    adapter: str = "adapter.path",
) -> str:
    """What a directory is, where it is not what a command or key takes, and what to do, as the end of a message.

    Args:
        path: the directory.
        wanted: what it should be.
        model: the argument or key that takes a whole model.
        adapter: the argument or key that takes an adapter.

    Returns:
        Empty where it is what is wanted, or of no known kind.
    """
    folder = Path(path).expanduser()
    quoted = shlex.quote(str(path))
    kind = _kind(folder)
    if kind in ("", wanted) or (kind, wanted) == ("run", "checkpoint"):
        return ""
    if wanted == "checkpoint":
        if kind == "checkpoints":
            return f"; it is the directory of all checkpoints of a run: take one of them, or the run, {folder.parent}"
        return f"; it is {_WORDS[kind]} already, for `meshwright generate`{' --adapter' if kind == 'adapter' else ''}"
    if kind == "adapter":
        return f"; it is an adapter: give it as {adapter}, and its model{_base(folder)} as {model}"
    if kind == "model":
        return f"; it is a whole model: give it as {model}"
    source = shlex.quote(str(folder.parent)) if kind == "checkpoints" else quoted
    made = folder / "export"
    known = f", or take {made}, its last export" if _kind(made) == wanted else ""
    option = " --adapter" if wanted == "adapter" else ""
    return f"; it is {_WORDS[kind]}: `meshwright export {source} OUT{option}` writes the {wanted}{known}"


_WORDS = {
    "run": "the directory of a run",
    "checkpoints": "the directory of a run's checkpoints",
    "checkpoint": "a checkpoint of a run",
    "adapter": "an adapter",
    "model": "a model",
}


def _kind(folder: Path) -> Literal["run", "checkpoints", "checkpoint", "adapter", "model", ""]:
    """What a directory is, by its files; empty if unknown."""
    if (folder / "meta.json").is_file() and (folder / ".metadata").is_file():
        return "checkpoint"
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    if (folder / "config.json").is_file():
        return "model"
    if (folder / "checkpoints").is_dir() or ((folder / "config.yaml").is_file() and (folder / "source.json").is_file()):
        return "run"
    return "checkpoints" if any(folder.glob("step-*/meta.json")) else ""


def _base(adapter: Path) -> str:
    """The model that an adapter names, in brackets; empty if it names none."""
    try:
        base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f" ({base})" if base else ""


def _not_on_hub(name: str) -> str | None:
    """Why a name of the hub cannot be loaded; ``None`` where it can be, or where whatever loads it knows better."""
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.file_download import repo_folder_name

    loaded = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    if loaded.is_dir():
        return None
    try:
        huggingface_hub.model_info(name, timeout=SECONDS)
    except errors.RepositoryNotFoundError:
        return "the hub has no such model, or it is private and you are not logged in"
    except errors.OfflineModeIsEnabled:
        return "it was never loaded here, and HF_HUB_OFFLINE forbids to ask the hub"
    except (errors.HfHubHTTPError, errors.HFValidationError):
        return None
    except Exception as error:  # of the HTTP library, whichever huggingface_hub has: no network, no answer in time
        return f"it was never loaded here, and the hub cannot be reached ({described(error)})"
    return None
