"""The spec of a plain module, which declares nothing: the entries of its lists are layers."""

from collections.abc import Iterator

from torch import nn

from meshwright.distributed.class_names import class_name
from meshwright.plan.given.names import generalize, match_names
from meshwright.plan.given.spec import ParallelSpec

__all__ = ["INFERRED", "inferred_layers", "inferred_spec"]

_SIZES = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "layers": "num_hidden_layers"}
"""Field of ModelSizes to the attribute of a config, if the module has a config with this attribute."""


INFERRED = "layers: inferred; they are the entries of lists whose entries are all of one class and hold parameters"
"""The remark of a spec whose layers nobody declared."""


def inferred_spec(model: nn.Module) -> ParallelSpec:
    """Return the spec of a module that is no model of transformers.

    A list of modules counts if all its entries are of one class and have parameters. A dict whose keys are 0, 1, ... counts as
    a list. Nothing is guessed from the length or the name of a list: if there are several lists, the entries of all of them are
    layers. What is inside an entry belongs to it. Everything else belongs to the root.

    Args:
        model: the module, on any device.
    """
    config = getattr(model, "config", None)
    return ParallelSpec(
        family=class_name(model),
        layers=inferred_layers(model),
        remarks=(INFERRED,),
        sizes={field: name for field, name in _SIZES.items() if isinstance(getattr(config, name, None), int)},
    )


def inferred_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the layers of a module by the rule of :func:`inferred_spec`, as patterns if they match nothing else."""
    names = list(_layers(model))
    modules = [name for name, _ in model.named_modules()]
    patterns = dict.fromkeys(generalize(name) for name in names)
    exact = all(name in names for pattern in patterns for name in match_names(pattern, modules))
    return tuple(patterns if exact else names)


def _layers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for own, child in module.named_children():
        name = f"{prefix}{own}"
        if _is_stack(child):
            yield from (f"{name}.{entry}" for entry, _ in child.named_children())
        else:
            yield from _layers(child, f"{name}.")


def _is_stack(module: nn.Module) -> bool:
    numbered = isinstance(module, nn.ModuleDict) and list(module) == [str(index) for index in range(len(module))]
    entries = list(module.children()) if isinstance(module, nn.ModuleList) or numbered else []
    alike = len({type(entry) for entry in entries}) == 1 and not isinstance(entries[0], nn.ModuleList | nn.ModuleDict)
    return alike and all(any(True for _ in entry.parameters()) for entry in entries)
