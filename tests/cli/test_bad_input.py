"""Bad input: one clear message that names the knob, an exit code, no traceback unless asked for, nothing started."""

import importlib.util
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.conftest import Outcome
from tests.tiny import tiny_model
from tests.train.runs import LLAMA

Meshwright = Callable[..., Outcome]


def check(found: Outcome, *parts: str, messages: int = 1, code: int = 2) -> None:
    """The command failed with so many messages, and each part is in one of them."""
    assert found.code == code, found
    assert found.error.startswith("error: "), found.error
    assert found.error.count("error: ") == messages, found.error
    assert "Traceback" not in found.error + found.out
    for part in parts:
        assert part in found.error, found.error


def wrong(meshwright: Meshwright, *arguments: object, parts: tuple[str, ...], messages: int = 1, code: int = 2) -> None:
    """Fails as it should, also with --debug, which adds the traceback."""
    check(meshwright(*arguments), *parts, messages=messages, code=code)
    found = meshwright(*arguments, "--debug")
    assert found.code == code
    assert "Traceback (most recent call last)" in found.error
    for part in parts:
        assert part in found.error


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_world_size_that_does_not_factor(meshwright: Meshwright, config: str, verb: str) -> None:
    ranks = ("--nproc", 8) if verb == "train" else ("--world-size", 8)
    parts = ("dp_shard=3 makes 3 ranks, and there are 8", "dp_shard=3: ", "legal is 8")
    wrong(meshwright, verb, config, "layout.dp_shard=3", *ranks, parts=parts, messages=2)
    parts = (
        "8 ranks cannot be divided by dp_replicate=3",
        "as they are, legal are 1, 2, 4, 8",
    )
    wrong(meshwright, verb, config, "layout.dp_replicate=3", *ranks, parts=parts, messages=2)


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_heads_that_do_not_divide(meshwright: Meshwright, config: str, verb: str) -> None:
    ranks = ("--nproc", 3) if verb == "train" else ("--world-size", 3)
    sizes = ("model.config.num_attention_heads=8", "model.config.num_key_value_heads=8")
    parts = (
        "tp=3: 8 attention heads cannot be divided by 3; legal are 1, 2, 4, 8",
        "tp=3: 8 key/value heads cannot be divided by 3; legal are 1, 2, 4, 8",
    )
    wrong(meshwright, verb, config, "layout.tp=3", *sizes, *ranks, parts=parts, messages=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("verb", [("train",), ("plan",), ("plan", "--gpu", "h100")])
def test_key_value_heads_that_no_attention_can_share(meshwright: Meshwright, config: str, verb: tuple[str, ...]) -> None:
    """A config may leave them out, and its family's default is more than it has heads."""
    sizes = "model.config={model_type: gpt_oss, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 300}"
    words = "num_key_value_heads=8 does not divide num_attention_heads=4; legal are 1, 2, 4"
    parts = (f"error: model.config: {words} [model.config.heads]\n",)
    wrong(meshwright, verb[0], config, sizes, *verb[1:], parts=parts)


def test_a_schedule_that_does_not_take_the_microbatches(meshwright: Meshwright, config: str) -> None:
    sizes = ("layout.pp=2", "layout.dp_shard=1", "training.global_batch_size=1", "training.microbatch_size=1")
    parts = ("pipeline_schedule=1f1b: a run has 1 microbatch (", "with pp=2 legal are 2, 3, 4")
    wrong(meshwright, "train", config, *sizes, "--nproc", 2, parts=parts)


def test_batch_that_the_ranks_do_not_divide(meshwright: Meshwright, config: str) -> None:
    parts = ("global_batch_size=8 is no multiple of microbatch_size=3 x 2 data ranks = 6; nearest legal: 6 or 12",)
    wrong(meshwright, "train", config, "training.microbatch_size=3", "--nproc", 2, parts=parts)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("layout.dp_replicat=2", ("layout.dp_replicat: unknown key", "did you mean 'layout.dp_replicate'?")),
        ("training.steps=soon", ("training.steps='soon'", "integer")),
        ("checkpoint.resume=/nowhere", ("checkpoint.resume='/nowhere': no such directory",)),
        ("model.config.model_type=lama", ("model.config.model_type='lama'", "llama")),
        ("model.config.hiden_size=8", ("model.config.hiden_size: unknown key", "did you mean 'hidden_size'?")),
        ("model.config.hidden_size=big", ("model.config: 'llama' refuses it", "hidden_size")),
        ("parallel.freeze=['lm_heads.*']", ("freeze pattern 'lm_heads.*' matches no parameter", "lm_head.weight")),
        ("parallel.sync_units={'model.layer.*': defer}", ("model.layer.*", "matches no")),
        (
            "parallel.activation_checkpointing_layers={'model.layer.*': full}",
            ("'model.layer.*' matches no layer", "model.layers.* (model.layers.0 to model.layers."),
        ),
        (
            "parallel={activation_checkpointing: selective, activation_checkpointing_save: [aten.mm]}",
            ("activation_checkpointing_save='aten.mm': is no operator", "did you mean aten.mm.default"),
        ),
        ("data.files=['/nowhere.jsonl']", ("data.files: '/nowhere.jsonl': no such file",)),
        ("data.files=['/nowhere/*.txt']", ("data.files: '/nowhere/*.txt': glob matches no file",)),
        (
            "data.sequence_length=65",
            ("data.sequence_length=65: model.config has max_position_embeddings=64; legal is 2 to 64, or more with",),
        ),
        ("model.config.vocab_size=200", ("model.config.vocab_size=200: the tokenizer has 300 tokens", "300 or more")),
        ("tokenizer.vocab_size=20000", ("tokenizer.vocab_size=20000: the corpus is too small",)),
        ("tokenizer.path=/nowhere", ("tokenizer.path",)),
    ],
)
def test_one_wrong_value(meshwright: Meshwright, config: str, override: str, parts: tuple[str, ...]) -> None:
    if override.startswith("tokenizer.path"):
        override = "tokenizer={path: /nowhere}"
    wrong(meshwright, "train", config, override, parts=parts)
    assert not (Path(config).parent / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_cannot_be_used_are_one_report(meshwright: Meshwright, config: str, tmp_path: Path, ranks: int) -> None:
    answers: list[object] = ["fox", None, "dog", [{"type": "image"}], "\ud800", "box"] * 3
    rows = [{"prompt": "quick", "completion": answer} for answer in answers]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n{")
    wish = (f"data.files=['{path}']", "tokenizer={}", "model.config.vocab_size=300", "training.steps=1", "--nproc", ranks)
    parts = (
        "data: 10 of 19 rows cannot be used, and data.bad_rows is 'stop'",
        f"{path}:2: message 2: the assistant's answer is null",
        f"{path}:4: field 'completion' holds list, not text",
        f"{path}:5: a text holds half of a character",
        f"{path}:19: cannot be read as json",
    )
    wrong(meshwright, "train", config, *wish, parts=parts, messages=11)
    wrong(meshwright, "train", config, *wish, "data.bad_rows=skip", parts=("data.bad_rows_limit=0.1 is the most",), messages=11)
    found = meshwright("train", config, *wish, "data.bad_rows=skip", "data.bad_rows_limit=0.6")
    assert (found.code, found.error) == (0, "")
    assert "data: 19 rows, 9 documents of " in found.out
    assert "0 truncated, 0 dropped, 0 empty, 10 bad" in found.out
    assert f"  {path}:19: cannot be read as json" in found.out


def test_documents_that_are_too_long(meshwright: Meshwright, config: str) -> None:
    parts = ("data: 64 of 80 rows are longer than data.sequence_length=32 (the longest, ", "would keep 95 % of the documents")
    wrong(meshwright, "train", config, "data.long_documents=error", parts=parts, messages=1)


def test_all_that_is_wrong_at_once(meshwright: Meshwright, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layout, data and extras do not hide each other."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "mlflow" else find(name, *rest))
    found = meshwright("train", config, "layout.dp_shard=5", "data.files=['/nowhere.txt']", "metrics.mlflow=mine")
    check(found, "dp_shard=5", "/nowhere.txt", "metrics.mlflow='mine': needs `pip install 'meshwright[mlflow]'`", messages=4)


def test_missing_file(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    for verb in ("train", "plan"):
        wrong(meshwright, verb, tmp_path / "none.yaml", parts=("none.yaml: no such file",))
    (tmp_path / "run").mkdir()
    parts = (f"CHECKPOINT='{tmp_path}/rnu': no such directory; did you mean '{tmp_path}/run'?",)
    wrong(meshwright, "export", tmp_path / "rnu", tmp_path / "to", parts=parts)
    wrong(meshwright, "generate", tmp_path / "rnu", "abc", parts=(parts[0].replace("CHECKPOINT", "DIRECTORY"),))
    found = meshwright("train", Path(config).with_name("rum.yaml"))
    check(found, "rum.yaml: no such file; did you mean", "run.yaml'")
    wrong(meshwright, "generate", tmp_path / "run", "text", parts=("run: holds no model (no config.json)",))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "empty.jsonl' is empty"),
        ("\n\n", "empty.jsonl'"),
        ('{"text": ""}\n{"text": ""}\n', "hold no text to train a tokenizer on"),
    ],
    ids=["no bytes", "no rows", "no text"],
)
def test_empty_data_set(meshwright: Meshwright, config: str, tmp_path: Path, content: str, part: str) -> None:
    (tmp_path / "empty.jsonl").write_text(content)
    wrong(meshwright, "train", config, f"data.files=['{tmp_path / 'empty.jsonl'}']", parts=(part,))


def test_checkpoint_of_another_model(meshwright: Meshwright, config: str) -> None:
    assert meshwright("train", config, "training.steps=1").code == 0
    held = Path(config).parent / "out"
    before = {path: path.stat().st_mtime_ns for path in held.rglob("*")}
    parts = ("step-00000001 is of another model", "model.embed_tokens.weight: (300, 32) in the checkpoint, (300, 40)")
    changed = f"model.config={json.dumps({**LLAMA, 'hidden_size': 40})}"
    found = meshwright("train", config, changed)
    check(found, *parts, "... and 9 more like these")
    assert {path: path.stat().st_mtime_ns for path in held.rglob("*")} == before


def test_truncated_safetensors(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    tiny_model(vocab_size=300).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    assert load_file(file)
    file.write_bytes(file.read_bytes()[:-100])
    parts = (f"{file}: truncated or not safetensors",)
    wrong(meshwright, "train", config, f"model={{path: '{tmp_path / 'model'}'}}", parts=parts)


def test_output_that_cannot_be_written(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "below", tmp_path / "file"):
        wrong(meshwright, "train", config, f"output={output}", parts=(f"{output}: cannot be written",))


def test_files_of_others_are_not_written_over(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    parts = ("is the configuration itself; choose another file",)
    written = Path(config).read_text()
    wrong(meshwright, "calibrate", config, config, "--overwrite", parts=parts)
    wrong(meshwright, "audit", config, "--json", config, parts=parts)
    wrong(meshwright, "plan", config, "layout.pp=2", "-n", 2, "--timeline-svg", config, parts=parts)
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    wrong(meshwright, "calibrate", config, tmp_path / "mine.yaml", parts=("exists already; --overwrite replaces it",))
    out = tmp_path / "out"  # of the run
    for file, words in (("config.yaml", "is not of a run"), ("export/thesis.txt", "has files that are no export")):
        (out / file).parent.mkdir(exist_ok=True, parents=True)
        (out / file).write_text("mine")
        wrong(meshwright, "train", config, "export=true", parts=(words,))
        assert (out / file).read_text() == "mine"
        (out / file).unlink()
    assert Path(config).read_text() == written
    assert (tmp_path / "mine.yaml").read_text() == "name: mine\n"


def test_full_disk(meshwright: Meshwright, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    parts = ("out: checkpoints need 0.00 GiB and 0.00 GiB are free",)
    wrong(meshwright, "train", config, parts=parts)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2_000_000))
    assert meshwright("train", config, "training.steps=1").code == 0


def test_an_error_of_the_system_gets_a_place(meshwright: Meshwright, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")  # as a write says it, without a path

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    out = Path(config).parent / "out"
    check(meshwright("train", config), f"OSError: No space left on device: a file of '{out}'", code=1)


def test_an_error_that_says_nothing_is_not_an_empty_line(
    meshwright: Meshwright, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object, **__: object) -> None:
        raise EOFError

    monkeypatch.setattr("meshwright.train.start.setup.make_setup", end)
    found = meshwright("plan", config)
    assert (found.code, found.error) == (1, "error: EOFError without a message [worker.exception]\n")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_port_in_use(meshwright: Meshwright, config: str, taken_port: int) -> None:
    parts = (f"launch.port={taken_port}: address already in use", "or 0 for any that is free")
    wrong(meshwright, "train", config, f"launch.port={taken_port}", "--nproc", 2, parts=parts)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--nproc", "8"), "No such option: --nproc (Possible options: --world-size)"),
        (("plan", "--nproc_per_node=8"), "(Possible options: --world-size)"),
        (("plan", "--nnodes", "8"), "(Possible options: --world-size)"),
        (("plan", "--world_size", "8"), "(Possible options: --world-size)"),
        (("plan", "--num-gpus", "8"), "(Possible options: --world-size)"),
        (("plan", "--hardware", "h100"), "(Possible options: --gpu)"),
        (("train", "--nnodes", "8"), "torchrun or Slurm starts the processes: torchrun --nnodes NODES --nproc-per-node"),
        (("train", "--gpus", "2"), "(Possible options: --nproc)"),
        (("generate", "--lora", "x"), "(Possible options: --adapter)"),
        (("generate", "--prompt", "x"), "PROMPT is written without an option"),
        (("export", "--output", "x"), "DIRECTORY is written without an option"),
        (("train", "--config", "x"), "CONFIG is written without an option"),
        (("train", "--world-size", "8"), "No such option: --world-size (Possible options: --nproc)"),
        (("audit", "--gpus", "2"), "(Possible options: --nproc)"),
        (("train", "--learning-rate", "1e-4"), "without dashes: optimizer.lr=VALUE"),
        (("train", "--rank", "16"), "without dashes: adapter.rank=VALUE"),
        (("train", "--layout.tp", "2"), "without dashes: layout.tp=VALUE"),
        (("train", "--output", "x"), "without dashes: output=VALUE"),
        (("plan", "--worldsize", "2"), "(Possible options: --world-size)"),
        (("plan", "--nonsense", "2"), "No such option: --nonsense"),
    ],
)
def test_an_option_of_another_command_or_trainer(
    meshwright: Meshwright, config: str, arguments: tuple[str, ...], words: str
) -> None:
    verb, *options = arguments
    found = meshwright(verb, config, *options)
    assert found.code == 2
    assert words in " ".join(found.error.replace("│", "").split())


def test_usage(meshwright: Meshwright, config: str) -> None:
    for arguments in (("trian",), ("train",), ("train", config, "--nproc", "0"), ("plan", config, "--worldsize", "2")):
        found = meshwright(*arguments)
        assert found.code == 2
        assert "Traceback" not in found.error
        assert found.error
