"""The engine for a loop of one's own: on each layout what one process computes, in steps, halves, weights and files."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import meshwright as mw
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.objectives import given
from tests.harness import refuses, run_ranks

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "head_dim": 8}
WIDE = {"param_dtype": "float64", "reduce_dtype": "float64"}
LENGTHS = (11, 16, 7, 13)
"""Of the microbatches of a step: no two are equal, and no layout divides them all."""

Layout = tuple[str, dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "dp_shard": ("dp_shard=2", {}),
    "tp, loss parallel": ("tp=2", {"parallel": {"loss_parallel": True}}),
    "cp": ("cp=2", {}),
    "pp": ("pp=2", {}),
}
RARE: dict[str, Layout] = {
    "dp_replicate": ("dp_replicate=2,dp_shard=1", {}),
    "tp, sequence parallel": ("tp=2", {"parallel": {"sequence_parallel": True}}),
    "cp contiguous": ("cp=2", {"parallel": {"context_balance": "contiguous"}}),
    "cp ring": ("cp=2", {"parallel": {"context_parallel": "ring"}}),
    "pp interleaved": ("pp=2", {"parallel": {"pipeline": {"schedule": "interleaved_1f1b"}}}),
    "pp zbv": ("pp=2", {"parallel": {"pipeline": {"schedule": "zbv"}}}),
    "pp dualpipe_v": ("pp=2", {"parallel": {"pipeline": {"schedule": "dualpipe_v"}}}),
    "dp_shard tp": ("dp_shard=2,tp=2", {"parallel": {"loss_parallel": True}}),
    "pp cp": ("pp=2,cp=2", {}),
    "pp tp": ("pp=2,tp=2", {}),
    "dp_shard, in chunks": ("dp_shard=2", {"parallel": {"loss_chunks": 3}}),
    "pp, in chunks": ("pp=2", {"parallel": {"loss_chunks": 3}}),
    "ep": ("ep=2", {"experts": True}),
    "ep pp": ("ep=2,pp=2", {"experts": True}),
}
ADAPTED: dict[str, Layout] = {
    "dp_shard": ("dp_shard=2", {"adapter": {"rank": 4}}),
    "tp": ("tp=2", {"adapter": {"rank": 4}}),
    "pp": ("pp=2", {"adapter": {"rank": 4}}),
}


def model(experts: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    kind, more = ("qwen3_moe", EXPERTS) if experts else ("llama", {})
    config = AutoConfig.for_model(kind, **SIZES, **more)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()


def focal(log_probs: torch.Tensor, batch: mw.Engine, gamma: float = 2.0) -> torch.Tensor:
    return -((1 - log_probs.exp()) ** gamma) * log_probs


def make(layout: str = "", microbatches: int = len(LENGTHS), **options: Any) -> mw.Engine:
    options = dict(options)
    experts = options.pop("experts", False)
    parallel = {**WIDE, **options.pop("parallel", {})}
    return mw.Engine(
        model(experts),
        layout,
        microbatches=microbatches,
        parallel=parallel,
        optimizer={"lr": 1e-2, "weight_decay": 0.0},
        **options,
    )


def rows(step: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return [{"input_ids": torch.randint(0, 96, (2, length), generator=draw)} for length in LENGTHS]


def own(engine: mw.Engine, step: int) -> list[dict[str, torch.Tensor]]:
    """This data rank's microbatches of a step."""
    return rows(step)[engine.data_rank :: engine.data_ranks]


def numbers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def work(rank: int, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps with losses of two kinds, and everything that an engine says then."""
    ranks = 2 if "dp_" in layout or layout.startswith("ep=2") else 1
    engine = make(layout, len(LENGTHS) // ranks if layout else len(LENGTHS), **options)
    assert ranks == engine.data_ranks or not layout
    first = engine.step(own(engine, 0), focal)
    second = engine.forward_backward(own(engine, 1), log_probs=True)
    assert second.log_probs is not None
    updated = engine.optim_step(lr=5e-3)
    asked = engine.log_probs(own(engine, 1))
    evaluation = engine.evaluate(own(engine, 2), focal)
    held = dict(engine.shards())
    assert held.keys() == dict(engine.model.named_parameters()).keys()
    assert ("dp_shard" not in layout and "tp" not in layout) or any(isinstance(tensor, DTensor) for tensor in held.values())
    return {
        "numbers": {
            "loss": torch.tensor([first.loss, second.loss], dtype=torch.float64),
            "norm": torch.tensor([first.gradient_norm, float(updated["gradient_norm"])], dtype=torch.float64),
            "tokens": first.metrics["tokens"],
            "evaluation": torch.tensor([evaluation["loss"], evaluation["tokens"]], dtype=torch.float64),
            **{f"weight {name}": tensor for name, tensor in numbers(dict(engine.weights())).items()},
        },
        "log_probs": {engine.data_rank + engine.data_ranks * index: one for index, one in enumerate(second.log_probs)},
        "asked": {engine.data_rank + engine.data_ranks * index: one for index, one in enumerate(asked)},
    }


def compare(layout: str, options: dict[str, Any]) -> None:
    alone = {name: value for name, value in options.items() if name != "parallel"}
    [truth] = run_ranks(work, 1, "", alone)
    ranks = 4 if layout.count("=2") == 2 else 2
    every = run_ranks(work, ranks, layout, options)
    for name, expected in truth["numbers"].items():
        for found in every:
            torch.testing.assert_close(
                found["numbers"][name], expected, rtol=1e-11, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
            )
    for kind in ("log_probs", "asked"):
        for found in every:
            for number, one in found[kind].items():
                assert one.shape == (2, LENGTHS[number])
                torch.testing.assert_close(one, truth[kind][number], rtol=1e-11, atol=1e-12)
        assert {number for found in every for number in found[kind]} == set(range(len(LENGTHS)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_one_process_does(name: str) -> None:
    compare(*LAYOUTS[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", RARE)
def test_other_layouts_do_too(name: str) -> None:
    compare(*RARE[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_merged_into_the_same_weights(name: str) -> None:
    compare(*ADAPTED[name])


# -- one process beside plain torch --------------------------------------------------------------------------------------------


def plain_steps(rank: int) -> tuple[list[float], dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """Two steps of the engine, and of a plain loop of torch."""
    engine, plain = make(), model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    ours, theirs = [], []
    for step in range(2):
        ours.append(engine.step(rows(step)).loss)
        tokens = sum(one["input_ids"][:, 1:].numel() for one in rows(step))
        total = 0.0
        for one in rows(step):
            ids = one["input_ids"]
            logits = plain(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / tokens
            loss.backward()
            total += float(loss)
        theirs.append(total)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return ours, numbers(dict(engine.weights())), theirs, numbers(dict(plain.named_parameters()))


def test_an_engine_computes_what_a_plain_loop_does() -> None:
    [(ours, weights, theirs, plain)] = run_ranks(plain_steps, 1)
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert weights.keys() == plain.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-10, atol=1e-12)


# -- files ---------------------------------------------------------------------------------------------------------------------


def save_and_go_on(rank: int, layout: str, path: Path | None, load: bool) -> list[float]:
    engine = make(layout)
    if load:
        assert path is not None
        assert engine.load(path) == {"seen": 7}
    losses = [engine.step(own(engine, 0), focal).loss] if not load else []
    if path is not None and not load:
        engine.save(path, {"seen": 7})
        engine.save(path, {"seen": 7})  # in its own place
    return [*losses, *(engine.step(own(engine, step)).loss for step in (1, 2))]


def test_another_layout_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    straight, _ = run_ranks(save_and_go_on, 2, "tp=2", tmp_path / "mine" / "step-1", False)
    resumed, _ = run_ranks(save_and_go_on, 2, "pp=2", tmp_path / "mine" / "step-1", True)
    assert resumed == pytest.approx(straight[1:], rel=1e-12)
    assert sorted(entry.name for entry in (tmp_path / "mine").iterdir()) == ["step-1"]


def exported(rank: int, layout: str, options: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    engine = make(layout, **options)
    engine.step(own(engine, 0))
    engine.export(folder)
    return numbers(dict(engine.weights()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.thorough, id="whole"),
        pytest.param({"adapter": {"rank": 4}}, id="adapter"),
        pytest.param({"experts": True}, id="experts"),
    ],
)
def test_weights_are_those_of_an_export(tmp_path: Path, options: dict[str, Any]) -> None:
    layout = "ep=2" if "experts" in options else "tp=2"
    weights, others = run_ranks(exported, 2, layout, options, tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert set(weights) == set(files)
    assert list(weights) == list(others)
    for name, tensor in files.items():
        torch.testing.assert_close(weights[name].to(tensor.dtype), tensor, rtol=0, atol=1e-15)
    if "experts" in options:  # files have the matrices of each expert
        assert "model.layers.0.mlp.experts.3.down_proj.weight" in weights
    ids = torch.arange(8)[None]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")(ids)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]


# -- data ----------------------------------------------------------------------------------------------------------------------


def shared(rank: int, layout: str, packing: str, begin: int) -> list[list[list[int]]]:
    engine = make(layout, 2 if "dp" in layout else 4, sequence_length=16, packing=packing)
    data = engine.share([list(range(3 + 7 * number % 11)) for number in range(40)], epochs=2)
    engine.steps_done = begin
    steps = [[batch["input_ids"].flatten().tolist() for batch in batches] for batches in data]
    assert len(steps) == len(data) - begin
    return steps


@pytest.mark.parametrize("packing", ["pack", pytest.param("pad", marks=pytest.mark.thorough)])
def test_each_step_has_the_same_sequences_on_each_layout(packing: str) -> None:
    [alone] = run_ranks(shared, 1, "", packing, 0)
    first, second = run_ranks(shared, 2, "dp_shard=2", packing, 1)
    assert len(alone) > 3
    assert [[*one, *other] for one, other in zip(first, second, strict=True)] == alone[1:]


# -- refusals ------------------------------------------------------------------------------------------------------------------

IDS = torch.arange(8)[None]


def hf_labels(engine: mw.Engine) -> None:
    engine.step([{"input_ids": IDS, "labels": IDS.clone()}])


def too_many(engine: mw.Engine) -> None:
    engine.step([{"input_ids": IDS}] * 5)


def left_padding(engine: mw.Engine) -> None:
    engine.step([{"input_ids": IDS, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])}])


def packed_rows(engine: mw.Engine) -> None:
    engine.step([{"input_ids": IDS, "position_ids": torch.arange(8)[None] % 4}])


def no_tokens(engine: mw.Engine) -> None:
    engine.step([{"labels": IDS}])


def twice(engine: mw.Engine) -> None:
    engine.forward_backward([{"input_ids": IDS}])
    engine.forward_backward([{"input_ids": IDS}])


def nothing_to_update(engine: mw.Engine) -> None:
    engine.optim_step()


def mean_of_means(engine: mw.Engine) -> None:
    class Mean(mw.Objective):
        def sums(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return -given.log_probs(model, batch).mean()

    engine.step([{"input_ids": IDS}], Mean)


def no_row(engine: mw.Engine) -> None:
    engine.share([[1, 2, 3], "text"])


def unread_key(engine: mw.Engine) -> None:
    engine.share([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])


def unfinished(engine: mw.Engine) -> None:
    engine.load("/nonexistent")


REFUSALS: dict[Callable[[mw.Engine], None], tuple[type[Any], str, str]] = {
    hf_labels: (ConfigError, "engine.batch", "each position would say itself"),
    too_many: (ConfigError, "engine.batch", "5 batches; the engine was made for 1 to 4"),
    left_padding: (ConfigError, "engine.batch", "attention_mask: masks more than padding at the end"),
    packed_rows: (ConfigError, "engine.batch", "packing='pack'"),
    no_tokens: (ConfigError, "engine.batch", "input_ids: legal are whole numbers [rows, length], found none"),
    twice: (ConfigError, "engine.order", "optim_step first"),
    nothing_to_update: (ConfigError, "engine.order", "forward_backward first"),
    mean_of_means: (ConfigError, "objective.sums", "is not a sum over targets"),
    no_row: (DataError, "data.row", "row 1"),
    unread_key: (DataError, "data.row", "row 0: has labels, which nothing reads"),
    unfinished: (CheckpointError, "checkpoint.damaged", "/nonexistent"),
}


def refused(rank: int) -> None:
    for wrong, (kind, code, words) in REFUSALS.items():
        engine = make(sequence_length=16)
        with refuses(kind, code) as caught:
            wrong(engine)
        assert words in str(caught.value), (wrong, caught.value)


def test_what_cannot_be_used_is_refused_by_name() -> None:
    run_ranks(refused, 1)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ({"layout": "dp=2"}, "config.unknown_key", "layout.dp"),
        ({"layout": "tp"}, "config.value", "layout='tp'"),
        ({"layout": "tp=3"}, "layout.ranks", "3"),
        ({"optimizer": {"lr": -1}}, "config.type", "optimizer.lr"),
        ({"schedule": {"kind": "cosine"}}, "engine.steps", "steps="),
        ({"parallel": {"sinc": "defer"}}, "config.unknown_key", "parallel.sinc"),
        ({"model": torch.nn.Linear(2, 2)}, "engine.model", "Linear"),
    ],
)
def test_wrong_arguments_are_refused_before_a_process_group(arguments: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(mw.MeshwrightError) as caught:
        mw.Engine(**{"model": model(), **arguments})
    assert code in caught.value.codes, caught.value
    assert words in str(caught.value)
    assert not torch.distributed.is_initialized()


def filled_and_nonfinite(rank: int) -> tuple[list[float], bool, bool]:
    """A rank with fewer batches, and a step that is not finite: it changes nothing, and the next one does."""
    engine = make("dp_shard=2", 2)
    mine = rows(0)[:1] if engine.data_rank else rows(0)[1:3]
    losses = [engine.step(mine).loss]
    before = numbers(dict(engine.weights()))
    clip = engine.clip
    engine.clip = lambda: clip() * torch.nan  # type: ignore[method-assign]
    bad = engine.step(mine)
    engine.clip = clip  # type: ignore[method-assign]
    same = all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())
    losses.append(engine.step(mine).loss)
    return losses, bad.skipped, same


def test_missing_batches_are_filled_and_steps_that_are_not_finite_change_nothing() -> None:
    (first, skipped, same), (second, *_) = run_ranks(filled_and_nonfinite, 2)
    assert first == second
    assert first[1] < first[0]
    assert skipped
    assert same


# -- a loop of one's own -------------------------------------------------------------------------------------------------------

LOOP = """
import sys
import weakref
import torch
import meshwright as mw
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {SIZES}


def focal(log_probs, batch, gamma: float = 2.0):
    return -((1 - log_probs.exp()) ** gamma) * log_probs


def make_engine(layout="tp=2"):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    return mw.Engine(model, layout, microbatches=2, sequence_length=16, objective=focal, optimizer={{"lr": 1e-2}}, seed=3)


def make_nothing():
    return None


def make_unnamed():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    return mw.Engine(model, "tp=2", objective=lambda log_probs, batch: -log_probs)


if __name__ == "__main__":
    torch.manual_seed(0)
    engine = make_engine()
    for batches in engine.share([[n % 96 for n in range(k, k + 20)] for k in range(64)], epochs=2):
        result = engine.step(batches)
        if engine.rank == 0:
            print("loss", result.loss)
"""


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("loop") / "my_loop.py"
    file.write_text(LOOP.format(SIZES=SIZES))
    return file


@pytest.mark.thorough
def test_a_loop_learns_under_torchrun(loop: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", loop.name]
    done = subprocess.run(command, cwd=loop.parent, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]
    assert losses[-1] < losses[0] / 2


def test_a_loop_is_audited_and_planned(loop: Path) -> None:
    command = [sys.executable, "-m", "meshwright", "audit", "my_loop.py:make_engine", "--steps", "1", "--nproc", "2"]
    done = subprocess.run(command, cwd=loop.parent, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("PASS: LlamaForCausalLM")
    assert "focal" in done.stdout


@pytest.mark.parametrize(
    ("function", "words"),
    [("make_nothing", "makes no engine"), ("make_unnamed", "has no name"), ("make_other", "has no such function")],
)
def test_a_loop_that_cannot_be_audited_is_refused(loop: Path, function: str, words: str) -> None:
    from meshwright.train.engine.loop_audit import config_of_loop

    with refuses(ConfigError, "config.part" if function == "make_unnamed" else "engine.loop") as caught:
        config_of_loop(f"{loop}:{function}")
    assert words in str(caught.value)


def failing_once(rank: int) -> tuple[float, float]:
    """The norm of a step after one whose loss raises in its second microbatch, and that of a new engine."""
    engine, seen = make(), []

    def fails(log_probs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(batch)
        if batch["input_ids"].shape == (2, LENGTHS[1]):
            raise ValueError("planted")
        return -log_probs

    with pytest.raises(mw.MeshwrightError, match="planted"):
        engine.step(rows(0), fails)
    assert len(seen) > 1
    return engine.step(rows(0)).gradient_norm, make().step(rows(0)).gradient_norm


def test_a_step_that_failed_leaves_no_gradient() -> None:
    [(after, new)] = run_ranks(failing_once, 1)
    assert after == new


def policy(log_probs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A clipped ratio, with advantages and old log-probabilities beside the labels."""
    ratio = (log_probs - batch["old"]).exp()
    return -torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])


def policy_steps(rank: int, layout: str) -> tuple[list[float], list[float]]:
    engine = make(layout, 2 if "dp" in layout else 4)
    losses, ratios = [], []
    for step in range(2):
        batches = own(engine, step)
        for batch, old in zip(batches, engine.log_probs(batches), strict=True):
            batch["old"] = old
            batch["advantage"] = torch.cos(batch["input_ids"].double())
        result = engine.forward_backward(batches, policy, log_probs=True)
        assert result.log_probs is not None
        ratios += [float((new - batch["old"]).abs().max()) for new, batch in zip(result.log_probs, batches, strict=True)]
        engine.optim_step()
        losses.append(result.loss)
    return losses, ratios


def test_columns_of_a_rollout_reach_the_loss_and_the_first_ratio_is_one() -> None:
    [(truth, _)] = run_ranks(policy_steps, 1, "")
    for layout in ("cp=2", "dp_shard=2"):
        for losses, ratios in run_ranks(policy_steps, 2, layout):
            assert losses == pytest.approx(truth, rel=1e-11)
            assert max(ratios) == 0.0


# -- mistakes and ways of others -----------------------------------------------------------------------------------------------


class Weighed:
    """A trainer of somebody's, whose loss is a method."""

    def loss(self, log_probs: torch.Tensor, batch: dict[str, torch.Tensor], weight: float = 2.0) -> torch.Tensor:
        return -weight * log_probs


def bound_losses(rank: int) -> tuple[list[float], int]:
    engine, weighed = make(), Weighed()
    losses = (weighed.loss, weighed.loss, partial(weighed.loss, weight=4.0))
    found = [engine.evaluate(rows(0), loss)["loss"] for loss in losses]
    return found, len(engine._objectives)


def test_a_loss_is_a_method_or_has_bound_arguments() -> None:
    [((first, again, double), kept)] = run_ranks(bound_losses, 1)
    assert first == again == pytest.approx(double / 2)
    assert kept == 2  # a method is tried once, although `weighed.loss` is another object each time


def lent(rank: int) -> tuple[list[float], bool]:
    """The optimizer's counters are where they were, the engine says that its model is away, and it is freed."""
    engine = make()
    losses = [engine.step(rows(0)).loss]
    homes = {name: value.device for state in engine.optimizer.state.values() for name, value in state.items()}
    engine.offload()
    with refuses(ConfigError, "engine.order"):
        engine.step(rows(0))
    engine.onload()
    assert homes == {name: value.device for state in engine.optimizer.state.values() for name, value in state.items()}
    losses.append(engine.step(rows(0)).loss)
    with refuses(ConfigError, "engine.batch"):
        engine.evaluate([])
    kept = weakref.ref(engine)
    del engine
    gc.collect()
    return losses, kept() is None


def test_a_lent_engine_says_so_and_one_that_is_dropped_is_freed() -> None:
    [(losses, freed)] = run_ranks(lent, 1)
    assert losses[1] < losses[0]
    assert freed


def export_nowhere(rank: int, folder: Path) -> str:
    engine = make("tp=2")
    full = patch("meshwright.checkpoint.export.export_checkpoint", side_effect=OSError(28, "No space left on device"))
    with full, refuses(CheckpointError, "checkpoint.unwritten") as caught:
        engine.export(folder / "out")
    return str(caught.value)


def test_an_export_that_cannot_be_written_is_said_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(export_nowhere, 2, tmp_path)
    assert first == second


def uneven(rank: int, layout: str) -> tuple[float, list[torch.Tensor]]:
    """More batches than in a step, on one rank fewer than on the other."""
    engine = make(layout, 1)
    mine = rows(0)[:1] if layout and engine.data_rank else rows(0)[1:] if layout else [*rows(0)[1:], rows(0)[0]]
    loss, values = engine.evaluate(mine)["loss"], engine.log_probs(mine)
    with refuses(ConfigError, "engine.batch"):  # on all ranks
        engine.evaluate([] if engine.data_rank == engine.data_ranks - 1 else mine)
    return loss, values


def test_ranks_may_evaluate_different_numbers_of_batches() -> None:
    [(truth, values)] = run_ranks(uneven, 1, "")
    (loss, first), (other, second) = run_ranks(uneven, 2, "dp_shard=2")
    assert loss == other == pytest.approx(truth, rel=1e-12)
    for found, expected in zip((*first, *second), values, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def whole_logits(rank: int) -> float:
    engine = make("tp=2")
    with refuses(ConfigError, "engine.loss") as caught:
        engine.step(rows(0), of_logits)
    assert "objective=" in str(caught.value)
    return make("tp=2", objective=of_logits).step(rows(0)).loss


def test_a_loss_that_needs_another_plan_is_given_to_the_engine() -> None:
    first, second = run_ranks(whole_logits, 2)
    assert first == second
    assert 4 < first < 5  # of 96 words, at random


def exported_of_4_bits(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    given = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **{**SIZES, "hidden_size": 64, "intermediate_size": 64})
    )
    engine = mw.Engine(given, adapter={"rank": 4, "base": "nf4"}, parallel={"param_dtype": "float32"})
    engine.step([{"input_ids": IDS}])
    engine.export(folder / "out")
    return numbers(dict(engine.weights()))


def test_an_instance_whose_weights_have_4_bits_is_exported(tmp_path: Path) -> None:
    [weights] = run_ranks(exported_of_4_bits, 1, tmp_path)
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert set(weights) == set(files)
    for name, tensor in files.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)
