"""How the ranks of `cp` share each sequence, and what their attentions send.

Each rank has ``1 / cp`` of the positions of every sequence, from the tokens to the loss. What processes a token alone needs no
change. An attention needs the keys and values of the other ranks, which it gets by one of three methods:

gather: all-gather keys and values; reduce-scatter their gradients. Any mask and any number of heads.
ulysses: exchange (all-to-all) sequence for heads: each rank attends over whole sequences with ``1 / cp`` of the heads, and
    exchanges the output back (DeepSpeed Ulysses, arXiv 2309.14509).
ring: pass keys and values from rank to rank, and attend to one part after another (Ring Attention, arXiv 2310.01889).

Under a causal mask late positions attend to more keys than early ones. So the sequence is cut into ``2 cp`` chunks, of which
rank `i` gets the chunks `i` and ``2 cp - 1 - i`` (zigzag; Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from meshwright.errors import Problems, Refusal, coded, number_of
from meshwright.layout import divisors
from meshwright.plan.axes.context.mixers import mixer_bytes, mixer_counts
from meshwright.plan.axes.context.model_computes import own_code_actions, own_code_refusals, own_code_remarks
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.attentions import AttentionFacts
from meshwright.plan.given.closed_choices import ContextBalance, ContextMethod
from meshwright.plan.given.names import holders_of, without_repetition
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.sequence.canvas_facts import CanvasFacts
from meshwright.plan.result.context.canvas_rows import CanvasRow, columns_of_rank
from meshwright.plan.result.program import Action, Assign, Attend
from meshwright.plan.result.sharding_plan import AttentionRow, ShardingPlan, itemsize

__all__ = [
    "FUNCTION",
    "attention_actions",
    "attention_program",
    "attention_runs",
    "context_bytes",
    "context_counts",
    "gathered_bytes",
    "is_flash",
    "positions_of",
    "resolve_attentions",
    "ring_message_bytes",
    "unevenness",
]

FUNCTION = "meshwright_context_parallel"
"""Name of the attention function of context parallel in transformers. No mask has this name, so models make none."""

KERNELS = ("sdpa", "eager", "flex_attention")
"""The values of ``model.attn_implementation`` that attentions over `cp` can compute with, beside those of flash."""


def positions_of(length: int, ranks: int, balance: ContextBalance, rank: int) -> tuple[range, ...]:
    """Return the positions of a sequence that a rank of `cp` has, piece by piece, in its order.

    Args:
        length: length of the padded sequence, a multiple of the number of ranks, and of twice that number for zigzag.
        ranks: number of ranks of `cp`.
        balance: how the sequence is cut.
        rank: index of the rank on `cp`.
    """
    if ranks == 1 or balance is ContextBalance.CONTIGUOUS:
        width = length // ranks
        return (range(rank * width, (rank + 1) * width),)
    width = length // (2 * ranks)
    return tuple(range(chunk * width, (chunk + 1) * width) for chunk in (rank, 2 * ranks - 1 - rank))


def is_flash(kernel: str) -> bool:
    """Return whether a value of ``attn_implementation`` names a flash kernel: of a package, or one of the hub."""
    return kernel.startswith("flash_attention_") or "/flash-attn" in kernel or "/vllm-flash-attn" in kernel


def unevenness(work: Sequence[float], ranks: int, balance: ContextBalance) -> float:
    """Return the work of the rank that has the most, over the mean of all ranks.

    Args:
        work: the work of each position of a sequence; under a causal mask, the number of keys up to it in its document.
        ranks: number of ranks of `cp`.
        balance: how the sequence is cut.
    """
    shares = [
        sum(sum(work[piece.start : piece.stop]) for piece in positions_of(len(work), ranks, balance, rank))
        for rank in range(ranks)
    ]
    return max(shares) * ranks / sum(shares)


def resolve_attentions(draft: Draft) -> Found[tuple[AttentionRow, ...]]:
    """Return a row for each attention, in the order in which they run.

    There are none if `cp` is 1, except for packed documents of a family whose own masks let them see each other.
    """
    options, cp, problems = draft.options, draft.layout.size("cp"), Problems()
    if cp == 1:
        default = ParallelOptions()
        for name in ("context_parallel", "context_balance", "context_recompute"):
            if (chosen := getattr(options, name)) != (legal := getattr(default, name)):
                problems.add("cp.option", f"{name}={chosen}: needs cp > 1; the legal value is {legal}")
        kept_apart = options.packed and draft.structure.leaks_documents and not _computes(draft) and not _refusals(draft)
        # If they are not kept apart, the check of boundaries refuses documents that see each other.
        return Found(_rows(draft) if kept_apart else (), problems)
    if draft.spec.twins and not _knows_canvases(draft):
        problems.add(
            "cp.twice",
            f"cp={cp}: {draft.spec.family} has a stack of layers that runs twice, with attention from one pass to the other, "
            "and nothing says which keys it sees there; the legal value is 1",
        )
        return Found((), problems)
    if refused := _refusals(draft):
        problems.extend(text.within(f"cp={cp}: ", "; the legal value of cp is 1") for text in without_repetition(refused))
        return Found((), problems)
    rows = _rows(draft)
    return Found(
        rows,
        _head_problems(cp, rows) if options.context_parallel is ContextMethod.ULYSSES else (),
        own_code_remarks(draft),
    )


def _computes(draft: Draft) -> bool:
    """Return whether the model's own code mixes tokens: a state goes along a sequence, or attentions compute themselves."""
    attentions = draft.model.traces.attentions
    return attentions is not None and bool(attentions.states or any(facts.cached for facts in attentions.rows))


def _knows_canvases(draft: Draft) -> bool:
    """Return whether a trace followed the stack that attends to the keys of another one."""
    attentions = draft.model.traces.attentions
    return attentions is not None and any(isinstance(facts, CanvasFacts) for facts in attentions.rows)


def _refusals(draft: Draft) -> Problems:
    """Return why the attentions of a model cannot be computed with the function of context parallel."""
    attentions = draft.model.traces.attentions
    if attentions is None:
        return Problems(
            [Refusal("cp.unknown", f"the attentions of {draft.spec.family} are unknown (attentions of its ParallelSpec)")]
        )
    refused = Problems(coded(problem, "cp.attention").within(f"{draft.spec.family}: ") for problem in attentions.problems)
    refused += [
        coded(facts.problem, "cp.attention").within(f"attention {facts.module!r} ")
        for facts in attentions.rows
        if facts.problem
    ]
    refused += [
        Refusal(
            "cp.dropout",
            f"attention {facts.module!r} drops attention weights with probability {facts.dropout:g}; set attention_dropout of "
            "the model's config to 0",
        )
        for facts in attentions.rows
        if facts.dropout
    ]
    refused += own_code_refusals(draft, attentions)
    if is_flash(attentions.kernel):
        refused += [
            Refusal(
                "cp.sinks",
                f"attention {facts.module!r} has sinks, which {attentions.kernel} does not know under cp; legal values of "
                f"attn_implementation are {', '.join(KERNELS)}",
            )
            for facts in attentions.rows
            if facts.sinks
        ]
        dtype = draft.options.param_dtype
        dtypes = {dtype} if dtype else {parameter.dtype for parameter in draft.model.parameters}
        if wide := sorted(dtypes - {"bfloat16", "float16"}):
            refused.add("cp.dtype", f"{attentions.kernel} computes in 16 bits, not in {wide[0]}; set param_dtype=bfloat16")
    elif attentions.kernel not in KERNELS:
        legal = ", ".join(KERNELS)
        refused.add(
            "cp.kernel", f"attn_implementation={attentions.kernel!r} is not supported; legal are {legal} and flash_attention_2"
        )
    if not attentions.rows and not attentions.states and not refused:
        refused.add("cp.no_attention", f"{draft.spec.family} has no attention")
    return refused


def _rows(draft: Draft) -> tuple[AttentionRow, ...]:
    attentions = draft.model.traces.attentions
    assert attentions is not None
    return tuple(_row(draft, facts, attentions.kernel) for facts in attentions.rows)


def _row(draft: Draft, facts: AttentionFacts, kernel: str) -> AttentionRow:
    tp, alone = draft.layout.size("tp"), draft.layout.size("cp") == 1
    row = AttentionRow(
        module=facts.module,
        method=ContextMethod.GATHER if alone else draft.options.context_parallel,
        kernel=kernel,
        heads=facts.heads // tp,
        kv_heads=max(1, facts.kv_heads // tp),
        key_size=facts.key_size,
        value_size=facts.value_size,
        causal=facts.causal,
        window=facts.window,
        sinks=facts.sinks,
        recompute=bool(draft.options.context_recompute),
        carried=facts.carried,
        calls=facts.calls,
        cached=facts.cached,
        trained=facts.trained,
    )
    return CanvasRow(**vars(row), canvas=facts.canvas) if isinstance(facts, CanvasFacts) else row


def _head_problems(cp: int, rows: Sequence[AttentionRow]) -> Problems:
    problems = Problems()
    for heads, kv_heads in dict.fromkeys((row.heads, row.kv_heads) for row in rows):
        legal = [size for size in divisors(heads) if kv_heads % size == 0 or size % kv_heads == 0]
        if cp not in legal:
            problems.add(
                "cp.ulysses",
                f"cp={cp}, context_parallel=ulysses: {number_of(heads, 'head')} and "
                f"{number_of(kv_heads, 'key/value head')} of a rank can be exchanged "
                f"over {', '.join(map(str, legal))} ranks; or use context_parallel=gather or ring",
            )
    return problems


def attention_actions(draft: Draft, plan: ShardingPlan) -> Iterator[Action]:
    """Yield the actions that let attentions work on a part of each sequence, and make the model call them."""
    # The config that masks are made by is that of a module around an attention, and may be another.
    around = {"", *(name for row in plan.attentions for name in (row.module, *holders_of(row.module)))}
    for name, module in draft.model.modules.items():
        if any(not row.cached for row in plan.attentions) and name in around and module.has_config:
            yield Assign(name, (("config._attn_implementation", FUNCTION),))
    for row in plan.attentions:
        if not row.cached:
            yield Attend(row, plan.options.context_balance)
    yield from own_code_actions(draft, plan)


def attention_program(plan: ShardingPlan) -> list[Action]:
    """Return those actions of a plan that :func:`attention_actions` yielded."""
    return [
        action
        for action in plan.program
        if isinstance(action, Attend) or (isinstance(action, Assign) and FUNCTION in dict(action.values).values())
    ]


_COUNTS = {
    ContextMethod.GATHER: {"all_gather": (1, 0), "reduce_scatter": (0, 1)},
    ContextMethod.ULYSSES: {"all_to_all": (3, 3)},
}
"""Method to the collectives of one attention in forward and in backward, by kind."""


def context_counts(plan: ShardingPlan) -> Counter[str]:
    """Return the collectives over `cp` of one optimizer step on one rank, by kind.

    The counts assume that everything is trained and no layer is recomputed.
    """
    counts: Counter[str] = Counter()
    cp = plan.layout.size("cp")
    if cp == 1:
        return counts
    if plan.options.balance_loss:  # loads of the whole sequence
        counts["all_reduce"] += sum(1 for row in plan.experts if row.router)
    counts["all_reduce"] += plan.options.objective_sums
    counts.update(mixer_counts(plan))
    for row in plan.attentions:
        forwards, backwards = attention_runs(plan, row)
        if row.method is ContextMethod.RING:
            # Keys and values visit each other rank once; in backward their gradients travel with them, and home at the end.
            counts["send"] += (cp - 1) * forwards + (2 * cp - 1) * backwards
            continue
        for kind, (forward, backward) in _COUNTS[row.method].items():
            counts[kind] += forward * forwards + backward * backwards
        if row.recompute and row.method is ContextMethod.GATHER:
            counts["all_gather"] += backwards
        if row.recompute and row.method is ContextMethod.ULYSSES:
            counts["all_to_all"] += 2 * backwards
    return Counter({kind: count * plan.options.microbatches for kind, count in counts.items() if count})


def context_bytes(plan: ShardingPlan, tokens: int) -> Counter[str]:
    """Return the bytes of these collectives: of the larger buffer of each call.

    Args:
        plan: the plan.
        tokens: number of tokens of a microbatch that a rank has.
    """
    cp, sizes = plan.layout.size("cp"), mixer_bytes(plan, tokens)
    for row in plan.attentions:
        (forwards, backwards), item = attention_runs(plan, row), _itemsize(plan)
        keys = (tokens + _columns(plan, row, tokens)) * row.kv_heads * (row.key_size + row.value_size) * item
        if row.method is ContextMethod.GATHER:
            sizes["all_gather"] += (forwards + backwards * row.recompute) * keys * cp
            sizes["reduce_scatter"] += backwards * keys * cp
        elif row.method is ContextMethod.ULYSSES:
            repeated = keys * max(1, cp // row.kv_heads)
            queried = _columns(plan, row, tokens) or tokens
            queries = queried * row.heads * row.key_size * item
            outputs = queried * row.heads * row.value_size * item
            sizes["all_to_all"] += (forwards + backwards) * (queries + repeated + outputs)
            sizes["all_to_all"] += backwards * row.recompute * (queries + repeated)
        else:
            keys, gradients = ring_message_bytes(plan, row, tokens)
            sizes["send"] += (cp - 1) * (forwards + backwards) * keys + backwards * cp * gradients
    if plan.options.balance_loss and cp > 1:  # for each sequence the loads of experts, and its tokens
        numbers = sum(row.experts + 1 for row in plan.experts if row.router)
        sizes["all_reduce"] += plan.options.balance_loss * numbers * itemsize("float32")
    return Counter({kind: size * plan.options.microbatches for kind, size in sizes.items()})


def attention_runs(plan: ShardingPlan, row: AttentionRow) -> tuple[int, int]:
    """Return how often an attention is computed in a microbatch, and how often of these with gradient."""
    forwards, backwards = plan.runs(row.module)
    return forwards * row.calls, backwards * row.calls * row.trained


def ring_message_bytes(plan: ShardingPlan, row: AttentionRow, tokens: int) -> tuple[int, int]:
    """Return the bytes of the keys and values that an attention passes on, and of their gradients, for ``tokens`` of a rank."""
    keys, item = tokens + _columns(plan, row, tokens), _itemsize(plan)
    numbers = keys * row.kv_heads * (row.key_size + row.value_size)
    return numbers * item, numbers * max(item, itemsize("float32"))  # gradients are added up in fp32 or better on their way


def gathered_bytes(plan: ShardingPlan, tokens: int) -> int:
    """Return the bytes of the gathered keys and values of the largest attention, for ``tokens`` of a microbatch on a rank."""
    cp, item = plan.layout.size("cp"), _itemsize(plan)
    sizes = [
        (tokens + _columns(plan, row, tokens)) * cp * row.kv_heads * (row.key_size + row.value_size) * item
        for row in plan.attentions
    ]
    return max(sizes, default=0) if plan.options.context_parallel is ContextMethod.GATHER else 0


def _columns(plan: ShardingPlan, row: AttentionRow, tokens: int) -> int:
    return columns_of_rank(row, tokens, plan.layout.size("cp"), plan.sequence_multiple)


def _itemsize(plan: ShardingPlan) -> int:
    return itemsize(plan.options.param_dtype or next((row.dtype for row in plan.parameters), "float32"))
