"""An objective of the user is tried when its run is planned: what it needs is found, and what is wrong is named."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ConfigError, MeshwrightError, PartError
from meshwright.models.objective import Objective
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.setup import make_setup
from tests.harness import refuses
from tests.train.runs import write_config

PARTS = "tests.objectives.parts:"


def config(tmp_path: Path, name: str, *overrides: str, **arguments: Any) -> RunConfig:
    objective = {"use": f"{PARTS}{name}", "with": arguments} if arguments else f"{PARTS}{name}"
    training = {"steps": 2, "global_batch_size": 8, "microbatch_size": 2, "objective": objective}
    model = {"config": {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
                        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}}  # fmt: skip
    return load_config(write_config(tmp_path, tmp_path / "words.jsonl", model=model, training=training), overrides)


def tried(tmp_path: Path, name: str, *overrides: str, world_size: int = 1, **arguments: Any) -> Objective:
    return make_setup(config(tmp_path, name, *overrides, **arguments), world_size).objective


def test_what_an_objective_needs_is_found(tmp_path: Path) -> None:
    tokens = tried(tmp_path, "Tokens")
    assert all((tokens.pipelines, tokens.chunks, tokens.shares, tokens.packs, tokens.documents))
    assert (tokens.wanted, tokens.metric_names) == ({"log_probs", "entropy"}, ("entropy",))
    assert (tokens.collectives, tokens.whole_logits, tokens.gathers) == ((0, 0, 2), False, False)
    vectors = tried(tmp_path, "Vectors")
    assert (vectors.gathers, vectors.collectives, vectors.without_head) == (True, (1, 1, 2 + 1 + 2), True)
    assert tried(tmp_path, "smooth").whole_logits
    assert tried(tmp_path, "Copies").documents
    twice = tried(tmp_path, "CallsTwice", "data.packing=pad")
    assert not twice.pipelines


def test_arguments(tmp_path: Path) -> None:
    assert tried(tmp_path, "focal", gamma="3").function.keywords == {"gamma": 3.0}  # type: ignore[attr-defined]
    with refuses(ConfigError, "config.part.arguments") as caught:
        tried(tmp_path, "focal", gama=3, eps="much")
    assert len(caught.value.problems) == 2
    assert "did you mean 'gamma'?" in str(caught.value)


def test_the_configuration_keeps_a_part(tmp_path: Path) -> None:
    made = config(tmp_path, "focal", gamma=3)
    again = tmp_path / "again.yaml"
    again.write_text(made.to_yaml())
    assert load_config(again) == made
    assert made.model_dump(mode="json")["training"]["objective"] == {"use": f"{PARTS}focal", "with": {"gamma": 3}}
    assert made.own_parts == [f"objective: {PARTS}focal (gamma=3)"]
    short = config(tmp_path, "Tokens").model_dump(mode="json")["training"]["objective"]
    assert short == f"{PARTS}Tokens"


@pytest.mark.parametrize(
    ("name", "kind", "code", "words"),
    [
        ("MeanOfMeans", ConfigError, "objective.sums", "together give"),
        ("NotANumber", ConfigError, "objective.sums", "a sum over no targets is 0"),
        ("Remembers", ConfigError, "objective.sums", "keeps nothing between batches"),
        ("CountsBatches", ConfigError, "objective.sums", "must not depend on how rows are put into batches"),
        ("Detached", ConfigError, "objective.sums", "does not depend on the model"),
        ("WrongShape", PartError, "part.returned", "legal is one scalar for each of its terms: wrong_shape"),
        ("Raises", ConfigError, "objective.batch", 'batch["no_such_column"]'),
        ("CannotBeMade", ConfigError, "config.part", "no such file of weights"),
        ("TwoTerms", ConfigError, "part.signature", "3 terms and 2 weights"),
        ("HoldsOut", PartError, "part.raised", "held_out: KeyError"),
        ("Lacks", ConfigError, "part.signature", "`def sums("),
        ("neither", ConfigError, "part.signature", "(log_probs, batch, ...)"),
        ("IGNORE", ConfigError, "part.signature", "a subclass of meshwright.Objective"),
        ("Tokenz", ConfigError, "config.part", "did you mean 'Tokens'?"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, kind: type[MeshwrightError], code: str, words: str) -> None:
    with refuses(kind, code) as caught:
        tried(tmp_path, name)
    assert words in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "override", "code"),
    [
        ("ByRow", "layout.cp=2", "objective.layout"),
        ("ByRow", "data.packing=pack", "objective.layout"),
        ("CallsTwice", "layout.pp=2", "pp.objective"),
        ("smooth", "parallel.loss_chunks=2", "loss.chunks"),
        ("Before", "data.packing=pad", "objective.reference"),
    ],
)
def test_a_layout_that_it_cannot_run_on_is_refused(tmp_path: Path, name: str, override: str, code: str) -> None:
    with refuses(ConfigError, code) as caught:
        tried(tmp_path, name, "data.packing=pad", override, world_size=2)
    assert name in str(caught.value)


def test_names_that_are_none(tmp_path: Path) -> None:
    for name, words in (("nowhere", "legal are"), ("no_module:Thing", "cannot be imported"), ("a b:c", "no name of a part")):
        path = write_config(tmp_path, tmp_path / "words.jsonl")
        with refuses(ConfigError, "config.part") as caught:
            make_setup(load_config(path, [f"training.objective={name}"]), 1)
        assert words in str(caught.value)


def test_metrics_have_the_names_that_they_had_when_they_were_tried(tmp_path: Path) -> None:
    with refuses(PartError, "part.returned") as caught:
        tried(tmp_path, "OtherMetrics")
    assert "metrics returned rows_1, and rows_4 when it was tried" in str(caught.value)
