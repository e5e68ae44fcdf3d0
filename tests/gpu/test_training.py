"""The runs of tests/accelerator on a real GPU, on one rank: the CPU's numbers, and no waits but those.

World size 1 keeps every policy, hook, stream and buffer; what more ranks do was simulated.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from meshwright.ranks.pool import Pool
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from tests.accelerator.runs import place_of, trainer_on
from tests.accelerator.test_training import CASES, READ, Case, overrides_of, write_weights
from tests.train.runs import losses, rows

pytestmark = pytest.mark.gpu

STEPS = 4
EVERY = (f"training.steps={STEPS}", "training.log_every=1", "checkpoint.every=0", "data.eval_fraction=0")

MORE = {
    "microbatches": Case(("training.microbatch_size=2", "training.global_batch_size=8")),
    "selective": Case(("parallel.activation_checkpointing=selective",)),
    "submodule": Case(("parallel.activation_checkpointing=submodule",)),
    "compiled": Case(("parallel.compile=true",)),
    "compiled, recomputed": Case(("parallel.compile=true", "parallel.activation_checkpointing=selective")),
    "eager attention": Case(("model.attn_implementation=eager",)),
    "flex attention": Case(("model.attn_implementation=flex_attention",), "wide"),
    "padded": Case(("data.packing=pad",)),
    "experts": Case((), "experts"),
    "experts, compiled": Case(("parallel.compile=true",), "experts"),
}
NO_LAYOUT = {name: case for name, case in CASES.items() if not any("layout" in item for item in case.overrides)}
RUNS = {**NO_LAYOUT, **MORE}

TOLERANCE = 2e-4
"""Of losses and norms in fp32, relative: products are added in another order, and AdamW divides small numbers by small ones."""
ROUNDED = {
    "defer, bf16": 2e-2, "lora, nf4": 2e-3, "adamw8bit": 1e-2, "adamwfp8, offload": 1e-2, "lion": 1e-2, "muon": 2e-2,
    "muon, offload": 2e-2,
}  # fmt: skip
"""The same where something is rounded to fewer bits: Muon's iteration to bf16, Lion's update to its signs."""


def train_here(device: torch.device, config: RunConfig, store: Path) -> Counter[str]:
    """Train on this rank, and return the host's waits in the steps after the first, by place; none on the CPU.

    CUDA tells of all but those for events, which nobody but Meshwright and FSDP ask for.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    trainer = trainer_on(device, config, store)
    if device.type == "cpu":
        trainer.run()
        return Counter()
    waits: Counter[str] = Counter()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "synchronizing" in str(message):
            stack = reversed(traceback.extract_stack()[:-1])
            waits[place_of(tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack))] += 1

    plain = trainer.train_step

    def train_step() -> None:
        torch.cuda.set_sync_debug_mode("warn" if trainer.step else "default")
        try:
            plain()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.train_step = train_step  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        trainer.run()
    return waits


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return partial(write_weights, tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("name", RUNS)
def test_training(tiny: Callable[..., RunConfig], weights: Callable[[str], Path], gpu: Pool, cpu: Pool, name: str) -> None:
    case = RUNS[name]
    overrides = (*EVERY, *overrides_of(case, weights(case.model)))
    runs = [tiny(*overrides, name=kind) for kind in ("cpu", "gpu")]
    found = []
    for pool, config in zip((cpu, gpu), runs, strict=True):
        _, _, store = prepare_run(config, 1)
        found.append(pool.run(train_here, config, store.directory)[0])
    tolerance = ROUNDED.get(name, TOLERANCE)
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=tolerance)
    norms = [[row["gradient_norm"] for row in rows(config) if "loss" in row] for config in runs]
    assert norms[1] == pytest.approx(norms[0], rel=10 * tolerance)
    allowed = {place: count for place, count in case.waits.items() if place != READ}
    assert found[1] <= Counter(allowed), found[1]


def test_a_wait_is_seen(gpu: Pool) -> None:
    """What the test above counts can be counted."""
    assert gpu.run(planted_wait) == [1]


def planted_wait(device: torch.device) -> int:
    seen: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: seen.append(str(message))
        torch.ones(1, device=device).item()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in text for text in seen)
