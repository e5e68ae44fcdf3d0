"""How the ranks of `cp` share mixers: modules that carry a state along the sequence, such as those of Mamba-2.

A state needs all tokens before it, in order. But a mixer computes each of its heads alone. So a rank computes some heads, for
the whole sequence: what its first linear layers put out for the rank's own tokens is exchanged (all-to-all) for the features of
these heads for all tokens, in the order of the sequence. Convolution, scan and the norm of groups run as they are written, with
the rank's slices of their parameters. Before the last linear layer the heads are exchanged back for tokens. A norm over all
heads is after this exchange. (Megatron-LM splits Mamba so.) Where a linear layer in between mixes all features, as that of
Mamba-1 does which gives time steps, B and C, each rank computes what its features put out, and the ranks sum it up.

A mixer that needs a few tokens before a token, such as a short convolution, is not divided: each rank gets the tokens before
its own, and computes its own. So does a module without parameters in a mixer, such as the shift by one token of RWKV.

Parameters stay whole. A slice of one is a view of it, so its gradient is zero beside the slice, and the sum over `cp` that all
gradients have makes it whole. B and C of a group, or a key head, which the heads of several ranks need, go to each of them.
"""

from collections import Counter
from collections.abc import Iterator

from meshwright.errors import Problems, Refusal, coded
from meshwright.layout import divisors
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.closed_choices import ContextBalance
from meshwright.plan.given.names import inside, without_repetition
from meshwright.plan.given.sequence.mixer_shares import MOST_TRIED, MixerShare
from meshwright.plan.result.context.before_action import TakeTokensBefore
from meshwright.plan.result.context.heads_action import ShareHeads
from meshwright.plan.result.sharding_plan import ShardingPlan, TensorParallelRow, itemsize

__all__ = ["crossing_features", "elements_before", "mixer_actions", "mixer_bytes", "mixer_counts", "resolve_mixers"]


def resolve_mixers(draft: Draft) -> Found[tuple[MixerShare, ...]]:
    """Return a row for each mixer, in the order in which they are found, or why they cannot be shared. None if `cp` is 1."""
    cp = draft.layout.size("cp")
    attentions = draft.model.traces.attentions if cp > 1 else None
    if attentions is None or not attentions.states or draft.spec.twins:
        return Found(())
    shares, problems = draft.model.traces.mixers(cp), Problems()
    for name, mixes in attentions.states:
        share = shares.get(name, MixerShare(name, problem="how its heads divide is unknown"))
        fits = _keeps_tokens if share.before else _is_whole_outside
        sliced = [row.module for row in draft.tensor.rows if inside(row.module, name) and not fits(row)]
        if share.problem:
            problems.append(_refusal(draft, share, mixes))
        elif sliced:
            problems.add(
                "cp.state",
                f"{draft.spec.family}: tp slices {sliced[0]!r}, inside of a mixer "
                + (
                    "that gets the tokens before those of a rank; legal are cp=1, sequence_parallel=False, and a tp_plan "
                    "without it"
                    if share.before
                    else "whose heads cp divides; the legal value of cp is 1, or leave it out of tp_plan"
                ),
            )
    if problems:
        return Found((), [text.within(f"cp={cp}: ") for text in without_repetition(problems)])
    return Found(tuple(shares[name] for name, _ in attentions.states))


def _is_whole_outside(row: TensorParallelRow) -> bool:
    """Return whether what enters and leaves a module of tensor parallel is what does so without it."""
    entered = row.entry in (Move.NONE, Move.ENTER, Move.SPLIT_FEATURES)
    return entered and row.exit in (Move.GATHER_FEATURES, Move.LEAVE)


def _keeps_tokens(row: TensorParallelRow) -> bool:
    """Return whether a module of tensor parallel gets and gives all tokens, of whatever features."""
    return row.entry in (Move.NONE, Move.ENTER, Move.SPLIT_FEATURES) and row.exit in (
        Move.NONE, Move.LEAVE, Move.GATHER_FEATURES,
    )  # fmt: skip


def _refusal(draft: Draft, share: MixerShare, mixes: str) -> Refusal:
    """Return why a mixer cannot be shared by so many ranks, with the numbers of ranks that can."""
    legal = [1]
    if share.features:
        tried = [ranks for ranks in divisors(share.features[0]) if 1 < ranks <= MOST_TRIED and ranks != draft.layout.size("cp")]
        legal += [ranks for ranks in tried if not draft.model.traces.mixers(ranks)[share.module].problem]
    text = coded(mixes, "cp.state")
    code = text.code if len(legal) == 1 else "cp.heads"
    values = (
        f"the legal value of cp is {legal[0]}" if len(legal) == 1 else f"legal values of cp are {', '.join(map(str, legal))}"
    )
    return Refusal(code, f"{draft.spec.family}: {text}, and its heads cannot be divided: {share.problem}; {values}")


def mixer_actions(plan: ShardingPlan) -> Iterator[ShareHeads | TakeTokensBefore]:
    """Yield the actions that let mixers compute some heads for all tokens, or get the tokens before those of a rank."""
    balance = plan.options.context_balance
    for row in plan.mixers:
        if row.before:
            yield TakeTokensBefore(row.module, row.before, row.hidden, balance)
        else:
            for name, tokens, _, hidden in row.shifts:
                yield TakeTokensBefore(f"{row.module}.{name}", tokens, hidden, balance)
            yield ShareHeads(row, balance)


def mixer_counts(plan: ShardingPlan) -> Counter[str]:
    """Return the collectives of mixers over `cp` in a microbatch on one rank: two in forward, and two in backward.

    With one more in each for a linear layer in between that mixes the features of all ranks. Tokens before those of a rank are
    gathered, and their gradients are scattered; positions have none.
    """
    counts: Counter[str] = Counter()
    for row in plan.mixers:
        forwards, backwards = plan.runs(row.module)
        counts["all_to_all"] += 0 if row.before else 2 * (forwards + backwards)
        counts["all_reduce"] += len(row.summed) * (forwards + backwards)
        counts["all_gather"] += (len(row.gathered_before) + bool(row.positions)) * forwards
        counts["reduce_scatter"] += len(row.gathered_before) * backwards
    return counts


def mixer_bytes(plan: ShardingPlan, tokens: int) -> Counter[str]:
    """Return the bytes of these collectives in a microbatch, for ``tokens`` of it on a rank."""
    sizes: Counter[str] = Counter()
    cp = plan.layout.size("cp")
    for row in plan.mixers:
        item = itemsize(plan.options.param_dtype or next((own.dtype for own in plan.parameters), "float32"))
        forwards, backwards = plan.runs(row.module)
        sizes["all_to_all"] += (forwards + backwards) * tokens * sum(crossing_features(plan, row)) * item
        sizes["all_reduce"] += (forwards + backwards) * tokens * cp * sum(width for _, width in row.summed) * item
        before = elements_before(plan, row) * item
        sizes["all_gather"] += forwards * (before + (tokens * cp * itemsize("int64") if row.positions else 0))
        sizes["reduce_scatter"] += backwards * before
    return sizes


def elements_before(plan: ShardingPlan, row: MixerShare) -> int:
    """Return the number of elements that a rank has of the last tokens of all pieces, once they are gathered."""
    pieces = plan.layout.size("cp") * (2 if plan.options.context_balance is ContextBalance.ZIGZAG else 1)
    return plan.options.sequences * pieces * sum(tokens * features for tokens, features in row.gathered_before)


def crossing_features(plan: ShardingPlan, row: MixerShare) -> tuple[int, int]:
    """Return the features of a token that a rank sends before the mixing, each once for every rank that needs it, and after."""
    cp = plan.layout.size("cp")
    return row.received(cp) * cp, sum(row.features)
