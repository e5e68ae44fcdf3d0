"""The state of callbacks in a checkpoint: tensors among its tensors, as ``callback.NAME.KEY``, and values in its meta.json."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint import storage
from meshwright.errors import CheckpointError, PartError
from meshwright.objectives.call import in_part
from meshwright.train.callbacks.callback import Callback, overrides

__all__ = ["PREFIX", "read_states", "states"]

PREFIX = "callback."

State = tuple[dict[str, torch.Tensor], dict[str, Any]]


def _state(name: str, callback: Callback) -> State:
    """Return the tensors of a callback under their names in a checkpoint, and its values.

    Raises:
        PartError: a value is neither a tensor nor a value of JSON.
    """
    with in_part(f"callback {name}", "state_dict"):
        state = dict(callback.state_dict())
    tensors, values = {}, {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{PREFIX}{name}.{key}"] = value.detach()
            continue
        try:
            values[key] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise PartError(
                "part.returned",
                f"callback {name}: state_dict: {key!r} is of {type(value).__name__} ({error}); legal are tensors and "
                "values of JSON",
            ) from error
    return tensors, values


def states(named: Iterable[tuple[str, Callback]]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Return the tensors of all callbacks, and name to values of each."""
    tensors: dict[str, torch.Tensor] = {}
    values = {}
    for name, callback in named:
        own, values[name] = _state(name, callback)
        tensors |= own
    return tensors, values


def read_states(named: Iterable[tuple[str, Callback]], checkpoint: Path, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Give callbacks their state of a checkpoint, on any layout. Collective over all ranks.

    Args:
        named: the callbacks, which have begun.
        checkpoint: the checkpoint.
        saved: name of each callback in it to its values.

    Returns:
        A line for each callback with a state that was not there before, or is gone.

    Raises:
        CheckpointError: a callback has tensors that the checkpoint lacks.
    """
    stored = [name for name in storage.contents(checkpoint) if name.startswith(PREFIX)]
    known = [(name, callback) for name, callback in named if name in saved]
    own = {name: _state(name, callback)[0] for name, callback in known}
    tensors = {key: value for part in own.values() for key, value in part.items()}
    if missing := sorted(tensors.keys() - set(stored)):
        shown = ", ".join(missing[:4]) + (" ..." if len(missing) > 4 else "")
        raise CheckpointError(
            "checkpoint.callback", f"{checkpoint}: lacks {shown}; its run had another model, or this callback another state"
        )
    due = [name for name in stored if any(name.startswith(f"{PREFIX}{of}.") for of in own)]
    lines = [
        f"callback {name} was not in the checkpoint: it starts fresh"
        for name, callback in named
        if name not in saved and overrides(callback, "state_dict")
    ]
    lines += [
        f"callback {name} of the checkpoint is gone; its state is left"
        for name, values in saved.items()
        if name not in dict(named) and (values or any(key.startswith(f"{PREFIX}{name}.") for key in stored))
    ]
    if due:  # the same on all ranks, which may have other parameters
        storage.read(checkpoint, tensors)
        asked: list[list[str]] = [[*tensors]] * (dist.get_world_size() if dist.is_initialized() else 1)
        if dist.is_initialized():
            dist.all_gather_object(asked, [*tensors])
        left = sorted(set(due).difference(*asked))
        lines += [f"{name} of the checkpoint was not read: state_dict does not return it after on_start" for name in left[:4]]
    for name, callback in known:
        prefix = f"{PREFIX}{name}."
        with in_part(f"callback {name}", "load_state_dict"):
            callback.load_state_dict({**{key.removeprefix(prefix): own[name][key] for key in own[name]}, **saved[name]})
    return lines
