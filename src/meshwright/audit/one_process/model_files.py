"""The audited model as files: what one process began with, written by transformers and peft, and read back by the ranks.

A reader that takes a wrong slice on some rank is then found with the first values, and so is a parameter that reading puts in
the place of another one. The values of the reference do not pass through any reader.
"""

from contextlib import nullcontext
from pathlib import Path

from torch import nn

from meshwright.audit.case import Case
from meshwright.errors import described
from meshwright.models.adapters.adapt import without_adapters
from meshwright.models.adapters.adapter_files import write_adapter
from meshwright.models.added_modules import without_added
from meshwright.models.model_config import AdapterConfig
from meshwright.models.weights.bars import one_bar

__all__ = ["ADAPTER", "MODEL", "from_files", "unwritten", "write_files"]

MODEL, ADAPTER, _WHY = "model", "adapter", "unwritten.txt"
"""Folders beside the reference, and a file that says why there are none."""


def write_files(model: nn.Module, adapter: AdapterConfig | None, folder: Path) -> None:
    """Write a plain model with values, and its adapter, as transformers and peft do.

    A model that transformers itself cannot write is left out, with the reason in a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with without_added(model), one_bar("writing the small model"), without_adapters(model) if adapter else nullcontext():
            model.save_pretrained(folder / MODEL)  # type: ignore[operator]
        if adapter is not None:
            (folder / ADAPTER).mkdir(exist_ok=True)
            with without_added(model):
                write_adapter(model, adapter, str(folder / MODEL), folder / ADAPTER)
    except Exception as error:  # whatever transformers raises: the ranks then make their values as before
        (folder / _WHY).write_text(f"transformers cannot write the small model: {described(error)}")


def unwritten(folder: Path) -> str:
    """Return why there are no files; empty if there are."""
    why = folder / _WHY
    if why.is_file():
        return why.read_text()
    return "" if (folder / MODEL / "config.json").is_file() else "its weights are read from files already"


def from_files(case: Case, folder: Path) -> Case:
    """Return a case that begins with the values in the files."""
    config = case.config
    changed: dict[str, object] = {"model": config.model.model_copy(update={"path": str(folder / MODEL), "config": None})}
    if config.adapter is not None:
        changed["adapter"] = config.adapter.model_copy(update={"path": str(folder / ADAPTER)})
    return Case(config.model_copy(update=changed), case.store, case.steps)
