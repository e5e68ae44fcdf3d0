"""The functions of NeMo AutoModel's parallelizer, under the same names."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from meshwright.distributed.class_names import class_name
from meshwright.distributed.data.fsdp_units import (
    ShardFunction,
    gathered,
    refuse_parallelized,
    shard_by,
    shard_unit,
)
from meshwright.errors import LayoutError, MissingPlanError, ModelError, PlanError, Problems, coded, described
from meshwright.layout import Layout
from meshwright.models._transformers_compat import tp_style_names
from meshwright.models.specs.registry import get_parallelization_strategy, spec_of
from meshwright.models.specs.strategy import check_depths, check_shard_function, name_of_function
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
    "_get_parallel_plan",
    "apply_fsdp2_sharding_recursively",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "get_lm_ac_layers",
    "import_class_from_path",
    "import_classes_from_paths",
    "translate_to_torch_parallel_style",
    "unshard_fsdp2_model",
    "validate_tp_mesh",
]


# -- sharding ----------------------------------------------------------------------------------------------------------------


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    tp_shard_plan: Mapping[str, ParallelStyle | str] | str | None = None,
    dp_replicate_mesh_name: str = "dp_replicate",
    dp_shard_cp_mesh_name: str = "dp_shard_cp",
    tp_mesh_name: str = "tp",
    **others: Any,
) -> nn.Module:
    """Parallelize a model over an existing mesh, with the strategy of its family.

    All arguments are those of :meth:`~meshwright.models.specs.strategy.ParallelizationStrategy.parallelize`; ``others`` are its
    keywords beyond those of the reference page.
    """
    # By name, as in NeMo AutoModel: a strategy of the user may have them in another order.
    return get_parallelization_strategy(model).parallelize(
        model=model,
        device_mesh=device_mesh,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        sequence_parallel=sequence_parallel,
        activation_checkpointing=activation_checkpointing,
        tp_shard_plan=tp_shard_plan,
        dp_replicate_mesh_name=dp_replicate_mesh_name,
        dp_shard_cp_mesh_name=dp_shard_cp_mesh_name,
        tp_mesh_name=tp_mesh_name,
        **others,
    )


def apply_fsdp2_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None = None,
    enable_fsdp2_prefetch: bool = False,
    fsdp2_backward_prefetch_depth: int = 2,
    fsdp2_forward_prefetch_depth: int = 1,
    reshard_after_forward: bool | None = None,
    fully_shard_fn: ShardFunction | None = None,
) -> None:
    """Make every entry of each ``ModuleList`` or ``ModuleDict`` an FSDP unit. Other parameters are left to the caller's root.

    What is inside an entry belongs to its unit, with its lists. A container inside a container is searched too, and is no unit.
    An entry that is the last of its container keeps its gathered parameters after forward, because backward starts there.

    Args:
        module: root of the search, changed in place.
        mesh: 1-D mesh (shard) or 2-D mesh (replicate, shard).
        mp_policy: dtypes; ``None``: bf16 compute, fp32 reduction.
        offload_policy: ``None``: no offload.
        enable_fsdp2_prefetch: let each unit start the all-gathers of the next ones of its container; otherwise FSDP2 decides.
        fsdp2_backward_prefetch_depth: how many, in backward; 0: FSDP2 decides.
        fsdp2_forward_prefetch_depth: how many, in forward; 0: FSDP2 decides.
        reshard_after_forward: if given, it holds for all units, including the last entry of each container.
        fully_shard_fn: makes a unit in place of torch's ``fully_shard``: ``fn(module, mesh=, mp_policy=, offload_policy=,
            reshard_after_forward=)``.

    Raises:
        PlanError: `fully_shard_fn` cannot be called so, or returns another module; or prefetching as chosen has no effect.
    """
    check_shard_function(fully_shard_fn)
    check_depths(bool(enable_fsdp2_prefetch), fsdp2_forward_prefetch_depth, fsdp2_backward_prefetch_depth)
    if enable_fsdp2_prefetch and not (fsdp2_forward_prefetch_depth or fsdp2_backward_prefetch_depth):
        raise PlanError(
            "fsdp.prefetch",
            "enable_fsdp2_prefetch=True: has no effect with both depths 0; legal are a depth of 1 or more, and "
            "enable_fsdp2_prefetch=False",
        )
    if enable_fsdp2_prefetch and reshard_after_forward is False:
        raise PlanError(
            "fsdp.prefetch",
            "enable_fsdp2_prefetch=True: has no effect with reshard_after_forward=False; legal with it is "
            "enable_fsdp2_prefetch=False",
        )
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = offload_policy or OffloadPolicy()
    depths = (fsdp2_backward_prefetch_depth, fsdp2_forward_prefetch_depth) if enable_fsdp2_prefetch else (0, 0)
    children = list(module.children())
    entries = [child for child in children if _is_container(module) and not _is_container(child)]
    for child in children:
        if child not in entries:
            apply_fsdp2_sharding_recursively(
                child,
                mesh,
                policy,
                offload,
                enable_fsdp2_prefetch,
                fsdp2_backward_prefetch_depth,
                fsdp2_forward_prefetch_depth,
                reshard_after_forward,
                fully_shard_fn,
            )
            continue
        reshard = child is not children[-1] if reshard_after_forward is None else reshard_after_forward
        if fully_shard_fn is None:
            shard_unit([child], mesh, policy, offload, reshard)
        else:
            shard_by(
                fully_shard_fn, name_of_function(fully_shard_fn), child, type(child).__name__, mesh, policy, offload, reshard
            )
    _chain([entry for entry in entries if isinstance(entry, FSDPModule)], *depths)


def _chain(units: list[FSDPModule], backward: int, forward: int) -> None:
    """Let each unit start the all-gathers of the next ones."""
    for index, unit in enumerate(units):
        if ahead := units[index + 1 : index + 1 + forward]:
            unit.set_modules_to_forward_prefetch(ahead)
        if behind := units[max(0, index - backward) : index][::-1]:
            unit.set_modules_to_backward_prefetch(behind)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def get_lm_ac_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model, in model order: the layers that activation checkpointing applies to.

    For a plain module, these are the entries of its lists whose entries are all of one class and have parameters.

    Raises:
        ModelError: the model does not declare its layers, or a plain module has no such lists.
        PlanError: the model is parallelized already.
    """
    refuse_parallelized(model)
    patterns = spec_of(model).layers
    if not patterns:
        raise ModelError(
            "model.layers",
            f"{class_name(model)}: has no layers, which are entries of one class in a ModuleList or ModuleDict; register a "
            "strategy that declares them (docs/adding-a-family.md)",
        )
    return [module for name, module in model.named_modules() if any(match_names(pattern, [name]) for pattern in patterns)]


def unshard_fsdp2_model(model: nn.Module) -> AbstractContextManager[nn.Module]:
    """Inside this context, every FSDP unit of the model is gathered; at its end all are resharded, also after an exception."""
    return gathered(model)


# -- tensor parallel plans ---------------------------------------------------------------------------------------------------

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
    if sequence_parallel and (spec.structure is None or spec.structure.no_sequence_parallel or not spec.structure.regions):
        why = (spec.structure and spec.structure.no_sequence_parallel) or "the inside of its layers is unknown"
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


# -- names -------------------------------------------------------------------------------------------------------------------


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
