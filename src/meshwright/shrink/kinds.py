"""The layers of a model and their kinds, a config with other layers, and what a small model lacks of a large one."""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.names import generalize, holder_of, inside, match_names
from meshwright.plan.given.spec import ParallelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["kinds_of", "layers_of", "lists_of", "lost_between", "second_of_ties", "with_layers"]

LARGE = 50_000_000
"""Most parameters of a small model."""

MOST_KINDS = 12
"""Most kinds of layers. If there are more, some number differs in every layer, and kinds are compared without numbers."""


def layers_of(model: nn.Module, patterns: Iterable[str]) -> tuple[str, int]:
    """Return the path of the list of the language model's layers (the list with most parameters), and its length."""
    names = [name for name, _ in model.named_modules()]
    parents = [holder_of(name) for pattern in patterns for name in match_names(pattern, names)]
    path = max(dict.fromkeys(parents), key=lambda path: sum(item.numel() for item in model.get_submodule(path).parameters()))
    return path, parents.count(path)


def lists_of(config: Mapping[str, Any], count: int) -> list[str]:
    """Return the keys of a config whose value is a list with an entry for each layer."""
    return [key for key, value in config.items() if isinstance(value, list) and len(value) == count and "token" not in key]


def with_layers(config: Mapping[str, Any], key: str, layers: Sequence[int]) -> dict[str, Any]:
    """Return the values of a config that other layers change: their number, and its lists with an entry for each layer.

    Args:
        config: the values of the config.
        key: the key that has the number of layers, or a list of them.
        layers: numbers of the config's layers, one for each new layer; one may stand several times.
    """
    number = isinstance(config[key], int)
    lists = lists_of(config, config[key] if number else len(config[key]))
    picked: dict[str, Any] = {name: [config[name][index] for index in layers] for name in lists}
    return {**picked, key: len(layers)} if number else picked


def kinds_of(
    model: "PreTrainedModel", path: str, indices: Sequence[int], lists: Sequence[str], marks: Sequence[Hashable] = ()
) -> list[Hashable]:
    """Return the kind of each layer: with marks to distinguish the layers of one model, without to compare models of two sizes.

    Args:
        model: the model.
        path: path of its list of layers.
        indices: numbers of the layers.
        lists: keys of the config that have an entry for each layer.
        marks: what the patterns decide about each layer; empty: compare kinds without marks and without sizes.
    """
    text, sizes = model.config.get_text_config().to_dict(), bool(marks)
    kinds: list[Hashable] = []
    for index in indices:
        rows: set[Hashable] = set()
        for name, module in model.get_submodule(f"{path}.{index}").named_modules():
            for key, value in vars(module).items():
                if isinstance(value, (bool, str, int, type(None))) and not re.search(_NO_KIND, key):
                    rows.add((generalize(name), type(module).__name__, key, _flag(value, sizes)))
            for key, parameter in module.named_parameters(recurse=False):
                rows.add((generalize(name), type(module).__name__, key, tuple(parameter.shape) if sizes else parameter.ndim))
        kinds.append((frozenset(rows), tuple(_flag(text[key][index], sizes) for key in lists), marks[index] if marks else None))
    if marks and len(set(kinds)) > MOST_KINDS:
        return list(zip(kinds_of(model, path, indices, lists), marks, strict=True))
    return kinds


_NO_KIND = r"^_|^training$|idx|index|layer_id|number"
"""Pattern of the attributes of modules that are no part of a layer's kind."""


def _flag(value: Any, sizes: bool) -> Hashable:
    """Return a value as part of a kind. Without sizes, of a number only whether it is 0 counts."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value if sizes else bool(value)
    return value if isinstance(value, (bool, str, type(None))) else repr(value)


def lost_between(
    large: "PreTrainedModel", small: "PreTrainedModel", spec: ParallelSpec, path: str, kept: Sequence[int]
) -> list[str]:
    """Return what the small model lacks of the large one, or has in addition, or why it is still too large."""
    models, differences = (large, small), []
    classes = [{type(module).__name__ for module in model.modules()} for model in models]
    names = [{generalize(name) for name, _ in model.named_parameters()} for model in models]
    tied = [{" = ".join(dict.fromkeys(map(generalize, group))) for group in of.tied} for of in (spec, spec_of(small))]
    for kind, (old, new) in (("class", classes), ("parameter", names), ("tie", tied)):
        differences += [f"the {kind} {name} would be lost" for name in sorted(old - new)]
        differences += [f"the {kind} {name} would be new" for name in sorted(new - old)]
    lists = lists_of(large.config.get_text_config().to_dict(), sum(1 for _ in large.get_submodule(path).children()))
    if (left := sum(1 for _ in small.get_submodule(path).children())) != len(kept):
        return [*differences, f"{left} layers would be left, not {len(kept)}"]
    pairs = zip(kept, kinds_of(large, path, kept, lists), kinds_of(small, path, range(len(kept)), lists), strict=True)
    differences += [f"layer {index} would become another" for index, before, after in pairs if before != after]
    if (total := sum(parameter.numel() for parameter in small.parameters())) > LARGE:
        name, largest = max(small.named_parameters(), key=lambda item: item[1].numel())
        differences.append(f"{total:,} parameters would be left, the largest {name} of shape {tuple(largest.shape)}")
    return differences


def second_of_ties(spec: ParallelSpec, path: str) -> int:
    """Return the largest number that the second layer of a tie between layers has; 0 if none are tied."""
    seconds = [0]
    for group in spec.tied:
        layers = sorted({int(name.removeprefix(f"{path}.").partition(".")[0]) for name in group if inside(name, path)})
        seconds += layers[1:2]
    return max(seconds)
