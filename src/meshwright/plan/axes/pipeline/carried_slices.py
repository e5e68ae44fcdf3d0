"""What crosses cuts beside the hidden state on a rank of `tp`: keys and values have the heads that the rank computes."""

from collections.abc import Sequence

from meshwright.errors import Problems
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.styles import tp_dim
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.cut_points import Carried, RankSlices, StageFacts
from meshwright.plan.given.names import within

__all__ = ["carried_on_slices"]


def carried_on_slices(draft: Draft, facts: StageFacts) -> Found[tuple[Carried, ...]]:
    """Return what is carried, with the sizes that a rank has, or why these are unknown.

    What is made before the first layer is whole.
    """
    problems, whole = Problems(), facts.carried
    if draft.layout.size("tp") == 1 or not whole or draft.problems:
        return Found(whole)
    around = f"pp={draft.layout.size('pp')}"
    if draft.options.sequence_parallel:
        problems.add(
            "pp.reads_more",
            f"sequence_parallel=True, {around}: layer {_reader(facts, whole)!r} reads more of earlier stages than its "
            "hidden state, and whether that is sliced too is not known; legal are sequence_parallel=False, and pp=1",
        )
        return Found(whole, problems)
    of_layers = [item for item in whole if item[1] >= 0]
    if not of_layers:
        return Found(whole)
    own = draft.model.traces.carried([layer.name for layer in facts.layers], slices_of_rank(draft))
    if own is None or [item[1:] for item in own] != [item[1:] for item in whole]:
        problems.add(
            "pp.reads_more",
            f"tp={draft.layout.size('tp')}, {around}: layer {_reader(facts, of_layers)!r} reads more of an earlier layer than "
            "its hidden state, and how much of that a rank of tp has is not known; legal are tp=1, and pp=1",
        )
        return Found(whole, problems)
    return Found(own)


def _reader(facts: StageFacts, carried: Sequence[Carried]) -> str:
    return facts.layers[carried[0][2][-1][0]].name


def slices_of_rank(draft: Draft) -> RankSlices:
    """Return what a rank of `tp` has of a model. Mixers, which return whole features, are left out."""
    tp, rows = draft.layout.size("tp"), draft.tensor.rows
    mixers = [row.module for row in rows if row.style == "mixer"]
    parameters: dict[str, tuple[int, ...]] = {}
    for facts in draft.parameters:
        cut = tp_dim(draft.tensor.styles.get(facts.name), facts.shape)
        if cut is not None and not within(facts.name, mixers):
            parameters[facts.name] = (*facts.shape[:cut], -(-facts.shape[cut] // tp), *facts.shape[cut + 1 :])
    entering: dict[str, int] = {}
    leaving: dict[str, int] = {}
    for row in rows:
        if within(row.module, mixers):
            continue
        if row.entry is Move.SPLIT_FEATURES:
            entering[row.module] = row.features[0] // tp
        if row.exit is Move.GATHER_FEATURES:
            leaving[row.module] = row.features[1]
        elif row.style == "grouped_colwise":
            leaving[row.module] = row.features[1] // row.parts[0]
    return RankSlices(parameters, entering, leaving)
