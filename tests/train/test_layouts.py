"""The trainer on 1, 2 and 4 ranks: the same run whatever the layout, and what the options of a run do to it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from tests.harness import run_ranks
from tests.train.runs import eval_losses, losses, train, train_on_rank, trainer_on_rank

Tiny = Callable[..., RunConfig]

LAYOUTS = {
    "shard 2": (2, ()),
    "replicate 2": (2, ("layout.dp_replicate=2",)),
    "2x2, a microbatch a rank": (4, ("layout.dp_replicate=2",)),
    "shard 2, microbatches of 1, reduce each": (2, ("training.microbatch_size=1", "parallel.sync=reduce_each")),
    "replicate 2, microbatches of 1": (2, ("layout.dp_replicate=2", "training.microbatch_size=1")),
    "tp 2": (2, ("layout.dp_shard=1", "layout.tp=2")),
    "tp 2 x shard 2": (4, ("layout.tp=2",)),
    "2 replicas x tp 2": (4, ("layout.dp_shard=1", "layout.dp_replicate=2", "layout.tp=2")),
    "tp 2, sequence parallel": (2, ("layout.dp_shard=1", "layout.tp=2", "parallel.sequence_parallel=true")),
    "tp 2 x shard 2, sequence parallel": (4, ("layout.tp=2", "parallel.sequence_parallel=true")),
    "tp 2, whole logits": (2, ("layout.dp_shard=1", "layout.tp=2", "parallel.loss_parallel=false")),
    "pp 2": (2, ("layout.dp_shard=1", "layout.pp=2")),
    "pp 2 x shard 2, gpipe": (4, ("layout.pp=2", "training.microbatch_size=1", "parallel.pipeline.schedule=gpipe")),
    "one rank, one microbatch": (1, ("training.microbatch_size=8",)),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunConfig:
    """The run on one rank."""
    from tests.train.runs import tiny_run

    config = tiny_run(tmp_path_factory.mktemp("reference"), corpus, "training.eval_every=3")
    train(config)
    return config


def test_loss_goes_down(reference: RunConfig) -> None:
    found, held_out = losses(reference), eval_losses(reference)
    assert len(found) == 6
    assert len(held_out) == 3  # before, at step 3, after
    assert found[-1] < found[0] - 0.5
    assert held_out[2] < held_out[1] < held_out[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_same_losses_on_every_layout(tiny: Tiny, reference: RunConfig, name: str) -> None:
    ranks, overrides = LAYOUTS[name]
    config = tiny("training.eval_every=3", *overrides)
    assert train(config, ranks) == pytest.approx(losses(reference), rel=1e-5)
    assert eval_losses(config) == pytest.approx(eval_losses(reference), rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["pack", "pad"])
def test_a_sequence_length_that_tp_does_not_divide_is_padded(tiny: Tiny, packing: str) -> None:
    odd = ("data.sequence_length=27", f"data.packing={packing}", "training.eval_every=3")
    alone = tiny(*odd, name="alone")
    expected = train(alone, 1)
    for ranks, overrides in ((2, ("layout.dp_shard=1", "layout.tp=2")), (4, ("layout.dp_shard=1", "layout.tp=4"))):
        shared = tiny(*odd, *overrides, "parallel.sequence_parallel=true", name=f"tp {ranks}")
        assert train(shared, ranks) == pytest.approx(expected, rel=1e-5)
        assert eval_losses(shared) == pytest.approx(eval_losses(alone), rel=1e-5)


@pytest.mark.thorough
def test_options_that_change_no_value(tiny: Tiny) -> None:
    """Recomputing, offloading and compiling without fusion are the same arithmetic: the same bits, or almost."""
    plain = train(tiny(name="plain"), 2)
    for mode in ("full", "submodule", "selective"):
        assert train(tiny(f"parallel.activation_checkpointing={mode}", name=mode), 2) == plain
    assert train(tiny("parallel.cpu_offload=true", name="offload"), 2) == pytest.approx(plain, rel=1e-6)
    compiled = tiny("parallel.compile=true", "parallel.compile_backend=aot_eager", name="compiled")
    assert train(compiled, 2) == pytest.approx(plain, rel=1e-5)


@pytest.mark.thorough
def test_activation_checkpointing_draws_the_same_dropout(tiny: Tiny) -> None:
    from tests.train.runs import GPT2_WITH_DROPOUT

    plain = train(tiny(GPT2_WITH_DROPOUT, name="plain"), 2)
    assert plain != train(tiny(GPT2_WITH_DROPOUT.replace("pdrop: 0.2", "pdrop: 0.0"), name="without"), 2)  # it does act
    for mode in ("full", "submodule", "selective"):
        recomputed = tiny(GPT2_WITH_DROPOUT, f"parallel.activation_checkpointing={mode}", name=mode)
        assert train(recomputed, 2) == plain, mode


@pytest.mark.thorough
def test_bf16_learns(tiny: Tiny) -> None:
    exact, rounded = train(tiny(name="fp32"), 2), train(tiny("parallel.param_dtype=bfloat16", name="bf16"), 2)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
    assert rounded[-1] < rounded[0] - 0.5


def _parameters(rank: int, config: RunConfig, store: Path, steps: int) -> dict[str, torch.Tensor]:
    trainer = trainer_on_rank(config, store)
    for _ in range(steps):
        trainer.train_step()
        trainer.step += 1
    trainer.recorder.close()
    found = {}
    for name, parameter in trainer.model.named_parameters():
        data = parameter.data
        found[name] = (data.full_tensor() if isinstance(data, DTensor) else data).clone().numpy()
    return found


def test_frozen_parameters_stay_where_they_are(tiny: Tiny) -> None:
    config = tiny("parallel.freeze=['model.layers.0.**', 'model.embed_tokens.weight']")
    _, _, store = prepare_run(config, 2)
    before = run_ranks(_parameters, 2, config, store.directory, 0)[0]
    after = run_ranks(_parameters, 2, config, store.directory, 2)
    moved = {name for name in before if (before[name] != after[0][name]).any()}
    frozen = {name for name in before if name.startswith(("model.layers.0.", "model.embed_tokens."))}
    assert len(frozen) == 10
    assert moved == before.keys() - frozen
    assert all((after[0][name] == after[1][name]).all() for name in before)


def test_only_rank_0_speaks(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny()
    _, _, store = prepare_run(config, 2)
    capfd.readouterr()
    run_ranks(train_on_rank, 2, config, store.directory)
    out, error = capfd.readouterr()
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step ")] == [f"{n}/6" for n in range(1, 7)]
    assert out.count("held-out loss after 0 steps") == 1
    assert out.count("checkpoint ") == 1
    assert error == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "equal"), [(("layout.pp=2",), False), (("layout.cp=2",), False), (("layout.tp=2",), True)], ids=str
)
def test_ranks_with_other_layers_or_tokens_draw_other_random_numbers(tiny: Tiny, layout: tuple[str, ...], equal: bool) -> None:
    def draws(rank: int, config: RunConfig, store: Path) -> float:
        trainer = trainer_on_rank(config, store)
        trainer.recorder.close()
        return float(torch.rand(()))

    config = tiny("layout.dp_shard=1", "data.packing=pad", *layout)
    first, second = run_ranks(draws, 2, config, prepare_run(config, 2)[2].directory)
    assert (first == second) is equal
