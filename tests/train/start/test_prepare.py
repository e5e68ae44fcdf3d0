"""The preparation of a run by one process."""

from collections.abc import Callable

import pytest

from meshwright.train.config import RunConfig
from meshwright.train.start import setup as module
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup


@pytest.mark.parametrize(
    ("options", "times"),
    [((), 1), (("model.config.vocab_size=400",), 2)],
    ids=["the tokenizer has what was asked for", "the config knows no special tokens"],
)
def test_the_plan_is_made_once_unless_the_tokenizer_changes_the_model(
    tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], times: int
) -> None:
    calls = []

    def describe(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        return inner(*arguments, **options)  # type: ignore[arg-type]

    inner = module.describe_model
    monkeypatch.setattr(module, "describe_model", describe)
    config = tiny(*options)
    setup, tokenizer, _ = prepare_run(config, 2)
    assert len(calls) == times
    worker = make_setup(config, 2, tokenizer)
    assert setup.plan == worker.plan
    assert setup.model.config.to_dict() == worker.model.config.to_dict()
