"""The rows of a matrix with an adapter under tensor parallel: the moves of the matrix are placed around both.

The small matrix that has the dimension which the style slices is sliced too, and the other one is whole on each rank, with its
gradient summed. DoRA adds trained norms of the rows of W + s B A: slices of them where a rank has whole rows, and whole ones
where it has some columns.
"""

from collections.abc import Mapping

from meshwright.errors import Problems, Refusal
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.styles import DERIVED, STYLES, tp_dim
from meshwright.plan.given.inspection import Inspection
from meshwright.plan.result.sharding_plan import TensorParallelRow

__all__ = ["adapted_rows", "small_of_experts", "styles_of_experts"]

MAGNITUDE = "lora_magnitude_vector"
"""Name of the norms of DoRA."""

DORA = {"colwise", "colwise_gather_output", "rowwise"}
"""Styles of matrices that may have them."""


def adapted_rows(
    model: Inspection, tp: int, name: str, style: str, entry: Move, exit_: Move, parts: tuple[int, ...]
) -> tuple[list[TensorParallelRow], dict[str, str], Problems]:
    """Return the rows of a wrapped matrix, the styles of the adapter's parameters, and what is not supported.

    Args:
        model: the model.
        tp: number of ranks.
        name: the module that peft put around the matrix.
        style: style of the matrix.
        entry: move of its input.
        exit_: move of its output.
        parts: see :class:`~meshwright.plan.result.sharding_plan.TensorParallelRow`.
    """
    base, features = f"{name}.base_layer", model.modules[name].unheld
    if model.modules[base].embedding and MAGNITUDE not in features:
        # The small matrices are whole on each rank, which adds their rows to those of the embedding after its exit.
        return [TensorParallelRow(base, style, entry, exit_)], {}, Problems()
    own = tuple(model.modules[base].parameters)
    with_bias = style == "rowwise" and "bias" in own
    problems = Problems(
        Refusal("tp.adapter", f"tp={tp}: {name!r} has {feature}, which is not supported inside of tensor parallel layers")
        for feature in features
        if feature != MAGNITUDE
    )
    if MAGNITUDE in features and (style not in DORA or with_bias):
        problems.add(
            "tp.adapter",
            f"tp={tp}: {name!r} has dora, and its style is {style}{' with a bias' if with_bias else ''}; legal with dora are "
            f"{', '.join(sorted(DORA))} (rowwise without a bias), or kind: lora",
        )
    grouped, rows_sliced = style == "grouped_colwise", (STYLES.get(style) or DERIVED[style]).dim != -1
    inner = "colwise" if style == "fused_colwise" else style
    rows = [TensorParallelRow(name, "adapted", entry, exit_, parts=parts if style == "fused_colwise" else ())]
    parts = parts if grouped else ()
    bias = ("bias",) if not rows_sliced and "bias" in own else ()
    rows.append(TensorParallelRow(base, inner, sums=own if grouped else bias, parts=parts))
    parameter_styles: dict[str, str] = {}

    def slice_of(child: str) -> None:
        parameter_styles.update((f"{child}.{item}", inner) for item in model.modules[child].parameters)

    for which in ("lora_A", "lora_B"):
        for child in model.children(f"{name}.{which}"):
            child_parameters = tuple(model.modules[child].parameters)
            if (which == "lora_B") == rows_sliced:
                rows.append(TensorParallelRow(child, inner, sums=child_parameters if grouped else (), parts=parts))
                slice_of(child)
            else:
                whole = "replicated_with_grad_allreduce" if rows_sliced else "whole_on_parts"
                rows.append(TensorParallelRow(child, whole, sums=child_parameters))
    for child in model.children(f"{name}.{MAGNITUDE}") if MAGNITUDE in features else ():
        rows.append(
            TensorParallelRow(child, "dora_rows" if rows_sliced else "dora_columns", sums=() if rows_sliced else ("weight",))
        )
        if rows_sliced:
            slice_of(child)
    return rows, parameter_styles, problems


def small_of_experts(model: Inspection, name: str) -> tuple[str, ...]:
    """Return the names of the parameters of adapters that are in a module of experts itself: ``<weight>_lora_A`` and ``B``."""
    return tuple(own for own in model.modules[name].parameters if own.endswith(("_lora_A", "_lora_B")))


def styles_of_experts(model: Inspection, name: str, parameter_styles: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of the adapters of experts that are sliced: A [experts, rank, in] and B [experts, out, rank].

    Args:
        model: the model.
        name: the module of experts.
        parameter_styles: style of each parameter that has one, by its first name.
    """
    styles = {}
    for own in small_of_experts(model, name):
        weight, is_a = own[: -len("_lora_A")], own.endswith("_lora_A")
        style = parameter_styles.get(model.parameter_of[f"{name}.{weight}"].name)
        dim = tp_dim(style, model.modules[name].parameters[weight])
        if style is None or dim is None:
            continue
        rows_sliced = (dim == 1) != model.modules[name].transposed
        if rows_sliced != is_a:
            packed = "packed_" if STYLES[style].pieces > 1 else ""
            styles[model.parameter_of[f"{name}.{own}"].name] = packed + ("colwise" if rows_sliced else "rowwise")
    return styles
