"""How a plan shares a model over `tp`: whose styles are taken, and that each rank gets something to hold.

Styles are in the words of transformers (`base_model_tp_plan`). They come from the first of four levels that has any: given by
the user, written for the family, declared by the model, or, for a model whose layers are those of a Llama, generic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from meshwright.layout import Layout, ModelSizes, divisors
from meshwright.plan.given_styles import load_styles
from meshwright.plan.options import ParallelOptions
from meshwright.plan.sharding_plan import TensorParallelRow
from meshwright.plan.sliced_code import counts_heads
from meshwright.plan.spec import ParallelSpec, generalize, match_names
from meshwright.plan.tp_rows import Rows
from meshwright.plan.tp_styles import STYLES, Claim, styles_of_parameters, tp_dim

__all__ = ["TensorParallelChoice", "choose_styles", "resolve_tensor_parallel"]


GENERIC = {
    "**.self_attn.q_proj": "colwise", "**.self_attn.k_proj": "colwise", "**.self_attn.v_proj": "colwise",
    "**.self_attn.o_proj": "rowwise", "**.mlp.gate_proj": "colwise", "**.mlp.up_proj": "colwise", "**.mlp.down_proj": "rowwise",
}  # fmt: skip
"""For layers that have these modules in their attention and MLP and no others with parameters."""


@dataclass
class TensorParallelChoice:
    """What was resolved.

    Attributes:
        level: whose styles were taken: ``given``, ``family``, ``model`` or ``generic``; empty where ``tp`` is 1.
        passed_over: the levels above it, each with the reason that it was not taken.
        styles: of each parameter that has one.
        rows: of each module that computes with slices or moves something.
    """

    level: str = ""
    passed_over: tuple[tuple[str, str], ...] = ()
    styles: dict[str, str] = field(default_factory=dict)
    rows: tuple[TensorParallelRow, ...] = ()


def resolve_tensor_parallel(
    spec: ParallelSpec,
    model: nn.Module,
    layout: Layout,
    options: ParallelOptions,
    sizes: ModelSizes,
    claims: Sequence[Claim],
    problems: list[str],
) -> TensorParallelChoice:
    """Choose the styles, give them to parameters and modules, and derive what moves.

    Args:
        spec: declares styles and structure.
        model: to read names from.
        layout: resolved.
        options: ``tp_plan``, ``sequence_parallel`` and ``loss_parallel`` are read.
        sizes: heads of the model.
        claims: its parameters.
        problems: what is wrong is added to it.
    """
    tp = layout.size("tp")
    if tp == 1:
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(options, name):
                problems.append(f"{name}=True: is a matter of tensor parallel, and tp is 1; the legal value is False")
        if options.tp_plan is not None:
            problems.append("tp_plan: is a matter of tensor parallel, and tp is 1; leave it out")
        # What a family or a model declares is checked on the laptop, not first on the cluster.
        declared = spec.structure.styles if spec.structure else {}
        styles_of_parameters("tp_styles", declared or spec.tp_styles, claims, problems)
        return TensorParallelChoice()
    level, styles, passed_over = choose_styles(spec, model, options, problems)
    for pattern, style in styles.items():
        if style not in STYLES and style != "sequence_parallel":
            problems.append(f"tp={tp}: the style {style!r} of {pattern!r} is not carried out; legal are {', '.join(STYLES)}")
    where = "tp_plan" if level == "given" else "tp_styles"
    builder = Rows(spec, model, layout, options, sizes)
    builder.assign(where, styles, claims, problems)
    if not problems:
        builder.derive(claims, problems)
    for what, count in spec.structure.divisible if spec.structure else ():
        if count % tp:
            problems.append(f"tp={tp}: {count} {what} are divisible by {', '.join(map(str, divisors(count)))}")
    _check_slices(builder.of_parameters, claims, layout, problems)
    whole = tuple((name, f"takes the {statistic} of its features") for name, statistic in builder.left_whole.items())
    return TensorParallelChoice(level, (*passed_over, *whole), builder.of_parameters, builder.sorted_rows())


def choose_styles(
    spec: ParallelSpec, model: nn.Module, options: ParallelOptions, problems: list[str]
) -> tuple[str, Mapping[str, str], list[tuple[str, str]]]:
    """The first level that has styles, its styles, and why those above have not.

    Args:
        spec: what is declared.
        model: to read names from.
        options: ``tp_plan`` and ``sequence_parallel`` are read.
        problems: what is wrong is added to it.
    """
    passed_over: list[tuple[str, str]] = []
    if options.tp_plan is not None:
        return "given", load_styles(options.tp_plan, model, options.sequence_parallel, problems), passed_over
    passed_over.append(("given", "no tp_plan is set"))
    if spec.structure is not None and spec.structure.styles:
        return "family", spec.structure.styles, passed_over
    passed_over.append(("family", f"none is written for {spec.family}"))
    if spec.tp_styles:
        return "model", spec.tp_styles, passed_over
    passed_over.append(("model", f"{spec.family} declares no tp_styles (base_model_tp_plan of its config)"))
    unfit = _not_generic(spec, model)
    if not unfit:
        names = [name for name, _ in model.named_modules()]
        return "generic", {pattern: style for pattern, style in GENERIC.items() if match_names(pattern, names)}, passed_over
    passed_over.append(("generic", unfit))
    problems.append(
        "tp: there are no styles; " + "; ".join(f"{name}: {why}" for name, why in passed_over) + "; the legal value of tp is 1"
    )
    return "", {}, passed_over


def _not_generic(spec: ParallelSpec, model: nn.Module) -> str:
    """Why the generic styles do not fit a model; empty where they do."""
    expected = {"self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"}, "mlp": {"gate_proj", "up_proj", "down_proj"}}
    layers = [name for pattern in spec.layers for name in match_names(pattern, [name for name, _ in model.named_modules()])]
    for layer in layers:
        for part, matrices in expected.items():
            module = model.get_submodule(layer)
            if not hasattr(module, part):
                return f"{generalize(layer)} has no {part}, so it is not the layer of a Llama"
            found = {name.partition(".")[0] for name, _ in getattr(module, part).named_parameters()}
            if found != matrices:
                held, wanted = (", ".join(sorted(names)) for names in (found, matrices))
                return f"{generalize(layer)}.{part} holds {held}; a Llama's holds {wanted}"
        # A Llama's attention reads heads from shapes. One that knows their number would not see that it has fewer.
        if count := counts_heads(model.get_submodule(f"{layer}.self_attn")):
            return f"{generalize(layer)}.self_attn counts heads by itself ({count}), and would not see that it has fewer"
    return "" if layers else "there are no layers"


def _check_slices(styles: Mapping[str, str], claims: Sequence[Claim], layout: Layout, problems: list[str]) -> None:
    tp, shards = layout.size("tp"), layout.size("dp_shard_cp")
    for claim in claims:
        style = styles.get(claim.name)
        if (cut := tp_dim(style, claim.shape)) is None:
            continue
        size, pieces = claim.shape[cut], STYLES[style or ""].pieces
        if size % pieces or _empty_slices(size // pieces, tp):
            problems.append(f"tp={tp}: {claim.name!r} has {size} entries to slice, too few for each rank")
        if pieces > 1 and (size // pieces) % tp:
            problems.append(
                f"tp={tp}: {claim.name!r} holds {pieces} matrices of {size // pieces} rows; legal are "
                f"{', '.join(map(str, divisors(size // pieces)))}"
            )
        if pieces > 1 and cut == 0 and shards > 1 and (len(claim.shape) == 1 or claim.shape[1] % shards):
            what = f"its {claim.shape[1]} columns" if len(claim.shape) > 1 else "nothing else"
            problems.append(
                f"dp_shard={shards}: {claim.name!r} is packed along its rows, so FSDP shards {what}, and not evenly"
            )


def _empty_slices(size: int, ranks: int) -> bool:
    """Whether slices of one width leave a rank with nothing."""
    return -(-size // ranks) * (ranks - 1) >= size
