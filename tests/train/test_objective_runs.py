"""Whole runs of preferences and rollouts: the examples learn, resume, run on each axis, and are loaded by transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import meshwright as mw
from examples.make_rollouts import mean_reward, new_model, rollouts
from meshwright.checkpoint.directory import latest
from meshwright.checkpoint.export import export_checkpoint
from meshwright.data.tokenizer import train_tokenizer
from meshwright.objectives.preference import Kto, Preference
from meshwright.train.config import RunConfig, load_config
from meshwright.user_code import PartConfig
from tests.harness import run_ranks
from tests.train.runs import losses, rows, train

ROOT = Path(__file__).parents[2]
LAYOUTS = ["layout.tp=2", "layout.cp=2", "layout.pp=2"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(autouse=True)
def _of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are run from the root of the repository."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in place of that of lora_chat.yaml, and its tokenizer."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = train_tokenizer([(ROOT / "examples" / "chats.jsonl").read_text()], 400)
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rollout_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What make_rollouts.py writes."""
    folder = tmp_path_factory.mktemp("rollouts")
    new_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts(folder / "model")))
    return folder


def dpo(model: Path, output: Path, *overrides: str) -> RunConfig:
    short = ["training.steps=12", "training.eval_every=6", "training.log_every=1", "checkpoint.every=6", "optimizer.lr=0.01"]
    short += ["schedule.kind=constant", "schedule.warmup_steps=0"]
    return load_config("examples/dpo_chat.yaml", [f"model.path={model}", f"output={output}", *short, *overrides])


def grpo(folder: Path, output: Path, *overrides: str) -> RunConfig:
    paths = [f"model.path={folder}/model", f"data.files=[{folder}/rows.jsonl]", f"output={output}"]
    return load_config("examples/grpo_offline.yaml", [*paths, "training.log_every=1", *overrides])


def test_dpo_learns_and_is_exported(chat_model: Path, tmp_path: Path) -> None:
    whole = train(dpo(chat_model, tmp_path / "whole"), 2)
    found = [row for row in rows(dpo(chat_model, tmp_path / "whole")) if "eval/rewards/margins" in row]
    assert found[0]["eval/rewards/margins"] == 0  # the reference is the model as it begins
    assert found[-1]["eval/rewards/margins"] > 0.5
    assert found[-1]["eval/rewards/accuracies"] > 0.7
    assert whole[0] == pytest.approx(0.6931, abs=1e-4)
    newest = latest(tmp_path / "whole" / "checkpoints")
    assert newest is not None
    export_checkpoint(newest, tmp_path / "export")
    model, tokenizer = (kind.from_pretrained(tmp_path / "export") for kind in (AutoModelForCausalLM, AutoTokenizer))
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "What is a plan?"}], return_tensors="pt")
    assert model.generate(**asked, max_new_tokens=2, do_sample=False).shape[1] > asked["input_ids"].shape[1]


@pytest.mark.thorough
def test_dpo_resumes(chat_model: Path, tmp_path: Path) -> None:
    whole = train(dpo(chat_model, tmp_path / "whole"), 2)
    assert train(dpo(chat_model, tmp_path / "cut", "training.steps=6"), 2) == whole[:6]
    assert train(dpo(chat_model, tmp_path / "cut"), 2) == whole


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo_on_each_axis(chat_model: Path, tmp_path: Path, layout: str) -> None:
    whole = losses_of(dpo(chat_model, tmp_path / "one", "training.steps=3"), 2)
    other = losses_of(dpo(chat_model, tmp_path / "other", "training.steps=3", layout), 2)
    assert other == pytest.approx(whole, rel=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ipo", "hinge", "kto", "simpo", "orpo", "cpo"])
def test_each_loss_learns(chat_model: Path, tmp_path: Path, kind: str) -> None:
    objective = f"training.objective={{use: preference, with: {{loss_type: {kind}}}}}"
    found = losses_of(dpo(chat_model, tmp_path / "out", objective), 2)
    assert found[-1] < found[0]


@pytest.mark.thorough
def test_rewards_grow(rollout_rows: Path, tmp_path: Path) -> None:
    config = grpo(rollout_rows, tmp_path / "out", "checkpoint.every=8")
    losses_of(config, 2)
    first = next(row for row in rows(config) if "ratio" in row)
    assert first["ratio"] == 1.0
    assert first["clipped"] == 0.0
    newest = latest(config.directory / "checkpoints")
    assert newest is not None
    export_checkpoint(newest, tmp_path / "export")
    before, after = (mean_reward(rollouts(folder, seed=1)) for folder in (rollout_rows / "model", tmp_path / "export"))
    assert after > before + 0.05


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollouts_on_each_axis(rollout_rows: Path, tmp_path: Path, layout: str) -> None:
    short = ("training.epochs=null", "training.steps=3")
    whole, other = (losses_of(grpo(rollout_rows, tmp_path / f"{len(more)}", *short, *more), 2) for more in ((), (layout,)))
    assert other == pytest.approx(whole, rel=2e-3, abs=1e-4)


def losses_of(config: RunConfig, ranks: int) -> list[float]:
    train(config, ranks)
    return losses(config)


def test_an_object_is_named_as_in_a_configuration(chat_model: Path, tmp_path: Path) -> None:
    overrides = {"model.path": str(chat_model), "output": str(tmp_path)}
    run = mw.Run("examples/dpo_chat.yaml", overrides, objective=Preference("ipo", beta=0.2))
    config = run.config
    assert config.training.objective == PartConfig(use="preference", arguments={"loss_type": "ipo", "beta": 0.2})
    assert config.data.formats == ("preference", "token_pairs")
    kto = mw.Run("examples/dpo_chat.yaml", overrides, objective=Kto(beta=0.3)).config
    assert kto.data.unpairs


def pairs_in_a_loop(rank: int, ranks: int) -> list[float]:
    """Losses of an engine on pairs; each of ``ranks`` data ranks has its rows of two."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    loss, engine = Preference("simpo"), mw.Engine(model, optimizer={"lr": 1e-2}, microbatches=1, packing="pack")
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    places = torch.arange(16).expand(2, -1)
    labels = ids.roll(-1, 1).masked_fill((places % 8 < 3) | (places % 8 == 7), -100)
    batch = {"input_ids": ids, "labels": labels, "position_ids": places % 8, "member": 1 + places // 8}
    own = {name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()}
    return [float(engine.step([own], loss).metrics["loss"]) for _ in range(4)]


def test_a_loop_of_ones_own_has_pairs() -> None:
    found, (whole,) = run_ranks(pairs_in_a_loop, 2, 2), run_ranks(pairs_in_a_loop, 1, 1)
    assert whole[-1] < whole[0] / 2
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(whole[0], rel=1e-6)
    assert found[0] == pytest.approx(whole, rel=1e-2)
