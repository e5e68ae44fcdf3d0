"""Messages: none is empty, none holds a whole book, and each names the file."""

import pickle
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from meshwright.errors import LONGEST_LINE, ConfigError, described, number_of, shortened
from meshwright.paths import no_directory
from tests.train.test_config import file as file  # a fixture
from tests.train.test_config import problems


@pytest.mark.parametrize("value", ["a" * 10_000, "word " * 2_000, "/a" * 5_000, "[" + "1, " * 3_000 + "]"])
@pytest.mark.parametrize("key", ["training.steps", "model.config.text_config", "optimizer.betas", "output", "unknown"])
def test_a_long_value_is_cut_and_what_is_around_it_stays(file, key: str, value: str) -> None:
    for problem in problems(file, f"{key}={value}") if key != "output" or " " not in value else ():
        assert len(problem) < LONGEST_LINE + 100
        assert key in problem
        assert "characters)..." in problem or len(problem) < 1000


def test_head_and_tail_stay_and_a_short_message_is_as_it_was() -> None:
    message = f"training.steps={'9' * 10_000!r}: must be below 5"
    cut = shortened(message)
    assert cut.startswith("training.steps='999")
    assert cut.endswith("999': must be below 5") or cut.endswith("must be below 5")
    assert len(cut) < 400
    assert shortened(cut) == cut
    assert pickle.loads(pickle.dumps(ConfigError(message))).problems == (cut,)
    usual = "layout.tp=3: 8 attention heads cannot be divided by 3; legal are 1, 2, 4, 8\n  and so on"
    assert ConfigError(usual).problems == (usual,)


def test_an_exception_of_others_is_never_described_by_nothing() -> None:
    assert described(EOFError()) == "EOFError without a message"
    echo = EOFError()
    echo.__cause__ = KeyError("weight")
    assert described(echo) == "EOFError without a message; after KeyError: 'weight'"
    assert described(OSError(28, "No space left on device", "/data/x")) == "OSError: No space left on device: '/data/x'"
    assert described(ValueError("two\nlines")) == "ValueError: two lines"


@pytest.mark.parametrize("value", ["path/to/model", "tok/", "./x", "/nowhere", "~/nowhere", "a b", "x/../y", "c:\\models"])
def test_what_can_only_be_a_directory(value: str) -> None:
    found = no_directory("model.path", value)
    assert found is not None
    assert found.startswith(f"model.path={value!r}: no such directory")
    assert "hub" not in found


def asked(monkeypatch: pytest.MonkeyPatch, answer: Exception | None, cache: Path) -> list[str]:
    """Names that the hub is asked for; it gives this answer."""
    names = []

    def info(name: str, **_: object) -> None:
        names.append(name)
        if answer is not None:
            raise answer

    monkeypatch.setattr(huggingface_hub, "model_info", info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return names


def test_what_may_be_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = asked(monkeypatch, None, tmp_path)
    assert no_directory("model.path", "gpt2") is no_directory("model.path", "meta-llama/Llama-3.1-8B") is None
    assert names == ["gpt2", "meta-llama/Llama-3.1-8B"]
    assert no_directory("model.path", str(tmp_path)) is None
    (tmp_path / "file").write_text("")
    assert "is a file" in str(no_directory("model.path", str(tmp_path / "file")))
    (tmp_path / "models--gpt2" / "snapshots").mkdir(parents=True)
    assert no_directory("model.path", "gpt2") is None
    assert len(names) == 2  # what was loaded before is not asked for
    assert "hub" not in str(no_directory("adapter.path", "gpt2", hub=False))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "the hub has no such model, or it is private"),
        (OfflineModeIsEnabled("offline"), "it was never loaded here, and HF_HUB_OFFLINE forbids to ask the hub"),
        (TimeoutError("too slow"), "it was never loaded here, and the hub cannot be reached (TimeoutError: too slow)"),
        (HfHubHTTPError.__new__(HfHubHTTPError), None),  # what loads it says more
    ],
)
def test_a_name_that_is_neither_a_folder_nor_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Exception, words: str | None
) -> None:
    asked(monkeypatch, answer, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama-8b").mkdir(parents=True)
    (tmp_path / "model").write_text("")
    for value, near in (("models/lama-8b", "'models/llama-8b'"), ("modles/llama-8b", "'models/llama-8b' or 'model'")):
        found = no_directory("model.path", value)
        if words is None:
            assert found is None
            continue
        assert found is not None
        assert found.startswith(f"model.path={value!r}: no such directory; did you mean {near}? (working directory {tmp_path})")
        assert f"; as a name of the hub: {words}" in found


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "rank", "1 rank"),
        (0, "rank", "0 ranks"),
        (2, "process", "2 processes"),
        (1, "microbatch", "1 microbatch"),
        (3, "microbatch", "3 microbatches"),
        (1024, "key/value head of a layer", "1,024 key/value heads of a layer"),
    ],
)
def test_numbers_of_things(number: int, noun: str, words: str) -> None:
    assert number_of(number, noun) == words
