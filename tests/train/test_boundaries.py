"""The check that packed documents stay apart: passes for families that keep them apart, and catches those that do not."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.experts.balance import Balance
from meshwright.errors import ConfigError
from meshwright.models.objective import NextToken
from meshwright.train.boundaries import check_boundaries
from meshwright.train.engine.runner import Sequential
from tests.harness import refuses, run_ranks
from tests.tiny import FAMILIES, SPARSE, UNPACKED, tiny_model

CPU = torch.device("cpu")


def check(model: nn.Module, **options: Any) -> None:
    engine = Sequential(model, NextToken(), GradSync(model), Balance(model, (), CPU), lambda: None)
    check_boundaries(engine.logits, model, CPU, **options)


DENSE = [family for family in FAMILIES if family not in SPARSE | UNPACKED]


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_that_keep_documents_apart_pass_to_the_last_bit(family: str, attention: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, attn_implementation=attention).to(dtype).train()
    check(model, rows=3, length=20)
    assert model.training


LEAKING = {
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


@pytest.mark.parametrize("family", LEAKING)
def test_families_that_let_documents_through_are_refused(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, vocab_size=67, bos_token_id=1, eos_token_id=2, pad_token_id=0, **LEAKING[family])
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"data\.packing=pack.*set data\.packing=pad or another") as error:
        check(model, rows=1, length=20)
    assert "microbatch" not in str(error.value)  # there is one sequence in it already
    with pytest.raises(ConfigError, match=r"implementation, or training\.microbatch_size=1"):
        check(model, rows=2, length=20)


def test_the_trainer_checks_before_it_trains(tiny, tmp_path) -> None:
    from meshwright.train.start.prepare import prepare_run
    from tests.train.runs import trainer_on_rank

    config = tiny(
        "model.config={model_type: opt, hidden_size: 32, ffn_dim: 48, num_hidden_layers: 2, num_attention_heads: 4, "
        "word_embed_proj_dim: 32, max_position_embeddings: 64}"
    )
    _, _, store = prepare_run(config, 2)

    def on_rank(rank: int) -> None:
        with refuses(ConfigError, "data.packing.documents"):
            trainer_on_rank(config, store.directory)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_mixture_of_experts_passes(family: str) -> None:
    check(tiny_model(family), rows=2, length=20, exact=False)


def test_attention_with_sinks_is_refused() -> None:
    """transformers' gpt_oss does not tell its masks of positions that restart. A run uses another attention function."""
    with refuses(ConfigError, "data.packing.documents"):
        check(tiny_model("gpt_oss"), rows=2, length=20, exact=False)


@pytest.mark.parametrize("kinds", [["linear_attention", "moe"], ["linear_attention", "mlp"]], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_mamba_carries_a_document_into_the_next_and_is_refused(kinds: list[str], rows: int) -> None:
    """Also where the bound is that of a mixture of experts: the leak is no rounding."""
    with refuses(ConfigError, "data.packing.documents"):
        check(tiny_model("nemotron_h", layers_block_type=kinds), rows=rows, length=20, exact=False)
