"""Runs that train an adapter: what is saved, resumed, exported and loaded elsewhere, and that the base stays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from meshwright.audit.conduct import audit
from meshwright.checkpoint.directory import latest
from meshwright.checkpoint.export import export_checkpoint, generate
from meshwright.checkpoint.storage import contents
from meshwright.errors import CheckpointError, MeshwrightError, ModelError
from meshwright.train.config import RunConfig
from tests.train.runs import losses, train
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


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_goes_out_to_peft_and_back(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    base = saved(tmp_path / "model")
    options = {"kind": kind, "save_modules": ["lm_head"]}
    config = tiny(*adapter(tmp_path / "model", **options), "checkpoint.every=3", "schedule.kind=constant")
    ours = train(config, 2)
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

    with pytest.raises(ModelError, match=r"--adapter=/nowhere: Can't find 'adapter_config\.json'"):
        generate(tmp_path / "model", "abc", 4, 0, adapter=Path("/nowhere"))

    # It goes on from there, and plain peft's files are taken as well as ours.
    beside.save_pretrained(tmp_path / "theirs")
    again = tiny(*adapter(tmp_path / "model", path=str(tmp_path / "theirs"), **options), f"output={tmp_path}/again")
    assert train(again, 2)[0] < ours[0]
    with pytest.raises(MeshwrightError, match=r"is of another adapter: .* set rank, targets and save_modules as in"):
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
    with pytest.raises(CheckpointError, match="trained the whole model, and has no adapter; leave --adapter out"):
        export_checkpoint(newest(plain), tmp_path / "x", adapter=True)


def test_a_directory_that_is_no_adapter_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    with pytest.raises((ModelError, MeshwrightError), match=r"adapter\.path='/nowhere': is no adapter of peft"):
        train(tiny(*adapter(tmp_path / "model", path="/nowhere")), 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "sizes", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}, {"tp": 2, "dp_shard": 1}, {"cp": 2, "dp_shard": 1},
              {"pp": 2, "dp_shard": 1}, {"ep": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2}], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_are_those_of_one_process(tiny: Tiny, kind: str, sizes: dict[str, int], family: str) -> None:
    """The audit draws all matrices, so that a zero B hides no gradient of A."""
    if "ep" in sizes and family == "llama":
        pytest.skip("refused")
    from meshwright.models.families import TINY_MODELS

    config = {"model_type": family, **TINY_MODELS[family].config}
    config.pop("vocab_size", None)
    run = tiny(
        f"model.config={json.dumps(config)}", f"adapter={json.dumps({'kind': kind, 'rank': 3, 'alpha': 6})}",
        f"layout={json.dumps(sizes)}", "training.global_batch_size=16",
    )  # fmt: skip
    world = 4 if sizes == {"tp": 2, "dp_shard": 2} else 2
    report = audit(run, nproc=world)
    assert report.passed, report.verdict
