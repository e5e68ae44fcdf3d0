"""A run on rows by code of the user, with columns: trained, evaluated, resumed; and what is wrong is said before it starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import MeshwrightError
from meshwright.objectives import Batch, Objective, given
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from tests.train.runs import rows, tiny_run, train, write_corpus

HERE = "tests.train.test_columns:"


def texts(path: str, count: int = 80) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(Path(path).read_text().splitlines()[:count]):
        yield {"line": line, "reward": number % 4 / 3}


def unpacked(row: dict[str, Any]) -> dict[str, Any] | None:
    import json

    return {"text": json.loads(row["line"])["text"], "reward": row["reward"]} if row["reward"] else None


class Rewarded(Objective):
    """Rows with a larger reward count more."""

    def sums(self, model: Any, batch: Batch) -> Any:
        return (-(given.per_token(batch["reward"], batch) * given.log_probs(model, batch)).sum(),)

    def metrics(self, model: Any, batch: Batch) -> Any:
        return {"reward": (given.document_sum(batch["reward"], batch), given.document_sum(batch["reward"] * 0 + 1, batch))}


def run(folder: Path, *overrides: str) -> RunConfig:
    corpus = write_corpus(folder / "words.jsonl")
    sets = (
        "data.files=[]",
        f"data.source={{use: '{HERE}texts', with: {{path: '{corpus}'}}}}",
        f"data.map={HERE}unpacked",
        "data.tensors={reward: {per: document}}",
        f"training.objective={HERE}Rewarded",
        "training.steps=4",
    )
    return tiny_run(folder, corpus, *sets, *overrides)


def test_a_run_with_columns(tmp_path: Path) -> None:
    config = run(tmp_path, "layout.cp=2", "layout.dp_shard=1", "checkpoint.every=2")
    at_once = train(config, 2)
    assert len(at_once) == 4
    means = [row["eval/reward"] for row in rows(config) if "eval/reward" in row]
    assert 1 / 3 < means[0] < 1
    assert means == pytest.approx(means[:1] * len(means))
    for later in (Path(config.output) / "checkpoints").glob("*4"):
        later.rename(tmp_path / "gone")
    assert train(config, 2) == at_once


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    config = run(tmp_path, "data.map=nowhere:at_all", "layout.tp=3", "metrics.gpu=h1000")
    with pytest.raises(MeshwrightError) as caught:
        prepare_run(config, 2)
    for words in ("data.map=nowhere:at_all: 'nowhere' cannot be imported", "metrics.gpu", "tp=3"):
        assert any(words in problem for problem in caught.value.problems), words
    bad = run(tmp_path, f"data.source={{use: '{HERE}texts', with: {{path: gone}}}}", "layout.tp=3")
    with pytest.raises(MeshwrightError) as caught:
        prepare_run(bad, 2)
    assert "No such file or directory" in str(caught.value)
    assert "in texts: for number, line" in str(caught.value)
    assert any("tp=3" in problem for problem in caught.value.problems)
    assert not (tmp_path / "out" / "tokens").exists()
    assert make_setup(run(tmp_path), 1).config.own_parts[-1] == "columns: reward (per document, float32)"
