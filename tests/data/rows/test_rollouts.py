"""Rollouts: what is learned of them, advantages of groups of rewards, and what is refused by file and line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.data_config import DataConfig
from meshwright.data.packing import IGNORE, SequenceDataset
from meshwright.data.preparation import prepare
from meshwright.data.rows.wanted import Wanted
from meshwright.errors import DataError

Jsonl = Callable[..., str]
ROW = {"prompt_ids": [5, 6, 7], "completion_ids": [8, 9], "old_log_probs": [-0.5, -1.5], "advantages": 2.0}


def config(path: str, scales: bool = True, **changes: Any) -> DataConfig:
    made = DataConfig.model_validate({"files": [path], "sequence_length": 16, "eval_fraction": 0.0, **changes})
    assert not made.read_as(Wanted("policy", ("rollout",), scales=scales))
    return made


def test_values_stand_beside_the_labels(jsonl: Jsonl, tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl([ROW, {**ROW, "advantages": [1.0, -1.0], "completion_mask": [1, 0]}])
    store = prepare(config(path, shuffle=False), tokenizer, tmp_path / "store", 0)
    sequence = SequenceDataset(store, "train", 16, shuffle=False)[0]
    learned = sequence["labels"] != IGNORE
    assert sequence["labels"][learned].tolist() == [8, 9, 8]
    assert sequence["old_log_probs"][learned].tolist() == [-0.5, -1.5, -0.5]
    assert sequence["advantages"][learned].tolist() == [2.0, 2.0, 1.0]
    assert not sequence["advantages"][~learned].any()


@pytest.mark.parametrize("scales", [True, False])
def test_advantages_of_a_group(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, scales: bool) -> None:
    rewarded = {name: value for name, value in ROW.items() if name != "advantages"}
    given = (("a", 1.0), ("a", 3.0), (7, 0.0), (7, 0.0), (7, 3.0))
    rows = [{**rewarded, "reward": reward, "group": group} for group, reward in given]
    store = prepare(config(jsonl(rows), scales), tokenizer, tmp_path / "store", 0)
    found = np.asarray(store.values["advantages"]).reshape(5, 5)
    assert not found[:, :3].any()
    expected = np.array([-1.0, 1.0, -1.0, -1.0, 2.0])
    if scales:
        expected = expected / (np.array([np.sqrt(2)] * 2 + [np.sqrt(3)] * 3) + 1e-4)
    np.testing.assert_allclose(found[:, 3], expected, rtol=1e-6)
    np.testing.assert_array_equal(found[:, 3], found[:, 4])


def test_a_certain_token_may_be_a_little_more_than_certain(jsonl: Jsonl, tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl([{**ROW, "old_log_probs": [1.2e-7, -1.5]}])
    store = prepare(config(path), tokenizer, tmp_path / "store", 0)
    assert store.values["old_log_probs"][3] == np.float32(1.2e-7)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt_ids": []}, "field 'prompt_ids' is empty"),
    "no answer": ({"completion_ids": []}, "field 'completion_ids' is empty"),
    "too few": ({"old_log_probs": [-0.5]}, "field 'old_log_probs' has 1 value, and the completion has 2 tokens"),
    "positive": ({"old_log_probs": [-0.5, 0.5]}, "'old_log_probs' holds 0.5; a log-probability is at most 0"),
    "too few advantages": ({"advantages": [1.0]}, "field 'advantages' has 1 value"),
    "not finite": ({"advantages": float("nan")}, "field 'advantages' holds nan"),
    "infinite": ({"advantages": [1.0, float("inf")]}, "field 'advantages' holds inf at place 1"),
    "neither": ({"advantages": None}, "there is neither 'advantages' nor both of 'reward' and 'group'"),
    "half": ({"advantages": None, "reward": 1.0}, "there is neither 'advantages' nor both"),
    "a group alone": ({"advantages": None, "reward": 1.0, "group": "a"}, "group 'a' has one row"),
    "no group": ({"advantages": None, "reward": 1.0, "group": [1]}, "field 'group' is list"),
    "nothing learned": ({"completion_mask": [0, 0]}, "'completion_mask' has no 1"),
    "text": ({"completion_ids": "fox"}, "field 'completion_ids' is str; legal is a list of ids"),
    "an id that is none": ({"completion_ids": [8, 99999]}, "token 4 is 99999; legal are the ids of the tokenizer"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused_by_file_and_line(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, what: str) -> None:
    changes, words = WRONG[what]
    path = jsonl([ROW, ROW | changes, ROW])
    with pytest.raises(DataError, match=words) as caught:
        prepare(config(path), tokenizer, tmp_path / "store", 0)
    assert f"{path}:2" in str(caught.value)


def test_a_group_that_comes_again(jsonl: Jsonl, tokenizer: Any, tmp_path: Path) -> None:
    groups = [ROW | {"advantages": None, "reward": number, "group": name} for number, name in enumerate("aabbaa")]
    with pytest.raises(DataError, match=r"data.jsonl:5: group 'a' comes again after another group"):
        prepare(config(jsonl(groups)), tokenizer, tmp_path / "store", 0)
