"""Two destinations of metrics: a table of comma-separated values, and an address that gets a POST for each line.

metrics: {sinks: [{use: "sinks:Table", with: {path: metrics.csv}}, {use: "sinks:Webhook", with: {url: "http://127.0.0.1:8000"}}]}
"""

import csv
import json
from collections.abc import Mapping
from typing import Any
from urllib.request import Request, urlopen

from meshwright import MetricSink


class Table(MetricSink):
    """A file with a row for each number: step, name, value. A run that resumes adds to it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self, config: Mapping[str, Any], step: int) -> None:
        self.file = open(self.path, "a" if step else "w", newline="")  # noqa: SIM115 - closed with the sink
        self.rows = csv.writer(self.file)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.writerows((step, name, value) for name, value in values.items())

    def close(self) -> None:
        self.file.close()


class Webhook(MetricSink):
    """Sends the numbers of each step as JSON. A sink that fails is said, and the run goes on without it."""

    def __init__(self, url: str, seconds: float = 5.0) -> None:
        self.url, self.seconds = url, seconds

    def write(self, step: int, values: Mapping[str, float]) -> None:
        body = json.dumps({"step": step, **values}).encode()
        request = Request(self.url, body, {"Content-Type": "application/json"})
        urlopen(request, timeout=self.seconds).close()
