"""Tensor parallel plans of NeMo AutoModel's parallelizer: dicts of torch's styles."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from meshwright.distributed.class_names import class_name
from meshwright.distributed.data.fsdp_units import refuse_parallelized
from meshwright.errors import LayoutError, MissingPlanError, PlanError, Problems, coded, described
from meshwright.layout import Layout
from meshwright.models._transformers_compat import tp_style_names
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.data.unit_choice import choose_units
from meshwright.plan.axes.tensor.choose import choose_styles
from meshwright.plan.axes.tensor.given_styles import declared_styles, import_object, read_plan
from meshwright.plan.axes.tensor.styles import HEAD
from meshwright.plan.draft import Draft
from meshwright.plan.given.inspection import inspect_model, model_sizes
from meshwright.plan.given.names import generalize, match_names, within
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec

__all__ = [
    "PlanOfStyles",
    "_get_parallel_plan",
    "get_hf_tp_shard_plan",
    "import_class_from_path",
    "import_classes_from_paths",
    "translate_to_torch_parallel_style",
    "validate_tp_mesh",
]

PlanOfStyles = dict[str, ParallelStyle | str]
"""Pattern of module names to a style of torch, or to the name of a style that torch does not have."""


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Return the style of torch for a name.

    Raises:
        ValueError: the name is unknown, or torch has no such style; the message names the legal ones.
    """
    torch_styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
        "sequence_parallel": SequenceParallel(),
    }
    if style not in torch_styles:
        raise ValueError(f"style {style!r}: torch has no such style; legal are {', '.join(torch_styles)}")
    return torch_styles[style]


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the tensor parallel plan that a model of transformers declares, with those of its submodels, as styles of torch.

    The output head leaves its logits sharded over the vocabulary, as a DTensor, for a loss that accepts them. Parts for which
    ``parallelize_module`` has no style (packed matrices, experts, norms of queries and keys) are left out and named in a
    warning: without them, the plan is not complete.

    Raises:
        MissingPlanError: the model declares no plan.
        ValueError: the name of a style is unknown.
    """
    refuse_parallelized(model)
    spec = spec_of(model)
    plan = _as_torch(spec, declared_styles(spec), sequence_parallel=False)
    if unknown := [name for name in plan.values() if isinstance(name, str) and name not in tp_style_names()]:
        translate_to_torch_parallel_style(unknown[0])
    if lacking := {pattern: style for pattern, style in plan.items() if isinstance(style, str)}:
        shown = ", ".join(f"{pattern} ({style})" for pattern, style in lacking.items())
        warnings.warn(f"{class_name(model)}: torch has no style for {shown}; left out", stacklevel=2)
    return {pattern: style for pattern, style in plan.items() if not isinstance(style, str)}


def _get_parallel_plan(
    model: nn.Module,
    sequence_parallel: bool = False,
    tp_shard_plan: Mapping[str, ParallelStyle | str] | str | None = None,
    use_hf_tp_plan: bool = False,
) -> PlanOfStyles:
    """Return the plan that :func:`fsdp2_strategy_parallelize` would use: given > written for the family > declared > derived.

    Args:
        model: the model.
        sequence_parallel: also say which hidden states are sharded over the sequence (``Shard(1)``), and name the norms
            between.
        tp_shard_plan: a plan that is returned as it is: a dict, or the import path of a dict or of a function that returns one.
        use_hf_tp_plan: use the plan that the model declares, if no plan is given.

    Raises:
        MissingPlanError: there is no plan; the message says why for each level.
        PlanError: a given plan cannot be read; ``use_hf_tp_plan`` with sequence parallel; or the model is parallelized already.
    """
    refuse_parallelized(model)
    if tp_shard_plan is not None:
        return read_plan(tp_shard_plan)
    if use_hf_tp_plan:
        if sequence_parallel:
            raise PlanError(
                "strategy.sequence_parallel",
                "use_hf_tp_plan=True: a model's own plan shards no sequence; legal is sequence_parallel=False",
            )
        return dict(get_hf_tp_shard_plan(model))
    spec = spec_of(model)
    options = ParallelOptions(sequence_parallel=sequence_parallel)
    draft = Draft(spec, inspect_model(spec, model), Layout().resolve(1), options)
    draft = replace(draft, units=choose_units(draft).value)
    chosen = choose_styles(draft)
    (level, styles, _), problems = chosen.value, Problems(chosen.problems)
    if level == "derived" and (counting := [module for pair in draft.pairs.found for module, *_ in pair.counts]):
        raise MissingPlanError(
            "tp.no_styles",
            f"tp: there are no styles; derived: {generalize(counting[0])!r} counts what is sliced, which styles do not change; "
            "legal are fsdp2_strategy_parallelize without a plan, and tp_shard_plan",
        )
    known = spec.structure
    if sequence_parallel and (known is None or known.no_sequence_parallel or not known.regions or known.stream_traced):
        why = (known and known.no_sequence_parallel) or "the inside of its layers is unknown"
        if known and known.stream_traced and not known.no_sequence_parallel:
            why = "experts take slices of its residual stream, which no style of torch gathers"
        problems.append(
            coded(why, "strategy.sequence_parallel").within("sequence_parallel=True: ", "; the legal value is False")
        )
    draft.refuse(problems)
    plan = _as_torch(spec, styles, sequence_parallel)
    if sequence_parallel:
        plan.update((pattern, SequenceParallel()) for pattern in _norms(spec, model) if pattern not in plan)
    return plan


def _as_torch(spec: ParallelSpec, styles: Mapping[str, str], sequence_parallel: bool) -> PlanOfStyles:
    sharded = Shard(1)
    head = spec.structure.head if spec.structure else None
    torch_styles: PlanOfStyles = {}
    for pattern, style in styles.items():
        if (pattern == head or pattern.split(".")[-1] == "lm_head") and style in HEAD:
            entry = sharded if sequence_parallel else Replicate()
            torch_styles[pattern] = ColwiseParallel(input_layouts=entry, output_layouts=Shard(-1), use_local_output=False)
        elif sequence_parallel and style == "rowwise":
            torch_styles[pattern] = RowwiseParallel(output_layouts=sharded)
        elif sequence_parallel and style == "embedding_rowwise":
            torch_styles[pattern] = RowwiseParallel(input_layouts=Replicate(), output_layouts=sharded)
        else:
            try:
                torch_styles[pattern] = translate_to_torch_parallel_style(style)
            except ValueError:
                torch_styles[pattern] = style
    return torch_styles


def _norms(spec: ParallelSpec, model: nn.Module) -> list[str]:
    """Return patterns of the modules on the residual stream that have parameters."""
    assert spec.structure is not None
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
    regions = [name for pattern in spec.structure.regions for name in match_names(pattern, modules)]
    layers = [name for pattern in spec.layers for name in match_names(pattern, modules)]
    between = [generalize(name) for name in names if within(name, layers) and not within(name, regions)]
    return list(dict.fromkeys([*between, *spec.structure.tokenwise]))


def validate_tp_mesh(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Check that the heads of a model can be divided over the ranks of a mesh.

    Raises:
        LayoutError: numbers of heads that cannot be divided, with the legal sizes.
    """
    problems = model_sizes(spec_of(model), model).problems(Layout(dp_shard=1, tp=tp_mesh.size()))
    if problems:
        raise LayoutError(problems)


def import_class_from_path(name: str) -> Any:
    """Return the class (or function) at a dotted path, such as ``torch.optim.AdamW``.

    Raises:
        ImportError: there is nothing at this path.
    """
    return import_object(name)


def import_classes_from_paths(class_paths: list[str]) -> list[Any]:
    """Return the classes at several paths, in their order. A path that cannot be imported is left out, with a warning."""
    classes = []
    for path in class_paths:
        try:
            classes.append(import_class_from_path(path))
        except Exception as error:  # errors of the user's module
            warnings.warn(f"{path!r}: left out, because it cannot be imported: {described(error)}", stacklevel=2)
    return classes
