"""Rows of preferences: their forms, what is learned of them, pairs that stay together, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.data_config import DataConfig
from meshwright.data.packing import IGNORE, SequenceDataset
from meshwright.data.preparation import prepare
from meshwright.data.rows.corpora import documents
from meshwright.data.rows.wanted import Wanted
from meshwright.data.store import TokenStore
from meshwright.errors import DataError

Jsonl = Callable[..., str]


def config(path: str, format: str = "preference", unpairs: bool = False, whole: bool = False, **changes: Any) -> DataConfig:
    made = DataConfig.model_validate({"files": [path], "sequence_length": 128, "eval_fraction": 0.0, **changes})
    formats = ("preference", "unpaired_preference") if unpairs else (format,)
    assert not made.read_as(Wanted("preference", formats, unpairs, whole))
    return made


def turns(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in said]


ASKED, GOOD, BAD = turns(("user", "quick?")), turns(("assistant", "fox")), turns(("assistant", "dog"))
MORE = turns(("user", "quick?"), ("assistant", "box"), ("user", "lazy?"))
UNLEARNED = [MORE[0], {**MORE[1], "weight": 0}, MORE[2]]
FORMS = {
    "texts": ({"prompt": "quick?", "chosen": "fox", "rejected": "dog"}, ASKED),
    "messages": ({"prompt": ASKED, "chosen": GOOD, "rejected": BAD}, ASKED),
    "messages that repeat the prompt": ({"prompt": ASKED, "chosen": ASKED + GOOD, "rejected": ASKED + BAD}, ASKED),
    "whole chats beside a text": ({"prompt": "quick?", "chosen": ASKED + GOOD, "rejected": ASKED + BAD}, ASKED),
    "implicit": ({"chosen": ASKED + GOOD, "rejected": ASKED + BAD}, ASKED),
    "several turns": ({"chosen": MORE + GOOD, "rejected": MORE + BAD}, UNLEARNED),
    "null": ({"prompt": None, "chosen": ASKED + GOOD, "rejected": ASKED + BAD}, ASKED),
    "a prompt as text, answers as messages": ({"prompt": "quick?", "chosen": GOOD, "rejected": BAD}, ASKED),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, form: str) -> None:
    row, prompt = FORMS[form]
    made = config(jsonl([row, row | {"id": 7}]))
    for document in documents(made):
        assert document.messages == prompt + GOOD
        assert document.second == prompt + BAD
    store = prepare(made, tokenizer, tmp_path / "store", 0)
    assert store.loss_mask is not None
    assert tokenizer.decode(store.tokens[store.loss_mask]) == "fox<|im_end|>dog<|im_end|>" * 2


def test_texts_with_a_prompt_in_both(jsonl: Jsonl) -> None:
    row = {"chosen": "Human: quick? Assistant: fox", "rejected": "Human: quick? Assistant: fondue"}
    found = next(documents(config(jsonl([row]))))
    assert found.messages == turns(("user", "Human: quick? Assistant: "), ("assistant", "fox"))
    assert found.second == turns(("user", "Human: quick? Assistant: "), ("assistant", "fondue"))


def test_texts_of_turns_are_chats(jsonl: Jsonl) -> None:
    shared = "\n\nHuman: quick?\n\nAssistant: box\n\nHuman: lazy?\n\nAssistant: I"
    row = {"chosen": f"{shared} jump\n\nover: it", "rejected": f"{shared} am a dog"}
    (found,) = documents(config(jsonl([row])))
    assert found.messages == [*UNLEARNED, {"role": "assistant", "content": "I jump\n\nover: it"}]
    assert found.second == [*UNLEARNED, {"role": "assistant", "content": "I am a dog"}]
    with pytest.raises(DataError, match="field 'rejected' ends with a turn of the user"):
        list(documents(config(jsonl([row | {"rejected": f"{shared}\n\nHuman: why?"}], "bad.jsonl"))))


def test_other_names_and_a_system_column(jsonl: Jsonl) -> None:
    row = {"question": "quick?", "better": "fox", "worse": "dog", "system": "be lazy"}
    columns = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    found = next(documents(config(jsonl([row]), columns=columns)))
    assert found.messages == turns(("system", "be lazy")) + ASKED + GOOD


def sequences(store: TokenStore, length: int, packing: Any) -> list[dict[str, Any]]:
    dataset = SequenceDataset(store, "train", length, packing)
    return [dataset[number] for number in range(len(dataset))]


@pytest.mark.parametrize("packing", ["pack", "pad"])
def test_a_pair_is_two_documents_of_one_sequence(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, packing: str) -> None:
    rows = [{"prompt": f"quick {n}?", "chosen": "fox " * (1 + n % 3), "rejected": "dog " * (1 + n % 2)} for n in range(9)]
    store = prepare(config(jsonl(rows), sequence_length=128), tokenizer, tmp_path / "store", 0)
    pairs = 0
    for sequence in sequences(store, 128, packing):
        begins = np.flatnonzero(sequence["position_ids"] == 0)
        members = [int(sequence["member"][begin]) for begin in begins]
        assert members in ([1, 2] * (len(members) // 2), [*[1, 2] * (len(members) // 2), 0])
        pairs += len(members) // 2
        for begin, end, member in zip(begins, [*begins[1:], 128], members, strict=True):
            labels = sequence["labels"][begin:end]
            said = tokenizer.decode(labels[labels != IGNORE])
            assert {1: "fox", 2: "dog", 0: ""}[member] in said
            assert (labels != IGNORE).any() == bool(member)
            assert labels[-1] == IGNORE
    assert pairs == 9
    assert packing == "pack" or len(sequences(store, 128, packing)) == 9


@pytest.mark.parametrize("policy", ["truncate", "drop", "error"])
def test_a_pair_that_is_too_long(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, policy: str) -> None:
    short = {"prompt": "quick?", "chosen": "fox", "rejected": "dog"}
    long = {"prompt": "quick?", "chosen": "fox " * 60, "rejected": "dog"}
    hopeless = {"prompt": "quick? " * 60, "chosen": "fox", "rejected": "dog"}
    made = config(jsonl([short, long, hopeless]), sequence_length=60, long_documents=policy)
    if policy == "error":
        with pytest.raises(DataError, match=r"2 of 3 rows are longer than data.sequence_length=60"):
            prepare(made, tokenizer, tmp_path / "store", 0)
        return
    store = prepare(made, tokenizer, tmp_path / "store", 0)
    assert (store.index.truncated, store.index.dropped) == ((1, 1) if policy == "truncate" else (0, 2))
    assert store.seconds is not None
    for begin, end, first in zip(store.offsets, store.offsets[1:], store.seconds, strict=False):
        assert end - begin <= 60
        assert store.loss_mask is not None
        assert store.loss_mask[begin + 1 : begin + first].any()
        assert store.loss_mask[begin + first + 1 : end].any()


def test_a_pair_whose_answers_are_alike_once_they_are_cut(jsonl: Jsonl, tokenizer: Any, tmp_path: Path) -> None:
    long = {"prompt": "quick?", "chosen": "fox " * 60 + "box", "rejected": "fox " * 60 + "dog"}
    made = config(jsonl([long, FORMS["texts"][0]]), sequence_length=60, long_documents="truncate")
    store = prepare(made, tokenizer, tmp_path / "store", 0)
    assert (store.index.truncated, store.index.dropped, store.index.documents) == (0, 1, 1)


@pytest.mark.parametrize("unpairs", [False, True])
def test_answers_that_are_alike_are_counted(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, unpairs: bool) -> None:
    good = {"prompt": "quick?", "chosen": "fox", "rejected": "dog"}
    made = config(jsonl([good | {"rejected": "fox"}, good, good]), unpairs=unpairs)
    store = prepare(made, tokenizer, tmp_path / "store", 0)
    assert (store.index.alike, store.index.documents, store.index.rows) == (1, 4 if unpairs else 2, 3)


def test_no_reward_of_a_pair_whose_answers_are_cut_off(jsonl: Jsonl, tokenizer: Any, tmp_path: Path) -> None:
    short = {"prompt": "quick?", "chosen": "fox", "rejected": "dog"}
    hopeless = {"prompt": "quick? " * 60, "chosen": "fox", "rejected": "dog"}
    half = {"prompt": "quick?", "chosen": "fox " * 60, "rejected": "dog"}
    made = config(jsonl([short, hopeless, half]), sequence_length=60, long_documents="truncate", whole=True)
    store = prepare(made, tokenizer, tmp_path / "store", 0)
    assert (store.index.documents, store.index.truncated, store.index.dropped, store.index.empty) == (2, 1, 1, 0)


def test_each_answer_has_one_to_another_prompt_beside_it(jsonl: Jsonl) -> None:
    rows = [{"prompt": f"{n}?", "completion": f"{n}!", "label": n % 2 == 0} for n in range(3)]
    found = list(documents(config(jsonl(rows), unpairs=True)))
    assert [document.messages[-1]["content"] for document in found if document.messages] == ["0!", "1!", "2!"]
    assert [document.second[0]["content"] for document in found if document.second] == ["0?", "1?", "2?"]
    assert [document.second[-1]["content"] for document in found if document.second] == ["1!", "0!", "1!"]
    assert [float(document.values["label"]) for document in found] == [1, 0, 1]


def test_rows_of_one_prompt_have_no_answer_of_it_beside_them(jsonl: Jsonl) -> None:
    rows = [{"prompt": f"{n // 2}?", "completion": f"{n}!", "label": n % 2 == 0} for n in range(6)]
    found = list(documents(config(jsonl(rows), unpairs=True)))
    said = [document.second[-1]["content"] for document in found if document.second]
    assert said == ["1!", "0!", "1!", "1!", "3!", "3!"]  # the first two have no row with another prompt before them


def test_pairs_become_answers_by_themselves(jsonl: Jsonl) -> None:
    rows = [{"prompt": f"{n}?", "chosen": f"{n} yes", "rejected": f"{n} no"} for n in range(2)]
    found = list(documents(config(jsonl(rows), unpairs=True)))
    said = [
        (document.messages[-1]["content"], document.second[-1]["content"])
        for document in found
        if document.messages and document.second
    ]
    assert said == [("0 yes", "1 yes"), ("0 no", "1 no"), ("1 yes", "0 yes"), ("1 no", "0 no")]
    assert [float(document.values["label"]) for document in found] == [1, 0, 1, 0]


@pytest.mark.parametrize("paired", [False, True])
def test_answers_to_one_prompt_are_held_out_together(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, paired: bool) -> None:
    """Or else an evaluation asks what was trained on."""
    prompts = [f"{'quick ' * n}?" for n in range(1, 11)]
    if paired:
        rows = [{"prompt": one, "chosen": "fox", "rejected": "dog"} for one in prompts]
    else:  # those of a prompt do not follow each other
        rows = [{"prompt": one, "completion": said, "label": said == "fox"} for said in ("fox", "dog") for one in prompts]
    for seed in range(4):
        made = config(jsonl(rows), unpairs=True, eval_fraction=0.3)
        store = prepare(made, tokenizer, tmp_path / f"store{seed}", seed)
        assert store.seconds is not None
        mask = np.array(store.loss_mask)
        answers = [begin + int(mask[begin:end].argmax()) for begin, end in zip(store.offsets, store.offsets[1:], strict=False)]
        asked = [bytes(store.tokens[begin:end]) for begin, end in zip(store.offsets, answers, strict=False)]
        held = {asked[number] for number in store.documents("eval")}
        assert len(held) == 3
        assert len(store.documents("eval")) == 6
        assert not held & {asked[number] for number in store.documents("train")}


def token_pairs(jsonl: Jsonl, tokenizer: Any, folder: Path, *rows: Any, **changes: Any) -> TokenStore:
    return prepare(config(jsonl(list(rows)), "token_pairs", **changes), tokenizer, folder, 0)


def test_pairs_that_are_tokens(jsonl: Jsonl, tokenizer: Any, tmp_path: Path) -> None:
    row = {"chosen_ids": [5, 6, 7, 8], "chosen_mask": [0, 0, 1, 1], "rejected_ids": [5, 6, 9], "rejected_mask": [1, 0, 1]}
    alike = {**row, "rejected_ids": row["chosen_ids"], "rejected_mask": row["chosen_mask"]}
    column = {"reference_log_probs": {"per": "token", "column": "log_probs"}}
    rows = [{**one, "log_probs": [-0.5] * (8 if one is alike else 7)} for one in (row, alike, row)]
    store = token_pairs(jsonl, tokenizer, tmp_path / "store", *rows, tensors=column)
    assert (store.index.documents, store.index.alike, store.index.kind) == (2, 1, "chat")
    assert store.seconds is not None
    assert store.loss_mask is not None
    assert (store.tokens[:7].tolist(), store.seconds.tolist()) == ([5, 6, 7, 8, 5, 6, 9], [4, 4])
    assert store.loss_mask[:7].tolist() == [False, False, True, True, False, False, True]  # the first token is no target
    cut = token_pairs(jsonl, tokenizer, tmp_path / "cut", *rows, tensors=column, sequence_length=6, long_documents="truncate")
    assert cut.tokens[:6].tolist() == [5, 6, 7, 5, 6, 9]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rejected_ids": []}, "field 'rejected_ids' is empty"),
        ({"chosen_mask": [0, 1]}, "field 'chosen_mask' has 2 values for 3 tokens"),
        ({"chosen_mask": [0, 1, 2]}, "field 'chosen_mask' holds 2"),
        ({"chosen_ids": [5, 6, 10**6]}, "token 2 is 1000000"),
        ({"tokenizer": "another"}, "another tokenizer"),
        ({"rejected_mask": None}, "field 'rejected_mask' is null"),
    ],
)
def test_pairs_of_tokens_that_are_wrong(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, change: Any, words: str) -> None:
    row = {"chosen_ids": [5, 6, 7], "chosen_mask": [0, 0, 1], "rejected_ids": [5, 6], "rejected_mask": [0, 1]}
    with pytest.raises(DataError) as caught:
        token_pairs(jsonl, tokenizer, tmp_path / "store", row, {**row, **change})
    assert words in str(caught.value)
    assert "data.jsonl:2" in str(caught.value)


WRONG = {
    "an answer that is empty": ({"prompt": "quick?", "chosen": "fox", "rejected": ""}, "answer is empty"),
    "no answer": ({"prompt": ASKED, "chosen": ASKED + GOOD, "rejected": ASKED}, "field 'rejected' adds nothing to the prompt"),
    "the user's": ({"prompt": "quick?", "chosen": GOOD, "rejected": ASKED}, "'rejected' ends with a turn of the user"),
    "two kinds": ({"prompt": "quick?", "chosen": "fox", "rejected": BAD}, "both are texts, or both are lists"),
    "no prompt": ({"chosen": "fox", "rejected": "dog"}, "there is no field 'prompt'; a pair has one prompt"),
    "no prompt in chats": ({"chosen": GOOD, "rejected": BAD}, "begin with different messages"),
    "half a prompt": (
        {"prompt": turns(("system", "be lazy")) + ASKED, "chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        "field 'chosen' begins with a turn of the user, and not with the prompt in 'prompt'",
    ),
    "another prompt": (
        {"prompt": "quick?", "chosen": ASKED + GOOD, "rejected": turns(("user", "lazy?")) + BAD},
        "both answers begin with the whole prompt, or neither",
    ),
    "no text": ({"prompt": 3, "chosen": "fox", "rejected": "dog"}, "field 'prompt' holds int, not text"),
    "nothing rejected": ({"prompt": "quick?", "chosen": "fox"}, "no field 'rejected'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused_by_file_and_line(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, what: str) -> None:
    row, words = WRONG[what]
    path = jsonl([FORMS["texts"][0], row])
    with pytest.raises(DataError, match=words) as caught:
        prepare(config(path), tokenizer, tmp_path / "store", 0)
    assert f"{path}:2" in str(caught.value)


@pytest.mark.parametrize("label", [2, "yes", None, float("nan")])
def test_labels_of_another_kind(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, label: Any) -> None:
    good = {"prompt": "quick?", "completion": "fox", "label": True}
    path = jsonl([good, good | {"label": label}, good])
    with pytest.raises(DataError, match=f"{path}:2: field 'label' holds"):
        prepare(config(path, unpairs=True), tokenizer, tmp_path / "store", 0)


def test_one_row_has_no_other_answer(jsonl: Jsonl, tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl([{"prompt": "quick?", "completion": "fox", "label": 1}])
    with pytest.raises(DataError, match="holds one row; the answer of another row is needed"):
        prepare(config(path, unpairs=True), tokenizer, tmp_path / "store", 0)
