"""What an audit feeds: words at the edges of slices, padding, and a microbatch without a label, the same on every layout."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.audit.data import (
    DOCUMENTS,
    UnevenLoader,
    documents_of_run,
    draw_documents,
    edge_words,
    unlabelled_microbatch,
    words_to_feed,
)
from meshwright.data.packing import IGNORE
from meshwright.data.store import TokenStore
from meshwright.errors import DataError
from tests.train.runs import tiny_run

VOCABULARY, LENGTH = 2048, 64


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return draw_documents(VOCABULARY, LENGTH, 200, 0, tmp_path_factory.mktemp("data") / "store")


def loader(store: TokenStore, rank: int = 0, ranks: int = 1, packing: str = "pack", batch: int = 4) -> UnevenLoader:
    found = UnevenLoader(
        store, sequence_length=LENGTH, global_batch_size=batch, microbatch_size=1, data_rank=rank, data_ranks=ranks,
        packing=packing,  # type: ignore[arg-type]
    )  # fmt: skip
    found.words = words_to_feed(VOCABULARY, (5, None))
    found.unlabelled = unlabelled_microbatch(batch, 1, 2)
    return found


@pytest.mark.parametrize(("vocabulary", "ranks"), product((2048, 67, 9), (2, 4, 8, 3)))
def test_edges_are_those_of_chunks(vocabulary: int, ranks: int) -> None:
    chunks = torch.arange(vocabulary).chunk(ranks)
    assert edge_words(vocabulary, ranks) == [int(word) for chunk in chunks for word in (chunk[0], chunk[-1])]


@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("starves", [False, True])
def test_every_edge_and_the_padding_are_inputs_and_labels_of_the_first_step(
    store: TokenStore, packing: str, starves: bool
) -> None:
    fed = loader(store, packing=packing)
    fed.starves = starves
    batches = fed.microbatches(0)
    inputs, labels = ({int(i) for batch in batches for i in batch[key].flatten()} for key in ("input_ids", "labels"))
    due = {5, *(word for ranks in (2, 4, 8) for word in edge_words(VOCABULARY, ranks))}
    assert due <= inputs & labels
    for index, batch in enumerate(batches):
        if starves and index % 3 == 1:
            continue  # one token at every place, under the labels of the sequence
        ids, targets = batch["input_ids"][:, 1:], batch["labels"][:, :-1]
        assert bool(((targets == IGNORE) | (targets == ids)).all())  # a label is still the token that follows


def test_one_microbatch_of_the_second_step_has_no_label_and_all_others_have(store: TokenStore) -> None:
    fed = loader(store)
    counts = [[int((batch["labels"] != IGNORE).sum()) for batch in fed.microbatches(step)] for step in range(4)]
    assert [step.count(0) for step in counts] == [0, 1, 0, 0]
    assert counts[1][-1] == 0
    assert unlabelled_microbatch(4, 2, 1) == range(2, 4)  # the only step
    assert len(unlabelled_microbatch(2, 2, 3)) == 0  # nothing would be left


def test_the_stream_is_that_of_one_process_on_any_ranks(store: TokenStore) -> None:
    alone = loader(store)
    for step, ranks in product((0, 1, 2), (2, 4)):
        whole = alone.microbatches(step)
        parts = [batch for rank in range(ranks) for batch in loader(store, rank, ranks).microbatches(step)]
        for one, other in zip(whole, parts, strict=True):
            assert all(np.array_equal(one[key], other[key]) for key in one)


def test_bad_rows_of_a_run_are_judged_by_the_run_and_not_by_its_first_documents(tmp_path: Path) -> None:
    rows = [{"text": "abc def " * 9} if number % 2 else {"text": None} for number in range(40)] + [{"text": "abc"}] * 400
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    skips = tiny_run(tmp_path, tmp_path / "texts.jsonl", "data.bad_rows=skip", "tokenizer={}", "model.config.vocab_size=300")
    assert len(documents_of_run(skips, 300, 32, tmp_path / "skips").lengths) >= DOCUMENTS / 2
    stops = tiny_run(tmp_path, tmp_path / "texts.jsonl", "tokenizer={}", "model.config.vocab_size=300")
    with pytest.raises(DataError, match=r"20 of \d+ rows cannot be used.*'stop'"):
        documents_of_run(stops, 300, 32, tmp_path / "stops")
