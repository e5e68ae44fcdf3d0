"""What `cp` does for models whose own code counts positions, or computes attention.

A model that counts tokens itself counts those of a rank from where they are in the sequence. An attention that computes itself
gets the keys and values of other ranks where it would read a cache, and the mask of its own queries. Both run inside of the
model's code, line by line as it is written, so layers are not compiled.
"""

from collections.abc import Iterator

from meshwright.errors import Problems
from meshwright.plan.draft import Draft
from meshwright.plan.given.attentions import Attentions
from meshwright.plan.given.closed_choices import ContextMethod
from meshwright.plan.result.context.cache_action import GiveCache
from meshwright.plan.result.context.count_action import CountPositions
from meshwright.plan.result.program import Action
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["own_code_actions", "own_code_refusals", "own_code_remarks"]


def own_code_actions(draft: Draft, plan: ShardingPlan) -> Iterator[Action]:
    """Yield the actions for what a model's own code does with the tokens of a rank."""
    if draft.layout.size("cp") == 1:
        return
    for module, places in _counted(draft).items():
        yield CountPositions(module, tuple(places), plan.options.context_balance)
    if any(row.cached for row in plan.attentions):
        yield GiveCache("", plan.options.context_balance)


def own_code_remarks(draft: Draft) -> list[str]:
    """Return what a reader of the plan would not expect, a sentence each."""
    remarks = [
        f"{module or 'the model'!r} counts positions itself ({', '.join(f'{file}:{line}' for file, line in places)}): on a "
        "rank of cp they are those of its part of each sequence"
        for module, places in _counted(draft).items()
    ]
    attentions = draft.model.traces.attentions
    if attentions is not None and (own := [facts.module for facts in attentions.rows if facts.cached]):
        which = f"{own[0]!r} and {len(own) - 1} more compute" if len(own) > 1 else f"{own[0]!r} computes"
        remarks.append(
            f"{which} attention in the model's own code: a cache returns the keys and values of all ranks of cp, and scores "
            "are of a rank's queries and all keys"
        )
    return remarks


def own_code_refusals(draft: Draft, attentions: Attentions) -> Problems:
    """Return which options a model cannot have whose own code does these."""
    refused, options = Problems(), draft.options
    own = next((facts.module for facts in attentions.rows if facts.cached), "")
    if draft.layout.size("cp") > 1 and own and options.context_parallel is not ContextMethod.GATHER:
        refused.add(
            "cp.attention",
            f"attention {own!r} computes itself, so its keys and values can only be gathered; set context_parallel=gather",
        )
    if own and options.context_recompute:
        refused.add(
            "cp.attention", f"attention {own!r} computes itself, and keeps the keys that it gets; set context_recompute=false"
        )
    what = {
        "computes attention itself": bool(own),
        "counts positions itself": bool(attentions.counted),
        "tells its attentions no positions": any(facts.carried for facts in attentions.rows),
    }
    if options.compile and (does := [words for words, holds in what.items() if holds]):
        refused.add("cp.compile", f"{draft.spec.family} {does[0]}, and a compiled layer would not notice; set compile=false")
    return refused


def _counted(draft: Draft) -> dict[str, list[tuple[str, int]]]:
    """Return where modules count tokens themselves, by name."""
    attentions, counted = draft.model.traces.attentions, dict[str, list[tuple[str, int]]]()
    for module, place in () if attentions is None else attentions.counted:
        counted.setdefault(module, []).append(place)
    return counted
