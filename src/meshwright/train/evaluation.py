"""An evaluation: the loss of what is held out, its terms, and the metrics of the objective."""

import math
from collections.abc import Callable, Iterator

import torch

from meshwright.data.loader import EvalLoader
from meshwright.errors import number_of
from meshwright.objectives.call import calling
from meshwright.train.batches import RankBatches
from meshwright.train.engine import Batch, Engine

__all__ = ["evaluate", "shown"]


@torch.no_grad()
def evaluate(engine: Engine, batches: RankBatches, loader: EvalLoader | None, progress: Callable[[], None]) -> dict[str, float]:
    """Return what an evaluation measures, the same on all ranks: names with ``eval/`` to values. All ranks call it.

    Args:
        engine: runs the batches.
        batches: prepares them.
        loader: gives this rank's part of what is held out; ``None``: nothing is, and nothing is measured.
        progress: called before each batch.
    """
    if loader is None:
        return {}
    objective, mesh = batches.objective, batches.mesh
    counted = torch.zeros(len(objective.terms), dtype=torch.float64)

    def held_out() -> Iterator[Batch]:
        for index, batch in enumerate(loader):
            progress()
            with calling(objective, "held_out"):
                whole = objective.held_out(batch, loader.numbers(index))
            on_host = batches.share(whole)
            with calling(objective, "counts"):
                counted.add_(torch.tensor(objective.counts([on_host])))
            yield batches.to_device(on_host)

    summed, own = engine.evaluate(held_out()), len(objective.terms)
    both = mesh.sum(torch.cat([summed, counted.to(batches.device)]))
    sums, counts = both[:own], both[-own:]
    found = {"eval/loss": float(objective.combine(sums.unbind(), counts) / counts[0].clamp(min=1))}
    if own > 1:
        found |= {
            f"eval/{name}_loss": mean for name, mean in zip(objective.terms, (sums / counts.clamp(min=1)).tolist(), strict=True)
        }
    pairs = both[own:-own].tolist()
    for name, total, count in zip(objective.metric_names, pairs[::2], pairs[1::2], strict=True):
        found[f"eval/{name}"] = total / max(count, 1)
    if objective.perplexity:
        found["eval/perplexity"] = math.exp(min(found["eval/loss"], 700.0))
    return {**found, "eval/tokens": int(counts[0])}


def shown(values: dict[str, float], step: int, unit: str) -> str:
    """Return a line about an evaluation after a step, in which the loss is the mean over some units."""
    named = {name.removeprefix("eval/"): value for name, value in values.items()}
    loss, tokens = named.pop("loss"), int(named.pop("tokens"))
    named.pop("perplexity", None)
    others = "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in named.items())
    return f"held-out loss after {number_of(step, 'step')}: [bold]{loss:.4f}[/bold] nats{others} ({number_of(tokens, unit)})"
