"""What an export reads of a checkpoint beside the model: moving averages, and modules that an objective added."""

from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import storage
from meshwright.errors import CheckpointError
from meshwright.files import save_tensors
from meshwright.models.added_modules import ADDED
from meshwright.plan.given.names import inside

__all__ = ["read_average", "write_added"]


def write_added(checkpoint: Path, folder: Path, average: str) -> None:
    """Write what an objective added to the model, if anything, in a folder: loaders read all weights that lie beside others.

    Args:
        checkpoint: the checkpoint.
        folder: the export.
        average: name of a callback whose moving averages are written where there are some; empty: what was trained.
    """
    of_model, of_average = f"model.{ADDED}.", f"callback.{average}.{ADDED}."
    stored = storage.contents(checkpoint)
    keys = {key.removeprefix(of_model): key for key in stored if key.startswith(of_model)}
    keys |= {key.removeprefix(of_average): key for key in stored if average and key.startswith(of_average)}
    if keys:
        values = {key: torch.empty(stored[key][0], dtype=getattr(torch, stored[key][1])) for key in keys.values()}
        storage.read(checkpoint, values, alone=True)
        (folder / ADDED).mkdir()
        save_tensors({name: values[key] for name, key in keys.items()}, folder / ADDED / f"{ADDED}.safetensors")


def read_average(checkpoint: Path, model: Any, name: str) -> None:
    """Give the trained parameters of a model their moving averages, each rounded once."""
    prefix = f"callback.{name}."
    stored = {key: shape for key, (shape, _) in storage.contents(checkpoint).items() if key.startswith(prefix)}
    if not stored:
        raise CheckpointError(
            "export.ema", f"{checkpoint}: has no moving average {name!r}; its run had no such callback (callbacks: [ema])"
        )
    kind = {
        key: torch.float64 if dtype == "float64" else torch.float32 for key, (_, dtype) in storage.contents(checkpoint).items()
    }
    averages = {key: torch.empty(shape, dtype=kind[key]) for key, shape in stored.items()}
    storage.read(checkpoint, averages, alone=True)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, value in averages.items():
            if inside(key.removeprefix(prefix), ADDED):
                continue  # no part of the exported model
            parameters[key.removeprefix(prefix)].copy_(value)
