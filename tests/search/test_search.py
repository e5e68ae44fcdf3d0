"""A search prices as `plan --gpu` does, its bounds are below its prices, and it finds what pricing everything finds."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli.main import app
from meshwright.cli.plan_files import _rows
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.plan.cost.hardware import Hardware, load_hardware
from meshwright.plan.given.closed_choices import PipelineSchedule
from meshwright.plan.show.summary import human_bytes
from meshwright.search.answer import Option, base_of, search
from meshwright.search.bounds import Bounds
from meshwright.search.candidate_price import Price, Pricer
from meshwright.search.find import _Search, find_best, front_of
from meshwright.search.measure import Trial, measure, trial_of
from meshwright.search.space import Branch, Candidate, Space
from meshwright.trace.few_layers import Traces
from meshwright.trace.kept_traces import TraceStore
from meshwright.trace.time import forecast_time
from meshwright.trace.verdict import fit
from meshwright.train.config import RunConfig, overridden
from meshwright.train.proofs import records
from meshwright.train.start.setup import RunSetup, make_setup
from tests.harness import LIMIT, run_ranks
from tests.trace.test_memory import setup_of

RANKS = 4
NODE = 2
"""Devices of a node: layouts of four ranks cross nodes."""

AT_ONCE = 20
"""Candidates that one process prices, for which it has a limit of time."""


def small_device(memory_mib: float) -> Hardware:
    """A device that is as slow as the models of tests are small, so that no part of a step vanishes."""
    h100 = load_hardware("h100")
    return replace(
        h100, memory_gib=memory_mib / 1024, reserved_gib=0.0, bf16_tflops=0.05, fp32_tflops=0.05, hbm_tb_s=0.002,
        gpus_per_node=NODE, link_gb_s=0.1, link_us=1.0, nic_gb_s=0.02, nic_us=2.0, host_gb_s=0.02, launch_us=0.1,
    )  # fmt: skip


def base(family: str = "llama", **sections: Any) -> RunSetup:
    config = setup_of(1, family, layers=4).config.model_dump(mode="json", exclude_unset=True, by_alias=True)
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return base_of(RunConfig.model_validate(config))


def small_space(setup: RunSetup, free: Iterable[str] = ("layout", "microbatch")) -> Space:
    return Space(setup, RANKS, NODE, free)


def all_candidates(space: Space) -> list[tuple[Branch, Candidate]]:
    return [(branch, one) for branch in space.branches() for one in branch.candidates()]


def shares_of_price(bounds: Bounds, branch: Branch, candidate: Candidate, price: Price) -> tuple[float, float]:
    """The largest bound of the time over the time, and the same of the memory."""
    times = (
        bounds.seconds(branch, *more, measured=measured)
        for more, measured in (([], False), ([candidate], False), ([candidate], True))
    )
    needed = max(bounds.bytes(branch, candidate), bounds.bytes_in_stages(branch, candidate, price.setup))
    return max(times) / price.seconds, needed / price.verdict.peak_bytes


def in_one_process(function: Any, limit: int = LIMIT) -> Any:
    """A forecast makes process groups of a world that is not there."""
    (found,) = run_ranks(lambda _: function(), 1, group=False, limit=limit)
    return found


def priced_anew(
    setup: RunSetup, candidate: Candidate, hardware: Hardware, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `plan --gpu` says of a candidate: model, plan and traces are made for it alone."""
    config = RunConfig.model_validate(candidate.config(setup.config).model_dump(by_alias=True))
    own = make_setup(config, RANKS, planning=True)
    traces = Traces(own, store=TraceStore(own, folder))
    return fit(own, hardware, traces).to_dict(), forecast_time(own, hardware, traces).to_dict()


CHOICES = {"compile": False, "cpu_offload": False, "context_parallel": "gather", "sync": "reduce_each"}
"""Choices that are written, so that the space is small enough to price all of it."""


@pytest.mark.parametrize(
    ("family", "number", "layout"),
    [
        ("llama", 2, {"cp": 1}),
        *(pytest.param(family, 40, {}, marks=pytest.mark.thorough) for family in ("llama", "qwen3_moe")),
    ],
)
def test_candidates_cost_what_plan_says(family: str, number: int, layout: dict[str, int], tmp_path: Path) -> None:
    """Traces, facts and prices that candidates share say of each, to the byte, what is found for it alone."""
    setup, device = base(family, layout=layout), small_device(64.0)
    drawn = random.Random(0).sample(all_candidates(small_space(setup, ["microbatch"])), 20 * number)

    def compared(begin: int) -> list[tuple[Any, Any]]:
        pricer, found = Pricer(setup, device, TraceStore(setup, tmp_path / "shared")), []
        legal = (candidate for _, candidate in drawn if pricer.setup_of(candidate) is not None)
        for place, candidate in enumerate(islice(legal, begin, min(begin + 10, number)), begin):
            price = pricer.price(candidate)
            assert price is not None
            both = price.verdict.to_dict(), price.time.to_dict()
            found.append((both, priced_anew(setup, candidate, device, tmp_path / str(place))))
        return found

    pairs = [pair for begin in range(0, number, 10) for pair in in_one_process(partial(compared, begin))]
    assert len(pairs) == number
    for searched, planned in pairs:
        assert searched == planned


@pytest.mark.parametrize(
    ("family", "memory", "layout"),
    [
        ("llama", 0.93, {"cp": 1, "dp_replicate": 1, "tp": 1}),
        *(
            pytest.param(family, memory, layout, marks=pytest.mark.thorough)
            for family, memory, layout in (
                ("llama", 64.0, {"cp": 1}), ("llama", 0.8, {"tp": 1}), ("qwen3_moe", 2.0, {"cp": 1, "pp": 1})
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.timeout(900)
def test_the_winners_are_those_of_pricing_everything(family: str, memory: float, layout: dict[str, int]) -> None:
    setup, device = base(family, parallel=CHOICES, layout=layout), small_device(memory)

    def found() -> tuple[list[float], int, int]:
        answer = find_best(small_space(setup, []), device, Pricer(setup, device, TraceStore(setup)))
        return [price.seconds for price in answer.best], answer.tally.priced, answer.tally.candidates

    def priced_from(begin: int) -> list[tuple[float, bool, Any, tuple[float, float]]]:
        store = TraceStore(setup)
        pricer, bounds = Pricer(setup, device, store), Bounds(setup, device, store)
        some = all_candidates(small_space(setup, []))[begin : begin + AT_ONCE]
        prices = ((branch, candidate, pricer.price(candidate)) for branch, candidate in some)
        return [
            (price.seconds, price.verdict.fits, candidate.layout, shares_of_price(bounds, branch, candidate, price))
            for branch, candidate, price in prices
            if price is not None
        ]

    times, priced, candidates = in_one_process(found, 4 * LIMIT)
    best: dict[Any, float] = {}
    for begin in range(0, len(all_candidates(small_space(setup, []))), AT_ONCE):
        for seconds, fits, own, shares in in_one_process(partial(priced_from, begin)):
            assert max(shares) <= 1.0
            if fits and seconds < best.get(own, float("inf")):
                best[own] = seconds
    assert times
    assert times == pytest.approx(sorted(best.values())[: len(times)])
    assert priced < candidates / 2


@pytest.mark.parametrize(
    ("family", "number", "tokens"),
    [
        ("llama", 5, 64),
        *(
            pytest.param(family, 24, tokens, marks=pytest.mark.thorough)
            for tokens, families in (
                (64, ("llama", "gemma3n_text", "gemma4_moe", "gpt2", "qwen3_moe", "deepseek_v3", "nemotron_h")),
                (4, ("llama", "qwen3_moe")),
                (1024, ("llama",)),
            )
            for family in families
        ),
    ],
)
@pytest.mark.timeout(900)
def test_no_bound_is_above_its_price(family: str, number: int, tokens: int) -> None:
    """Candidates are drawn from all that a run leaves open: layouts, schedules, recomputation, offload, compile.

    With few tokens, most of what a rank holds are parameters and their gradients. With many, `cp` is among the layouts.
    """
    content = setup_of(1, family, layers=8 if tokens < 64 else None).config.model_dump(
        mode="json", exclude_unset=True, by_alias=True
    )
    longer = [f"model.config.max_position_embeddings={tokens}"] if tokens > 64 else []
    setup = base_of(overridden(content, [f"data.sequence_length={tokens}", *longer]))
    device = small_device(1.5)

    def found() -> list[tuple[str, float]]:
        store = TraceStore(setup)
        space, pricer, bounds = small_space(setup), Pricer(setup, device, store), Bounds(setup, device, store)
        drawn = all_candidates(space)
        random.Random(1).shuffle(drawn)
        priced = ((branch, one, pricer.price(one)) for branch, one in drawn if not bounds.refused(branch, one))
        return [
            (f"{one.overrides(setup.config)}", share)
            for branch, one, price in islice((item for item in priced if item[2] is not None), number)
            for share in shares_of_price(bounds, branch, one, price)
        ]

    shares = in_one_process(found, 4 * LIMIT)
    assert [(candidate, share) for candidate, share in shares if share > 1] == []
    assert len({candidate for candidate, _ in shares}) == number


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "pipeline", [{"runs_per_step": 4}, {"stages_per_rank": 4}], ids=["more runs than microbatches", "stages of no schedule"]
)
def test_bounds_of_runs_that_the_plan_refuses(pipeline: dict[str, int]) -> None:
    """A written key may leave a schedule without microbatches, or with stages that it does not have: that is no crash."""
    choices = {**CHOICES, "activation_checkpointing": "none", "pipeline": pipeline}
    setup = base(parallel=choices, layout={"pp": 2, "cp": 1, "tp": 1}, training={"global_batch_size": 8})

    def found() -> list[tuple[float, float]]:
        bounds = Bounds(setup, small_device(64.0), TraceStore(setup))
        return [(bounds.seconds(branch, one), bounds.bytes(branch, one)) for branch, one in all_candidates(small_space(setup))]

    pairs = in_one_process(found)
    assert pairs
    assert all(seconds > 0 and size > 0 for seconds, size in pairs)


def schedules(branches: Iterable[Branch]) -> set[PipelineSchedule]:
    key = "parallel.pipeline.schedule"
    return {
        value for branch in branches for candidate in branch.candidates() for name, value in candidate.values if name == key
    }


def test_what_is_written_is_kept() -> None:
    setup = base(layout={"tp": 2}, parallel={"activation_checkpointing": "full"}, training={"microbatch_size": 2})
    kept = list(Space(setup, RANKS, NODE).branches())
    assert {branch.layout.size("tp") for branch in kept} == {2}
    assert {branch.rows for branch in kept} == {2}
    assert not any("parallel.activation_checkpointing" in branch.choices for branch in kept)
    assert not any("optimizer.kind" in branch.choices for branch in kept)
    assert schedules(kept) == {PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED}  # others split what is recomputed
    freed = list(Space(setup, RANKS, NODE, ["all"]).branches())
    assert PipelineSchedule.ZBV in schedules(freed)
    assert {branch.layout.size("tp") for branch in freed} == {1, 2}
    assert len({branch.rows for branch in freed}) > 2
    assert all("optimizer.kind" in branch.choices for branch in freed)
    with pytest.raises(ConfigError, match="legal are layout, microbatch"):
        Space(setup, RANKS, NODE, ["layouts"])


def test_overrides_make_the_candidate() -> None:
    setup = base(parallel=CHOICES)
    for _, candidate in random.Random(1).sample(all_candidates(small_space(setup)), 20):
        config = candidate.config(setup.config)
        content = json.loads(setup.config.model_dump_json(by_alias=True))
        given = overridden(content, candidate.overrides(setup.config))
        assert given.layout.layout().resolve(RANKS) == candidate.layout
        assert given.parallel == config.parallel
        assert given.training == config.training


@pytest.mark.parametrize(
    ("axis", "written"),
    [
        ("pp", {"pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "runs_per_step": 2, "cuts": [1, 2, 3]}}),
        ("tp", {"sequence_parallel": True, "loss_parallel": True, "tp_plan": {"model.layers.*.mlp.up_proj": "colwise"}}),
        ("cp", {"context_parallel": "ulysses", "context_balance": "contiguous", "context_recompute": True}),
    ],
)
def test_what_is_written_for_an_axis_goes_with_it(axis: str, written: dict[str, Any]) -> None:
    """It would be refused where the axis is 1: a candidate sets it back, and its overrides say so."""
    setup = base(parallel={**CHOICES, **written})
    pricer = Pricer(setup, small_device(64.0), TraceStore(setup))
    others = {"pp", "tp", "cp"} - {axis}
    alone = [
        one
        for _, one in all_candidates(small_space(setup))
        if one.layout.size(axis) == 1 and all(one.layout.size(other) == 1 for other in others)
    ]
    assert pricer.setup_of(alone[0]) is not None, pricer.refusals
    given = {override.partition("=")[0] for override in alone[0].overrides(setup.config)}
    keys = written["pipeline"].keys() if axis == "pp" else written.keys()
    assert {f"parallel.pipeline.{key}" if axis == "pp" else f"parallel.{key}" for key in keys} <= given
    branch = next(small_space(setup).branches())
    assert Bounds(setup, small_device(64.0), pricer.store).numbers.slices(branch, alone[0]) is not None


def test_overrides_of_another_optimizer_are_complete() -> None:
    setup = base(parallel=CHOICES, optimizer={"fused": True})
    other = next(
        one for _, one in all_candidates(small_space(setup, ["optimizer"])) if "adamw8bit" in dict(one.values).values()
    )
    assert {"optimizer.kind=adamw8bit", "optimizer.fused=null"} <= set(other.overrides(setup.config))


def _option(name: str) -> Option:
    return Option(name, (name,), 1.0, 1.0, 1.0, 0.4, 1, 1, "", True, "unproven", "", 1.0, 1.0)


def test_the_winner_by_measurement() -> None:
    given = {"a": 3.0, "b": None, "c": 2.0}
    trials = measure(
        [_option(name) for name in given], lambda one: Trial(one, given[one.layout], "" if given[one.layout] else "out")
    )
    assert [trial.option.layout for trial in trials] == ["c", "a", "b"]
    assert trials[-1].problem == "out"


def test_the_front_has_what_nothing_beats() -> None:
    def price(seconds: float, peak: int) -> Price:
        verdict = type("V", (), {"peak_bytes": peak})()
        found = Price(None, None, verdict, None, None)  # type: ignore[arg-type]
        vars(found)["time"] = type("T", (), {"step_seconds": seconds})()
        return found

    front = front_of([price(2, 5), price(1, 9), price(3, 6), price(3, 4), price(1, 8)])
    assert [(one.seconds, one.verdict.peak_bytes) for one in front] == [(1, 8), (2, 5), (3, 4)]


def test_why_the_own_layout_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "shipped_matrix", lambda: {"versions": {}, "date": "2026-01-02", "cells": []})
    setup = base(parallel={**CHOICES, "activation_checkpointing": "none"}, layout={"dp_shard": 2, "tp": 2})

    def answered() -> Any:
        answer = search(setup, RANKS, small_device(64.0), free=["layout"])
        return answer.own, answer.options, search(setup, 3, small_device(64.0)).own_refused

    own, options, refused = in_one_process(answered)
    assert own.fits
    assert own.layout == "dp_shard=2 tp=2"
    assert own.step_seconds > options[0].step_seconds
    assert "more in communication over tp" in own.words
    assert options[0].as_fast
    assert options[0].proven == "unproven"
    assert "3" in refused
    assert options[0].gpu_hours == pytest.approx(options[0].step_seconds * RANKS / 3600)


def test_nothing_fits() -> None:
    """What came nearest is named, and few candidates are priced: one of each branch shows that the others are too large."""
    setup = base(parallel=CHOICES, layout={"cp": 1, "pp": 1})
    answer = in_one_process(lambda: replace(search(setup, RANKS, small_device(0.45)), prices=()))
    assert answer.options == ()
    assert answer.lacks == "nothing fits"
    assert answer.nearest.endswith("iB too much")
    assert "does not fit: " in answer.own.words
    assert 0 < answer.tally.priced == answer.tally.do_not_fit
    assert answer.tally.too_large > answer.tally.priced


def test_what_came_nearest_of_those_that_bounds_cut() -> None:
    """On a device with next to no memory, nothing is priced but what is named."""
    setup = base(parallel={**CHOICES, "activation_checkpointing": "none"}, layout={"cp": 1, "pp": 1})
    device = small_device(0.01)

    def least() -> int:
        pricer = Pricer(setup, device, TraceStore(setup))
        prices = [pricer.price(candidate) for _, candidate in all_candidates(small_space(setup, []))]
        return min(price.verdict.peak_bytes for price in prices if price is not None)

    answer = in_one_process(lambda: replace(search(setup, RANKS, device), prices=()))
    lacking = human_bytes(in_one_process(least) - round(device.memory_gib * 2**30))
    assert answer.nearest.endswith(f": {lacking} too much")
    assert (answer.tally.priced, answer.tally.too_large) == (0, answer.tally.candidates - answer.tally.refused)
    assert answer.lacks == "nothing fits"


def test_nothing_is_legal() -> None:
    def answered(ranks: int, **sections: Any) -> tuple[str, str, int]:
        answer = in_one_process(lambda: search(base(**sections), ranks, small_device(64.0)))
        return answer.lacks, answer.advice, answer.tally.candidates

    lacks, advice, candidates = answered(3, layout={"tp": 2})
    assert (lacks, candidates) == ("no layout is legal", 0)
    assert "--free layout" in advice
    _, advice, _ = answered(4, layout={"pp": 1, "tp": 1, "cp": 1}, training={"microbatch_size": 16})
    assert "--free microbatch " in advice  # that is enough
    _, advice, _ = answered(7, layout={"pp": 1})  # what is set is no hindrance
    assert "legal are, among others, 4 or 8 ranks" in advice
    lacks, advice, candidates = answered(2, layout={"pp": 2}, parallel={"pipeline": {"runs_per_step": 100}})
    assert lacks == "no layout is legal"  # all are refused, which is no lack of memory
    assert candidates > 0
    assert not advice


@pytest.mark.parametrize("rows", [3, 128])
def test_all_microbatches_that_divide_are_searched(rows: int) -> None:
    setup = base(training={"microbatch_size": rows, "global_batch_size": 768})
    own = {branch.rows for branch in Space(setup, 2, NODE, ["microbatch"]).branches() if branch.layout.size("dp") == 2}
    assert own == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, rows}


@pytest.mark.parametrize(
    ("family", "budget", "parts"),
    [("qwen3_moe", 0.0003, True), ("qwen3_moe", 8.0, False), ("qwen3_moe", 0.00001, False), ("llama", 0.0003, False)],
)
def test_a_policy_that_parts_experts_is_searched_where_there_is_one(family: str, budget: float, parts: bool) -> None:
    """Elsewhere null is one of the three."""
    setup = base(family, parallel={"sync_budget_gib": budget})
    found = [branch.choices.get("parallel.sync", ()) for branch in Space(setup, RANKS, NODE, ["microbatch"]).branches()]
    assert any(found)
    assert any(None in choices for choices in found) is parts


def test_what_is_tried_first_and_left_out_last() -> None:
    """Of a policy that is left open the bounds know little; the configuration itself says nothing of layouts without `cp`."""
    setup = base("qwen3_moe", parallel={"sync_budget_gib": 0.0003})
    space = small_space(setup)
    found = _Search(space, small_device(64.0), Pricer(setup, small_device(64.0), TraceStore(setup)), 5, print)
    found.bounds = SimpleNamespace(bytes=lambda _, one: 0.0 if dict(one.values)["parallel.sync"] is None else 1.0)  # type: ignore[assignment]
    branch = next(branch for branch in space.branches() if None in branch.choices.get("parallel.sync", ()))
    leanest = min(branch.candidates(), key=lambda one: found._lean(branch, one))
    assert dict(leanest.values)["parallel.sync"] is not None

    def price(cp: int) -> Any:
        candidate = Candidate(Layout(cp=cp, dp_shard=4 // cp).resolve(4), ())
        return SimpleNamespace(candidate=candidate, seconds=1.0, setup=setup)

    found._found(price(2))
    assert not found._nothing_to_gain(1)
    found._found(price(1))
    assert found._nothing_to_gain(1)


def test_the_configuration_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the space lacks of what the user wrote, no answer is slower than that."""
    monkeypatch.setattr(Space, "branches", lambda space: iter(()))
    setup = base(layout={"dp_shard": 2, "dp_replicate": 1, "cp": 1, "pp": 1, "tp": 2}, parallel=CHOICES)
    answer = in_one_process(lambda: replace(search(setup, RANKS, small_device(64.0)), prices=()))
    (option,) = answer.options
    assert option.overrides == ()
    assert option.step_seconds == answer.own.step_seconds
    assert answer.own.words == "is the best that was found"
    assert [(row["own"], row["pareto"]) for row in _rows(answer)] == [(True, True)]
    slower = replace(answer.own, step_seconds=2 * option.step_seconds)
    assert [row["own"] for row in _rows(replace(answer, own=slower))] == [False, True]
    assert not answer.advice


CONFIG = """
output: {folder}/run
model:
  config: {{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4,
            num_key_value_heads: 2, vocab_size: 512, max_position_embeddings: 128}}
data: {{files: [{folder}/text.jsonl], sequence_length: 64}}
tokenizer: {{vocab_size: 512}}
training: {{steps: 4, global_batch_size: 8}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = [json.dumps({"text": f"one sentence number {index} of many, each about nothing at all"}) for index in range(400)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return file


def test_the_command(config: Path) -> None:
    def run(*options: str) -> tuple[int, str]:
        found = CliRunner().invoke(app, ["plan", str(config), *options])
        return found.exit_code, found.output + (str(found.exception) if found.exception else "")

    written = {"compile": "false", "activation_checkpointing": "none", "sync": "reduce_each", "cpu_offload": "false"}
    kept = (
        "training.microbatch_size=2",
        "layout.cp=1",
        "layout.pp=1",
        "layout.dp_replicate=1",
        "parallel.sequence_parallel=false",
    )
    arguments = (*kept, *(f"parallel.{name}={value}" for name, value in written.items()), "--gpu", "h100")
    code, text = in_one_process(lambda: run(*arguments, "--search", "--world-size", "1,2", "--price", "2", "--json"))
    assert code == 0, text
    answers = json.loads(text[text.index("{") :])["answers"]
    assert [answer["world_size"] for answer in answers] == [1, 2]
    assert all(answer["options"] and answer["tally"]["candidates"] for answer in answers)
    best = answers[1]["options"][0]
    assert best["cost"] == pytest.approx(2 * best["gpu_hours"])
    assert best["cost_per_billion"] == pytest.approx(2 * best["gpu_hours_per_billion"])
    lines = [argument for argument in arguments if "=" in argument]
    found = in_one_process(lambda: replace(mw.Run(config, lines).search(2, gpu="h100"), prices=()))
    assert [list(one.overrides) for one in found.options] == [one["overrides"] for one in answers[1]["options"]]
    code, text = in_one_process(lambda: run(*arguments, "--search", "--world-size", "1,2", "--price", "2"))
    assert code == 0
    for words in ("The best layout by number of ranks", "cost", "meshwright train"):
        assert words in text
    refused = CliRunner().invoke(app, ["plan", "my_loop.py:make_engine", "--search", "--gpu", "h100"])
    assert "a loop of your own" in str(refused.exception)
    for options, words in (
        (("--search",), "add --gpu"),
        (("--free", "layout"), "add --search"),
        (("--world-size", "2,4"), "several numbers are for searches"),
        (("--world-size", "two", "--search", "--gpu", "h100"), "positive whole numbers"),
        (("--search", "--gpu", "h100", "--diff", "x.json", "--html", "x.html", "-n", "2"), "shows one plan"),
        (("--search", "--gpu", "h100", "--program"), "--search: --program shows one plan"),
        (("--search", "--gpu", "h100", "--full"), "--search: --full shows one plan"),
        (("--search", "--gpu", "h100", "--price", "inf"), "legal are numbers from 0 on"),
        (("--search", "--gpu", "h100", "--try", "1", "--world-size", "2,4"), "give one number"),
        (("--search", "--gpu", "h100", "--free", "every", "--world-size", "2"), "legal are layout"),
    ):
        code, text = run(*options)
        assert code != 0
        assert words in text


@pytest.mark.thorough
def test_the_best_are_measured_here(config: Path, tmp_path: Path) -> None:
    """On two processes of this machine, and one option that cannot run."""
    options = ("parallel.compile=false", "--gpu", "h100", "--search", "-n", "2", "--try", "2", "--json")
    command = [sys.executable, "-m", "meshwright", "plan", str(config), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    trials = json.loads(done.stdout)["trials"]
    assert len(trials) == 2
    assert all(trial["seconds"] > 0 for trial in trials)
    assert not (tmp_path / "run").exists()
    train = [sys.executable, "-m", "meshwright", "train", str(config), "--nproc", "2"]
    failed = trial_of(_option("layout.tp=3"), train)
    assert failed.seconds is None
    assert "tp" in failed.problem
