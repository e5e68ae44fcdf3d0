"""docs/own-parts.md does what it says, and so do the two examples."""

import re
from pathlib import Path

import pytest
import yaml

from meshwright.audit.conduct import audit
from meshwright.train.config import load_config
from meshwright.train.start.setup import make_setup
from tests.train.runs import losses, rows, tiny_run, train, write_corpus

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-parts.md").read_text()


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "parts_of_page.py").write_text("".join(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    sets, grouped = list[str](), list[list[str]]()
    for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for section, keys in yaml.safe_load(block.replace("my_parts:", "parts_of_page:")).items():
            flat = {section: keys} if isinstance(keys, list) else {f"{section}.{key}": value for key, value in keys.items()}
            lines = [f"{key}={value if not isinstance(value, str) else repr(value)}" for key, value in flat.items()]
            if "optimizer.groups" in flat:  # another optimizer stands on the page too
                grouped.append(lines)
            else:
                sets += lines
    assert (len(sets), len(grouped)) == (9, 2)
    corpus = write_corpus(tmp_path / "words.jsonl")
    numbers = tmp_path / "numbers.txt"
    sets.append(f"metrics.sinks=[{{use: 'parts_of_page:Lines', with: {{path: '{numbers}'}}}}]")
    config = tiny_run(tmp_path, corpus, *sets, "training.steps=3")
    assert train(config, 2)[-1] < losses(config)[0]
    assert f"3 loss {losses(config)[-1]}" in numbers.read_text().splitlines()
    assert [row["spikes"] for row in rows(config) if "loss" in row] == [0, 0, 0]
    other = tiny_run(
        tmp_path, corpus, "training.objective=parts_of_page:Confident", "training.steps=2", f"output={tmp_path}/other"
    )
    train(other, 2)
    assert {"documents_loss", "entropy"} <= rows(other)[1].keys()
    assert "eval/entropy" in rows(other)[0]
    plans = [make_setup(tiny_run(tmp_path, corpus, *lines), 1).plan for lines in grouped]
    embeddings = [row for plan in plans for row in plan.parameters if row.name == "model.embed_tokens.weight"]
    assert [row.betas for row in embeddings] == [None, (0.9, 0.99)]
    rewards = tiny_run(
        tmp_path, corpus, "training.objective=parts_of_page:Rewards", "data.tensors={reward: {per: document}}", "layout.tp=2"
    )
    names = {row.name for row in make_setup(rewards, 2).plan.parameters}
    assert {"objective.head.weight", "objective.head.bias", "objective.temperature.log"} <= names


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("contrastive", "layout.cp=2"),
        ("masked_diffusion", "layout.tp=2"),
        pytest.param("contrastive", "layout.tp=2", marks=pytest.mark.thorough),
        pytest.param("masked_diffusion", "layout.cp=2", marks=pytest.mark.thorough),
    ],
)
def test_an_example_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: str) -> None:
    monkeypatch.chdir(ROOT / "examples" / "parts")
    monkeypatch.syspath_prepend(".")
    config = load_config(f"{name}.yaml", ["layout.dp_shard=1", layout, f"output={tmp_path}"])
    report = audit(config, nproc=2)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["contrastive", "masked_diffusion"])
def test_an_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(ROOT / "examples" / "parts")
    monkeypatch.syspath_prepend(".")
    config = load_config(f"{name}.yaml", [f"output={tmp_path}", "metrics.tensorboard=false"])
    train(config, 2)
    held_out = [row["eval/loss"] for row in rows(config) if "eval/loss" in row]
    assert held_out[-1] < 0.9 * held_out[0]
    assert len((ROOT / "examples" / "parts" / f"{name}.py").read_text().splitlines()) < 80
