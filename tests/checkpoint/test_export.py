"""Export: a Hugging Face directory that loads with the trained values, and continues a prompt."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshwright.checkpoint.export import export_checkpoint, generate
from meshwright.errors import CheckpointError, ModelError
from meshwright.train.config import RunConfig
from meshwright.train.prepare import prepare_run
from meshwright.train.setup import Paths
from tests.harness import run_ranks
from tests.tiny import whole
from tests.train.runs import LLAMA, tiny_run, trainer_on_rank

IDS = [[5, 17, 290, 4, 60, 61, 62], [9, 8, 7, 6, 5, 4, 3]]
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
PHI3 = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {"model_type": "phi3", "pad_token_id": 0}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "intermediate_size": 64, "num_local_experts": 4}
MODELS = {"mixtral": MIXTRAL, "tied llama": {**LLAMA, "tie_word_embeddings": True}, "llama": LLAMA, "gpt2": GPT2, "phi3": PHI3}


def _train_and_ask(rank: int, config: RunConfig, store: Path) -> list[list[float]]:
    trainer = trainer_on_rank(config, store)
    trainer.run()
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(torch.tensor(IDS)).logits
    assert isinstance(logits, DTensor) == (config.layout.tp == 2)  # sharded over the vocabulary, for the loss
    return whole(logits).tolist()


@pytest.fixture(
    scope="module", params=["tied llama", "llama", "gpt2", "llama, tp 2", "tied llama, tp 2", "phi3, tp 2", "mixtral, ep 2"]
)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> tuple[RunConfig, torch.Tensor]:
    """A run on two ranks, and what its model answered while it was sharded."""
    name, _, parallel = request.param.partition(", ")
    layout = {"": (), "tp 2": ("layout.tp=2", "layout.dp_shard=1"), "ep 2": ("layout.ep=2",)}[parallel]
    override = f"model.config={json.dumps(MODELS[name])}"
    config = tiny_run(tmp_path_factory.mktemp("trained"), corpus, override, "training.steps=3", *layout)
    _, _, store = prepare_run(config, 2)
    return config, torch.tensor(run_ranks(_train_and_ask, 2, config, store.directory)[0])


@pytest.fixture
def exported(trained: tuple[RunConfig, torch.Tensor], tmp_path: Path) -> Path:
    export_checkpoint(checkpoint(trained[0]), tmp_path / "export")
    return tmp_path / "export"


def checkpoint(config: RunConfig) -> Path:
    return Paths(config.directory).checkpoints / "step-00000003"


def test_logits_and_tokenizer(trained: tuple[RunConfig, torch.Tensor], exported: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    with torch.no_grad():
        logits = model.eval()(torch.tensor(IDS)).logits
    assert torch.allclose(logits, trained[1], rtol=1e-6, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert len(tokenizer) == 300 == model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.use_cache


def test_each_weight_once(exported: Path) -> None:
    with safe_open(exported / "model.safetensors", framework="pt") as content:
        names = set(content.keys())
        elements = sum(content.get_tensor(name).numel() for name in names)
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert elements == sum(parameter.numel() for parameter in model.parameters())
    assert ("lm_head.weight" in names) == (not model.config.tie_word_embeddings)
    assert {path.name for path in exported.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert not list(exported.glob("*.bin"))
    if model.config.model_type == "mixtral":  # as on the hub: each expert apart
        assert sum(".experts.3." in name for name in names) == 2 * 3


def test_half_precision(trained: tuple[RunConfig, torch.Tensor], tmp_path: Path) -> None:
    export_checkpoint(checkpoint(trained[0]), tmp_path / "half", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert model.dtype == torch.bfloat16
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    with torch.no_grad():
        logits = model.float().eval()(torch.tensor(IDS)).logits
    assert torch.allclose(logits, trained[1], rtol=0.1, atol=0.05)


def test_generate_is_deterministic(exported: Path) -> None:
    first = generate(exported, "abc", max_new_tokens=8, temperature=0.0)
    assert first
    assert generate(exported, "abc", max_new_tokens=8, temperature=0.0, seed=1) == first
    sampled = {generate(exported, "abc", max_new_tokens=8, temperature=2.0, seed=seed) for seed in range(3)}
    assert len(sampled) > 1
    assert generate(exported, "abc", max_new_tokens=8, temperature=2.0, seed=1) in sampled


def test_directories_that_are_refused_or_replaced(trained: tuple[RunConfig, torch.Tensor], exported: Path) -> None:
    source = checkpoint(trained[0])
    (exported / "old-file").write_text("")
    export_checkpoint(source, exported)  # an earlier export is replaced whole
    assert not (exported / "old-file").exists()
    empty = exported.with_name("empty")
    empty.mkdir()
    export_checkpoint(source, empty)
    assert (empty / "config.json").exists()
    for name in ("notes", "file", "model"):
        other = exported.with_name(name)
        if name in ("notes", "model"):
            other.mkdir()
            (other / "thesis.txt").write_text("years of work")
            if name == "model":  # somebody's model is no export of ours either
                (other / "config.json").write_text("{}")
        else:
            other.write_text("years of work")
        with pytest.raises(CheckpointError, match="holds something that is no export"):
            export_checkpoint(source, other)
        kept = other / "thesis.txt" if other.is_dir() else other
        assert kept.read_text() == "years of work"
    assert not list(exported.parent.glob(".*.tmp"))


def test_failure_leaves_the_earlier_export(
    trained: tuple[RunConfig, torch.Tensor], exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedModel

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = (exported / "model.safetensors").read_bytes()
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", no_space)
    with pytest.raises(CheckpointError, match=r"not written: .*No space left"):
        export_checkpoint(checkpoint(trained[0]), exported)
    assert (exported / "model.safetensors").read_bytes() == before
    assert not list(exported.parent.glob(".*.tmp"))


def test_sources_that_are_refused(trained: tuple[RunConfig, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: not a complete checkpoint"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "export")
    cut = tmp_path / "run" / "checkpoints" / "step-00000003"
    shutil.copytree(trained[0].directory, tmp_path / "run")
    (cut / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: __1_0.distcp is missing"):
        export_checkpoint(cut, tmp_path / "export")
    assert not (tmp_path / "export").exists()
    with pytest.raises(ModelError, match=r"no config\.json"):
        generate(tmp_path, "abc")
