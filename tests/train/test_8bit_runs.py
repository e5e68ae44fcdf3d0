"""examples/qlora_8bit.yaml over a small model: it learns with moments in blocks of 8 bits, and layouts have the same losses."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.data.tokenizer import train_tokenizer
from meshwright.distributed.update.quantized import is_quantized
from meshwright.plan.cost.price import totals
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from tests.harness import run_ranks
from tests.train.runs import eval_losses, losses, trainer_on_rank

pytest.importorskip("torchao", reason="pip install 'meshwright[torchao]'")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is run from the root of the repository."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the example's width, and its tokenizer."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    tokenizer = train_tokenizer([(ROOT / "examples" / "chats.jsonl").read_text()], 400)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.06,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def qlora(model: Path, output: Path, *overrides: str) -> RunConfig:
    paths = [f"model.path={model}", f"tokenizer.path={model}", f"output={output}"]
    short = ["training.epochs=null", "training.steps=6", "training.eval_every=6", "training.log_every=1", "export=false"]
    off = ["sample.prompts=[]", "metrics.tensorboard=false", "checkpoint.every=0"]
    return load_config("examples/qlora_8bit.yaml", [*paths, *short, *off, *overrides])


def on_rank(rank: int, config: RunConfig, store: Path) -> tuple[int, int]:
    """Train, and return how many moments are in blocks, and how many there are."""
    trainer = trainer_on_rank(config, store)
    trainer.run()
    states = trainer.optimizer.state.values()
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
    return sum(map(is_quantized, moments)), len(moments)


def ran(config: RunConfig, ranks: int) -> list[tuple[int, int]]:
    _, _, store = prepare_run(config, ranks)
    return run_ranks(on_rank, ranks, config, store.directory)


def test_it_learns_with_moments_in_blocks(wide_model: Path, tmp_path: Path) -> None:
    config = qlora(wide_model, tmp_path / "run")
    assert ran(config, 2) == [(48, 56)] * 2  # all but those of B of keys and values, whose shards have 1,024 numbers
    first, last = eval_losses(config)
    assert last < first - 0.3
    in_fp32 = make_setup(qlora(wide_model, tmp_path / "run", "optimizer.kind=adamw"), 2).plan
    assert totals(make_setup(config, 2).plan).optimizer_bytes < 0.4 * totals(in_fp32).optimizer_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2", "tp=2", "cp=2", "pp=2"])
def test_layouts_have_its_losses(wide_model: Path, tmp_path: Path, layout: str) -> None:
    one, other = (qlora(wide_model, tmp_path / name, *more) for name, more in (("one", ()), ("other", (f"layout.{layout}",))))
    ran(one, 1)
    found = ran(other, 2 if layout == "dp_shard=2" else 4)
    assert all(blocks for blocks, _ in found)
    # Blocks of other numbers have other scales, so they round otherwise.
    assert losses(other) == pytest.approx(losses(one), rel=1e-3)
    assert eval_losses(other) == pytest.approx(eval_losses(one), rel=1e-3)
