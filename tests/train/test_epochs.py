"""`training.epochs` in place of steps: counted from the packed data, the same on every layout and after a resume."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.audit.ready import make_ready
from meshwright.data.loader import TrainLoader
from meshwright.data.packing import SequenceDataset
from meshwright.errors import ConfigError
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.data_lines import describe_data
from meshwright.train.start.prepare import prepare_run
from tests.data.conftest import write_store
from tests.train.runs import losses, rows, train

Tiny = Callable[..., RunConfig]
LENGTHS = [9, 4, 2, 21, 6, 3, 17, 40, 12, 5, 8, 8]
EPOCHS = ("training.steps=null", "training.global_batch_size=16", "schedule.kind=constant")


@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("epochs", [1, 3, 0.5, 2.25, 0.001])
def test_steps_see_so_many_epochs_on_every_layout(tmp_path: Path, packing: str, epochs: float) -> None:
    store = write_store(tmp_path, LENGTHS, long_documents="error", sequence_length=40)  # so that packing differs by epoch
    options = {"sequence_length": 40, "packing": packing, "seed": 5}
    sizes = [len(SequenceDataset(store, "train", 40, packing, 5, epoch)) for epoch in range(4)]
    whole = int(epochs)
    expected = sum(sizes[:whole]) + math.ceil((epochs - whole) * sizes[whole])
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            loader = TrainLoader(store, global_batch_size=4, microbatch_size=1, data_rank=rank, data_ranks=ranks, **options)
            assert loader.sequences(epochs) == expected
            assert loader.steps(epochs) == math.ceil(expected / 4)
            seen = loader.steps(epochs) * 4  # in the last epoch, as many as the last step needs
            full = max(number for number in range(5) if sum(sizes[:number]) <= seen)
            assert loader.epochs(loader.steps(epochs)) == pytest.approx(full + (seen - sum(sizes[:full])) / (*sizes, 1)[full])
    if epochs == whole:
        assert loader.epoch(loader.steps(epochs) - 1) == whole - 1
        assert (loader.steps(epochs) + 1) * 4 > expected


@pytest.mark.thorough
def test_a_run_of_epochs_is_that_of_as_many_steps_and_resumes(tiny: Tiny) -> None:
    config = tiny(*EPOCHS, "training.epochs=2", "checkpoint.every=3")
    found = train(config, 2)
    sequences = TrainLoader(
        prepare_run(config, 2)[2], sequence_length=32, global_batch_size=16, microbatch_size=1, seed=0
    ).sequences(2)
    steps = -(-sequences // 16)
    assert len(found) == steps > 3
    assert [row["epoch"] for row in rows(config) if "epoch" in row][-1] == pytest.approx(steps * 16 / sequences * 2, rel=0.02)
    assert train(tiny(f"training.steps={steps}", *EPOCHS[1:], name="steps"), 2) == found

    # What it keeps says epochs, not steps; and where it was interrupted, it goes on to the same last step.
    assert load_config(config.directory / "config.yaml").training.epochs == 2
    kept = sorted((config.directory / "checkpoints").iterdir())
    for path in kept[1:]:
        path.rename(path.with_name(f"gone-{path.name}"))
    assert train(config, 1) == pytest.approx(found, rel=1e-4)
    longer = tiny(*EPOCHS, "training.epochs=2.5")
    assert len(train(longer, 1)) > steps
    assert losses(longer)[:steps] == losses(config)[:steps]


def test_warmup_longer_than_the_epochs_is_found_before_training(tiny: Tiny) -> None:
    config = tiny(*EPOCHS, "training.epochs=0.5", "schedule.warmup_steps=50")
    with pytest.raises(ConfigError, match=r"schedule.warmup_steps=50: must be below \d, the steps of training.epochs=0.5, or"):
        prepare_run(config, 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.epochs=2"], "training.steps=6 and training.epochs=2 exclude each other; set one to null"),
        (["training.steps=null"], "training.steps: is required (or training.epochs)"),
        (["training.steps=null", "training.epochs=0"], "training.epochs=0: input should be greater than 0"),
        (["training.steps=null", "training.epochs=.inf"], "training.epochs=inf: input should be a finite number"),
        (["training.steps=null", "training.epochs=.nan"], "training.epochs=nan"),
        (["training.steps=null", "training.epochs=many"], "training.epochs='many': input should be a valid number"),
    ],
)
def test_steps_or_epochs(tiny: Tiny, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(*overrides)
    assert len(caught.value.problems) == 1
    assert words in caught.value.problems[0]


def test_an_audit_of_a_run_of_epochs_takes_its_own_steps(tiny: Tiny, tmp_path: Path) -> None:
    ready, _ = make_ready(tiny(*EPOCHS, "training.epochs=2"), "float64", 3, tmp_path)
    assert (ready.training.steps, ready.training.epochs) == (3, None)
    assert RunConfig.model_validate(ready.model_dump()) == ready


def test_what_chats_have_and_what_nothing_reads_is_told(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    asked, said = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd", "mood": "calm"}
    rows = [
        {"messages": [asked, said], "tools": [{"name": "f"}], "id": 1},
        {"messages": [asked, said | {"weight": 0}, asked, said]},
    ]
    path.write_text("\n".join(map(json.dumps, rows * 2)))
    config = tiny(f"data.files=['{path}']", "tokenizer={}", "model.config.vocab_size=300", "data.sequence_length=64")
    first, _, tools, unread = describe_data(config, prepare_run(config, 1)[2]).splitlines()
    assert first.endswith("0 bad; 2 chats with tools, 2 answers not learned (weight 0)")
    assert tools == (
        "data: the chat template writes nothing of the tools of 2 chats, so the model does not see them; "
        "set tokenizer.chat_template to one that does"
    )
    assert unread == "data: not read: the columns id; the keys of messages mood"


def test_what_became_of_the_data_is_told(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    texts = [{"text": "abc def " * count} for count in (1, 2, 3, 30, 4, 5)]
    path.write_text("\n".join(map(json.dumps, [*texts, {"text": ""}, {"text": None}])))
    wish = ("data.bad_rows=skip", "data.bad_rows_limit=0.2", "data.long_documents=truncate", "tokenizer.vocab_size=262")
    config = tiny(f"data.files=['{path}']", *wish, "training.global_batch_size=2")
    store = prepare_run(config, 1)[2]
    first, second, _, bad = describe_data(config, store).splitlines()
    index = store.index
    documents = f"6 documents of {index.tokens} tokens, 1 held out"
    assert first == f"data: 8 rows, {documents}; {index.truncated} truncated, 0 dropped, 1 empty, 1 bad"
    assert index.truncated >= 1
    sequences = len(SequenceDataset(store, "train", 32))
    share = index.train_tokens / (32 * sequences)
    assert second == f"{sequences} packed sequences of 32, {share:.1%} full; 6 steps of 2 are {12 / sequences:.3g} epochs"
    assert bad == f"  {path}:8: field 'text' holds null, not text"
