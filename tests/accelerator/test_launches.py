"""What the host launches in an optimizer step, beside FSDP2 by hand: on a GPU, that is the CPU's cost of a step."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from tests.accelerator.floor import train_by_hand
from tests.accelerator.runs import trainer_on
from tests.accelerator.workers import Workers, module_of
from tests.tiny import tiny_model
from tests.train.runs import losses


class Counts(NamedTuple):
    """What the host launches: operators and copies (of which those of many tensors are one), and collectives."""

    launches: int
    collectives: int


class Case(NamedTuple):
    """A run on two ranks.

    Attributes:
        microbatches: of a step.
        recomputed: whether layers are recomputed in backward.
        above: counts of a step that is not logged, minus those of FSDP2 by hand. They may shrink, and not grow.
    """

    microbatches: int
    recomputed: bool
    above: Counts


CASES = [
    Case(1, False, Counts(-7, -3)),
    pytest.param(Case(1, True, Counts(-7, -3)), marks=pytest.mark.thorough),
    Case(4, False, Counts(-93, -24)),
    Case(4, True, Counts(-93, -24)),
]
STEPS = 2
"""The last of these is counted: the first one makes the state of the optimizer, and is logged. Another one follows."""
SEQUENCES = 4
"""Of a rank in a step."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    tiny_model("llama", seed=7, vocab_size=300, num_hidden_layers=3).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.microbatches}{' recomputed' * case.recomputed}")
def test_launches(tiny: Callable[..., RunConfig], weights: Path, two: Workers, case: Case) -> None:
    config = tiny(
        f"model={{path: '{weights}'}}",
        f"training.microbatch_size={SEQUENCES // case.microbatches}",
        f"training.steps={STEPS + 1}",
        "training.log_every=1000",
        "schedule.kind=constant",
        "parallel.param_dtype=bfloat16",
        f"parallel.activation_checkpointing={'full' if case.recomputed else 'none'}",
        "data.eval_fraction=0",
        "checkpoint.every=0",
    )
    store = prepare_run(config, 2)[2].directory
    (ours, floor, floor_losses), _ = two.run(count_both, config, store, case.recomputed)
    first, last = losses(config)
    same_work = pytest.approx([floor_losses[0], floor_losses[-1]], rel=1e-4)  # up to rounding in bf16
    assert [first, last] == same_work
    above = Counts(*(one - other for one, other in zip(ours, floor, strict=True)))
    assert above.launches <= case.above.launches, (ours, floor)
    assert above.collectives <= case.above.collectives, (ours, floor)


def count_both(device: torch.device, config: RunConfig, store: Path, recomputed: bool) -> tuple[Counts, Counts, list[float]]:
    """Train a run, then FSDP2 by hand on the same microbatches. Returns the counts of each, and the losses by hand."""
    module, found = module_of(device), list[Counts]()

    def note() -> None:
        counts = module.counts()
        found.append(Counts(counts.get("launches", 0), counts.get("collectives", 0)))

    def of_step() -> Counts:
        begin, end = found[STEPS - 1], found[STEPS]
        found.clear()
        return Counts(*(after - before for before, after in zip(begin, end, strict=True)))

    trainer = trainer_on(device, config, store)
    steps = [trainer.microbatches(step) for step in range(STEPS + 1)]
    step = trainer.train_step

    def noted() -> None:
        note()
        step()

    trainer.train_step = noted  # type: ignore[method-assign]
    trainer.run()
    ours = of_step()
    by_hand = train_by_hand(
        device, config.model.path, steps, config.optimizer.lr, param_dtype=torch.bfloat16, recompute=recomputed, begin_step=note
    )
    return ours, of_step(), [loss.item() for loss in by_hand]
