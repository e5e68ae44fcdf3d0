"""The pages about runs and audits: they say what the metrics and the report say, and work in a real browser."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.audit.causes.diagnose import Finding
from meshwright.audit.compare import Row
from meshwright.audit.report import AuditReport, Check
from meshwright.cli.main import _report, app
from meshwright.errors import ConfigError
from meshwright.report.audit_page import audit_page, failed_page
from meshwright.report.run_page import write_run_page
from meshwright.shrink.small_config import Change
from meshwright.train.config import load_config
from tests.browser import opened
from tests.report.test_plan_page import QUICKSTART, check_markup, needs_browser


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [
        {"step": step, "loss": 6 - step / 300, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 5e3 + step,
         "memory_bytes": 7 * 2**20 + step, "step_seconds": 0.25, "mfu": 0.4}
        for step in range(1, 1201)
    ]  # fmt: skip
    lines += [{"step": step, "eval/loss": 5.5} for step in (0, 600, 1200)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_the_page_of_a_run(run: Path) -> None:
    (run / "forecast.json").write_text(
        json.dumps({"forecast": {"products": 0.2, "ep": 0.1}, "measured": {"products": 0.1, "waiting": 0.3}})
    )
    text = write_run_page(run).read_text()
    check_markup(text)
    assert len(text.encode()) < 400_000
    for words in ("Loss, in nats", "Learning rate", "Tokens a second", "Memory of rank 0", "after step 1,200", "40.0%"):
        assert words in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])["charts"]  # type: ignore[index]
    loss = data["chart-loss"]
    assert [line["name"] for line in loss["lines"]] == ["loss", "eval/loss"]
    assert loss["at"][-1] == 1200
    assert loss["lines"][0]["values"][-1] == pytest.approx(2.0)
    rows = re.search(r"Parts of a step.*?</table>", text, re.DOTALL)[0]  # type: ignore[index]
    assert re.search(r"products</th>.*?200 ms.*?100 ms.*?\+100%", rows)
    assert re.search(r"waiting</th>.*?100 ms.*?300 ms.*?-67%", rows)


def test_a_run_without_a_forecast_says_so(run: Path) -> None:
    assert "There is none" in write_run_page(run).read_text()
    (run / "forecast.json").write_text("{")
    assert "forecast.json cannot be read" in write_run_page(run).read_text()


def test_one_process_of_a_run_writes_the_page_if_it_is_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = run / "report.html"
    _report(load_config(Path(QUICKSTART), [f"output={run}"]))
    assert not page.exists()
    config = load_config(Path(QUICKSTART), [f"output={run}", "metrics.html=true"])
    monkeypatch.setenv("RANK", "1")
    _report(config)
    assert not page.exists()
    monkeypatch.setenv("RANK", "0")
    _report(config)
    assert "Run " in page.read_text()


def test_a_page_without_metrics_is_refused(tmp_path: Path) -> None:
    more = [f"output={tmp_path}", "metrics.html=true", "metrics.jsonl=false", "data.corpus=null", f"data.files=[{QUICKSTART}]"]
    result = CliRunner().invoke(app, ["train", QUICKSTART, *more])
    assert isinstance(result.exception, ConfigError)
    assert "config.together" in result.exception.codes
    assert "metrics.html=True: is made from metrics.jsonl" in str(result.exception)


def report(*errors: float, findings: tuple[Finding, ...] = ()) -> AuditReport:
    rows = tuple(
        Row("gradient", f"layers.{place}.weight", "(root)", "dp_shard: Shard(0)", error, 1.0, 0.0, 1e-9, 1.0)
        for place, error in enumerate(errors)
    )
    return AuditReport(
        family="Llama<b>", layout="dp_shard=2", world_size=2, dtype="float64", steps=3, microbatches=2,
        changes=(Change("model.x", 1, 2, "small"),), losses=(1.0,), norms=(1.0,), counts={"dp": {"all_gather": 3}},
        bytes={"dp": {"all_gather": 2**20}}, rows=rows, borders=(), checks=(Check("gradients", "2", "1e-12", True),),
        findings=findings, seconds=2.0, claim=None,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_page_of_an_audit() -> None:
    text = audit_page(report(1e-12, 0.0, 3e-16), "run")
    check_markup(text)
    assert ">PASS<" in text
    assert "Llama&lt;b&gt;" in text
    assert re.search(r"all_gather</td><td class=\"n\">3</td><td class=\"n\">1.0 MiB", text)
    assert text.count('class="dot l2"') == 3


def test_the_page_of_an_audit_that_found_something() -> None:
    finding = Finding("gradient", "layers.1.weight is wrong")
    text = audit_page(replace(report(1e-12, 0.5, float("inf")), findings=(finding,)), "run")
    check_markup(text)
    assert ">FAIL<" in text
    assert "gradient: layers.1.weight is wrong" in text
    assert text.count('class="dot FAIL"') == 2
    check_markup(failed_page("run", ["rank 1 hangs"]))
    assert "rank 1 hangs" in failed_page("run", ["rank 1 hangs"])


@needs_browser
def test_they_work_in_a_browser(run: Path) -> None:
    audit = run / "audit.html"
    audit.write_text(audit_page(report(1e-12, 0.0, 0.5), "run"))
    with opened() as page:
        page.open(write_run_page(run))
        page.point("#chart-loss svg", 0.5, 0.5)
        assert re.fullmatch(r"step [0-9]+: loss [0-9.]+(, eval/loss 5.5)?", page.text("#chart-loss-readout"))
        page.run("document.querySelector('#chart-memory .pane').focus()")
        page.press("End")
        assert page.text("#chart-memory-readout") == "step 1,200: memory_bytes 7.0 MiB"
        page.press("Home")
        assert page.text("#chart-memory-readout").startswith("step ")
        page.open(audit)
        page.click("#comparisons summary")
        first = "document.querySelector('#comparisons tbody th').textContent"
        assert page.run(first) == "layers.2.weight"
        page.click("#comparisons th:nth-child(1) button")
        assert page.run(first) == "layers.0.weight"
        page.click("#comparisons th:nth-child(5) button")
        assert page.run(first) == "layers.2.weight"
        for file in (run / "report.html", audit):
            page.open(file, width=390, height=844, phone=True)
            assert page.run("document.documentElement.scrollWidth") <= 390
        assert page.problems == []
        assert page.requests == []
