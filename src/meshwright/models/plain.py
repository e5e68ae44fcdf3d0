"""The spec of a plain module, which declares nothing: its layers are the entries of its lists."""

from collections.abc import Iterator

from torch import nn

from meshwright.distributed.names import class_name
from meshwright.plan.names import generalize
from meshwright.plan.spec import ParallelSpec

__all__ = ["inferred_spec"]

_SIZES = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "layers": "num_hidden_layers"}
"""Field of ModelSizes to the attribute of a config, where the module has one."""


def inferred_spec(model: nn.Module) -> ParallelSpec:
    """The spec of a module that is none of transformers.

    Every list (or dict) of modules counts whose entries are all of one class and hold parameters: nothing is guessed from its
    length or its name, and where there are several, all are layers. What is inside an entry belongs to it. All else belongs to
    the root.

    Args:
        model: on any device.
    """
    config = getattr(model, "config", None)
    return ParallelSpec(
        family=class_name(model),
        layers=tuple(dict.fromkeys(generalize(name) for name in _layers(model))),
        sizes={field: name for field, name in _SIZES.items() if isinstance(getattr(config, name, None), int)},
    )


def _layers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for own, child in module.named_children():
        name = f"{prefix}{own}"
        if _is_stack(child):
            yield from (f"{name}.{entry}" for entry, _ in child.named_children())
        else:
            yield from _layers(child, f"{name}.")


def _is_stack(module: nn.Module) -> bool:
    entries = list(module.children()) if isinstance(module, nn.ModuleList | nn.ModuleDict) else []
    alike = len({type(entry) for entry in entries}) == 1 and not isinstance(entries[0], nn.ModuleList | nn.ModuleDict)
    return alike and all(any(True for _ in entry.parameters()) for entry in entries)
