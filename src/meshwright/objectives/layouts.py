"""Which layouts an objective can have."""

from collections.abc import Iterator

from meshwright.errors import Refusal
from meshwright.layout import Layout
from meshwright.models.objective import Objective
from meshwright.objectives.call import named

__all__ = ["layout_problems"]


def layout_problems(objective: Objective, layout: Layout, packing: str) -> Iterator[Refusal]:
    """Yield why a run cannot have an objective: the key and its value, and what is legal.

    Args:
        objective: the objective; one of the user's was tried.
        layout: the layout, with sizes that may not be known yet.
        packing: ``data.packing``.
    """
    name = named(objective)
    if layout.pp not in (None, -1, 1) and not objective.pipelines:
        yield Refusal(
            "pp.objective",
            f"layout.pp={layout.pp}: objective {name} does not call the model once a batch, as stages need; legal is 1",
        )
    if layout.cp not in (None, -1, 1) and not objective.shares:
        yield Refusal(
            "objective.layout",
            f"layout.cp={layout.cp}: objective {name} gives other sums for the halves of a sequence than for the whole, so "
            "ranks cannot share one; the legal value is 1, or sums over documents (given.per_document)",
        )
    if packing == "pack" and not objective.packs:
        yield Refusal(
            "objective.layout",
            f"data.packing=pack: objective {name} gives other sums for two documents in one sequence than in two; the legal "
            "value is pad",
        )
