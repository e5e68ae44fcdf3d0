"""Runs of block diffusion: the same on every layout and after a resume, both losses in the metrics, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint.export import export_checkpoint, generate
from meshwright.errors import ConfigError, NonFiniteError
from meshwright.models.diffusion_gemma.canvas_columns import flat
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.run_files import Paths
from meshwright.train.start.setup import make_setup
from tests.diffusion_gemma import RUN
from tests.harness import run_ranks
from tests.train.runs import eval_losses, losses, rows, tiny_run, train, trainer_on_rank

Tiny = Callable[..., RunConfig]
EVERY = ("checkpoint.every=3", "checkpoint.keep=null", "training.eval_every=3")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunConfig:
    """A run of six steps in one process."""
    config = tiny_run(tmp_path_factory.mktemp("diffusion"), corpus, *RUN, *EVERY)
    train(config)
    return config


@pytest.mark.thorough
def test_it_learns_and_reports_both_losses(finished: RunConfig) -> None:
    first, *_, last = (row for row in rows(finished) if "loss" in row)
    for row in (first, last):
        assert row["loss"] == pytest.approx(row["denoising_loss"] + row["encoder_loss"], rel=1e-5)
    assert last["denoising_loss"] < first["denoising_loss"]
    begin, middle, end = (row for row in rows(finished) if "eval/loss" in row)
    assert end["eval/loss"] == pytest.approx(end["eval/denoising_loss"] + end["eval/encoder_loss"])
    assert end["eval/denoising_loss"] < middle["eval/denoising_loss"] < begin["eval/denoising_loss"]
    assert "eval/perplexity" not in end


@pytest.mark.thorough
def test_a_resumed_run_repeats_its_noise(finished: RunConfig, tiny: Tiny) -> None:
    at = Paths(finished.directory).checkpoints / "step-00000003"
    again = tiny(*RUN, *EVERY, f"checkpoint.resume={at}")
    assert train(again) == losses(finished)[3:]
    assert eval_losses(again) == eval_losses(finished)[-1:]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [(), ("training.microbatch_size=1",), ("layout.cp=2", "layout.dp_shard=1")],
    ids=["as it is", "smaller microbatches", "shared sequences"],
)
def test_another_layout_puts_the_same_noise_on_the_same_sequences(finished: RunConfig, tiny: Tiny, changes: Any) -> None:
    other = tiny(*RUN, *EVERY, *changes)
    assert train(other, 2) == pytest.approx(losses(finished), abs=2e-4)
    assert eval_losses(other) == pytest.approx(eval_losses(finished), abs=2e-4)


@pytest.mark.thorough
def test_one_random_block_and_no_loss_of_the_encoder(tiny: Tiny) -> None:
    config = tiny(*RUN, "diffusion.mode=one_block", "diffusion.encoder_loss_weight=0")
    train(config)
    found = [row for row in rows(config) if "loss" in row]
    assert found[-1]["loss"] < found[0]["loss"]
    assert all(row["tokens"] <= 8 * 8 and "encoder_loss" not in row for row in found)  # eight sequences, blocks of eight


def test_routers_are_frozen_by_option_and_the_vision_tower_always(tiny: Tiny) -> None:
    def frozen(*overrides: str) -> set[str]:
        plan = make_setup(tiny(*RUN, *overrides), 1).plan
        return {row.name for row in plan.parameters if not row.trainable}

    vision = frozen()
    assert vision
    assert all(".vision_tower." in name or ".embed_vision." in name for name in vision)
    routers = frozen("diffusion.freeze_router=true", "parallel.freeze=[model.decoder.self_conditioning.**]") - vision
    assert len([name for name in routers if ".router." in name]) == 2 * 3
    assert {name for name in routers if ".router." not in name} == {
        f"model.decoder.self_conditioning.{name}.weight" for name in ("pre_norm", "gate_proj", "up_proj", "down_proj")
    }


def test_a_chat_denoises_its_last_reply(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    talk = [("user", "ab cd"), ("assistant", "ef"), ("user", "gh"), ("assistant", "ij kl mn op")]
    messages = [{"role": role, "content": content} for role, content in talk]
    path.write_text("\n".join(json.dumps({"messages": messages}) for _ in range(20)) + "\n")
    config = tiny_run(tmp_path, path, *RUN, "tokenizer.vocab_size=261", "data.sequence_length=64", "data.eval_fraction=0")
    _, tokenizer, store = prepare_run(config, 1)
    [batch, *_] = map(flat, run_ranks(_batches, 1, config, store.directory)[0])
    said = batch["canvas_labels"][0]
    assert tokenizer.decode(said[: len(tokenizer.encode("ij kl mn op<|im_end|>"))]) == "ij kl mn op<|im_end|>"
    assert tokenizer.decode(batch["input_ids"][0][: batch["canvas_positions"][0, 0]]).endswith("<|im_start|>assistant\n")


def _batches(rank: int, config: RunConfig, store: Path) -> Any:
    trainer = trainer_on_rank(config, store)
    return trainer.objective.training(trainer.loader.microbatches(0), trainer.loader.numbers(0))


def _poisoned(rank: int, config: RunConfig, store: Path) -> str:
    trainer = trainer_on_rank(config, store)
    sums = trainer.objective.sums
    trainer.objective.sums = lambda model, batch: tuple(term * float("nan") for term in sums(model, batch))  # type: ignore
    try:
        trainer.train_step()
        trainer.read_finished_steps()
    except NonFiniteError as error:
        return str(error)
    return ""


def test_a_step_that_is_not_finite_leaves_its_noise_behind(tiny: Tiny) -> None:
    config = tiny(*RUN)
    _, _, store = prepare_run(config, 1)
    [message] = run_ranks(_poisoned, 1, config, store.directory)
    assert "step 1: loss nan" in message
    held = load_file(config.directory / "nonfinite-step-1" / "batch-rank-0.safetensors")
    assert held["canvas_ids"].shape == held["canvas_labels"].shape
    assert len(held["canvas_ids"]) == 8


@pytest.mark.thorough
def test_an_export_is_the_hub_s_and_fills_canvases(finished: RunConfig, tmp_path: Path) -> None:
    checkpoint = Paths(finished.directory).checkpoints / "step-00000006"
    export_checkpoint(checkpoint, tmp_path / "export")
    held = load_file(tmp_path / "export" / "model.safetensors")
    assert not any("encoder.language_model.layers" in name and "layer_scalar" not in name for name in held)  # tied: once
    lines: list[str] = []
    text = generate(tmp_path / "export", "abc", max_new_tokens=6, steps=3, show=lines.append)
    assert isinstance(text, str)
    assert len(lines) == 3
    assert lines[0].startswith("canvas 1 step  1  uncertain ")
    with pytest.raises(ConfigError, match=r"top_p=0\.5.*the legal value is 1"):
        generate(tmp_path / "export", "abc", top_p=0.5)


@pytest.mark.thorough
def test_a_pretrained_model_goes_on_from_what_it_was(finished: RunConfig, tiny: Tiny, tmp_path: Path) -> None:
    """On two ranks, each of which reads its slices; files hold the decoder's names alone."""
    export_checkpoint(Paths(finished.directory).checkpoints / "step-00000006", tmp_path / "export")
    config = tiny(*RUN[1:], f"model={{path: {tmp_path / 'export'}}}", "tokenizer={}", "training.steps=1", name="tuned")
    train(config, 2)
    assert eval_losses(config)[0] == pytest.approx(eval_losses(finished)[-1], abs=1e-5)


def test_what_does_not_apply_is_refused(tiny: Tiny) -> None:
    for overrides, message in (
        (("diffusion.mode=one_block",), r"diffusion\.mode='one_block'.*LlamaForCausalLM is trained to say the next token"),
        (("training.objective=block_diffusion",), r"LlamaForCausalLM is made for next_token"),
        ((*RUN, "training.objective=next_token"), r"legal are block_diffusion and null"),
        ((*RUN, "data.packing=pack"), r"data\.packing=pack.*the legal value is pad"),
        ((*RUN, "model.attn_implementation=flex_attention"), r"flex_attention: takes no mask.*sdpa and eager"),
        (
            (*RUN, "parallel.output_dtype=bfloat16"),
            r"parallel\.output_dtype=bfloat16: the encoder's loss.*legal are null, float32",
        ),
        (
            (*RUN, "parallel.compile=true", "parallel.activation_checkpointing=full"),
            r"activation_checkpointing=full with parallel\.compile.*legal are none and submodule",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make_setup(tiny(*overrides), 1)
    # Logits in bfloat16 are a loss of precision that was asked for, in any objective; sums over tokens are not among them then.
    for overrides in (
        ("parallel.output_dtype=float32",),
        ("parallel.output_dtype=bfloat16", "diffusion.encoder_loss_weight=0"),
    ):
        assert make_setup(tiny(*RUN, *overrides), 1).plan.unit("").output_dtype == overrides[0].partition("=")[2]
    for override in ("diffusion.minimum_noise=1.5", "diffusion.self_conditioning=-1", "diffusion.encoder_loss_weight=-1"):
        with pytest.raises(ConfigError, match=override.split("=")[0]):
            tiny(*RUN, override)


def test_keys_of_the_parts_of_a_config_are_checked(tiny: Tiny) -> None:
    changed = RUN[0].replace("'head_dim':", "'head_dims':", 1)
    with pytest.raises(ConfigError, match=r"model\.config\.text_config\.head_dims: unknown key.*did you mean 'head_dim'"):
        make_setup(tiny(changed, RUN[1]), 1)


def test_the_vocabulary_is_that_of_the_text(tiny: Tiny) -> None:
    setup = make_setup(tiny(*RUN), 1)
    assert setup.model.config.get_text_config().vocab_size == 300
    assert next(p.shape for n, p in setup.model.named_parameters() if n.endswith("embed_tokens.weight")) == torch.Size(
        [300, 32]
    )
