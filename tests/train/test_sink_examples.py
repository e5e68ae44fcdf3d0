"""The sinks of examples/parts/sinks.py get what a run measures."""

import csv
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshwright.train.metrics import Recorder
from tests.train.runs import tiny_run, write_corpus

EXAMPLES = Path(__file__).parents[2] / "examples" / "parts"


@contextmanager
def listening() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An address, and what was sent to it."""
    sent: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()
            thread.join()


def test_a_table_and_a_webhook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    corpus, table = write_corpus(tmp_path / "words.jsonl"), tmp_path / "metrics.csv"
    with listening() as (url, sent):
        sinks = f"[{{use: 'sinks:Table', with: {{path: {table}}}}}, {{use: 'sinks:Webhook', with: {{url: '{url}'}}}}]"
        config = tiny_run(tmp_path, corpus, f"metrics.sinks={sinks}", "metrics.jsonl=false")
        for resumed, step in ((0, 1), (1, 2)):
            recorder = Recorder(config, speaks=True, resumed_step=resumed)
            recorder.event(step, {"eval/loss": 1.5 / step, "eval/tokens": 7}, "evaluated")
            recorder.close()
    assert sent == [{"step": 1, "eval/loss": 1.5, "eval/tokens": 7}, {"step": 2, "eval/loss": 0.75, "eval/tokens": 7}]
    rows = list(csv.reader(table.read_text().splitlines()))
    assert rows == [["1", "eval/loss", "1.5"], ["1", "eval/tokens", "7"], ["2", "eval/loss", "0.75"], ["2", "eval/tokens", "7"]]
    assert "goes on without" not in capsys.readouterr().out
