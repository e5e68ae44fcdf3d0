"""Modules that are no models of transformers in an engine: what they need, and what is said where it is missing."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig

import meshwright as mw
from meshwright.errors import ConfigError, ModelError, PlanError
from tests.harness import refuses, run_ranks
from tests.train.test_engine import SIZES


class Bigram(nn.Module):
    """Each word says the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(**SIZES)
        self.words, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.words(input_ids)))


class Bare(Bigram):
    """The same without `logits`."""

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        return self.head(self.words(input_ids))


def engine(model: Any, layout: str = "", **options: Any) -> mw.Engine:
    wide = {"param_dtype": "float64", "reduce_dtype": "float64"}
    return mw.Engine(model, layout, optimizer={"lr": 1e-2}, parallel=wide, sequence_length=16, **options)


def steps(rank: int, layout: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    made = engine(Bigram().double(), layout)
    ids = torch.arange(32).view(4, 8) * 5 % 96
    mine = [{"input_ids": ids[made.data_rank :: made.data_ranks]}]
    losses = [made.step(mine).loss for _ in range(3)]
    made.save(folder / "saved")
    losses.append(made.step(mine).loss)
    weights = {name: tensor.clone() for name, tensor in made.weights()}
    made.load(folder / "saved")
    assert made.step(mine).loss == losses[-1]
    with refuses(ConfigError, "engine.model"):
        made.export(folder / "exported")
    return {"losses": losses, "weights": weights}


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2,dp_shard=1"])
def test_a_module_with_a_config_and_logits_runs_on_data_ranks(tmp_path: Path, layout: str) -> None:
    [truth] = run_ranks(steps, 1, "", tmp_path)
    assert truth["losses"][-1] < truth["losses"][0]
    assert truth["weights"].keys() == {"words.weight", "head.weight", "head.bias"}
    for found in run_ranks(steps, 2, layout, tmp_path):
        assert found["losses"] == pytest.approx(truth["losses"], rel=1e-12)
        for name, expected in truth["weights"].items():
            torch.testing.assert_close(found["weights"][name], expected, rtol=1e-12, atol=1e-12)


def without_logits(rank: int) -> str:
    with refuses(ModelError, "model.logits") as caught:
        engine(Bare()).step([{"input_ids": torch.arange(8)[None]}])
    return str(caught.value)


def test_a_forward_without_logits_is_named() -> None:
    [said] = run_ranks(without_logits, 1)
    assert "Bare" in said
    assert "returned Tensor" in said


def llama() -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))


def with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def seq2seq() -> Any:
    sizes = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 96}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes))


MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "no config": (lambda: nn.Linear(2, 2), "has no config of transformers"),
    "no head": (lambda: AutoModel.from_config(AutoConfig.for_model("llama", **SIZES)), "LlamaModel has no output head"),
    "compiled": (lambda: torch.compile(llama()), "its attribute _orig_mod, and parallel={'compile': True}"),
    "wrapped": (lambda: nn.DataParallel(llama()), "its attribute module, and layout="),
    "peft": (with_adapters, "has adapters of peft already"),
    "encoder and decoder": (seq2seq, "has an encoder and a decoder"),
    "float16": (lambda: llama().half(), "is stored in torch.float16"),
    "nothing": (lambda: None, "model is None"),
    "a class": (lambda: nn.Linear, "model is <class"),
}


@pytest.mark.parametrize("case", MODULES)
def test_what_is_missing_is_named_before_a_process_group(case: str) -> None:
    make, words = MODULES[case]
    with refuses(ConfigError, "engine.model") as caught:
        engine(make())
    assert words in str(caught.value)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("layout", "words"), [("tp=2", "tp"), ("cp=2", "attentions of Bigram"), ("pp=2", "cut is unknown")])
def test_axes_that_a_module_says_nothing_of_are_refused(layout: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PlanError) as caught:
        engine(Bigram(), layout)
    assert words in str(caught.value)
