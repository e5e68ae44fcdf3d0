"""Training from the safetensors of a pretrained model, and files that are not what they should be."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from meshwright.audit.case import local_part
from meshwright.data.packing import IGNORE
from meshwright.errors import ConfigError, ModelError
from meshwright.models.token_loss import count_tokens, forward_logits, token_loss_sum
from meshwright.train.config import RunConfig
from meshwright.train.start.data_lines import plain_loader
from meshwright.train.start.prepare import load_run_tokenizer, prepare_run
from tests.harness import RankError, run_ranks
from tests.tiny import tiny_model
from tests.train.runs import losses, train, train_on_rank, trainer_on_rank

Tiny = Callable[..., RunConfig]
MODELS = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),  # its head is tied, and its files leave out a prefix
    "qwen3": ("qwen3", {}),
}


def saved(directory: Path, family: str = "llama", parts: bool = False, **changes: object) -> PreTrainedModel:
    """A model with values of its own in a directory of transformers."""
    model = tiny_model(family, seed=7, **{"vocab_size": 300, **changes})
    model.save_pretrained(directory, max_shard_size="20KB" if parts else "1GB")
    return model


def overrides(directory: Path) -> tuple[str, ...]:
    return (f"model={{path: '{directory}'}}",)


def first_loss(model: PreTrainedModel, config: RunConfig, store: object) -> float:
    """The loss of the plain model on the sequences of the first step."""
    batches = plain_loader(config, store).microbatches(0)
    with torch.no_grad():
        total = sum(float(token_loss_sum(forward_logits(model.eval(), batch), batch["labels"])) for batch in batches)
    assert any((batch["labels"] == IGNORE).any() for batch in batches)  # uneven numbers of tokens
    return total / count_tokens(batches)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts", [False, True], ids=["one file", "several files"])
@pytest.mark.parametrize("name", MODELS)
def test_first_loss_is_that_of_the_plain_model(tiny: Tiny, tmp_path: Path, name: str, parts: bool) -> None:
    family, changes = MODELS[name]
    model = saved(tmp_path / "model", family, parts, **changes)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2 if parts else True
    config = tiny(*overrides(tmp_path / "model"), "training.steps=2")
    expected = first_loss(model, config, prepare_run(config, 2)[2])
    found = train(config, 2)
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert found[1] < found[0]


def test_sequences_beyond_its_positions_train_with_what_the_message_says(tiny: Tiny, tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    longer = (*overrides(tmp_path / "model"), "data.sequence_length=150", "training.steps=1")
    with pytest.raises(ConfigError) as caught:
        prepare_run(tiny(*longer), 1)
    said = re.search(r"2 to 64; for more, scale its rotary positions: write (.*) into the config.json of", str(caught.value))
    assert said is not None
    values = json.loads(f"{{{said[1]}}}")
    assert values["max_position_embeddings"] == 192
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    scaled = type(model).from_pretrained(tmp_path / "model")
    assert not torch.equal(scaled.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    config = tiny(*longer)
    expected = first_loss(scaled, config, prepare_run(config, 1)[2])
    assert train(config, 1)[0] == pytest.approx(expected, rel=1e-5)
    # who has scaled it already, and who has no such positions
    with pytest.raises(ConfigError, match="needs other max_position_embeddings and rope_parameters"):
        prepare_run(tiny(*longer, "data.sequence_length=999"), 1)
    saved(tmp_path / "model", "gpt2")
    with pytest.raises(ConfigError, match="its positions are not rotary, and cannot be scaled"):
        prepare_run(tiny(*longer), 1)


STAGES = ("layout.pp=2", "layout.dp_shard=1")
SLICES = ("layout.tp=2", "parallel.sequence_parallel=true")
"""Also matrices that are packed, which FSDP shards by columns, and one value for each head."""
EXPERTS = ("layout.ep=2",)
"""Files hold an expert each; a rank of `ep` has whole ones, sharded over `ep_shard`."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        *((name, STAGES, 2) for name in ("tied llama", "llama", "gpt2", "mixtral", "gpt_oss")),
        *((name, SLICES, 4) for name in ("llama", "tied llama", "qwen3", "mixtral", "phi3", "gpt_oss")),
        *((name, EXPERTS, 4) for name in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4_moe")),
    ],
)
def test_each_layout_reads_the_same(tiny: Tiny, tmp_path: Path, name: str, layout: tuple[str, ...], ranks: int) -> None:
    family, changes = MODELS.get(name, (name, {}))
    model = saved(tmp_path / "model", family, **changes)
    config = tiny(*overrides(tmp_path / "model"), "training.steps=2", "data.packing=pad", *layout)
    expected = first_loss(model, config, prepare_run(config, ranks)[2])
    found = train(config, ranks)
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert found[1] < found[0]


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["zbv", pytest.param("dualpipe_v", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.thorough)])
def test_a_tied_embedding_that_one_rank_has_twice_trains_on(tiny: Tiny, tmp_path: Path, family: str, schedule: str) -> None:
    """One rank has the first stage and the last. Reading files makes both copies of the embedding anew."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "gemma3_text" else {}
    saved(tmp_path / "model", family, tie_word_embeddings=True, num_hidden_layers=4, **kinds)
    steps = (*overrides(tmp_path / "model"), "training.steps=4", "training.microbatch_size=1", "data.packing=pad")
    alone = train(tiny(*steps, f"output={tmp_path / 'alone'}"))
    found = train(tiny(*steps, "layout.pp=2", "layout.dp_shard=1", f"parallel.pipeline.schedule={schedule}"), 2)
    assert found == pytest.approx(alone, rel=1e-4)


class Counting:
    """A slice of a safetensors file that counts the elements that are read of it."""

    read: ClassVar[list[int]] = []

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitem__(self, where: Any) -> torch.Tensor:
        value = self.inner[where]
        self.read.append(value.numel())
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CountingFile:
    """A safetensors file whose slices count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.inner = safe_open(*args, **kwargs)

    def get_slice(self, name: str) -> Counting:
        return Counting(self.inner.get_slice(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> "CountingFile":
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)


def read_on_rank(rank: int, config: RunConfig, store: Path) -> tuple[int, int]:
    """Elements that a rank reads of the files, and holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_open", CountingFile)
        trainer = trainer_on_rank(config, store)
    return sum(Counting.read), sum(local_part(p).numel() for p in trainer.model.parameters())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_each_rank_reads_its_own_experts(tiny: Tiny, tmp_path: Path, ep: int) -> None:
    saved(tmp_path / "model", "qwen3_moe")
    config = tiny(*overrides(tmp_path / "model"), f"layout.ep={ep}")
    found = run_ranks(read_on_rank, 4, config, prepare_run(config, 4)[2].directory)
    for read, held in found:
        assert held <= read <= 1.01 * held


def test_its_own_tokenizer_is_used(tiny: Tiny, tmp_path: Path) -> None:
    other = tiny("tokenizer.vocab_size=280", name="other")
    prepare_run(other, 1)
    saved(tmp_path / "model")
    load_run_tokenizer(other).save_pretrained(tmp_path / "model")
    config = tiny(*overrides(tmp_path / "model"), "tokenizer.vocab_size=null")
    _, tokenizer, _ = prepare_run(config, 1)
    assert len(tokenizer) == 280


def test_bf16_weights_are_trained_in_fp32(tiny: Tiny, tmp_path: Path) -> None:
    """The files' dtype is not the dtype of training: model.dtype decides."""
    model = tiny_model(seed=7, vocab_size=300).bfloat16()
    model.save_pretrained(tmp_path / "model")
    config = tiny(*overrides(tmp_path / "model"), "training.steps=2")
    setup, _, store = prepare_run(config, 2)
    assert {row.dtype for row in setup.plan.parameters} == {"float32"}
    assert train(config, 2)[0] == pytest.approx(first_loss(model.float(), config, store), rel=1e-5)


# -- files that are not right ----------------------------------------------------------------------------------------------


def change(file: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of a safetensors file, or (None) leave them out; '__' in a name stands for '.'."""
    content = load_file(file)
    for name, tensor in tensors.items():
        content.pop(name.replace("__", "."), None)
        if tensor is not None:
            content[name.replace("__", ".")] = tensor
    save_file(content, file, metadata={"format": "pt"})


def refusal(config: RunConfig) -> str:
    with pytest.raises(ModelError) as caught:
        prepare_run(config, 2)
    return str(caught.value)


def test_truncated_file(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert f"{file}: truncated or not safetensors" in refusal(tiny(*overrides(tmp_path / "model")))


def test_wrong_shape(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    change(tmp_path / "model" / "model.safetensors", model__norm__weight=torch.ones(31), lm_head__weight=torch.ones(300, 8))
    found = refusal(tiny(*overrides(tmp_path / "model")))
    assert "model.safetensors: model.norm.weight has shape (31,), the model has (32,)" in found
    assert "model.safetensors: lm_head.weight has shape (300, 8), the model has (300, 32)" in found


def test_missing_and_excess_keys(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    change(tmp_path / "model" / "model.safetensors", model__norm__weight=None, model__extra__weight=torch.ones(3))
    config = tiny(*overrides(tmp_path / "model"))
    try:
        _, _, store = prepare_run(config, 2)
        with pytest.raises(RankError) as caught:
            run_ranks(train_on_rank, 2, config, store.directory)
        found = str(caught.value)
        assert "meshwright.errors.ModelError" in found
    except ModelError as error:
        found = str(error)
    assert "model.norm.weight: not in the files" in found
    assert "model.extra.weight: in the files, but the model has no such parameter" in found


def test_missing_parts(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model", parts=True)
    index = tmp_path / "model" / "model.safetensors.index.json"
    named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    (tmp_path / "model" / named[1]).unlink()
    assert f"the index names files that are missing: {named[1]}" in refusal(tiny(*overrides(tmp_path / "model")))
    index.unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(tiny(*overrides(tmp_path / "model")))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": 3}', "{}"])
def test_damaged_index(tiny: Tiny, tmp_path: Path, content: str) -> None:
    saved(tmp_path / "model", parts=True)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(tiny(*overrides(tmp_path / "model")))


def test_no_model_there(tiny: Tiny, tmp_path: Path) -> None:
    assert "no such directory" in refusal(tiny(*overrides(tmp_path / "nowhere")))
    (tmp_path / "model").mkdir()
    assert "the directory has no config.json" in refusal(tiny(*overrides(tmp_path / "model")))
    for content in ("{", "[]", "{}", '{"model_type": "nonesuch"}'):
        (tmp_path / "model" / "config.json").write_text(content)
        assert "model.path=" in refusal(tiny(*overrides(tmp_path / "model")))


def test_pickled_weights_are_not_read(tiny: Tiny, tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    assert "no pickles are read" in refusal(tiny(*overrides(tmp_path / "model")))


def test_vocabulary_larger_than_the_model(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model", vocab_size=290)
    with pytest.raises(ConfigError, match=r"the vocabulary of .*model=290: the tokenizer has 300 tokens.*legal is 300 or more"):
        prepare_run(tiny(*overrides(tmp_path / "model")), 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "layout", "ranks"),
    [
        ("llama", "{dp_shard: 2}", 2),
        ("llama", "{dp_shard: 3}", 3),  # of 32 rows the last rank holds 10, and FSDP pads them
        ("llama", "{dp_shard: 1, dp_replicate: 2}", 2),
        ("llama", "{dp_shard: 2, tp: 2}", 4),
        ("phi3", "{dp_shard: 1, tp: 2}", 2),  # packed: laid out anew to be saved
        ("mixtral", "{dp_shard: 2, ep: 2}", 2),
    ],
    ids=str,
)
def test_read_shards_have_memory_of_their_own_and_are_saved_in_the_background(
    tiny: Tiny, tmp_path: Path, family: str, layout: str, ranks: int
) -> None:
    """A view of the file would hold whole parameters, change with the file, and break DCP's copy aside."""
    saved(tmp_path / "model", family)
    sections = (*overrides(tmp_path / "model"), "model.dtype=float32", f"layout={layout}", "training.steps=2")
    sections = (*sections, "training.global_batch_size=6", "training.microbatch_size=1")
    config = tiny(*sections, "checkpoint.asynchronous=true")
    run_ranks(_holds_its_own_bytes_and_trains, ranks, config, prepare_run(config, ranks)[2].directory)
    assert losses(config) == train(tiny(*sections, name="waiting"), ranks)


def _holds_its_own_bytes_and_trains(rank: int, config: RunConfig, store: Path) -> None:
    trainer, ranks = trainer_on_rank(config, store), dist.get_world_size()
    for name, parameter in trainer.model.named_parameters():
        local = local_part(parameter.data)
        padding = (ranks - 1) * local.element_size() * local[:1].numel()
        # Where ranks have different numbers of rows, FSDP pads to the largest.
        assert local.untyped_storage().nbytes() <= local.numel() * local.element_size() + padding, name
    trainer.run()
