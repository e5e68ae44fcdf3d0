"""Export: a Hugging Face directory that loads with the trained values, and continues a prompt."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from meshwright.checkpoint.export import MARK, check_target, export_checkpoint, generate, needed_paths
from meshwright.errors import CheckpointError, ModelError
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.run_files import Paths
from tests.harness import refuses, run_ranks
from tests.tiny import tiny_model, whole
from tests.train.runs import LLAMA, tiny_run, train, trainer_on_rank

Tiny = Callable[..., RunConfig]

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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(2)
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
    with pytest.raises(CheckpointError, match=rf"is an export of {source} already; --overwrite"):
        export_checkpoint(source, exported)
    assert (exported / "old-file").exists()
    link = exported.with_name("link")
    link.symlink_to(exported.name)
    export_checkpoint(source, link, overwrite=True)  # an earlier export is replaced whole
    assert link.is_symlink()
    assert (exported / "config.json").exists()
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
        with refuses(CheckpointError, "export.directory"):
            export_checkpoint(source, other, overwrite=True)
        kept = other / "thesis.txt" if other.is_dir() else other
        assert kept.read_text() == "years of work"
    assert not list(exported.parent.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("names", "accepted"),
    [
        (["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"], True),
        (["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"], True),
        (["adapter_config.json", "adapter_model.safetensors", "README.md"], True),
        (["config.json", "model.safetensors", "README.md"], False),  # of the hub
        (["config.json", "model.safetensors", "notes.txt"], False),
        (["config.json", "model.safetensors", "folder/config.json"], False),
        (["config.json", "tokenizer.json"], False),
        (["model.safetensors"], False),
    ],
)
def test_an_export_of_a_version_without_the_mark_is_known_by_its_files(
    tmp_path: Path, names: list[str], accepted: bool
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    if not accepted:
        with refuses(CheckpointError, "export.directory"):
            check_target(tmp_path, overwrite=True)
        return
    check_target(tmp_path, overwrite=True)
    with pytest.raises(CheckpointError, match="is an export already; --overwrite replaces it"):
        check_target(tmp_path, overwrite=False)


@pytest.mark.parametrize("section", ["model", "adapter"])
def test_what_the_run_needs_to_resume_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    """Even where it is an export: a run that goes on from an earlier one reads it again."""
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "all" / "base"
    (base / "inside").mkdir(parents=True)
    for folder in (base, base.parent):
        (folder / MARK).write_text("a checkpoint")
    (base / "inside" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(base)
    needed = needed_paths({"model": {"path": "gpt2"}, "adapter": None} | {section: {"path": "all/base"}})
    for target, words in (("all/base", "is"), ("link", "is"), ("all", "contains"), ("all/base/inside", "is inside")):
        with pytest.raises(CheckpointError, match=f"{target}: {words} {section}.path='all/base', which the run needs"):
            check_target(Path(target), overwrite=True, needed=needed)
    check_target(Path("all/base"), overwrite=True, needed=needed_paths({"model": {"path": "gpt2"}}))
    check_target(Path("all/new"), overwrite=True, needed=needed)


def test_failure_leaves_the_earlier_export(
    trained: tuple[RunConfig, torch.Tensor], exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedModel

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = (exported / "model.safetensors").read_bytes()
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", no_space)
    with pytest.raises(CheckpointError, match=r"not written: .*No space left"):
        export_checkpoint(checkpoint(trained[0]), exported, overwrite=True)
    assert (exported / "model.safetensors").read_bytes() == before
    assert not list(exported.parent.glob(".*.tmp"))


def _killed_at_the_first_rename(source: Path, place: Path, at: int) -> None:
    rename = Path.rename
    count = itertools.count(1)

    def dies(path: Path, to: Path) -> Path:
        if next(count) == at:
            os._exit(9)
        return rename(path, to)

    Path.rename = dies
    export_checkpoint(source, place, overwrite=True)
    os._exit(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("swaps", [True, False])
def test_a_kill_leaves_the_earlier_export_or_the_new_one(
    trained: tuple[RunConfig, torch.Tensor], exported: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    """Where the system exchanges directories, no rename is seen; elsewhere the next export repairs what a kill left."""
    if not swaps:
        monkeypatch.setattr("meshwright.files._exchanged", lambda *_: False)
    (exported / "of-the-earlier").write_text("")
    for at in (1, 2):
        child = os.fork()
        if child == 0:
            _killed_at_the_first_rename(checkpoint(trained[0]), exported, at)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (0 if swaps else 9)
        if swaps:
            assert not (exported / "of-the-earlier").exists()
            continue
        with pytest.raises(CheckpointError, match="--overwrite"):  # and not taken for an absent one
            export_checkpoint(checkpoint(trained[0]), exported)
        assert (exported / "of-the-earlier").exists()
    export_checkpoint(checkpoint(trained[0]), exported, overwrite=True)
    assert not (exported / "of-the-earlier").exists()
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


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


# -- what a pretrained model was, an export is again -------------------------------------------------------------------------

GENERATION = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [2, 0], "bos_token_id": 1, "pad_token_id": 0}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def pretrained(folder: Path, generation: dict[str, object] | None = None, **dtypes: torch.dtype) -> None:
    """A model in a directory; its tensors are bfloat16, and those named (with __ for .) of another dtype."""
    tiny_model(seed=7, vocab_size=300).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, dtype in dtypes.items():
        tensors[name.replace("__", ".")] = tensors[name.replace("__", ".")].to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if generation is None:
        (folder / "generation_config.json").unlink()
    else:
        (folder / "generation_config.json").write_text(json.dumps(generation))


def tuned(tiny: Tiny, folder: Path, *overrides: str, ranks: int = 2) -> RunConfig:
    """Two steps from there."""
    config = tiny(f"model={{path: '{folder}'}}", "training.steps=2", *overrides)
    train(config, ranks)
    return config


def dtypes(folder: Path) -> dict[str, str]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            found |= {name: content.get_slice(name).get_dtype() for name in content.keys()}  # noqa: SIM118
    return found


def newest(config: RunConfig) -> Path:
    return Paths(config.directory).checkpoints / "step-00000002"


def test_the_generation_of_the_original_stays(tiny: Tiny, tmp_path: Path) -> None:
    pretrained(tmp_path / "model", GENERATION)
    config = tuned(tiny, tmp_path / "model")
    shutil.rmtree(tmp_path / "model")  # a checkpoint stands alone
    export_checkpoint(newest(config), tmp_path / "export")
    assert json.loads((tmp_path / "export" / "generation_config.json").read_text()) == GENERATION
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "export").generation_config
    assert (found.eos_token_id, found.temperature, found.top_p, found.top_k) == ([2, 0], 0.6, 0.9, 20)
    assert found.use_cache is not False


def test_a_run_that_resumes_knows_it_still(tiny: Tiny, tmp_path: Path) -> None:
    pretrained(tmp_path / "model", GENERATION)
    config = tuned(tiny, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    train(tiny(f"model={{path: '{tmp_path / 'model'}'}}", "training.steps=3"), 1)
    export_checkpoint(newest(config).with_name("step-00000003"), tmp_path / "export")
    assert json.loads((tmp_path / "export" / "generation_config.json").read_text()) == GENERATION


@pytest.mark.parametrize("ends", [2, [2, 0]])
def test_without_one_the_config_says_when_to_stop(tiny: Tiny, tmp_path: Path, ends: object) -> None:
    pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
    export_checkpoint(newest(tuned(tiny, tmp_path / "model")), tmp_path / "export")
    found = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert found["eos_token_id"] == ends
    assert found.get("use_cache", True) is True


def test_a_generation_that_transformers_would_not_write_stays(tiny: Tiny, tmp_path: Path) -> None:
    odd = {"do_sample": False, "temperature": 0.6, "eos_token_id": 2}  # as some on the hub are
    pretrained(tmp_path / "model", odd)
    export_checkpoint(newest(tuned(tiny, tmp_path / "model", ranks=1)), tmp_path / "export")
    assert json.loads((tmp_path / "export" / "generation_config.json").read_text()) == odd


def test_weights_have_the_dtype_that_was_read(tiny: Tiny, tmp_path: Path) -> None:
    pretrained(tmp_path / "model")
    config = tuned(tiny, tmp_path / "model")  # trained in float32
    export_checkpoint(newest(config), tmp_path / "export")
    assert set(dtypes(tmp_path / "export").values()) == {"BF16"}
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("model", "export")]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").dtype == torch.bfloat16
    export_checkpoint(newest(config), tmp_path / "wide", dtype="float32")
    assert set(dtypes(tmp_path / "wide").values()) == {"F32"}


def test_each_tensor_of_a_mixed_file_has_its_own(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrained(tmp_path / "model", None, model__norm__weight=torch.float32, lm_head__weight=torch.float16)
    config = tuned(tiny, tmp_path / "model")
    save = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda *a, **k: save(*a, **k, max_shard_size="20KB"))
    export_checkpoint(newest(config), tmp_path / "export")
    assert dtypes(tmp_path / "export") == dtypes(tmp_path / "model")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = list((tmp_path / "export").glob("*.safetensors"))
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files for t in load_file(file).values())
    monkeypatch.undo()
    export_checkpoint(newest(config), tmp_path / "wide", dtype="float32")
    heads = [AutoModelForCausalLM.from_pretrained(tmp_path / name).lm_head.weight for name in ("export", "wide")]
    assert torch.allclose(heads[0].float(), heads[1].float(), rtol=0.02, atol=1e-3)


def test_the_dtype_of_the_run(tiny: Tiny, tmp_path: Path) -> None:
    pretrained(tmp_path / "model")
    config = tuned(tiny, tmp_path / "model", "export_dtype=float16", ranks=1)
    export_checkpoint(newest(config), tmp_path / "export")
    assert set(dtypes(tmp_path / "export").values()) == {"F16"}


# -- chats -------------------------------------------------------------------------------------------------------------------


def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], object]]:
    """What a model is asked from here on: ids, and which of them end it."""
    asked = []

    def answer(self: PreTrainedModel, ids: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append((ids[0].tolist(), self.generation_config.eos_token_id))
        return torch.cat([ids, ids[:, -1:]], dim=1)

    monkeypatch.setattr(LlamaForCausalLM, "generate", answer)
    return asked


def test_a_chat_template_is_used_unless_it_is_not_wanted(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, exported = tiny("training.steps=2"), tmp_path / "export"
    train(config, 1)
    export_checkpoint(newest(config), exported)
    asked, tokenizer = seen(monkeypatch), AutoTokenizer.from_pretrained(exported)
    assert tokenizer.chat_template is None  # the run learned texts
    assert not generate(exported, "abc").startswith("\n")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(exported)
    assert generate(exported, "abc").startswith("\n")
    generate(exported, "abc", raw=True)
    texts = [tokenizer.decode(ids) for ids, _ in asked]
    assert texts == ["abc", "<user>abc<|eos|><assistant>", "abc"]
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    tokenizer.save_pretrained(exported)
    with refuses(ModelError, "generate.prompt"):
        generate(exported, "abc")


def test_a_model_that_learned_chats_stops_at_the_end_of_a_turn(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(60)))
    config = tiny(f"data.files=['{tmp_path / 'chats.jsonl'}']", "training.steps=2", "tokenizer.vocab_size=262")
    train(config, 1)
    export_checkpoint(newest(config), tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends = json.loads((tmp_path / "export" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [tokenizer.eos_token_id, end]
    asked = seen(monkeypatch)
    generate(tmp_path / "export", "one")
    assert asked[0][1] == ends
    assert tokenizer.decode(asked[0][0]) == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
