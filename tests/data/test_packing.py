"""Every target once, segments that stay apart, and a model that agrees."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.order import stable_choice, stable_hash, stable_permutation
from meshwright.data.packing import IGNORE, SequenceDataset, pack
from meshwright.errors import DataError
from tests.harness import refuses

from .conftest import write_store

lengths_of_documents = st.lists(st.integers(2, 40), min_size=1, max_size=25)


def targets_of(dataset):
    return np.sort(
        np.concatenate([row["labels"][row["labels"] != IGNORE] for row in map(dataset.__getitem__, range(len(dataset)))])
    )


def due_targets(store):
    """Ids are their own position plus one: all but each document's first are due."""
    first = set(store.offsets[:-1].tolist())
    return np.array([i + 1 for i in range(store.index.tokens) if i not in first])


@settings(max_examples=150, deadline=None)
@given(lengths_of_documents, st.integers(2, 17), st.sampled_from(["pack", "pad"]), st.booleans(), st.integers(0, 3))
def test_every_target_occurs_exactly_once(lengths, sequence_length, packing, shuffle, epoch):
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder), lengths)
        dataset = SequenceDataset(store, "train", sequence_length, packing, seed=5, epoch=epoch, shuffle=shuffle)
        np.testing.assert_array_equal(targets_of(dataset), due_targets(store))
        for i in range(len(dataset)):
            check_sequence(store, dataset, i)


@settings(max_examples=60, deadline=None)
@given(lengths_of_documents, st.integers(40, 60), st.sampled_from(["pack", "pad"]))
def test_whole_documents_stay_whole(lengths, sequence_length, packing):
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder), lengths, long_documents="drop")
        dataset = SequenceDataset(store, "train", sequence_length, packing)
        pieces = [piece for i in range(len(dataset)) for piece in dataset.pieces(i)]
        assert sorted((p.document, p.start, p.length) for p in pieces) == [(d, 0, n) for d, n in enumerate(lengths)]
        np.testing.assert_array_equal(targets_of(dataset), due_targets(store))


def check_sequence(store, dataset, number):
    row = dataset[number]
    assert all(value.dtype == np.int64 and value.shape == (dataset.sequence_length,) for value in row.values())
    at = 0
    for document, start, length in dataset.pieces(number):
        assert length >= 2
        begin = store.offsets[document] + start
        here = slice(at, at + length)
        np.testing.assert_array_equal(row["input_ids"][here], store.tokens[begin : begin + length])
        np.testing.assert_array_equal(row["position_ids"][here], np.arange(length))  # both packings: segments start at 0
        np.testing.assert_array_equal(row["labels"][here][:-1], row["input_ids"][here][1:])
        assert row["labels"][at + length - 1] == IGNORE
        at += length
    assert (row["labels"][at:] == IGNORE).all()
    assert (row["input_ids"][at:] == store.index.pad_token_id).all()
    restart = 0 if dataset.packing == "pack" else at
    np.testing.assert_array_equal(row["position_ids"][at:], np.arange(dataset.sequence_length - at) + restart)


def test_the_example_of_the_module(make_store):
    dataset = SequenceDataset(make_store([5]), "train", 3)
    assert [row["input_ids"].tolist() for row in (dataset[0], dataset[1])] in (
        [[1, 2, 3], [3, 4, 5]],
        [[3, 4, 5], [1, 2, 3]],
    )


def test_split_packing_pads_only_the_end_and_single_slots():
    lengths = np.array([7, 30, 2, 2, 19, 11])
    index = pack(lengths, 8, split=True)
    used = [sum(piece.length for piece in index.pieces(row)) for row in range(len(index))]
    assert all(slots >= 7 for slots in used[:-1])


def test_loss_mask_reaches_labels(make_store):
    store = make_store([4, 3], mask=[0, 1, 0, 1, 0, 0, 1], long_documents="error")
    dataset = SequenceDataset(store, "train", 8, shuffle=False)
    assert dataset[0]["labels"].tolist() == [2, IGNORE, 4, IGNORE, IGNORE, 7, IGNORE, IGNORE]
    assert dataset[0]["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]


def test_epochs_differ_and_repeat(make_store):
    store = make_store([9, 14, 5, 33, 8, 21, 6])

    def first(epoch, seed=1):
        return [SequenceDataset(store, "train", 8, seed=seed, epoch=epoch)[i]["input_ids"].tolist() for i in range(5)]

    assert first(0) == first(0)
    assert first(0) != first(1)
    assert first(0) != first(0, seed=2)


def test_splits_do_not_mix(make_store):
    store = make_store([5, 6, 7, 8], held_out=[1, 3])
    train = SequenceDataset(store, "train", 8)
    held_out = SequenceDataset(store, "eval", 8)
    both = np.sort(np.concatenate([targets_of(train), targets_of(held_out)]))
    np.testing.assert_array_equal(both, due_targets(store))
    assert {piece.document for i in range(len(held_out)) for piece in held_out.pieces(i)} == {1, 3}


def test_empty_splits_are_refused(make_store):
    with pytest.raises(DataError, match="eval_fraction"):
        SequenceDataset(make_store([5, 6]), "eval", 8)
    with refuses(DataError, "data.split"):
        SequenceDataset(make_store([5, 6], held_out=[0, 1]), "train", 8)


def test_whole_documents_need_room(make_store):
    store = make_store([5, 30], long_documents="truncate", sequence_length=30)
    with pytest.raises(DataError, match=r"sequence_length=16.*30 tokens"):
        SequenceDataset(store, "train", 16)


def test_index_out_of_range(make_store):
    dataset = SequenceDataset(make_store([5]), "train", 8)
    with pytest.raises(IndexError):
        dataset[1]
    with pytest.raises(IndexError):
        dataset[-1]


def test_order_is_pinned():
    """These values may never change: runs resume by them."""
    assert stable_permutation(8, 0, 0).tolist() == stable_permutation(8, 0, 0).tolist()
    assert sorted(stable_permutation(1000, 3, 4).tolist()) == list(range(1000))
    assert stable_permutation(50, 1, 2).tolist() != stable_permutation(50, 2, 1).tolist()
    assert stable_hash(3, 42, 7).tolist() == PINNED_HASH


PINNED_HASH = [10333377850968207417, 9172991291426251657, 3124399435993880842]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_sees_a_packed_document_as_if_alone(make_store, attention):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    store = make_store([9, 4, 2, 21, 6, 3, 17])
    dataset = SequenceDataset(store, "train", 16, seed=3)
    rows = [dataset[i] for i in range(len(dataset))]
    batch = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in ("input_ids", "position_ids")}
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits
        for i in range(len(dataset)):
            at = 0
            for _, _, length in dataset.pieces(i):
                alone = model(batch["input_ids"][i : i + 1, at : at + length], use_cache=False).logits
                torch.testing.assert_close(packed[i, at : at + length], alone[0], atol=1e-5, rtol=1e-5)
                at += length


def test_a_share_is_chosen_by_hash_and_what_belongs_together_is_not_parted() -> None:
    alone = stable_choice(0.25, range(40), 7, 1)
    assert alone.sum() == 10
    assert (alone == stable_choice(0.25, list(range(40)), 7, 1)).all()
    threes = stable_choice(0.25, [number // 3 for number in range(40)], 7, 1).reshape(-1)
    assert all(len({*threes[begin : begin + 3]}) == 1 for begin in range(0, 40, 3))
    assert 10 <= threes.sum() <= 12
    assert not stable_choice(0.25, "aaa", 7, 1).any()  # more would be all
    assert stable_choice(0.1, "aab", 7, 1).sum() == 1 + stable_choice(0.1, "aab", 7, 1)[0]
    assert not stable_choice(0.5, range(1), 7, 1).any()
