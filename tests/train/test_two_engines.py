"""Two engines in one process, a policy and its reference, on one layout or on two: each computes what it does alone."""

import os

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from tests.cli.test_launchers import free_port
from tests.harness import run_ranks
from tests.train.test_engine import LENGTHS, focal, make, numbers, own, rows

LAYOUTS = {
    "two layouts": (("dp_shard=2", {}), ("tp=2", {})),
    "one layout": (("dp_shard=2", {}), ("dp_shard=2", {})),
    "pp, cp": (("pp=2", {}), ("cp=2", {})),
    "pp, pp": (("pp=2", {"parallel": {"pipeline": {"schedule": "zbv"}}}), ("pp=2", {})),
    "cp, cp": (("cp=2", {"parallel": {"context_parallel": "ring"}}), ("cp=2", {})),
    "recomputed, replicas": (
        ("dp_shard=2", {"parallel": {"activation_checkpointing": "full", "loss_chunks": 3}}),
        ("dp_replicate=2,dp_shard=1", {}),
    ),
}


def policy(log_probs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return -(log_probs - batch["old"]).exp() + 0.1 * (log_probs - batch["said"]) ** 2


def of_each_batch(engine: mw.Engine, step: int) -> list[torch.Tensor]:
    """What an engine says of all batches of a step, on all ranks."""
    every: list[tuple[int, list[torch.Tensor]]] = [(0, [])] * dist.get_world_size()
    dist.all_gather_object(every, (engine.data_rank, engine.log_probs(own(engine, step))))
    found, ranks = dict(every), engine.data_ranks
    return [found[number % ranks][number // ranks] for number in range(len(LENGTHS))]


def both(rank: int, *layouts: tuple[str, dict[str, object]]) -> dict[str, torch.Tensor]:
    """Train two engines, the first with what the second says; each between the halves of a step of the other."""
    engines = []
    for seed, (layout, options) in enumerate(layouts):
        engines.append(make(layout, len(LENGTHS) // (2 if "dp_" in layout else 1), seed=seed, **options))
    first, second = engines
    losses = []
    for step in range(2):
        said = of_each_batch(second, step)[first.data_rank :: first.data_ranks]
        batches = own(first, step)
        for batch, one, old in zip(batches, said, first.log_probs(batches), strict=True):
            batch |= {"said": one, "old": old}
        results = first.forward_backward(batches, policy), second.forward_backward(own(second, step), focal)
        first.optim_step()
        second.optim_step()
        losses += [result.loss for result in results]
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        **{f"{number} {name}": one for number, own in enumerate(engines) for name, one in numbers(dict(own.weights())).items()},
    }


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "two layouts" else pytest.mark.thorough) for name in LAYOUTS]
)
def test_each_computes_what_it_does_alone(layout: str) -> None:
    [truth] = run_ranks(both, 1, ("", {}), ("", {}))
    for found in run_ranks(both, 2, *LAYOUTS[layout]):
        assert found.keys() == truth.keys()
        for name, expected in truth.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


def closed(rank: int, port: int) -> tuple[float, float, bool]:
    """The first engine, which starts the group, is closed, and the second goes on."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    with make("dp_shard=2", 2) as first:
        loss = first.step(own(first, 0)).loss
        second = make("tp=2")
    other = second.step(rows(0)).loss
    first.close()  # once more does nothing
    assert dist.is_initialized()
    second.close()
    return loss, other, dist.is_initialized()


def test_the_last_engine_that_is_closed_ends_the_group() -> None:
    (loss, other, left), second = run_ranks(closed, 2, free_port(), group=False)
    assert second == (loss, other, left)
    assert loss == pytest.approx(other, rel=1e-12)
    assert not left


def of_the_user(rank: int) -> bool:
    make("dp_shard=2", 2).close()
    return dist.is_initialized()


def test_a_group_of_the_user_stays() -> None:
    assert run_ranks(of_the_user, 2) == [True, True]
