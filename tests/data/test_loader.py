"""The data of a step does not depend on who computes it, and a loader resumes as if nothing had happened."""

import pytest
import torch

from meshwright.data.loader import EvalLoader, TrainLoader, check_batch_sizes
from meshwright.data.packing import IGNORE, SequenceDataset
from meshwright.errors import CheckpointError, ConfigError
from tests.harness import refuses

LENGTHS = [9, 4, 2, 21, 6, 3, 17, 40, 12, 5, 8, 8]


def loader(store, **changes):
    options = {"sequence_length": 8, "global_batch_size": 8, "microbatch_size": 2, "seed": 3} | changes
    return TrainLoader(store, **options)


def rows(batches):
    return torch.cat([batch["input_ids"] for batch in batches])


@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_is_the_same_on_every_layout(make_store, packing, shuffle):
    store = make_store(LENGTHS)
    options = {"packing": packing, "shuffle": shuffle}
    reference = loader(store, microbatch_size=8, **options)
    for ranks in (1, 2, 4):
        for size in (1, 2, 4, 8):
            if 8 % (ranks * size):
                continue
            parts = [loader(store, data_rank=r, data_ranks=ranks, microbatch_size=size, **options) for r in range(ranks)]
            for step in range(7):
                union = torch.cat([rows(part.microbatches(step)) for part in parts])
                assert torch.equal(union, rows(reference.microbatches(step)))
                assert len(parts[0].microbatches(step)) == parts[0].accumulation


def test_microbatches_are_a_function_of_the_step(make_store):
    store = make_store(LENGTHS)
    forward, backward = loader(store), loader(store)
    steps = [rows(forward.microbatches(step)) for step in range(12)]
    for step in reversed(range(12)):
        assert torch.equal(rows(backward.microbatches(step)), steps[step])
    assert len(backward._epochs) <= 2


def test_the_stream_is_epochs_end_to_end(make_store):
    store = make_store(LENGTHS)
    stream = [SequenceDataset(store, "train", 8, seed=3, epoch=epoch) for epoch in range(3)]
    expected = [torch.from_numpy(epoch[i]["input_ids"]) for epoch in stream for i in range(len(epoch))]
    it = loader(store)
    got = torch.cat([rows(it.microbatches(step)) for step in range(len(expected) // 8)])
    assert torch.equal(got, torch.stack(expected[: len(got)]))
    assert it.epoch(0) == 0
    assert it.epoch(len(expected) // 8) >= 2
    assert len(stream[0]) % 8  # so that some step straddled two epochs


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_equals_uninterrupted(make_store, ranks):
    store = make_store(LENGTHS)
    whole = loader(store)
    steps = [rows(whole.microbatches(step)) for step in range(9)]
    first = loader(store)
    state = first.state_dict(4)
    parts = [loader(store, data_rank=r, data_ranks=ranks, microbatch_size=1) for r in range(ranks)]
    for part in parts:
        assert part.check_state(state) == 4
    for step in range(4, 9):
        assert torch.equal(torch.cat([rows(part.microbatches(step)) for part in parts]), steps[step])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"global_batch_size": 4}, ["global_batch_size=8", "global_batch_size=4"]),
        ({"seed": 4}, ["seed=3", "seed=4"]),
        ({"sequence_length": 9}, ["sequence_length=8", "sequence_length=9"]),
        ({"packing": "pad"}, ["packing='pack'", "packing='pad'"]),
        ({"shuffle": False}, ["shuffle=True", "shuffle=False"]),
    ],
)
def test_a_state_of_another_run_is_refused(make_store, change, names):
    store = make_store(LENGTHS)
    with pytest.raises(CheckpointError) as caught:
        loader(store, **change).check_state(loader(store).state_dict(1))
    assert all(name in str(caught.value) for name in names)


def test_a_state_of_other_data_or_of_nothing_is_refused(make_store):
    state = loader(make_store(LENGTHS)).state_dict(1)
    with pytest.raises(CheckpointError, match="fingerprint="):
        loader(make_store([5, 7])).check_state(state)
    del state["seed"]
    with pytest.raises(CheckpointError, match="lacks seed"):
        loader(make_store(LENGTHS)).check_state(state)


def test_batch_sizes_must_share_out(make_store):
    check_batch_sizes(12, 3, 4)
    with pytest.raises(ConfigError, match=r"global_batch_size=10 .* nearest legal: 8 or 16") as caught:
        check_batch_sizes(10, 4, 2)
    assert "microbatch_size one of 1, 5" in str(caught.value)
    with pytest.raises(ConfigError, match=r"nearest legal: 8$"):
        check_batch_sizes(3, 4, 2)
    with pytest.raises(ConfigError, match="microbatch_size=0"):
        check_batch_sizes(3, 0, 2)
    with pytest.raises(ConfigError, match="data_rank=2: legal are 0 to 1"):
        loader(make_store(LENGTHS), data_rank=2, data_ranks=2)


@pytest.mark.parametrize("maximum", [None, 5])
@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (2, 1), (1, 4), (3, 4), (2, 3)])
def test_evaluation_gives_every_rank_as_many_batches(make_store, size, ranks, maximum):
    dataset = SequenceDataset(make_store(LENGTHS, held_out=[1, 3, 4, 7]), "eval", 8)
    loaders = [EvalLoader(dataset, size, rank, ranks, maximum) for rank in range(ranks)]
    batches = [list(each) for each in loaders]
    assert {len(each) for each in batches} == {len(loaders[0])}
    assert all(batch["labels"].shape == (size, 8) for each in batches for batch in each)
    labels = torch.cat([batch["labels"] for each in batches for batch in each])
    counted = sorted(labels[(labels != IGNORE).any(-1)].flatten().tolist())
    expected = [dataset[i]["labels"].tolist() for i in range(len(dataset) if maximum is None else maximum)]
    assert counted == sorted(label for labels in expected for label in labels)


def test_evaluation_refuses_bad_sizes(make_store):
    dataset = SequenceDataset(make_store(LENGTHS), "train", 8)
    with pytest.raises(ConfigError, match="max_sequences=0"):
        EvalLoader(dataset, 1, max_sequences=0)
    with refuses(ConfigError, "layout.rank"):
        EvalLoader(dataset, 1, data_rank=1)
