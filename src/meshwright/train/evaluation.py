"""An evaluation: the loss of what is held out, its terms, and the metrics of the objective."""

import math
from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from meshwright.errors import number_of
from meshwright.models.objective import Objective
from meshwright.objectives.call import calling, passes_before
from meshwright.train.batches import RankBatches
from meshwright.train.engine.runner import Batch, Runner

__all__ = ["evaluate", "shown"]

GROUP = 8
"""Batches that are on the device together where a teacher, or stages, run through several at once."""


@torch.no_grad()
def evaluate(runner: Runner, batches: RankBatches, held_out: Iterable[Batch]) -> dict[str, float]:
    """Return what an evaluation measures, the same on all ranks: names with ``eval/`` to values. All ranks call it.

    Args:
        runner: runs the batches.
        batches: prepares them.
        held_out: this rank's part of what is held out, on the host.
    """
    objective, mesh = batches.objective, batches.mesh
    counted = torch.zeros(len(objective.terms), dtype=torch.float64)

    def counting() -> Iterator[Batch]:
        for on_host in held_out:
            with calling(objective, "counts"):
                counted.add_(torch.tensor(objective.counts([on_host])))
            yield batches.to_device(on_host)

    prepared, passes = counting(), passes_before(objective)
    together = GROUP if runner.teach is not None or (runner.plan is not None and runner.plan.stages) else 1
    if (runner.teach is not None or passes) and not any(one.means for one in passes):
        # A pass before an evaluation holds all the batches that it is given, with what it has found of their tokens.
        parts = [runner.evaluate(group) for group in iter(lambda: list(islice(prepared, together)), [])]
        summed = torch.stack(parts).sum(0)
    else:
        summed = runner.evaluate(prepared)
    own = len(objective.terms)
    both = mesh.sum(torch.cat([summed, counted.to(batches.device)]))
    sums, counts = both[:own], both[-own:]
    found = {"eval/loss": float(objective.combine(sums.unbind(), counts) / counts[0].clamp(min=1))}
    if own > 1:
        found |= {
            f"eval/{name}_loss": mean for name, mean in zip(objective.terms, (sums / counts.clamp(min=1)).tolist(), strict=True)
        }
    pairs = both[own:-own].view(-1, 2)
    with calling(objective, "summary"):
        reported = objective.summary(
            {name: (pair[0], pair[1]) for name, pair in zip(objective.metric_names, pairs, strict=True)}
        )
    found |= {f"eval/{name}": float(value) for name, value in reported.items()}
    if objective.perplexity:
        found["eval/perplexity"] = math.exp(min(found["eval/loss"], 700.0))
    return {**found, "eval/tokens": int(counts[0])}


def shown(values: dict[str, float], step: int, objective: Objective) -> str:
    """Return a line about an evaluation after a step, in which the loss is the mean over the units of an objective."""
    named = {name.removeprefix("eval/"): value for name, value in values.items()}
    loss, tokens = named.pop("loss"), int(named.pop("tokens"))
    named.pop("perplexity", None)
    others = "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in named.items())
    nats, count = " nats" if objective.nats else "", number_of(tokens, objective.unit)
    return f"held-out loss after {number_of(step, 'step')}: [bold]{loss:.4f}[/bold]{nats}{others} ({count})"
