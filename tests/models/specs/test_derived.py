"""spec_of() and build: what is derived from a model's own declarations, and what is refused."""

import pytest
import torch

from meshwright.errors import ConfigError, ModelError
from meshwright.models import _transformers_compat
from meshwright.models.model_config import ModelConfig
from meshwright.models.specs.derived import derived_spec
from meshwright.models.specs.plain_module import INFERRED
from meshwright.models.specs.registry import spec_of
from meshwright.models.token_loss import forward_logits
from meshwright.models.weights.build import build_on_meta, check_files, materialize, pretrained_config, weight_files
from meshwright.plan.given.spec import ParallelSpec
from tests.harness import refuses
from tests.tiny import FAMILIES, SPARSE, UNPACKED, Plain, tiny_config, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_come_from_the_models_own_declaration(family: str) -> None:
    model = tiny_model(family, meta=True)
    spec = spec_of(model)
    others = {"gpt2": "transformer.h.*", "opt": "model.decoder.layers.*"}
    assert spec.layers == (others.get(family, "model.layers.*"),)
    assert spec.units == ()
    assert spec.family == type(model).__name__
    if family not in ("gpt2", "opt", "gpt_oss", "deepseek_v3", "nemotron_h"):  # these declare nothing for attention
        assert spec.tp_styles["model.layers.*.self_attn.o_proj"].startswith("rowwise")
    assert [rule.router is not None for rule in spec.experts] == [True] * (family in SPARSE)
    assert bool(spec.tied) == model.config.tie_word_embeddings
    if family != "nemotron_h":  # whose attention stays whole
        assert spec.sizes["heads"] == "num_attention_heads"


def test_a_plain_module_has_its_lists_and_a_model_without_layers_is_refused_with_what_it_lacks() -> None:
    assert spec_of(Plain()) == ParallelSpec("Plain", layers=("blocks.*",), remarks=(INFERRED,))
    with pytest.raises(ModelError, match=r"Plain is not a model of transformers.*pass a ParallelSpec"):
        derived_spec(Plain())
    model = tiny_model(meta=True)
    model._no_split_modules = set()
    assert (spec_of(model).layers, spec_of(model).remarks) == (("model.layers.*",), (INFERRED,))
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ModelError, match="set _no_split_modules on the class"):
        spec_of(model)


def test_private_names_are_all_there() -> None:
    _transformers_compat.check()


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNPACKED))  # refused: test_boundaries.py
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(family: str, attention: str) -> None:
    """Positions that restart are all that tells a model where a document begins."""
    model = tiny_model(family, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(3, 67, (1, length), generator=generator) for length in (13, 9))
    packed = {
        "input_ids": torch.cat([first, second], 1),
        "position_ids": torch.cat([torch.arange(13), torch.arange(9)])[None],
    }
    with torch.no_grad():
        together = forward_logits(model, packed)
        for ids, found in ((first, together[:, :13]), (second, together[:, 13:])):
            alone = forward_logits(model, {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]})
            torch.testing.assert_close(found, alone, atol=2e-5, rtol=1e-4)


def test_a_new_models_config_is_checked_key_by_key() -> None:
    with pytest.raises(ConfigError, match=r"model_type='lama': unknown to transformers; near: .*llama"):
        pretrained_config(ModelConfig(config={"model_type": "lama"}))
    with pytest.raises(ConfigError, match=r"rope_scaling: unknown key of 'llama'; did you mean 'rope_parameters'"):
        pretrained_config(ModelConfig(config={"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    with pytest.raises(ConfigError, match=r"hiden_size: unknown key of 'llama'; did you mean 'hidden_size'"):
        pretrained_config(ModelConfig(config={"model_type": "llama", "hiden_size": 8}))
    with refuses(ConfigError, "model.config.refused"):
        pretrained_config(ModelConfig(config={"model_type": "llama", "hidden_size": "wide"}))
    found = pretrained_config(ModelConfig(config={"model_type": "gpt2", "n_embd": 8}), {"vocab_size": 300})
    assert (found.hidden_size, found.vocab_size) == (8, 300)


def test_a_pretrained_model_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        pretrained_config(ModelConfig(path=str(tmp_path / "absent")))
    with pytest.raises(ModelError, match=r"no config\.json"):
        pretrained_config(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_pretrained_weights_are_read_as_they_were_saved(family: str, tmp_path) -> None:
    original = tiny_model(family, seed=5)
    original.save_pretrained(tmp_path, max_shard_size="20KB")
    config = ModelConfig(path=str(tmp_path))
    model = build_on_meta(config, pretrained_config(config))
    files = weight_files(config)
    assert len(files) > 1
    check_files(files, model)
    materialize(model, config, torch.device("cpu"), 0)
    for (name, mine), expected in zip(model.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(mine, expected), name
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(model.eval()(ids).logits, original.eval()(ids).logits, atol=0, rtol=0)


def test_weights_that_do_not_fit_are_listed(tmp_path) -> None:
    original = tiny_model("llama")
    original.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    wider = ModelConfig(path=str(tmp_path))
    other = build_on_meta(wider, tiny_config("llama", intermediate_size=64))
    with pytest.raises(ModelError, match=r"up_proj.weight has shape \(48, 32\), the model has \(64, 32\)"):
        check_files([file], other)
    deeper = build_on_meta(wider, tiny_config("llama", num_hidden_layers=3))
    with pytest.raises(ModelError, match=r"model.layers.2.input_layernorm.weight: not in the files"):
        materialize(deeper, wider, torch.device("cpu"), 0)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated"):
        check_files([file], original)
    file.unlink()
    with refuses(ModelError, "model.weights.files"):
        weight_files(wider)


def test_a_model_class_without_causal_head_is_refused() -> None:
    with pytest.raises(ModelError):
        build_on_meta(ModelConfig(config={"model_type": "vit"}), pretrained_config(ModelConfig(config={"model_type": "vit"})))


@pytest.mark.parametrize("family", ["deepseek_v3", "nemotron_h"])
def test_the_bias_of_a_router_is_stored_in_fp32(family: str) -> None:
    config = ModelConfig(config={"model_type": family, **FAMILIES[family]}, dtype="bfloat16")
    model = build_on_meta(config, pretrained_config(config))
    [rule] = spec_of(model).experts
    found = {name.rpartition(".")[2]: buffer.dtype for name, buffer in model.named_buffers() if name.endswith(rule.bias)}
    assert found == {"e_score_correction_bias": torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
