"""The command: what it writes, prints and refuses."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Outcome

Meshwright = Callable[..., Outcome]


def test_the_verb(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    out = tmp_path / "scored.jsonl"
    found = meshwright("score", config, out, "--top-k", 2, "--nproc", 2)
    assert (found.code, found.error) == (0, "")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    documents = f"{len(lines)} documents -> {out}"
    assert found.out.startswith("perplexity ")
    assert found.out.rstrip().endswith(documents)
    assert {len(one) for one in lines[0]["top_ids"]} == {2}
    assert [path.name for path in tmp_path.glob(".*")] == []
    for arguments, words in (
        ((config, out), "exists already; --overwrite replaces it"),
        ((config, tmp_path / "scored.csv"), "legal are names that end with .jsonl or .parquet"),
        ((config, tmp_path / "none" / "a.jsonl"), "its directory does not exist"),
        ((tmp_path / "absent.yaml", tmp_path / "a.jsonl"), "no such file"),
    ):
        refused = meshwright("score", *arguments)
        assert refused.code == 2
        assert words in refused.error
