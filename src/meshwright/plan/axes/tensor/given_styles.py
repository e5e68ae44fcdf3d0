"""A tensor parallel plan that the user gives: a dict, or an import path of a dict or of a function that returns one."""

import importlib
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MissingPlanError, PlanError, Problems
from meshwright.plan.axes.tensor.styles import HEAD
from meshwright.plan.given.inspection import Inspection
from meshwright.plan.given.names import match_names
from meshwright.plan.given.spec import ParallelSpec

__all__ = [
    "declared_styles",
    "import_object",
    "leaves_logits_sharded",
    "load_styles",
    "read_plan",
    "shards_sequence",
    "style_name",
]


def import_object(path: str) -> Any:
    """Return the object at a dotted path, such as ``torch.optim.AdamW`` or ``my_package.plans.STYLES``.

    Raises:
        ImportError: there is no module of that name, or the module has nothing of that name.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            target: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue  # a shorter path may be a module that has the rest as attributes
            raise
        for part in parts[cut:]:
            if not hasattr(target, part):
                raise ImportError(f"{path!r}: {name} has no {'.'.join(parts[cut:])}")
            target = getattr(target, part)
        return target
    raise ImportError(f"{path!r}: no such module; write package.module.name")


def read_plan(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return a given plan as patterns to styles, as they were written.

    Args:
        given: pattern of module names to style (a name, or a ``ParallelStyle`` of torch), or the import path of such a dict or
            of a function without arguments that returns one.

    Raises:
        PlanError: it is none of these.
    """
    plan: Any = given
    if isinstance(given, str):
        try:
            plan = import_object(given)
            plan = plan() if callable(plan) else plan
        except Exception as error:
            raise PlanError(
                "tp.plan",
                f"tp_plan={given!r}: cannot be imported ({error}); legal is the import path of a dict or of a function",
            ) from error
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan) or not plan:
        raise PlanError(
            "tp.plan",
            f"tp_plan={given!r}: is {type(plan).__name__}; legal is a dict of module patterns to styles, the import path of "
            "such a dict, or that of a function without arguments that returns one",
        )
    return dict(plan)


def load_styles(given: Mapping[str, Any] | str, model: Inspection, sequence_parallel: bool) -> dict[str, str]:
    """Return a given plan as patterns to style names.

    Args:
        given: see :func:`read_plan`.
        model: facts of the model whose modules the patterns name.
        sequence_parallel: whether styles may refer to a sharded sequence.

    Raises:
        PlanError: everything that is wrong with the plan.
    """
    styles, problems = {}, Problems()
    for pattern, style in read_plan(given).items():
        matched = match_names(pattern, model.modules)
        try:
            styles[pattern] = style_name(style, is_embedding=any(model.modules[name].embedding for name in matched))
            if _speaks_of_sequence(style) and not sequence_parallel:
                raise PlanError("tp.plan", "the style refers to a sharded sequence; set sequence_parallel=True")
        except PlanError as error:
            problems.extend(problem.within(f"tp_plan[{pattern!r}]: ") for problem in error.problems)
    if problems:
        raise PlanError(problems)
    return styles


def declared_styles(spec: ParallelSpec) -> dict[str, str]:
    """Return the styles that a model of transformers declares; its output head, if known, leaves its logits sharded.

    Raises:
        MissingPlanError: it declares none.
    """
    if not spec.tp_styles:
        raise MissingPlanError(
            "tp.no_styles", f"{spec.family}: declares no tensor parallel plan (base_model_tp_plan of its config)"
        )
    head = spec.structure.head if spec.structure else None
    return {pattern: "colwise" if pattern == head and style in HEAD else style for pattern, style in spec.tp_styles.items()}


def shards_sequence(given: Mapping[str, Any] | str) -> bool:
    """Return whether a style of a given plan refers to a sharded sequence.

    Raises:
        PlanError: see :func:`read_plan`.
    """
    return any(_speaks_of_sequence(style) for style in read_plan(given).values())


def leaves_logits_sharded(spec: ParallelSpec, given: Mapping[str, Any] | str, model: Inspection) -> bool:
    """Return whether a given plan lets the output head leave its logits sharded over the vocabulary."""
    head = spec.structure.head if spec.structure else None
    try:
        styles = load_styles(given, model, sequence_parallel=True)
    except PlanError:  # the resolver reports it
        return False
    return (
        head is not None and next((style for pattern, style in styles.items() if match_names(pattern, [head])), "") == "colwise"
    )


def style_name(style: Any, *, is_embedding: bool = False) -> str:
    """Return the name of a style, which may be a ``ParallelStyle`` of torch.

    If a style of torch shards the sequence (``Shard(1)``), the name is that of the style that does not: the redistribution of
    the sequence is derived for the whole layer.

    Raises:
        PlanError: a style of torch that has no name here.
    """
    if isinstance(style, str):
        return style
    from torch.distributed.tensor import Placement, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def at(layouts: Any) -> Placement | None:
        return layouts[0] if isinstance(layouts, tuple) else layouts

    if isinstance(style, SequenceParallel):
        return "sequence_parallel"
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        entry, exit_ = at(style.input_layouts), at(style.output_layouts)
        colwise = isinstance(style, ColwiseParallel)
        if is_embedding and isinstance(entry, Replicate) and isinstance(exit_, Replicate | Shard):
            return "embedding_colwise" if colwise else "embedding_rowwise"
        names = {
            (True, "whole", "features"): "colwise",
            (True, "whole", "whole"): "colwise_gather_output",
            (False, "features", "whole"): "rowwise",
            (False, "whole", "whole"): "rowwise_split_input",
        }
        if name := names.get((colwise, _kept(entry), _kept(exit_))):
            return name
    raise PlanError(
        "tp.style.unknown",
        f"{style!r} is not supported; legal are names of styles, and ColwiseParallel, RowwiseParallel and SequenceParallel of "
        "torch on hidden states that are whole or split over their last dimension",
    )


def _kept(placement: Any) -> str:
    """Return how a tensor [batch, sequence, features] is placed; a sharded sequence counts as whole."""
    from torch.distributed.tensor import Replicate, Shard

    if isinstance(placement, Replicate) or placement == Shard(1):
        return "whole"
    return "features" if placement in (Shard(-1), Shard(2)) else "otherwise"


def _speaks_of_sequence(style: Any) -> bool:
    if isinstance(style, str):
        return style == "sequence_parallel"
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import SequenceParallel

    layouts = [getattr(style, name, None) for name in ("input_layouts", "output_layouts")]
    flat = [item for layout in layouts for item in (layout if isinstance(layout, tuple) else (layout,))]
    return isinstance(style, SequenceParallel) or Shard(1) in flat
