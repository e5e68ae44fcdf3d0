"""How a plan slices a model over `tp`: where the styles come from, and whether every rank gets a slice.

Styles are named as in transformers (`base_model_tp_plan`). They come from the first of four levels that has any: given by
the user, written for the family, declared by the model, or derived from a trace of the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.errors import PlanError, Problems, Refusal
from meshwright.layout import divisors, undivided
from meshwright.plan.axes.tensor.assignment import assign_styles
from meshwright.plan.axes.tensor.channels import (
    mixer_styles,
    pairs_beside,
    problems_of_mixers,
    shared_mixers,
    slice_mixers,
    whole_mixers,
)
from meshwright.plan.axes.tensor.given_styles import load_styles
from meshwright.plan.axes.tensor.modules import module_rows
from meshwright.plan.axes.tensor.move_kinds import Bias, Kernel, Move
from meshwright.plan.axes.tensor.sliced_model import SlicedModel
from meshwright.plan.axes.tensor.style_checks import misfits_of_norms
from meshwright.plan.axes.tensor.styles import (
    FIRST,
    INNER,
    NORM,
    PARTIAL,
    STYLES,
    styles_of_norms,
    styles_of_parameters,
    tp_dim,
)
from meshwright.plan.draft import Draft, Found, TensorParallel
from meshwright.plan.given import widths
from meshwright.plan.given.names import generalize, match_names, within
from meshwright.plan.given.sequence.mixer_shares import MOST_TRIED
from meshwright.plan.given.sliceable_pairs import Pair
from meshwright.plan.given.spec import Structure
from meshwright.plan.given.traces import RegionFacts
from meshwright.plan.result.program import Action, Assign, Compute, Slice
from meshwright.plan.result.sharding_plan import ShardingPlan, TensorParallelRow

__all__ = ["choose_styles", "resolve_tensor_parallel", "tensor_parallel_actions"]


def resolve_tensor_parallel(draft: Draft) -> Found[TensorParallel]:
    """Choose the styles, assign them to parameters and modules, and derive the moves."""
    options, structure, tp = draft.options, draft.structure, draft.layout.size("tp")
    if tp == 1:
        problems = Problems()
        for name, asked in (("sequence_parallel", options.sequence_parallel), ("loss_parallel", options.loss_parallel)):
            if asked:
                problems.add("tp.option", f"{name}=True: needs tensor parallelism, but tp is 1; the legal value is False")
        if options.tp_plan is not None:
            problems.add("tp.option", "tp_plan: needs tensor parallelism, but tp is 1; leave it out")
        # Check declared styles here too, so that errors show on a laptop and not first on a cluster.
        problems += styles_of_parameters("tp_styles", structure.styles or draft.spec.tp_styles, draft.parameters)[1]
        return Found(TensorParallel(), problems)
    chosen = choose_styles(draft)
    found = _carried_out(draft, chosen)
    if chosen.value[0] != "model" or not found.problems or {problem.code for problem in found.problems} - _INCOMPLETE:
        return found
    # A declared plan that leaves something out is no reason not to slice what a trace shows.
    why = ("model", f"its plan cannot be carried out: {found.problems[0]}")
    traced = _derived(draft)
    derived = _carried_out(draft, Found(_with_norms(draft, "derived", traced, [*chosen.value[2], why]))) if traced else found
    return found if derived.problems else derived


_INCOMPLETE = {"tp.style.missing", "tp.style.unknown"}
"""Codes of what may be wrong with the styles that a model declares: they leave a parameter out, or are not supported."""


def _carried_out(draft: Draft, chosen: Found["StyleChoice"]) -> Found[TensorParallel]:
    """Assign styles to parameters and modules, and derive the moves."""
    structure, tp = draft.structure, draft.layout.size("tp")
    (level, styles, passed_over), problems = chosen.value, Problems(chosen.problems)
    if level == "given" and draft.model.sizes.whole_heads:
        problems += draft.model.sizes.undivided_heads(tp)
    for pattern, style in styles.items():
        if style not in STYLES and style != "sequence_parallel":
            problems.add(
                "tp.style.unknown",
                f"tp={tp}: the style {style!r} of {pattern!r} is not supported; legal are {', '.join(STYLES)}",
            )
    assigned, found = assign_styles(draft, level, styles)
    problems += found
    if not (draft.problems or problems) and level != "derived":
        problems += misfits_of_norms(draft.pairs, assigned.modules, tp)
    normed = {name for pair in draft.pairs.found if pair.norms for name in pair.firsts}
    mixers = shared_mixers(draft)
    for name, operator in draft.pairs.mixed.items() if not (draft.problems or problems) and level != "derived" else ():
        style = assigned.modules.get(name, "")
        if style in FIRST and name not in normed and not within(name, mixers):
            problems.add(
                "tp.style.misfit",
                f"tp={tp}: {name!r} has the style {style}, but {operator} mixes its features, of which a rank has some; "
                "legal are colwise_gather_output and no style",
            )
    rows: dict[str, TensorParallelRow] = {}
    on_slices: tuple[str, ...] = ()
    adapter_styles: dict[str, str] = {}
    if not (draft.problems or problems):
        known, facts = _structure(draft)
        model = SlicedModel(draft, known, assigned, facts)
        rows, adapter_styles, found = module_rows(model, traced=level == "derived")
        problems += found
        on_slices = model.on_slices
    problems += [undivided("tp", tp, count, noun) for noun, count in structure.divisible if count % tp]
    parameter_styles = {**assigned.parameters, **adapter_styles}
    problems += _slice_problems(draft, parameter_styles)
    stream = widths.stream_width(draft)
    measured = tuple(replace(row, features=widths.module_widths(draft, row.module, stream)) for row in rows.values())
    left_whole = assigned.left_whole.items()
    sliced = TensorParallel(level, (*passed_over, *left_whole), measured, parameter_styles, draft.pairs, on_slices)
    return Found(sliced, problems)


def _structure(draft: Draft) -> tuple[Structure, RegionFacts | None]:
    """Return the inside of the layers: if sequence parallel needs more than the spec says of regions, those of a trace.

    Returns:
        It, and what the trace found; ``None``: the spec names the regions, or none are needed.
    """
    known = draft.structure
    lacking = not known.regions or known.stream_traced
    asked = draft.options.sequence_parallel and lacking and not known.no_sequence_parallel
    found = draft.model.traces.regions(draft.layers) if asked and draft.layers else None
    if found is None:
        return known, None
    problem = found.problem or (found.problem_in_stages if draft.layout.size("pp") > 1 else "")
    return replace(known, regions=found.regions, tokenwise=found.tokenwise, no_sequence_parallel=problem), found


def tensor_parallel_actions(draft: Draft, plan: ShardingPlan) -> Iterator[Action]:
    """Yield the actions that slice the weights over `tp` and let their modules compute with the slices."""
    for parameter in plan.parameters:
        if "tp" in dict(parameter.placements):
            cut = tp_dim(parameter.tp_style, parameter.shape)
            assert cut is not None
            yield Slice((parameter.name, *parameter.aliases), "tp", cut, STYLES[parameter.tp_style or ""].pieces)
    yield from slice_mixers(draft)
    for row in plan.tensor_parallel:
        if row.style == "region" and row.parts:
            yield from _own_heads(draft, row.module, *row.parts)
        if row.style not in INNER:
            yield _compute(draft, row)
    if plan.tp_level == "derived":
        yield from _own_counts(pairs_beside(draft), plan)


_KERNELS = {
    "embedding_rowwise": Kernel.VOCABULARY_ROWS,
    "grouped_colwise": Kernel.ONE_HEAD,
    "dora_rows": Kernel.DORA_ROWS,
    "dora_columns": Kernel.DORA_COLUMNS,
    NORM: Kernel.MEANS,
}


def _compute(draft: Draft, row: TensorParallelRow) -> Compute:
    module = draft.model.modules[row.module]
    kernel = _KERNELS.get(row.style, Kernel.OWN)
    adapted = draft.model.modules.get(f"{row.module}.base_layer", module)
    weight = adapted.parameters.get("weight", (0,))
    bias = Bias.EACH
    if row.style in PARTIAL and "bias" in module.parameters:  # the bias is to be added once, not by each rank
        bias = Bias.LATE if row.exit is not Move.NONE else Bias.FIRST
    moves_one = row.entry not in (Move.NONE, Move.ENTER)
    widens = row.exit in (Move.GATHER_FEATURES, Move.VOCABULARY)
    return Compute(
        row,
        kernel,
        argument=module.hidden if moves_one else None,
        parts=() if row.style == "region" else row.parts,
        features=weight[1 if row.style == "embedding_colwise" else 0] if widens else 0,
        bias=bias,
        padding=module.padding if kernel is Kernel.VOCABULARY_ROWS else None,
    )


def _own_heads(draft: Draft, name: str, heads: int, kv_heads: int) -> Iterator[Assign]:
    """Give an attention that reads head counts, and not shapes, the head counts of its rank."""
    module = draft.model.modules[name]
    known = {
        "num_attention_heads": heads,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_key_value_groups": heads // kv_heads,
    }
    values = [(own, value) for own, value in known.items() if own in module.counts]
    if module.has_config:  # the whole model shares it: the module gets its own copy
        values += [("config.num_attention_heads", heads), ("config.num_key_value_heads", kv_heads)]
    yield Assign(name, tuple(values), ("config",) if module.has_config else ())


def _own_counts(pairs: Sequence[Pair], plan: ShardingPlan) -> Iterator[Assign]:
    """Give modules that count what derived styles slice the numbers of their rank."""
    sliced, tp = {row.module for row in plan.tensor_parallel}, plan.layout.size("tp")
    for pair in pairs:
        for module in dict.fromkeys(module for module, _, _ in pair.counts if pair.second in sliced):
            yield Assign(module, tuple((name, value // tp) for of, name, value in pair.counts if of == module))


StyleChoice = tuple[str, Mapping[str, str], list[tuple[str, str]]]
"""A level, its styles by pattern, and (level, reason) for each level above it."""


def choose_styles(draft: Draft) -> Found[StyleChoice]:
    """Return the first level that has styles, its styles, and (level, reason) for each level above it.

    Raises:
        PlanError: a given plan cannot be read.
    """
    level, styles, passed_over = _first_level(draft)
    if not level:
        text = "; ".join(f"{name}: {why}" for name, why in passed_over)
        _, legal = whole_mixers(draft)
        values = (
            "legal value of tp is 1"
            if len(legal) < 2
            else f"legal values of tp up to {MOST_TRIED} are {', '.join(map(str, legal))}"
        )
        code = "tp.no_styles" if len(legal) < 2 else "tp.heads"
        problem = Refusal(code, f"tp: there are no styles; {text}; the {values}")
        return Found(("", {}, []), [problem])
    if level == "given":
        return Found((level, styles, passed_over))
    return Found(_with_norms(draft, level, styles, passed_over))


def _with_norms(draft: Draft, level: str, styles: Mapping[str, str], passed_over: list[tuple[str, str]]) -> "StyleChoice":
    """Return a choice with the styles of norms that it leaves out, and of mixers, none of whose matrices it names."""
    styles = {**styles, **_patterns(draft, mixer_styles(draft))}
    whole = {generalize(name): f"whole on each rank: {why}" for name, why in problems_of_mixers(draft).items()}
    passed_over = [*passed_over, *whole.items()]
    named: dict[str, str] = {}
    for pattern, style in styles.items():
        for name in match_names(pattern, draft.model.modules):
            named.setdefault(name, style)
    norm_styles = _patterns(draft, styles_of_norms(draft.pairs.found, named, draft.model))
    return level, {**styles, **norm_styles}, passed_over


def _patterns(draft: Draft, styles: dict[str, str]) -> dict[str, str]:
    """Return patterns of names instead of names, if they match the same."""
    patterns = {generalize(name): style for name, style in styles.items()}
    names = (*draft.model.modules, *draft.model.parameter_of)
    matched = ((name, style) for item, style in patterns.items() for name in match_names(item, names))
    return patterns if all(styles.get(name) == style for name, style in matched) else styles


def _first_level(draft: Draft) -> StyleChoice:
    spec, options, declared = draft.spec, draft.options, draft.structure.styles
    passed_over: list[tuple[str, str]] = []
    if options.tp_plan is not None:
        try:
            return "given", load_styles(options.tp_plan, draft.model, options.sequence_parallel), passed_over
        except PlanError as error:
            draft.refuse(error.problems)
    passed_over.append(("given", "no tp_plan is set"))
    if declared:
        return "family", declared, passed_over
    passed_over.append(("family", f"none is written for {spec.family}"))
    if spec.tp_styles:
        return "model", _summed(draft, spec.tp_styles), passed_over
    passed_over.append(("model", f"{spec.family} declares no tp_styles (base_model_tp_plan of its config)"))
    if derived := _derived(draft):
        return "derived", derived, passed_over
    untraced = "the model is not traced (traces of its ParallelSpec)"
    unpaired = "no linear layer puts out features that enter another one without being mixed"
    passed_over.append(("derived", untraced if draft.traced_pairs is None else unpaired))
    if why := whole_mixers(draft)[0]:
        passed_over.append(("derived", why))
    return "", {}, passed_over


def _summed(draft: Draft, styles: Mapping[str, str]) -> dict[str, str]:
    """Return declared styles with ``moe_tp_experts`` in place of ``all_reduce``, for modules whose own parameters are sliced.

    transformers sums what such a module puts out, and leaves the gradient of its input to the caller; ours sums both.
    """
    model = draft.model
    parameters, _ = styles_of_parameters("tp_styles", styles, model.parameters)

    def sliced(name: str) -> bool:
        shapes = model.modules[name].parameters
        given = {own: parameters.get(model.parameter_of[f"{name}.{own}"].name) for own in shapes}
        return bool(shapes) and all(tp_dim(given[own], shape) is not None for own, shape in shapes.items())

    summed = {
        pattern: "moe_tp_experts"
        for pattern, style in styles.items()
        if style == "all_reduce" and all(map(sliced, match_names(pattern, model.modules)))
    }
    return {**styles, **summed}


def _derived(draft: Draft) -> dict[str, str]:
    """Return the styles of the pairs that a trace of the model found; the rest of a layer is computed whole by each rank."""
    styles: dict[str, str] = {}
    for pair in pairs_beside(draft):
        if pair.blocks % draft.layout.size("tp") == 0:
            form = "_transposed" if draft.model.modules[pair.second].transposed else ""
            styles |= {**dict.fromkeys(pair.firsts, f"colwise{form}"), pair.second: f"rowwise{form}"}
            styles |= {name: NORM for name, _ in pair.norms}
    styles |= mixer_styles(draft)  # they alone are enough
    if styles:  # the vocabulary alone would not be worth it
        styles |= dict(zip(draft.pairs.vocabulary, ("embedding_rowwise", "colwise_gather_output"), strict=False))
    return _patterns(draft, styles)


def _slice_problems(draft: Draft, styles: Mapping[str, str]) -> Problems:
    """Return a problem for each parameter whose slices are empty or not even."""
    tp, problems = draft.layout.size("tp"), Problems()
    for parameter in draft.parameters:
        style = styles.get(parameter.name)
        if (cut := tp_dim(style, parameter.shape)) is None:
            continue
        size, pieces = parameter.shape[cut], STYLES[style or ""].pieces
        if size % pieces or _empty_slices(size // pieces, tp):
            problems.add("tp.entries", f"tp={tp}: {parameter.name!r} has {size} entries to slice, too few for each rank")
        if pieces > 1 and (size // pieces) % tp:
            problems.add(
                "tp.packed",
                f"tp={tp}: {parameter.name!r} packs {pieces} matrices of {size // pieces} rows, which tp must divide; legal "
                f"are {', '.join(map(str, divisors(size // pieces)))}",
            )
        if pieces == 1 or cut:
            continue
        shards = draft.layout.size("dp_shard_cp")  # read here, so that plans of other models need not be made again for it
        if shards > 1 and (len(parameter.shape) == 1 or parameter.shape[1] % shards):
            reason = f"its {parameter.shape[1]} columns, not evenly" if len(parameter.shape) > 1 else "no other dimension"
            problems.add(
                "tp.packed",
                f"dp_shard={shards}: {parameter.name!r} packs matrices along its rows, which tp slices, so FSDP can shard "
                f"{reason}",
            )
    return problems


def _empty_slices(size: int, ranks: int) -> bool:
    """Return whether slices of equal width leave a rank with nothing."""
    return -(-size // ranks) * (ranks - 1) >= size
