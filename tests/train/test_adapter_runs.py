"""Runs that train an adapter: what is saved, resumed, exported and loaded elsewhere, and that the base stays."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from maintain.tiny import HEADS
from meshwright.checkpoint.directory import latest
from meshwright.checkpoint.export import export_checkpoint, generate
from meshwright.checkpoint.storage import contents
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.memory.nf4 import quantize
from meshwright.errors import CheckpointError, ConfigError, MeshwrightError, ModelError
from meshwright.models.weights import packed
from meshwright.plan.cost.price import totals
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from tests.diffusion_gemma import CONFIG as DIFFUSION
from tests.harness import refuses, run_ranks
from tests.train.runs import losses, train, trainer_on_rank
from tests.train.test_pretrained import saved

Tiny = Callable[..., RunConfig]
IDS = torch.arange(3, 40)[None]


def newest(config: RunConfig) -> Path:
    found = latest(config.directory / "checkpoints")
    assert found is not None
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


def adapter(directory: Path, **options: Any) -> tuple[str, ...]:
    return (f"model={{path: '{directory}'}}", f"adapter={json.dumps({'rank': 4, 'alpha': 8, **options})}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_goes_out_to_peft_and_back(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    base = saved(tmp_path / "model")
    options = {"kind": kind, "save_modules": ["lm_head"]}
    config = tiny(*adapter(tmp_path / "model", **options), "checkpoint.every=3", "schedule.kind=constant")
    ours = train(config, 4)
    assert ours[-1] < ours[0]
    stored = {name for name in contents(newest(config)) if name.startswith("model.")}
    assert stored
    assert all("lora_" in name or name == "model.lm_head.weight" for name in stored)

    export_checkpoint(newest(config), tmp_path / "adapter", adapter=True)
    export_checkpoint(newest(config), tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    beside = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(beside), rtol=0, atol=1e-5)
    assert (logits(merged) - logits(base)).abs().max() > 1e-2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((tmp_path / "merged" / name).read_bytes())
    assert generate(tmp_path / "merged", "abc", 4, 0) == generate(tmp_path / "model", "abc", 4, 0, adapter=tmp_path / "adapter")

    with pytest.raises(CheckpointError, match=r"--dtype=bfloat16: an adapter is written as it was trained"):
        export_checkpoint(newest(config), tmp_path / "other", "bfloat16", adapter=True)
    with pytest.raises(ModelError, match=r"--adapter='/nowhere': no such directory"):
        generate(tmp_path / "model", "abc", 4, 0, adapter=Path("/nowhere"))

    # Plain peft warns of what is missing in its files, and goes on with zeros.
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "less").mkdir()
    (tmp_path / "less" / "adapter_config.json").write_bytes((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    kept = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp.up_proj.lora_B" not in name}
    save_file(kept, tmp_path / "less" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"missing adapter keys"):
        generate(tmp_path / "model", "abc", 4, 0, adapter=tmp_path / "less")

    # It goes on from there, and plain peft's files are taken as well as ours.
    beside.save_pretrained(tmp_path / "theirs")
    again = tiny(*adapter(tmp_path / "model", path=str(tmp_path / "theirs"), **options), f"output={tmp_path}/again")
    assert train(again, 2)[0] < ours[0]
    with pytest.raises(MeshwrightError, match=r"is of another adapter: .* set rank, targets, experts and save_modules as in"):
        train(
            tiny(
                *adapter(tmp_path / "model", path=str(tmp_path / "theirs"), **{**options, "rank": 2}), f"output={tmp_path}/no"
            ),
            1,
        )


def test_tied_modules_that_are_trained_whole_reach_peft_under_both_names(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model", tie_word_embeddings=True)
    config = tiny(*adapter(tmp_path / "model", save_modules=["lm_head", "embed_tokens"]), "schedule.kind=constant")
    train(config, 2)
    export_checkpoint(newest(config), tmp_path / "adapter", adapter=True)
    export_checkpoint(newest(config), tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = logits(plain)
    beside = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(beside), rtol=0, atol=1e-5)
    assert (logits(merged) - before).abs().max() > 1e-2
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


@pytest.mark.thorough
def test_a_resumed_adapter_repeats_its_losses_on_another_layout(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    more = (*adapter(tmp_path / "model"), "schedule.kind=constant", "optimizer.lr=0.02")
    whole = train(tiny(*more, f"output={tmp_path}/whole"), 2)
    first = tiny(*more, "training.steps=3", "checkpoint.every=3", f"output={tmp_path}/part")
    train(first, 2)
    longer = tiny(*more, f"output={tmp_path}/part", "layout.tp=2", "layout.dp_shard=1")
    train(longer, 2)
    assert losses(longer) == pytest.approx(whole, rel=1e-5)


def test_an_adapter_is_not_put_on_another_base(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    config = tiny(*adapter(tmp_path / "model"), "training.steps=2", "schedule.kind=constant")
    train(config, 1)
    other = saved(tmp_path / "model")
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    other.save_pretrained(tmp_path / "model")
    longer = tiny(*adapter(tmp_path / "model"), "training.steps=4", "schedule.kind=constant")
    for act in (lambda: train(longer, 1), lambda: export_checkpoint(newest(config), tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"holds an adapter of other weights than those in .*model \(model\.path\)"):
            act()


def test_a_new_model_with_an_adapter_is_saved_whole(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("adapter={rank: 2}", "training.steps=2")
    train(config, 2)
    export_checkpoint(newest(config), tmp_path / "merged")
    assert "model.embed_tokens.weight" in load_file(tmp_path / "merged" / "model.safetensors")
    plain = tiny("training.steps=2", f"output={tmp_path}/plain")
    train(plain, 1)
    with refuses(CheckpointError, "export.adapter"):
        export_checkpoint(newest(plain), tmp_path / "x", adapter=True)


def test_a_directory_that_is_no_adapter_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    with pytest.raises((ModelError, MeshwrightError), match=r"adapter\.path='/nowhere': no such directory"):
        train(tiny(*adapter(tmp_path / "model", path="/nowhere")), 1)


def test_adapters_that_are_reduced_together_take_one_collective(tiny: Tiny) -> None:
    """That gradients are right is in tests/audit/test_adapters.py."""
    found = {}
    for reduce in ("unit", "once"):
        plan = make_setup(tiny(f"adapter={{rank: 2, reduce: {reduce}}}"), 2).plan
        found[reduce] = totals(plan).traffic
    assert found["unit"].reduce_scatters == 2  # a layer each
    assert found["once"].reduce_scatters == 1
    assert found["once"].reduce_scatter_bytes == found["unit"].reduce_scatter_bytes
    with pytest.raises(ConfigError, match=r"adapter\.reduce=once: .* with pp the legal value is unit"):
        make_setup(tiny("adapter={rank: 2, reduce: once}", "layout.pp=2", "layout.dp_shard=1"), 2)
    shared = (f"model.config={json.dumps(DIFFUSION)}", "adapter={rank: 2, reduce: once}", "data.packing=pad")
    with pytest.raises(ConfigError, match=r"adapter\.reduce=once: modules of DiffusionGemma.* share matrices"):
        make_setup(tiny(*shared), 2)


WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", ["dp_shard=2", "tp=2"])
@pytest.mark.parametrize("base", [None, "nf4"])
def test_frozen_bytes_are_gathered_and_never_reduced(tiny: Tiny, tmp_path: Path, base: str | None, sizes: str) -> None:
    saved(tmp_path / "model", **WIDE)
    config = tiny(
        *adapter(tmp_path / "model", base=base), "layout.dp_shard=1", f"layout.{sizes}", "training.global_batch_size=4"
    )
    _, _, store = prepare_run(config, 2)
    for found in run_ranks(bytes_of_a_step, 2, config, store.directory):
        assert found["moved"].get("reduce_scatter", 0) == (4 * found["trained"] if "dp" in sizes else 0)
        per_number = 2.25 / 4 if base else 4.0  # param_dtype is float32
        gathered = per_number * found["packed"] + 4 * (found["all"] - found["packed"])
        if "dp" in sizes:
            assert found["moved"]["all_gather"] == gathered
        assert found["held"] == (gathered / 2 if "dp" in sizes else found["planned"])


def bytes_of_a_step(rank: int, config: RunConfig, store: Path) -> dict[str, Any]:
    trainer = trainer_on_rank(config, store)
    with CommCounter() as counter:
        trainer.train_step()
    rows = trainer.setup.plan.parameters
    stored = [parameter.to_local() for parameter in trainer.model.parameters()]
    inside = [row for row in rows if ".layers." in row.name and "norm" not in row.name and not row.trainable]
    return {
        "moved": dict(counter.bytes),
        "held": sum(tensor.numel() * tensor.element_size() for tensor in stored),
        "planned": totals(trainer.setup.plan).parameter_bytes,
        "trained": sum(row.numel for row in rows if row.trainable),
        "packed": sum(row.numel for row in inside),
        "all": sum(row.numel for row in rows),
    }


def test_matrices_in_4_bits_are_packed_one_by_one_as_they_are_read(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no rank holds a model of whole numbers."""
    saved(tmp_path / "model", **WIDE, num_hidden_layers=8)

    def counting(matrix: torch.Tensor) -> torch.Tensor:
        alike = [
            item for item in gc.get_objects()
            if isinstance(item, torch.Tensor) and item.shape == matrix.shape and not item.is_meta and item.is_floating_point()
        ]  # fmt: skip
        places = {item.data_ptr() for item in alike if item.requires_grad is False}
        assert 1 <= len(places) <= 2, len(places)
        return quantize(matrix)

    monkeypatch.setattr(packed, "quantize", counting)
    section = {"base": "nf4", "targets": ["lm_head"]}
    train(tiny(*adapter(tmp_path / "model", **section), "training.steps=1", "layout.dp_shard=1"), 1)


@pytest.mark.thorough
def test_a_run_on_matrices_in_4_bits(tiny: Tiny, tmp_path: Path) -> None:
    """It is that of every layout, resumes, and its adapter fits the plain model."""
    saved(tmp_path / "model", "qwen3_moe", **WIDE, moe_intermediate_size=128)
    options = ("schedule.kind=constant", "checkpoint.every=3")
    section = {"base": "nf4", "experts": True}
    losses_of = {}
    for name, sizes in {"one": "dp_shard=1", "shard": "dp_shard=2", "tp": "tp=2", "ep": "ep=2"}.items():
        ranks = 1 if name == "one" else 2
        shard = "layout.dp_shard=2" if name == "ep" else "layout.dp_shard=1"
        config = tiny(*adapter(tmp_path / "model", **section), *options, shard, f"layout.{sizes}", f"output={tmp_path}/{name}")
        losses_of[name] = train(config, ranks)
    assert losses_of["one"] == pytest.approx(losses_of["shard"], rel=1e-5)
    assert losses_of["one"] == pytest.approx(losses_of["tp"], rel=1e-4)
    assert losses_of["one"] == pytest.approx(losses_of["ep"], rel=1e-4)
    assert losses_of["one"][-1] < losses_of["one"][0]

    plain = train(tiny(*adapter(tmp_path / "model", experts=True), *options, f"output={tmp_path}/plain"), 2)
    assert plain[0] != losses_of["one"][0]
    assert plain[0] == pytest.approx(losses_of["one"][0], rel=0.05)

    part = tiny(*adapter(tmp_path / "model", **section), *options, "training.steps=3", f"output={tmp_path}/part")
    train(part, 2)
    longer = tiny(*adapter(tmp_path / "model", **section), *options, f"output={tmp_path}/part", "layout.dp_shard=1")
    train(longer, 1)
    assert losses(longer) == pytest.approx(losses_of["one"], rel=1e-5)
    export_checkpoint(newest(longer), tmp_path / "adapter", adapter=True)
    export_checkpoint(newest(longer), tmp_path / "merged")
    beside = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(beside), rtol=0, atol=1e-5)


def test_files_of_another_shape_are_refused_before_a_process_starts(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 40}))
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \(48, 32\), the model has \(40, 32\)"):
        prepare_run(tiny(*adapter(tmp_path / "model")), 1)


def test_what_cannot_be_in_4_bits_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "narrow")
    saved(tmp_path / "model", **WIDE)
    with pytest.raises(ConfigError, match=r"adapter\.base=nf4: is for weights that are in files; set model\.path"):
        prepare_run(tiny("adapter={base: nf4}"), 1)
    with pytest.raises(
        MeshwrightError, match=r"adapter\.base=nf4: .* has 32 numbers in a row on each rank; legal are .* of 64"
    ):
        prepare_run(tiny(*adapter(tmp_path / "narrow", base="nf4")), 1)
    with pytest.raises(MeshwrightError, match=r"o_proj.* has 32 numbers in a row on each rank"):
        prepare_run(tiny(*adapter(tmp_path / "model", base="nf4"), "layout.dp_shard=1", "layout.tp=4"), 4)
    file = tmp_path / "model" / "config.json"
    declared = json.loads(file.read_text())
    for method, why in (("bitsandbytes", "lose their scales and some of their bytes under FSDP2"), ("mxfp4", "are not read")):
        file.write_text(json.dumps({**declared, "quantization_config": {"quant_method": method}}))
        with pytest.raises(ModelError, match=rf"quantized \({method}\), and {why}"):
            prepare_run(tiny(*adapter(tmp_path / "model")), 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama", {"tie_word_embeddings": True}, {"targets": ["q_proj", "down_proj"]}),
        ("mixtral", {}, {"targets": ["q_proj"], "experts": True}),
        ("llama", {}, {"kind": "dora", "save_modules": ["lm_head", "embed_tokens"]}),
        ("gpt2", {"n_layer": 4}, {"targets": ["c_attn", "c_fc"]}),
    ],
)
def test_a_pipeline_reads_the_adapter_that_it_exported(
    tiny: Tiny, tmp_path: Path, family: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    """Each stage takes its own tensors, and leaves those of the others."""
    saved(tmp_path / "model", family, **{"num_hidden_layers": 4, **changes} if family != "gpt2" else changes)
    stages = ("layout.pp=2", "layout.dp_shard=1", "parallel.pipeline.schedule=zbv", "training.microbatch_size=1")
    pad = ("data.packing=pad", "optimizer.lr=0.05", *stages)
    first = tiny(*adapter(tmp_path / "model", **options), *pad, f"output={tmp_path / 'first'}")
    train(first, 2)
    export_checkpoint(newest(first), tmp_path / "adapter", adapter=True)
    again = adapter(tmp_path / "model", path=str(tmp_path / "adapter"), **options)
    expected = train(tiny(*again, "data.packing=pad", f"output={tmp_path / 'alone'}", "training.steps=2"))
    found = train(tiny(*again, *pad, "optimizer.lr=0.01", f"output={tmp_path / 'staged'}", "training.steps=2"), 2)
    assert found == pytest.approx(expected, rel=1e-4)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file({f"base_model.model.other.{name}": tensor for name, tensor in tensors.items()},
              tmp_path / "adapter" / "adapter_model.safetensors")  # fmt: skip
    with refuses(ModelError, "adapter.path"):
        prepare_run(tiny(*again, *pad, f"output={tmp_path / 'refused'}"), 2)


MIXTURES = {
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
              "n_group": 1, "topk_group": 1},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
                 "n_group": 1, "topk_group": 1, "head_dim": 8},
}  # fmt: skip
"""Families with a dense MLP or shared experts whose matrices have the names that those of experts had."""


def mixture(directory: Path, family: str) -> PreTrainedModel:
    sizes = {**HEADS, "vocab_size": 300, "num_hidden_layers": 2, "moe_intermediate_size": 32, **MIXTURES[family]}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.float32)
    model.save_pretrained(directory)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("options", [{}, {"experts": True}, {"dropout": 0.1}, {"targets": ["gate_proj", "q_proj"]}])
def test_dense_and_shared_experts_of_mixtures_are_adapted_and_loaded_by_peft(
    tiny: Tiny, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    base = mixture(tmp_path / "model", family)
    config = tiny(*adapter(tmp_path / "model", **options), "optimizer.lr=0.05", "data.packing=pad", "layout.tp=2")
    setup, *_ = prepare_run(config, 2)
    adapted = {name.split(".lora_A")[0] for name, _ in setup.model.named_parameters() if ".lora_A.default" in name}
    dense, shared = "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.gate_proj"
    assert {dense, shared} <= adapted
    left_out = [text for text in setup.plan.remarks if "all-linear leaves out" in text]
    assert any("lm_head: it is outside of the layers" in text for text in left_out) is ("targets" not in options)
    told = any("experts: fused experts: adapter.experts=true" in text for text in left_out)
    assert told is ("targets" not in options and not options.get("experts"))
    train(config, 2)
    export_checkpoint(newest(config), tmp_path / "adapter", adapter=True)
    export_checkpoint(newest(config), tmp_path / "merged")
    beside = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(beside), rtol=0, atol=1e-5)
    assert (logits(merged) - logits(base)).abs().max() > 1e-2
    again = adapter(tmp_path / "model", path=str(tmp_path / "adapter"), **options)
    assert prepare_run(tiny(*again, "data.packing=pad", f"output={tmp_path / 'again'}"), 2)


@pytest.mark.thorough
def test_dora_that_plain_peft_cannot_load_says_so_and_what_to_do(tiny: Tiny, tmp_path: Path) -> None:
    mixture(tmp_path / "model", "glm4_moe")
    config = tiny(*adapter(tmp_path / "model", kind="dora"), "training.steps=2", "data.packing=pad")
    setup, *_ = prepare_run(config, 1)
    (remark,) = [text for text in setup.plan.remarks if "plain peft cannot load" in text]
    assert "takes model.layers.0.mlp.down_proj for the name of fused experts" in remark
    train(config)
    with pytest.warns(UserWarning, match="`meshwright export` without --adapter merges it"):
        export_checkpoint(newest(config), tmp_path / "adapter", adapter=True)
    again = adapter(tmp_path / "model", path=str(tmp_path / "adapter"), kind="dora")
    assert prepare_run(tiny(*again, "data.packing=pad", f"output={tmp_path / 'again'}"), 1)
