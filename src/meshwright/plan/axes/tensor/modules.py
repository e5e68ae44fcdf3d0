"""The row of each module under tensor parallel: how it computes, and how its input and output are redistributed.

If the spec declares the *regions* of a layer (its attention, its MLP), each split or partial region has one move at its entry,
in place of those of the matrices inside, and one at its exit, as in Megatron-LM. The exit move of a split region is in the row
of its rowwise matrix. In a whole region the matrices keep their own moves.

| region  | inside                                       | entry, exit      | entry, exit with sequence parallel        |
|---------|----------------------------------------------|------------------|-------------------------------------------|
| split   | heads or features, ended by a rowwise matrix | `enter`, `leave` | `gather_sequence`, `scatter_sequence`     |
| partial | experts: the output is a sum over ranks      | `enter`, `leave` | `gather_sequence`, `scatter_sequence`     |
| whole   | every rank computes the same                 |                  | `gather_sequence_whole`, `split_sequence` |

A router and experts that a layer calls itself are in no region. Under sequence parallel the router chooses for the tokens of a
slice, so each of its parameters has a part of its gradient on each rank. Sliced experts take the tokens of all slices with
their routing (`gather_tokens`, `scatter_sequence`); experts that `ep` distributes take those of the slice, which the rank
sends.

Sequence parallel (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): between regions, each rank has its own slice of
the sequence, so that norms and residuals are computed, and their activations stored, only once.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshwright.errors import Problems, Refusal, coded
from meshwright.plan.axes.tensor.channels import mixer_rows, packed_sizes, shared_mixers
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.sliced_model import SlicedModel
from meshwright.plan.axes.tensor.spans_of_layers import misfits, rows_of_span
from meshwright.plan.axes.tensor.style_checks import slices_nobody_computes, style_problems
from meshwright.plan.axes.tensor.styles import DERIVED, HEAD, NORM, PARTIAL, STYLES
from meshwright.plan.axes.tensor.with_adapters import adapted_rows, small_of_experts, styles_of_experts
from meshwright.plan.given.names import holder_of, match_names, within
from meshwright.plan.result.sharding_plan import TensorParallelRow

__all__ = ["module_rows"]

Rows = dict[str, TensorParallelRow]
"""The rows of modules, by name."""


def module_rows(model: SlicedModel, *, traced: bool) -> tuple[Rows, dict[str, str], Problems]:
    """Derive all rows.

    Args:
        model: the model and its styles.
        traced: whether a trace of the model showed that its styles are right.

    Returns:
        The rows in model order; the styles of the parameters of adapters, by first name; and what is wrong.
    """
    facts, styles = model.draft.model, model.styles
    if problems := Problems([*(_sequence_problems(model) if model.sequence else ()), *_head_problems(model)]):
        return {}, {}, problems
    if not traced:
        mixers = shared_mixers(model.draft)  # they have been tried
        named, own, declared = (
            {name: style for name, style in known.items() if not within(name, mixers)}
            for known in (styles.modules, styles.parameters, styles.declared)
        )
        checked = named, own, declared, facts.adapters
        problems += style_problems(facts, model.layers, model.structure.head, *checked)
    if problems:
        return {}, {}, problems
    rows, problems = _region_rows(model)
    for row in mixer_rows(model.draft):
        around = rows.get(row.module, row)
        rows[row.module] = replace(around, sums=tuple(dict.fromkeys((*around.sums, *row.sums))))
    parameter_styles: dict[str, str] = {}
    for name, style in styles.modules.items():
        sliced_anyway = style == "local_params" and name in rows  # a region computes with its slices
        if style not in ("replicate", "sequence_parallel") and not sliced_anyway:
            style_rows, adapter_styles, found = _style_rows(model, name, style)
            rows |= {row.module: row for row in style_rows}
            parameter_styles |= adapter_styles
            problems += found
    if model.sequence:
        sequence_rows, found = _sequence_rows(model, rows)
        rows |= sequence_rows
        problems += found
    for name, style in styles.modules.items():
        if style == "sequence_parallel" and (name not in rows or rows[name].style != style):
            problems.append(_misfit(name, style, f"is not on the residual stream of {model.draft.spec.family}"))
    problems += slices_nobody_computes(rows, {**styles.parameters, **parameter_styles}, facts.parameters)
    return {name: rows[name] for name in facts.modules if name in rows}, parameter_styles, problems


def _misfit(name: str, style: str, why: str) -> Refusal:
    return Refusal("tp.style.misfit", f"tp_plan: {name!r} has the style {style}, but {why}")


def _sequence_problems(model: SlicedModel) -> Iterable[Refusal]:
    family, structure = model.draft.spec.family, model.structure
    if structure.no_sequence_parallel:
        why = coded(structure.no_sequence_parallel, "sp.module")
    elif not model.traced and (not structure.regions or not model.draft.matched(structure.tokenwise)):
        text = f"the spec of {family} does not say which modules need the whole sequence (ParallelSpec.structure)"
        why = Refusal("sp.structure", text)
    elif any(len({holder_of(name) for name in stretch.layers}) != 1 for stretch in model.stretches):
        why = Refusal("sp.stacks", f"{family} has more than one stack of layers")
    elif whole := [name for name in model.on_slices if not model.takes_slices(name)]:
        why = Refusal("sp.module", f"{whole[0]!r} takes slices of the stream, and neither tp slices it nor ep distributes it")
    else:
        yield from misfits(model.spans, model.styles.modules)
        return
    yield why.within("sequence_parallel=True: ", "; the legal value is False")


def _head_problems(model: SlicedModel) -> Iterable[Refusal]:
    head = model.structure.head
    if model.draft.options.loss_parallel and not model.logits_can_stay_sharded:
        style = model.styles.modules.get(head or "", "none")
        yield Refusal(
            "tp.loss_parallel",
            f"loss_parallel=True: the style of the output head {head!r} is {style}; legal are one of "
            f"{', '.join(sorted(HEAD))}, or loss_parallel=False",
        )


# -- rows of regions ---------------------------------------------------------------------------------------------------------


_REGION_MOVES = {
    ("split", False): (Move.ENTER, Move.NONE),
    ("split", True): (Move.GATHER_SEQUENCE, Move.NONE),
    ("partial", False): (Move.ENTER, Move.LEAVE),
    ("partial", True): (Move.GATHER_SEQUENCE, Move.SCATTER_SEQUENCE),
    ("whole", True): (Move.GATHER_SEQUENCE_WHOLE, Move.SPLIT_SEQUENCE),
}
"""Kind of a region, and whether ranks share the sequence, to the moves at its entry and its exit."""


def _region_rows(model: SlicedModel) -> tuple[Rows, Problems]:
    """Return the rows of regions, and of attentions in no split region whose ranks share key/value heads."""
    rows, problems, styles = Rows(), Problems(), model.styles.modules
    for region, kind in model.regions.items():
        if (kind, model.sequence) not in _REGION_MOVES:
            continue
        entry, exit_ = _REGION_MOVES[kind, model.sequence]
        sums = model.own(region) if kind == "partial" else ()
        flat = model.traced is not None and region in model.traced.flat
        rows[region] = TensorParallelRow(region, "region", entry, exit_, sums, model.heads_of(region), flat=flat)
        for name in model.draft.model.inside(region) if kind == "partial" else ():
            if styles.get(name, "replicate") == "replicate" and not model.draft.model.in_adapter(name):
                problems += _problems_beside_experts(model, name)
                if sums := model.own(name):  # a router, where each rank has a partial sum of its gradient
                    rows[name] = TensorParallelRow(name, "router", exit=Move.COUNT_ONCE, sums=sums)
    for span, kind in model.spans.items():
        heads = model.heads_of(span.entries[0]) if kind == "split" else ()
        rows |= {row.module: row for row in rows_of_span(span, kind, styles, model.stream, heads)}
    for name, style in styles.items():
        holder = holder_of(name)
        if style == "grouped_colwise" and not model.region_around(name) and (heads := model.heads_of(holder)):
            rows[holder] = TensorParallelRow(holder, "region", parts=heads)
    return rows, problems


def _problems_beside_experts(model: SlicedModel, name: str) -> Iterable[Refusal]:
    """Yield a problem for each parameter of a module in a partial region that is neither sliced nor one of a router."""
    routes = {1, model.draft.model.sizes.experts or 1}
    for own, shape in model.draft.model.modules[name].parameters.items():
        if shape[0] not in routes:
            yield Refusal(
                "tp.style.missing",
                f"tp={model.tp}: {f'{name}.{own}'!r} is beside experts whose outputs are summed over tp, and is no router; "
                "give it a style that slices it",
            )


# -- rows of styles ----------------------------------------------------------------------------------------------------------


def _style_rows(model: SlicedModel, name: str, style: str) -> tuple[list[TensorParallelRow], dict[str, str], Problems]:
    """Return the row of a module with a style, or those of a matrix and its adapter, and the styles of the adapter."""
    facts, declared, region = model.draft.model, STYLES.get(style) or DERIVED[style], model.region_around(name)
    entry, exit_ = declared.entry, declared.exit
    flat = any(span.flat and name in (*span.entries, span.exit) for span in model.spans)
    if name in model.on_slices:
        entry, exit_, flat = Move.GATHER_TOKENS, Move.SCATTER_SEQUENCE, True
    if region in ("split", "partial"):
        entry = Move.NONE if entry is Move.ENTER else entry
        if exit_ is Move.LEAVE:
            exit_ = Move.NONE if region == "partial" else Move.SCATTER_SEQUENCE if model.sequence else Move.LEAVE
    if region == "split" and any(name in span.entries for span in model.spans):
        entry = Move.GATHER_SEQUENCE
    if name == model.structure.head and style in HEAD:
        exit_ = Move.VOCABULARY if model.shards_logits else Move.GATHER_FEATURES
    parts, problems = _parts(model, name, style)
    if name in facts.adapters:
        rows, adapter_styles, found = adapted_rows(facts, model.tp, name, style, entry, exit_, parts)
        return rows, adapter_styles, Problems([*problems, *found])
    return [TensorParallelRow(name, style, entry, exit_, _sums(model, name, style, exit_), parts, flat=flat)], {}, problems


def _sums(model: SlicedModel, name: str, style: str, exit_: Move) -> tuple[str, ...]:
    """Return the parameters of a module with a style that every rank stores whole and uses in part."""
    own, facts = model.own(name), model.draft.model
    if style in ("replicated_with_grad_allreduce", "grouped_colwise"):
        return own
    if style == "moe_tp_experts":
        sliced = styles_of_experts(facts, name, model.styles.parameters)
        return tuple(item for item in small_of_experts(facts, name) if facts.parameter_of[f"{name}.{item}"].name not in sliced)
    if style in PARTIAL and "bias" in own and exit_ in (Move.SCATTER_SEQUENCE, Move.NONE):
        return ("bias",)  # each rank adds it to its slice of the sequence, or only the first rank adds it
    return ()


def _parts(model: SlicedModel, name: str, style: str) -> tuple[tuple[int, ...], Problems]:
    """Return the sizes into which a move or a kernel splits a tensor of a module with a style."""
    if style == "grouped_colwise":
        return (model.draft.model.sizes.kv_heads or 1,), Problems()
    if style == NORM:
        return tuple(means for pair in model.draft.pairs.found for norm, means in pair.norms if norm == name), Problems()
    if style == "fused_colwise":
        if sizes := packed_sizes(model.draft, name):
            return sizes, Problems()
        for pattern, parts in model.structure.fused.items():
            if match_names(pattern, [name]):
                return parts, Problems()
        return (), Problems([_misfit(name, style, "ParallelSpec.structure does not say what it packs")])
    if style == "mla_kv_a_proj":
        if shared := _shared_keys(model, name):
            return (shared,), Problems()
        return (1,), Problems([_misfit(name, style, "is no latent projection with a kv_b_proj beside it")])
    return (), Problems()


def _shared_keys(model: SlicedModel, name: str) -> int:
    """Return how many of the last features of a latent projection all heads share: those that its matrix of keys lacks.

    0: it has no matrix of keys beside it, or one that does not fit.
    """
    facts = model.draft.model
    beside = next((other for other in facts.children(holder_of(name)) if other.endswith("kv_b_proj")), name)
    width, latent = (facts.modules[of].parameters.get("weight", (0, 0)) for of in (name, beside))
    shared = width[0] - latent[1]
    return shared if 0 < shared < width[0] else 0


# -- rows of sequence parallel -----------------------------------------------------------------------------------------------


def _sequence_rows(model: SlicedModel, known: Rows) -> tuple[Rows, Problems]:
    """Return the rows of the modules outside of regions, which process slices of the sequence.

    Args:
        model: the model.
        known: the rows of the other modules. One of these may have a parameter that is used on slices.
    """
    problems, facts = Problems(), model.draft.model
    on_slices = {*model.traced.on_slices} if model.spans and model.traced else None

    def sums(name: str) -> tuple[str, ...]:
        return tuple(own for own in model.own(name) if on_slices is None or f"{name}.{own}" in on_slices)

    rows = {layer: TensorParallelRow(layer, "stack", sums=own) for layer in model.stream if (own := sums(layer))}
    apart = (*model.regions, *model.on_slices)
    on_stream = [name for layer in model.stream for name in facts.inside(layer) if not within(name, apart)]
    after = [name for stretch in model.stretches for name in stretch.tokenwise]
    for stretch in model.stretches:
        first, final = stretch.layers[0], stretch.layers[-1]
        rows[first] = TensorParallelRow(first, "stack", Move.SPLIT_SEQUENCE, sums=sums(first))
        if not stretch.tokenwise:
            last_row = rows.get(final, TensorParallelRow(final, "stack"))
            rows[final] = replace(last_row, exit=Move.GATHER_SEQUENCE_WHOLE)
    lasts = {stretch.tokenwise[-1] for stretch in model.stretches if stretch.tokenwise}
    for name in [*on_stream, *after]:
        # After the last norm the hidden state is whole again, for the head and for everything else that uses it.
        last, own = name in lasts, model.own(name) if name in after else sums(name)
        if not own and not last:
            continue
        if name in known and name not in model.styles.modules:  # it begins a region, and hands out a bias that is added later
            rows[name] = replace(known[name], sums=(*known[name].sums, *own))
            continue
        if (style := model.styles.modules.get(name, "sequence_parallel")) != "sequence_parallel":
            problems.add(
                "sp.module",
                f"sequence_parallel=True: {name!r} has the style {style}, but no module around it gathers the sequence",
            )
            continue
        exit_ = Move.GATHER_SEQUENCE_WHOLE if last else Move.NONE
        rows[name] = TensorParallelRow(name, "sequence_parallel", exit=exit_, sums=own)
    return rows, problems
