"""Models that the commands do not train, in a loop of one's own: encoders, encoder-decoders, and a shared block."""

import copy
from typing import Any

import pytest
import torch
import transformers

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.slices import whole_tensor
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks

BERT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BART = {
    "vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "max_position_embeddings": 32,
}  # fmt: skip
T5 = {
    "vocab_size": 50,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "config", "tp"),
    [
        ("BertForMaskedLM", {**BERT, **NO_DROPOUT}, 1),
        ("BertForMaskedLM", {**BERT, **NO_DROPOUT}, 2),
        ("ModernBertForMaskedLM", {**BERT, "pad_token_id": 0, "attention_dropout": 0.0, "reference_compile": False}, 1),
        ("AlbertForMaskedLM", {**BERT, **NO_DROPOUT, "embedding_size": 16}, 1),  # one layer, three times
        ("BartForConditionalGeneration", BART, 1),
        ("BartForConditionalGeneration", BART, 2),
        ("T5ForConditionalGeneration", T5, 1),
    ],
)
def test_gradients_are_those_of_one_process(name: str, config: dict[str, Any], tp: int) -> None:
    def on_rank(rank: int) -> None:
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        whole = kind(kind.config_class(**config)).double().train()
        model, layout = copy.deepcopy(whole), Layout(dp_shard=2 // tp, tp=tp)
        options = ParallelOptions(param_dtype=None, reduce_dtype=None, microbatches=2)
        plan = resolve(spec_of(model), model, layout, options, world_size=2)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        data = torch.randint(3, 50, (2, 2, 2, 9), generator=torch.Generator().manual_seed(1))
        own = data[layout.resolve(2).coordinates(rank)["dp_shard"]] if tp == 1 else data.flatten(0, 1)
        for ids in data.flatten(0, 1):
            whole(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        for _, ids in GradSync.from_plan(model, plan).microbatches(list(own)):
            model(input_ids=ids, labels=ids).loss.backward()
        truth = dict(whole.named_parameters())
        for parameter_name, parameter in model.named_parameters():
            expected = truth[parameter_name].grad
            assert (parameter.grad is None) == (expected is None), parameter_name
            if expected is not None:
                torch.testing.assert_close(whole_tensor(parameter.grad), expected, msg=parameter_name)

    run_ranks(on_rank, 2)
