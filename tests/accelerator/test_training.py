"""Meshwright on the simulated accelerator: layouts train as on the CPU, without a race; the host waits where it may."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from peft import LoraConfig, get_peft_model

from meshwright.ranks.pool import Pool
from meshwright.trace.held.memory import forecast_memory
from meshwright.train.config import RunConfig
from meshwright.train.host import host_lines
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from meshwright.train.start.teacher_setup import teacher_bytes, with_teacher
from tests.accelerator.peaks import CASES_OF_MEMORY, EVERY, peak_and_forecast
from tests.accelerator.runs import forget_orders, ignore_orders, orders_of, train_with
from tests.accelerator.workers import Workers
from tests.diffusion_gemma import tiny_diffusion_gemma
from tests.tiny import tiny_model
from tests.train.runs import eval_losses, losses, rows

Tiny = Callable[..., RunConfig]

STEPS = 3
READ = "device.py wait"
"""The host reads the metrics."""
LOGGED = {READ: 1}
"""Waits of a run that logs each step: after the last one, since the device has the next step to do where others are read."""
LATE = {READ: STEPS - 1}
"""Waits behind which the device has work."""

ROUTES = "distributed/experts/dispatch.py _route"
"""The host waits for the numbers of tokens that ranks exchange, in each mixture and microbatch: 2 of each, and the steps."""
ROUTES_AGAIN = "distributed/memory/kept_results.py __torch_dispatch__"
"""The same under the mode that keeps results, where the layer is recomputed, so that it runs twice."""

GRADIENTS = "_fsdp_param_group.py finalize_backward"
"""With offload, the host waits for the gradients of each unit, of which the last one leaves the device without work."""

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_model("llama", seed=7, vocab_size=300),
    "four layers": lambda: tiny_model("llama", seed=7, vocab_size=300, num_hidden_layers=4),
    "tied": lambda: tiny_model("gpt2", seed=7, vocab_size=300),
    "experts": lambda: tiny_model("mixtral", seed=7, vocab_size=300),
    "wide": lambda: tiny_model("llama", seed=7, vocab_size=300, hidden_size=128, head_dim=32, intermediate_size=128),
    "diffusion": lambda: tiny_diffusion_gemma(seed=7, vocab_size=300),
}


class Case(NamedTuple):
    """A run.

    Attributes:
        model: which of the models.
        overrides: of a tiny run.
        waits: of the host inside the steps, by place.
        behind: those while the device has work. Where the steps have waits of their own, the metrics are there already.
    """

    overrides: tuple[str, ...] = ()
    model: str = "llama"
    waits: dict[str, int] = LOGGED
    behind: dict[str, int] = LATE


MUON = ("optimizer={kind: muon, lr: 0.01, with: {bucket: 2000}}",)
"""In several buckets, so that their exchanges overlap."""

BLOCKS = ("optimizer={kind: adamw8bit, lr: 0.01, with: {block_size: 64}}",)
"""Moments in blocks: some shards of the wide model have them."""

GUARDED = {**LOGGED, "train/engine/guard.py step": STEPS}
"""The host asks whether a step is skipped."""

TEACHER = (
    "training.objective={use: distillation, with: {next_token_weight: 1.0}}",
    "teacher={path: 'WEIGHTS', top_k: 8}",
)
"""The model as it begins."""

ONE = "layout.dp_shard=1"
SMALL = "training.microbatch_size=1"
CASES = {
    "defer": Case(),
    "defer, bf16": Case(("parallel.param_dtype=bfloat16",)),
    "reduce each": Case(("parallel.sync=reduce_each", SMALL)),
    "reshard each": Case(("parallel.sync=reshard_each", SMALL)),
    "replicas": Case(("layout.dp_replicate=2",)),
    "recomputed": Case(("parallel.activation_checkpointing=full", "parallel.reshard_after_forward=true")),
    "tied": Case(model="tied"),
    "chunks of the loss": Case(("parallel.loss_chunks=2",)),
    "logged at the ends": Case(("training.log_every=3",), behind={READ: 1}),
    "tp": Case((ONE, "layout.tp=2")),
    "tp, sequence parallel": Case((ONE, "layout.tp=2", "parallel.sequence_parallel=true")),
    "tp, whole logits": Case((ONE, "layout.tp=2", "parallel.loss_parallel=false")),
    "cp gather": Case((ONE, "layout.cp=2")),
    "cp ulysses": Case((ONE, "layout.cp=2", "parallel.context_parallel=ulysses")),
    "cp ring": Case((ONE, "layout.cp=2", "parallel.context_parallel=ring")),
    "ep": Case(("layout.ep=2",), "experts", {**LOGGED, ROUTES: 12}, {}),
    "ep, recomputed": Case(
        ("layout.ep=2", "parallel.activation_checkpointing=full"), "experts", {**LOGGED, ROUTES_AGAIN: 24}, {}
    ),
    "pp gpipe": Case((ONE, "layout.pp=2", SMALL, "parallel.pipeline.schedule=gpipe")),
    "pp 1f1b": Case((ONE, "layout.pp=2", SMALL)),
    "pp interleaved": Case((ONE, "layout.pp=2", SMALL, "parallel.pipeline.schedule=interleaved_1f1b"), "four layers"),
    "pp zero bubble": Case((ONE, "layout.pp=2", SMALL, "parallel.pipeline.schedule=interleaved_zero_bubble"), "four layers"),
    "pp zbv": Case((ONE, "layout.pp=2", SMALL, "parallel.pipeline.schedule=zbv"), "four layers"),
    "pp dualpipe_v": Case((ONE, "layout.pp=2", SMALL, "parallel.pipeline.schedule=dualpipe_v"), "four layers"),
    "lora": Case(("adapter={rank: 4, alpha: 8, path: 'WEIGHTS/adapter'}",)),
    "lora, nf4": Case(("adapter={rank: 4, alpha: 8, base: nf4, path: 'WEIGHTS/adapter'}",), "wide"),
    "diffusion": Case(("data.packing=pad",), "diffusion"),
    "callbacks": Case(
        (
            "callbacks=[{use: ema, with: {decay: 0.5, evaluate: true}}, 'tests.train.callbacks_of_users:Logs', "
            "{use: freeze, with: {match: ['**.norm.weight'], until: 1}}]",
        )
    ),
    "teacher": Case(TEACHER),
    "teacher in stages": Case((ONE, "layout.tp=2", *TEACHER, "teacher.layout={pp: 2}")),
    "lion": Case(("optimizer={kind: lion, lr: 0.001}",)),
    "sgd": Case(("optimizer={kind: sgd, lr: 0.1, with: {momentum: 0.9}}",)),
    "adafactor, tp": Case((ONE, "layout.tp=2", "optimizer={kind: adafactor, lr: 0.01}")),
    "adamw8bit": Case(BLOCKS, "wide", GUARDED, {}),
    "adamw4bit, tp": Case((ONE, "layout.tp=2", *BLOCKS, "optimizer.kind=adamw4bit"), "wide", GUARDED, {}),
    "adamwfp8, offload": Case(
        ("parallel.cpu_offload=true", *BLOCKS, "optimizer.kind=adamwfp8"),
        "wide",
        {**GUARDED, "train/engine/steps.py apply": STEPS, GRADIENTS: STEPS},
        {GRADIENTS: 2 * STEPS},
    ),
    "muon": Case(MUON),
    "muon, replicas": Case((*MUON, "layout.dp_replicate=2")),
    "muon, tp": Case((ONE, "layout.tp=2", *MUON)),
    "muon, ep": Case(("layout.ep=2", *MUON), "experts", {**LOGGED, ROUTES: 12}, {}),
    "muon, offload": Case(
        ("parallel.cpu_offload=true", *MUON),
        behind={GRADIENTS: 2 * STEPS},
        waits={  # five buckets go to the device, and come back
            **LOGGED,
            "train/engine/guard.py step": STEPS,
            "train/engine/steps.py apply": STEPS,
            "distributed/update/exchange.py _together": 5 * STEPS,
            "distributed/update/exchange.py finish": 5 * STEPS,
            GRADIENTS: STEPS,
        },
    ),
    "offload": Case(
        ("parallel.cpu_offload=true",),
        behind={GRADIENTS: 2 * STEPS},
        waits={
            **LOGGED,
            "train/engine/guard.py step": STEPS,
            "train/engine/steps.py apply": STEPS,
            GRADIENTS: STEPS,
        },
    ),
}

SELDOM = {
    "defer, bf16", "logged at the ends", "tp, whole logits", "ep, recomputed", "callbacks", "teacher in stages", "lion", "sgd",
    "adafactor, tp", "adamw4bit, tp", "adamwfp8, offload", "muon, replicas", "muon, tp", "muon, ep", "muon, offload",
}  # fmt: skip
"""Cases that vary others, and are thorough."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models on disk: a device and the CPU would draw other first values."""
    folder = tmp_path_factory.mktemp("weights")

    return partial(write_weights, folder)


def write_weights(folder: Path, name: str) -> Path:
    """Write a model and an adapter of it, if they are not there, and return where they are."""
    if not (folder / name).exists():
        model = MODELS[name]()
        model.save_pretrained(folder / name)
        if name != "diffusion":
            settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
            get_peft_model(model, settings).save_pretrained(str(folder / name / "adapter"))
    return folder / name


def overrides_of(case: Case, folder: Path) -> tuple[str, ...]:
    return (f"model={{path: '{folder}'}}", *(item.replace("WEIGHTS", str(folder)) for item in case.overrides))


def compare(tiny: Tiny, overrides: tuple[str, ...], workers: Workers, pool: Pool, case: Case) -> RunConfig:
    """Train a run on the CPU and on the device: the same numbers, no faults, and waits where they may be."""
    on_cpu, on_device = tiny(*overrides, name="cpu"), tiny(*overrides, name="device")
    train_with(pool, on_cpu)
    ranks = train_with(workers, on_device)
    assert not [fault for rank in ranks for fault in rank.faults]
    assert losses(on_device) == losses(on_cpu)
    assert eval_losses(on_device) == eval_losses(on_cpu)
    norms = [[row["gradient_norm"] for row in rows(config) if "loss" in row] for config in (on_device, on_cpu)]
    assert norms[0] == norms[1]
    for rank in ranks:
        assert (rank.waits, rank.behind) == (Counter(case.waits), Counter(case.behind))
    return on_device


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in SELDOM)) for name in CASES])
def test_training(tiny: Tiny, weights: Callable[[str], Path], two: Workers, cpu_pool: Pool, name: str) -> None:
    case = CASES[name]
    every = (f"training.steps={STEPS}", "training.log_every=1", f"training.eval_every={STEPS}", "checkpoint.every=0")
    on_device = compare(tiny, (*every, *overrides_of(case, weights(case.model))), two, cpu_pool, case)
    if routed := sum(count for place, count in case.waits.items() if place in (ROUTES, ROUTES_AGAIN)):
        (line,) = host_lines(on_device, prepare_run(on_device, 2)[0].plan)
        assert f"the host waits for the device {routed // STEPS} times a step" in line


@pytest.mark.thorough
def test_rounding_by_chance_does_not_wait(tiny: Tiny, weights: Callable[[str], Path], two: Workers) -> None:
    """The numbers are those of the device's generator, so losses are not those of the CPU."""
    chance = (*BLOCKS, "optimizer.with.bf16_stochastic_round=true", "model.dtype=bfloat16")
    every = (f"training.steps={STEPS}", "training.log_every=1", "training.eval_every=0", "checkpoint.every=0")
    ranks = train_with(two, tiny(*every, *overrides_of(Case(chance), weights("wide"))))
    assert not [fault for rank in ranks for fault in rank.faults]
    assert all(rank.waits == Counter(GUARDED) for rank in ranks)


PRODUCTS = {
    "tp 2 x shard 2": Case(("layout.tp=2", SMALL)),
    "cp 2 x shard 2": Case(("layout.cp=2", SMALL)),
    "2 x shard 2": Case(("layout.dp_replicate=2", SMALL)),
    "pp 2 x tp 2": Case((ONE, "layout.pp=2", "layout.tp=2", SMALL)),
    "ep 2 x shard 2": Case(("layout.ep=2", SMALL), "experts", {**LOGGED, ROUTES: 12}, {}),
    "muon, tp 2 x shard 2": Case(("layout.tp=2", SMALL, *MUON)),
    "pp 2 x ep 2": Case(("layout.pp=2", "layout.ep=2", SMALL), "experts", {**LOGGED, ROUTES: 12}, {}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PRODUCTS)
def test_training_on_four_ranks(
    tiny: Tiny, weights: Callable[[str], Path], four: Workers, four_on_cpu: Pool, name: str
) -> None:
    case = PRODUCTS[name]
    every = (f"training.steps={STEPS}", "training.log_every=1", f"training.eval_every={STEPS}", "checkpoint.every=0")
    compare(tiny, (*every, *overrides_of(case, weights(case.model))), four, four_on_cpu, case)


NUMBERS = 512
"""Bytes of the metrics, of the guard and of the balance, single numbers that no forecast has."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES_OF_MEMORY)
def test_the_peak_of_memory_is_the_forecast(tiny: Tiny, weights: Callable[[str], Path], two: Workers, name: str) -> None:
    config = tiny(*EVERY, *overrides_of(CASES[name], weights(CASES[name].model)))
    peak, forecast = peak_and_forecast(config, two)
    if name.startswith("pp "):  # closed forms of traces without stages
        assert 0.95 * forecast < peak < 1.05 * forecast
    else:
        assert 0 <= peak - forecast < NUMBERS


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["teacher", "teacher in stages"])
def test_a_teacher_takes_at_most_what_is_forecast(tiny: Tiny, weights: Callable[[str], Path], two: Workers, name: str) -> None:
    config = tiny(
        "training.steps=3", "data.eval_fraction=0", "checkpoint.every=0", *overrides_of(CASES[name], weights("llama"))
    )
    peak = max(rank.peak or 0 for rank in train_with(two, config))
    more, alone = teacher_bytes(with_teacher(make_setup(config, 2))), forecast_memory(make_setup(config, 2)).peak
    assert 0.9 * (alone + more) < peak < alone + more


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("cp ring", "context/ring.py"),
        ("pp 1f1b", "_wait_batch_p2p"),
        pytest.param("pp zbv", "_wait_batch_p2p", marks=pytest.mark.thorough),
        pytest.param("defer", "foreach_all_gather_copy_out", marks=pytest.mark.thorough),
        pytest.param("reduce each", "foreach_reduce", marks=pytest.mark.thorough),
    ],
)
def test_an_order_that_is_left_out_is_reported(
    tiny: Tiny, weights: Callable[[str], Path], two: Workers, name: str, place: str
) -> None:
    overrides = overrides_of(CASES[name], weights(CASES[name].model))
    config = tiny("training.steps=1", "data.eval_fraction=0", "checkpoint.every=0", *overrides)
    two.run(forget_orders)
    assert not any(rank.faults for rank in train_with(two, config))
    orders = sorted(set().union(*two.run(orders_of, place)))
    assert orders
    for number, order in enumerate(orders):
        again = tiny("training.steps=1", "data.eval_fraction=0", "checkpoint.every=0", *overrides, name=f"without-{number}")
        ranks = train_with(two, again, partial(ignore_orders, names=[order]))
        assert any(fault.startswith("race") for rank in ranks for fault in rank.faults), order
