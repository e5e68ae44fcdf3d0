"""Checks of tensor parallel styles, whoever gave them. Styles that fail them would make gradients wrong without an error.

- A matrix whose output stays sliced (`colwise`) has a matrix near it that takes slices (`rowwise`).
- A module with parameters between the two has a style that says whether it sees slices.
- What is added to a sum over ranks is a partial sum on every rank: all parameters of such experts (`moe_tp_experts`) are
  sliced.
- A matrix that packs several matrices is sliced as such.
- Every module that has a sliced parameter computes with slices, also if the parameter is tied to another one.
- An attention whose heads are split does not count them itself.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from meshwright.errors import Refusal
from meshwright.layout import divisors
from meshwright.plan.axes.tensor.styles import DERIVED, FIRST, NORM, SECOND, STYLES, canonical, tp_dim
from meshwright.plan.axes.tensor.with_adapters import small_of_experts
from meshwright.plan.given.inspection import Inspection, ParameterFacts
from meshwright.plan.given.names import generalize, holder_of, holders_of, within
from meshwright.plan.given.sliceable_pairs import Pairs
from meshwright.plan.given.sliced_code import counts_heads
from meshwright.plan.result.sharding_plan import TensorParallelRow

__all__ = ["misfits_of_norms", "packs_two", "slices_nobody_computes", "style_problems"]

_PACKED = {"packed_colwise", "fused_colwise"}
_GATHERED = {"colwise_gather_output", "colwise_rep"}
_BLIND = {"colwise", "colwise_transposed", "packed_colwise"}
"""Styles that slice heads or features; the module around them does not learn of it."""


def style_problems(
    model: Inspection,
    layers: Sequence[str],
    head: str | None,
    module_styles: Mapping[str, str],
    parameter_styles: Mapping[str, str],
    own_styles: Mapping[str, str],
    adapters: set[str],
) -> Iterator[Refusal]:
    """Yield a message for everything that is wrong with the styles.

    Args:
        model: facts of the model.
        layers: names of its layers.
        head: name of the output head, if it is known.
        module_styles: style of each module that has one, by name.
        parameter_styles: style of each parameter that has one, by its first name.
        own_styles: styles of parameters that the family or the model itself declares, by first name.
        adapters: names of modules that peft wrapped.
    """
    reported: set[str] = set()
    firsts, seconds = (_by_holders(module_styles, styles) for styles in (FIRST, SECOND))
    for name, style in module_styles.items():
        if style not in FIRST or name == head:
            continue
        scope = _scope(name, seconds, layers)
        if scope is None:
            yield Refusal(
                "tp.style.misfit",
                f"{name!r} has the style {style}, so its output stays sliced, and no rowwise module in its part of the "
                "layer takes sliced input; give it the style colwise_gather_output, or give the matrix behind it the style "
                "rowwise",
            )
        elif scope and scope not in layers and scope not in reported:
            reported.add(scope)
            yield from _between(scope, model, module_styles, parameter_styles, own_styles, adapters)
    yield from _counting(model, module_styles, head)
    for name, style in module_styles.items():
        transposed = model.modules[name].transposed
        if style in STYLES and STYLES[style].dim is not None and transposed != STYLES[style].transposed:
            yield Refusal(
                "tp.style.misfit",
                f"{name!r} has the style {style}, but its weight is {'[in, out]' if transposed else '[out, in]'}; legal "
                "are " + ("colwise_transposed and rowwise_transposed" if transposed else style.removesuffix("_transposed")),
            )
        if style == "packed_rowwise":
            yield Refusal(
                "tp.style.misfit",
                f"{name!r} has the style packed_rowwise, which is for parameters of experts alone; the legal style is rowwise",
            )
        if style == "replicated_with_grad_allreduce" and not _split_around(name, firsts, layers):
            yield Refusal(
                "tp.style.misfit",
                f"{name!r} has the style {style}, but no module beside it is sliced, so it computes with whole tensors; "
                "the legal style is replicate",
            )
        if style == "moe_tp_experts":
            for own, shape in model.modules[name].parameters.items():
                if parameter_styles.get(model.parameter_of[f"{name}.{own}"].name) == "colwise" and packs_two(model, name, own):
                    yield Refusal(
                        "tp.style.misfit",
                        f"{f'{name}.{own}'!r} has the style colwise, but the code of {name!r} takes it apart by chunk(2), "
                        "so a slice of its rows has all of one matrix and none of the other; the legal style is "
                        "packed_colwise",
                    )
                small = own in small_of_experts(model, name)
                if tp_dim(parameter_styles.get(model.parameter_of[f"{name}.{own}"].name), shape) is None and not small:
                    yield Refusal(
                        "tp.style.missing",
                        f"{f'{name}.{own}'!r} is not sliced, but the ranks of tp sum the outputs of {name!r} "
                        "(moe_tp_experts); give it a style that slices it",
                    )
    for parameter in model.parameters:
        given_style, model_style = parameter_styles.get(parameter.name), own_styles.get(parameter.name)
        if any(holder_of(name) == head for name in parameter.names):
            continue  # its logits may stay sharded
        if (
            given_style in FIRST
            and model_style not in (None, given_style)
            and (given_style in _PACKED or model_style in _PACKED | _GATHERED)
        ):
            yield Refusal(
                "tp.style.misfit",
                f"{parameter.name!r} has the style {given_style}, but the model declares {model_style}, because its output "
                f"is split into parts; the legal style is {model_style}",
            )


def misfits_of_norms(pairs: Pairs, styles: Mapping[str, str], tp: int) -> Iterator[Refusal]:
    """Yield a problem for each norm over features that is sliced and the features are not, or the other way round."""
    known: dict[str, bool] = {}
    for pair in pairs.found:
        for name, _ in pair.norms:
            known[name] = all(styles.get(first) in FIRST for first in pair.firsts)
            if known[name] and pair.blocks % tp:
                yield Refusal(
                    "tp.entries",
                    f"tp={tp}: {name!r} takes means over slices of {pair.blocks} features or heads, which tp must divide; "
                    f"legal are {', '.join(map(str, divisors(pair.blocks)))}",
                )
            elif known[name] and styles.get(name) != NORM:
                yield Refusal(
                    "tp.style.misfit",
                    f"{name!r} has the style {styles.get(name, 'none')}, but takes means over the features of "
                    f"{pair.firsts[0]!r}, of which a rank has some; the legal style is {NORM}",
                )
    for name, style in styles.items():
        if style == NORM and not known.get(name):
            yield Refusal(
                "tp.style.misfit",
                f"{name!r} has the style {style}, but a trace does not show that all it does with the features of "
                "all ranks, of matrices that are sliced, is to take means; the legal style is replicate",
            )


def packs_two(model: Inspection, name: str, own: str) -> bool:
    """Return whether a parameter of a module has the rows of two matrices, which its code takes apart by ``chunk``."""
    small = small_of_experts(model, name)
    shapes = {item: shape for item, shape in model.modules[name].parameters.items() if item not in small}
    if own in small or len(shapes[own]) < 3:  # a bias
        return False
    rows, beside = shapes[own][-2], {shape[-1] for other, shape in shapes.items() if other != own and len(shape) > 2}
    return "chunk" in model.modules[name].code and rows % 2 == 0 and rows // 2 in beside


def _counting(model: Inspection, module_styles: Mapping[str, str], head: str | None) -> Iterator[Refusal]:
    """Yield a message for each module that counts the heads of a matrix with sliced output, and not those of its rank."""
    parents = {holder_of(name): name for name, style in module_styles.items() if style in _BLIND and name != head}
    reported: set[str] = set()
    for parent, name in parents.items():
        count = counts_heads(model.modules[parent])
        if count and generalize(parent) not in reported:
            reported.add(generalize(parent))
            yield Refusal(
                "tp.style.misfit",
                f"{generalize(name)!r} has the style {module_styles[name]}, but {generalize(parent)!r} uses {count} of the "
                "whole model, and a rank has only some of the heads; legal are colwise_gather_output and no style",
            )


def _by_holders(module_styles: Mapping[str, str], styles: Collection[str]) -> dict[str, list[str]]:
    """Return the modules that have one of some styles, by each module around them."""
    found: dict[str, list[str]] = {}
    for name, style in module_styles.items():
        for holder in (*holders_of(name), "") if style in styles else ():
            found.setdefault(holder, []).append(name)
    return found


def _split_around(name: str, firsts: Mapping[str, list[str]], layers: Sequence[str]) -> bool:
    """Return whether another module in the same part of a layer is split over heads or features."""
    parent = holder_of(name)
    if not parent or any(within(layer, (parent,)) for layer in layers):
        return any(holder_of(other) == parent for other in firsts.get(parent, ()))
    return parent in firsts


def _scope(name: str, seconds: Mapping[str, list[str]], layers: Sequence[str]) -> str | None:
    """Return the innermost module around another one that has a ``rowwise`` module inside it; ``None`` if there is none.

    In a layer, or in the root, only direct children count, and the search ends there.
    """
    parent, own = name, holder_of(name)
    while parent:
        parent = holder_of(parent)
        takers = seconds.get(parent, [])
        if parent in layers or not parent:
            takers = [other for other in takers if holder_of(other) == parent == own]
            return parent if takers else None
        if takers:
            return parent
    return None


def _between(
    scope: str,
    model: Inspection,
    module_styles: Mapping[str, str],
    parameter_styles: Mapping[str, str],
    own_styles: Mapping[str, str],
    adapters: set[str],
) -> Iterator[Refusal]:
    """Yield a message for each parameter in a split module without a style, or ``replicate`` although it sees slices."""
    for name in (scope, *model.inside(scope)):
        if any(holder in adapters for holder in holders_of(name)):
            continue
        for own in model.modules[name].parameters:
            parameter = model.parameter_of[f"{name}.{own}"].name
            style = module_styles.get(name) or parameter_styles.get(parameter)
            if style is None:
                yield Refusal(
                    "tp.style.missing",
                    f"{f'{generalize(name)}.{own}'!r} has no style, but {generalize(scope)!r} is split over tp; legal are "
                    "replicated_with_grad_allreduce if it computes with slices, replicate if it computes with whole "
                    "tensors",
                )
            elif style == "replicate" and own_styles.get(parameter) == "replicated_with_grad_allreduce":
                yield Refusal(
                    "tp.style.misfit",
                    f"{f'{generalize(name)}.{own}'!r} has the style replicate, but computes with slices of "
                    f"{generalize(scope)!r}; the legal style is replicated_with_grad_allreduce",
                )


def slices_nobody_computes(
    rows: Mapping[str, TensorParallelRow], parameter_styles: Mapping[str, str], parameters: Sequence[ParameterFacts]
) -> Iterator[Refusal]:
    """Yield a message for each sliced parameter whose module does not compute with slices, or slices another dimension.

    Args:
        rows: rows of the modules that tensor parallel changes, by name.
        parameter_styles: style of each parameter that has one, by its first name.
        parameters: facts of the model's parameters.
    """
    for parameter in parameters:
        style = parameter_styles.get(parameter.name)
        if (cut := tp_dim(style, parameter.shape)) is None:
            continue
        for name in parameter.names:
            module = holder_of(name)
            row = rows.get(module)
            if row is None:
                tied = f" (tied to {parameter.name!r})" if name != parameter.name else ""
                where = canonical(module)
                yield Refusal(
                    "tp.style.missing",
                    f"{canonical(name)!r}{tied} is sliced ({style}), but {where!r} has no style to compute with slices",
                )
            elif row.style in {**STYLES, **DERIVED} and tp_dim(row.style, parameter.shape) not in (None, cut):
                yield Refusal(
                    "tp.style.tied",
                    f"{name!r} is tied to {parameter.name!r} and so sliced as {style}, but {module!r} has the style "
                    f"{row.style}; modules that share a parameter need styles that slice the same dimension",
                )
