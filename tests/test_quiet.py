"""Warnings of other libraries that no user can act on do not reach him; all others do."""

import subprocess
import sys
import warnings
from logging import NOTSET, getLogger

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.utils import logging

from meshwright.quiet import quiet

KINDS = [(FutureWarning, "torch.optim"), (DeprecationWarning, "x"), (UserWarning, "peft.tuners.lora"), (UserWarning, "torch.x")]


@pytest.mark.parametrize(("options", "left"), [([], ["UserWarning"]), (["default"], [kind.__name__ for kind, _ in KINDS])])
def test_what_reaches_the_user(monkeypatch: pytest.MonkeyPatch, options: list[str], left: list[str]) -> None:
    monkeypatch.setattr(sys, "warnoptions", options)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")  # what a user sets stays
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        quiet()
        for kind, module in KINDS:
            warnings.warn_explicit("said", kind, "file.py", 1, module=module, registry={})
    assert [item.category.__name__ for item in found] == left


def test_transformers_logs_errors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
    before = logging.get_verbosity()
    try:
        with warnings.catch_warnings():
            quiet()
            assert logging.get_verbosity() == before
            monkeypatch.delenv("TRANSFORMERS_VERBOSITY")
            quiet()
        assert logging.get_verbosity() == logging.ERROR
    finally:
        logging.set_verbosity(before)


def test_torch_logs_no_failure_in_a_trace(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    log = getLogger("torch._subclasses.fake_tensor")
    before = log.level
    try:
        for variable, lines in (("+dynamo", 1), (None, 0)):
            if variable:
                monkeypatch.setenv("TORCH_LOGS", variable)
            else:
                monkeypatch.delenv("TORCH_LOGS")
            caplog.clear()
            log.setLevel(NOTSET)
            with warnings.catch_warnings(), FakeTensorMode():
                quiet()
                log.addHandler(caplog.handler)
                with pytest.raises(RuntimeError, match="reduction dim"):
                    torch.empty(2, 3) @ torch.empty(4, 5)
            assert len([item for item in caplog.records if item.name == log.name]) == lines
    finally:
        log.removeHandler(caplog.handler)
        log.setLevel(before)


@pytest.mark.thorough
def test_torchao_is_imported_without_a_word() -> None:
    code = "from meshwright.quiet import quiet; quiet(); import transformers.quantizers.quantizer_torchao, torchao.optim"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("", "")
