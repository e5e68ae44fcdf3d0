"""An audit runs the callbacks of a run on both sides, and names one that does what it must not do."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.audit.case import Case
from meshwright.audit.causes.diagnose import Kind
from meshwright.audit.conduct import Auditor, audit
from meshwright.audit.report import AuditReport
from meshwright.train.proofs.claim import claim_of
from meshwright.train.start.setup import make_setup
from tests.audit.test_plants import PLACES, case
from tests.train.runs import tiny_run, write_corpus

HERE = "tests.train.callbacks_of_users:"


def audited(auditor: Auditor, folder: Path, place: str, *callbacks: Any) -> AuditReport:
    ready = case(folder, place)
    listed = [{"use": one} if isinstance(one, str) else one for one in callbacks]
    config = type(ready.config).model_validate({**ready.config.model_dump(mode="json"), "callbacks": listed})
    return auditor.audit(Case(config, ready.store, ready.steps), PLACES[place].world_size)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Noise", "draws random numbers in on_step"),
        ("Moves", "moves parameters in on_step: model.embed_tokens.weight"),
        ("ByShard", "changes gradients differently on layouts: in step 1 "),
    ],
)
def test_what_a_callback_must_not_do_is_named(auditor: Auditor, folder: Path, name: str, words: str) -> None:
    report = audited(auditor, folder, "shard 2", "ema", f"{HERE}{name}")
    assert [finding.kind for finding in report.findings] == [Kind.CALLBACK], report.findings
    assert report.findings[0].message.startswith(f"callback {HERE}{name} {words}")


@pytest.mark.parametrize("place", ["shard 2", pytest.param("pp 2", marks=pytest.mark.thorough)])
def test_callbacks_that_are_right_pass(auditor: Auditor, folder: Path, tmp_path: Path, place: str) -> None:
    own = {"use": f"{HERE}Notes", "with": {"path": str(tmp_path / "notes")}}
    freeze = {"use": "freeze", "with": {"match": ["**.1.**"], "until": 2}}
    report = audited(auditor, folder, place, "ema", f"{HERE}Signs", freeze, own)
    assert report.passed, report.findings
    names = next(check.compared for check in report.checks if "callbacks" in check.what)
    assert names == f"ema, {HERE}Signs, freeze, {HERE}Notes"


@pytest.mark.thorough
def test_a_whole_audit_of_a_run_with_callbacks(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "words.jsonl")
    freeze = "{use: freeze, with: {match: ['**.0.**'], until: 2}}"
    callbacks = f"callbacks=[{{use: ema, with: {{evaluate: true}}}}, early_stopping, '{HERE}Signs', {freeze}]"
    config = tiny_run(tmp_path, corpus, callbacks, "training.eval_every=2", "profile={step: 5}", "checkpoint.best={}")
    report = audit(config, nproc=2)
    assert report.passed, report.findings
    with_others = tiny_run(tmp_path, corpus, f"callbacks=['{HERE}Signs']", "training.eval_every=2")
    plain = tiny_run(tmp_path, corpus, "callbacks=[ema]")
    claims = [claim_of(make_setup(one, 2)) for one in (config, with_others, plain)]
    assert claims[0] == claims[1]
    assert claims[1].key != claims[2].key
