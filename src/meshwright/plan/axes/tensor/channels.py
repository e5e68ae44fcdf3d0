"""How the ranks of `tp` share mixers: each computes some channels, or heads, of all tokens.

A mixer carries a state along the sequence, and computes each of its channels (Mamba-1) or heads (Mamba-2) alone. How they
divide is read from its code (:mod:`meshwright.models.reading.context.mixer_heads`), as for context parallel, where ranks share
the sequence. Here each rank has all tokens, so nothing is exchanged but what matrices need:

- The matrices at its entry (`in_proj`): a rank stores the rows of its channels, of each matrix that is packed in one
  (`packed_colwise`). Where packed matrices differ in size, it stores an even slice, and an all-to-all of features gives each
  rank those of its heads (`fused_colwise`).
- What is in between by channel (`A_log`, `D`, a convolution): its channels (`channels`). Where several groups of channels are
  packed, it stores all, uses a part, and gradients are summed (`replicated_with_grad_allreduce`).
- A matrix in between that mixes all channels (`x_proj` of Mamba-1): the columns of its channels. What they put out is summed
  forward, and its gradient backward (`rowwise_within`).
- The matrix at its end (`out_proj`): the columns of its channels (`rowwise`).

A mixer whose heads need what those of other ranks need (B and C of fewer groups than ranks), or that ends with a norm over all
heads, is computed whole by each rank.
"""

from collections.abc import Iterator, Mapping

from meshwright.plan.axes.tensor.styles import CHANNELS
from meshwright.plan.draft import Draft
from meshwright.plan.given.names import holder_of, within
from meshwright.plan.given.sequence.mixer_shares import MOST_TRIED, MixerShare, Pieces
from meshwright.plan.given.sliceable_pairs import Pair
from meshwright.plan.result.mixer_action import MixChannels
from meshwright.plan.result.sharding_plan import TensorParallelRow

__all__ = [
    "mixer_rows",
    "mixer_styles",
    "packed_sizes",
    "pairs_beside",
    "problems_of_mixers",
    "shared_mixers",
    "slice_mixers",
    "whole_mixers",
]


def shared_mixers(draft: Draft) -> Mapping[str, MixerShare]:
    """Return how the ranks of `tp` divide each mixer that they share, by name."""
    return draft.once(_shared_mixers)


def _shared_mixers(draft: Draft) -> Mapping[str, MixerShare]:
    return {name: share for name, share in _shares(draft).items() if not _problem(draft, share, draft.layout.size("tp"))}


def pairs_beside(draft: Draft) -> tuple[Pair, ...]:
    """Return the pairs that are in no shared mixer: a small pair before one of its first matrices is computed whole."""
    mixers = shared_mixers(draft)
    return tuple(pair for pair in draft.pairs.found if not any(within(own, mixers) for own in (*pair.firsts, pair.second)))


def problems_of_mixers(draft: Draft) -> dict[str, str]:
    """Return why each rank computes a mixer whole, by its name. A mixer that needs only a few tokens before is none here."""
    tp = draft.layout.size("tp")
    shares = (own for own in _shares(draft).values() if own.closing or own.problem)
    return {own.module: problem for own in shares if (problem := _problem(draft, own, tp))}


def whole_mixers(draft: Draft) -> tuple[str, tuple[int, ...]]:
    """Return why each rank computes the mixers of a model whole, and the numbers of ranks that can share all; empty: none."""
    problems = problems_of_mixers(draft)
    if not problems:
        return "", ()
    name = next(iter(problems))
    features = [
        draft.model.modules[name].parameters,
        *(draft.model.modules[own].parameters for own in draft.model.inside(name)),
    ]
    widest = max((size for shapes in features for shape in shapes.values() for size in shape), default=1)
    tried = [ranks for ranks in range(2, MOST_TRIED + 1) if widest % ranks == 0]
    legal = [
        ranks for ranks in tried if not any(_problem(draft, own, ranks) for own in draft.model.traces.mixers(ranks).values())
    ]
    return f"{name!r} is not divided over tp: {problems[name]}", (1, *legal)


def _shares(draft: Draft) -> dict[str, MixerShare]:
    tp = draft.layout.size("tp")
    attentions = draft.model.traces.attentions if tp > 1 else None
    if attentions is None or not attentions.states or draft.spec.twins or draft.options.tp_plan is not None:
        return {}
    return dict(draft.model.traces.mixers(tp))


def _problem(draft: Draft, share: MixerShare, ranks: int) -> str:
    """Return why so many ranks of `tp` do not share a mixer of which it is known how it divides; empty: they do."""
    modules, name = draft.model.modules, share.module
    if share.problem:
        return share.problem
    if not share.closing:
        return "how its channels divide is not looked at, because it needs only a few tokens before"
    if draft.layout.size("cp") > 1:
        return "cp divides its heads"
    if not within(name, draft.layers) or any(within(own, [name]) for own in draft.model.adapters):
        return "it has an adapter, or is in no layer"
    if any(
        copies > 1
        for _, pieces in (*share.openings, *((own, pieces) for own, _, pieces in share.slices))
        for _, copies in pieces
    ):
        return "the heads of several ranks need the same features: it has fewer groups of them than ranks"
    closing = modules[f"{name}.{share.closing}"].parameters.get("weight", ())
    if share.after or len(share.features) != 1 or len(closing) != 2:
        return "its last matrix takes more than what its heads put out, as after a norm over all of them"
    if any("bias" in modules[f"{name}.{own}"].parameters for own, _ in share.summed):
        return "a matrix in it that mixes all heads has a bias"
    if name not in draft.model.traces.mixer_parameters(ranks):
        return "which of its parameters all heads use is unknown, or one is also used before its first matrices"
    declared = draft.matched(own for own, style in _declared(draft).items() if style != "replicate")
    if any(within(own, [name]) for own in declared):
        return "the styles that are declared for this model have a matrix in it"
    aliased = [own for own, _, _ in share.slices if _parameter(draft, share, own) and len(_names(draft, share, own)) > 1]
    if aliased:
        return "another module has a parameter of it"
    return ""


def _declared(draft: Draft) -> Mapping[str, str]:
    return draft.structure.styles or draft.spec.tp_styles


def _parameter(draft: Draft, share: MixerShare, own: str) -> bool:
    return f"{share.module}.{own}" in draft.model.parameter_of


def _names(draft: Draft, share: MixerShare, own: str) -> tuple[str, ...]:
    return draft.model.parameter_of[f"{share.module}.{own}"].names


def mixer_styles(draft: Draft) -> dict[str, str]:
    """Return the styles of modules and parameters of the mixers that `tp` shares."""
    styles: dict[str, str] = {}
    for name, share in shared_mixers(draft).items():
        shards = draft.layout.size("dp_shard_cp")  # read where there are mixers only, as plans of others do not depend on it
        for own, pieces in share.openings:
            parameters = draft.model.modules[f"{name}.{own}"].parameters
            alike = len({size for size, _ in pieces}) == 1 and len(pieces) <= 2
            # FSDP cannot shard the rows of packed matrices, nor a packed bias.
            packs = alike and "bias" not in parameters and parameters["weight"][1] % shards == 0
            styles[f"{name}.{own}"] = "colwise" if len(pieces) == 1 else "packed_colwise" if packs else "fused_colwise"
        styles |= {f"{name}.{own}": "rowwise_within" for own, _ in share.summed}
        styles |= {f"{name}.{own}": CHANNELS if _even(dim, pieces) else _WHOLE for own, dim, pieces in _between(draft, share)}
        styles[f"{name}.{share.closing}"] = "rowwise"
    return styles


_WHOLE = "replicated_with_grad_allreduce"
"""Style of a parameter that every rank stores whole and uses in part."""


def _even(dim: int, pieces: Pieces) -> bool:
    """Return whether a rank's part is one slice of the first dimension."""
    return dim == 0 and len(pieces) == 1 and pieces[0][1] == 1


def _between(draft: Draft, share: MixerShare) -> Iterator[tuple[str, int, Pieces]]:
    """Yield what of the parameters in between a rank uses, without the matrices that mix all channels.

    Of those that all heads use this is one block for all ranks.
    """
    tp, summed = draft.layout.size("tp"), {f"{own}.weight" for own, _ in share.summed}
    yield from ((own, dim, pieces) for own, dim, pieces in share.slices if own not in summed and _parameter(draft, share, own))
    for own in draft.model.traces.mixer_parameters(tp).get(share.module, ()):
        yield own, 0, ((draft.model.parameter_of[f"{share.module}.{own}"].shape[0], tp),)


def packed_sizes(draft: Draft, module: str) -> tuple[int, ...]:
    """Return the numbers of features of the matrices that are packed in one at the entry of a shared mixer; empty: not one."""
    share = shared_mixers(draft).get(holder_of(module))
    pieces = dict(share.openings).get(module.rpartition(".")[2], ()) if share else ()
    return tuple(size for size, _ in pieces)


def mixer_rows(draft: Draft) -> Iterator[TensorParallelRow]:
    """Yield a row for each shared mixer, and for each module in it that has channels; the matrices have rows of their own."""
    for name, share in shared_mixers(draft).items():
        sums = tuple(own for own, dim, pieces in _between(draft, share) if not _even(dim, pieces))
        yield TensorParallelRow(name, "mixer", sums=sums)
        for holder in dict.fromkeys(
            holder_of(f"{name}.{own}") for own, dim, pieces in _between(draft, share) if _even(dim, pieces)
        ):
            if holder != name:
                yield TensorParallelRow(holder, CHANNELS)


def slice_mixers(draft: Draft) -> Iterator[MixChannels]:
    """Yield the actions by which mixers compute the channels of their rank."""
    for name, share in shared_mixers(draft).items():
        between = list(_between(draft, share))
        stored = tuple(own for own, dim, pieces in between if _even(dim, pieces))
        of_buffers = (item for item in share.slices if not _parameter(draft, share, item[0]))
        used = (*(item for item in between if item[0] not in stored), *of_buffers)
        yield MixChannels(name, stored, used, share.values)
