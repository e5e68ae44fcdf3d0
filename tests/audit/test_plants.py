"""The audit must be able to fail: each kind of bug is planted, and gets its own words."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from maintain.cells import LAYOUTS, Variant, family_case
from meshwright.audit import conduct
from meshwright.audit.case import Case
from meshwright.audit.causes.diagnose import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.one_process.noise import measure_drift
from meshwright.audit.report import AuditReport
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.ranks.hang import HangError
from tests.audit import plants

STAGES = {
    "family": "gemma3_text",
    "model": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "pipeline": {},
}
"""A model of which two stages have layers of both types."""

ADAPTER = {"rank": 3, "alpha": 6}

PLACES = {place.label: place for place in LAYOUTS}


def case(folder: Path, place: str = "shard 2", family: str = "llama", microbatches: int = 2, **parallel: Any) -> Case:
    variant = Variant(SyncPolicy.DEFER, "float64", microbatches, False, False)
    return family_case(family, PLACES[place], variant, folder, **parallel)


def planted(auditor: Auditor, folder: Path, plant: Callable[..., None], place: str = "shard 2", **options: Any) -> AuditReport:
    return auditor.audit(case(folder, place, **options), PLACES[place].world_size, plants=[plant])


def test_nothing_planted_nothing_found(auditor: Auditor, tmp_path: Path) -> None:
    for place in ("shard 2", "2 x shard 2", "replicate 2"):
        report = auditor.audit(case(tmp_path, place), PLACES[place].world_size)
        assert report.passed, report.findings
        assert report.worst_gradient < 1e-12
        assert {row.what for row in report.rows} >= {"gradient", "parameter", "exp_avg", "exp_avg_sq", "buffer"}


QUIET = """
import sys
from pathlib import Path

from meshwright.audit.conduct import Auditor
from maintain.cells import LAYOUTS, Variant, family_case
from meshwright.plan.given.closed_choices import SyncPolicy

places = {place.label: place for place in LAYOUTS}
with Auditor() as auditor:
    for family, label in (("llama", "shard 2"), ("llama", "replicate 2"), ("llama", "tp 2 seq"), ("mixtral", "ep 2")):
        variant = Variant(SyncPolicy.DEFER, "float64", 2, True, "seq" not in label, True)
        report = auditor.audit(family_case(family, places[label], variant, Path(sys.argv[1])), places[label].world_size)
        assert report.passed, report.verdict
"""


@pytest.mark.thorough
def test_no_warning_on_the_way_to_a_pass(tmp_path: Path) -> None:
    """In a process of its own: pytest keeps warnings of forked workers to itself."""
    run = [sys.executable, "-W", "always", "-c", QUIET, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("plant", "place", "options", "kind", "words"),
    [
        (plants.divided_twice, "shard 2", {}, Kind.GRADIENT, "of unit model.layers.1 is 0.5 times that of one process, and right otherwise: divided by 2 (dp_shard"),
        (plants.divided_twice, "shard 4", {}, Kind.GRADIENT, "is 0.25 times that of one process, and right otherwise: divided by 4 (dp_shard"),
        (plants.never_reduced, "shard 2", {}, Kind.UNREDUCED, "of unit model.layers.1 arrived on ranks 0, 1: it is never reduced"),
        (plants.replicas_not_synchronised, "2 x shard 2", {}, Kind.UNREDUCED, "of unit model.layers.1 differs between ranks 0 and 2 and ranks 1 and 3, which should hold the same: it is not summed, or not kept in step, over dp_replicate"),
        (plants.tie_came_apart, "shard 2", {"family": "qwen2"}, Kind.TIES, "tied parameters came apart: model.embed_tokens.weight and lm_head.weight"),
        (plants.averaged_by_rank, "shard 2", {}, Kind.GRADIENT, "all 21 parameters is averaged over ranks, not over tokens: look at what divides the loss of a microbatch"),
        (plants.lost_microbatch, "shard 2", {}, Kind.GRADIENT, "is that of microbatch 2 alone: those of the others are lost"),
        (plants.local_clipping, "shard 2", {}, Kind.NORM, "each that of its own shards: not summed"),
        (plants.dropout_on_rank_1, "shard 2", {}, Kind.RANDOM, "rank 1 drew random numbers in the step (dropout"),
        (plants.data_of_rank_0_on_rank_1, "shard 2", {}, Kind.DATA, "rank 1 was fed the data of data rank 0 in step 1; it is data rank 1"),
        (plants.other_seed_on_rank_1, "shard 2", {}, Kind.DATA, "rank 1 was fed"),
        (plants.frozen_moves, "shard 2", {"freeze": ["model.embed_tokens.*"]}, Kind.FROZEN, "frozen parameters moved or got a gradient: model.embed_tokens.weight"),
        (plants.other_values_on_rank_1, "shard 2", {}, Kind.VALUES, "the ranks begin with other values than one process: model.layers.1."),
        (plants.norms_not_summed, "tp 2 seq", {}, Kind.UNREDUCED, "differs between ranks 0 and 1, which should hold the same: it is not summed, or not kept in step, over tp"),
        (plants.norms_not_summed, "tp 2 seq x shard 2", {"family": "gemma3_text"}, Kind.UNREDUCED, "it is not summed, or not kept in step, over tp"),
        (plants.query_norms_not_summed, "tp 2", {"family": "qwen3"}, Kind.UNREDUCED, "_norm.weight"),
        (plants.router_not_summed, "tp 2", {"family": "mixtral"}, Kind.UNREDUCED, "mlp.gate.weight"),
        (plants.shared_heads_not_summed, "tp 4", {}, Kind.UNREDUCED, "_proj.weight"),
        (plants.regions_not_entered, "tp 2", {}, Kind.BACKWARD, "backward diverges in model.layers.1.mlp: the gradient of its output agrees, that of its input is off by 0."),
        (plants.wrong_rotary_positions_on_rank_1, "shard 2", {}, Kind.FORWARD, "forward diverges in model.layers.1.self_attn: its inputs agree, its output is off by 0.0"),
        (plants.wrong_rotary_positions_on_rank_1, "tp 2 seq", {}, Kind.FORWARD, "forward diverges in model.layers.1.self_attn: its inputs agree, its output is off by 0.0"),
        (plants.rotary_begins_elsewhere_on_rank_1, "shard 2", {}, Kind.FORWARD, "forward diverges in model.rotary_emb: its inputs agree, its output is off by 2 on rank 1"),
        (plants.position_ids_shifted_on_rank_1, "shard 2", {}, Kind.FORWARD, "forward diverges before model.rotary_emb: all that was computed before agrees, but its input is off by"),
        (plants.wrong_head_of_a_group, "shard 2", {}, Kind.FORWARD, "forward diverges in model.layers.1.self_attn: its inputs agree, its output is off by"),
        (plants.dropped_token_in_dispatch, "ep 2", {"family": "mixtral"}, Kind.FORWARD, "forward diverges in model.layers.1.mlp.experts: its inputs agree, its output is off by 0."),
        (plants.swapped_combine_weights, "ep 2", {"family": "mixtral"}, Kind.FORWARD, "forward diverges in model.layers.1.mlp.experts: its inputs agree, its output is off by 0."),
        (plants.swapped_combine_weights, "ep 2 = tp 2", {"family": "mixtral"}, Kind.FORWARD, "forward diverges in model.layers.1.mlp.experts: its inputs agree, its output is off by 0."),
        (plants.last_word_of_a_slice_not_looked_up, "tp 2", {"model": {"vocab_size": 2048}}, Kind.FORWARD, "forward diverges in model.embed_tokens: its inputs agree"),
        (plants.last_word_of_a_slice_is_no_label, "tp 2", {"model": {"vocab_size": 2048}}, Kind.GRADIENT, "the gradient of"),
        (plants.gradient_left_from_step_1, "shard 2", {}, Kind.GRADIENT, "the gradient of model.layers.1.mlp.up_proj.weight (unit model.layers.1) is wrong in step 2 and in no step before"),
        (plants.gradient_left_from_step_1, "tp 2", {}, Kind.GRADIENT, "is wrong in step 2 and in no step before"),
        (plants.mean_of_a_microbatch, "shard 2", {}, Kind.LOSS, "in step 2 is nan, that of one process"),
        (plants.mean_of_a_microbatch, "shard 4", {"microbatches": 1}, Kind.LOSS, "not finite; a microbatch of that step has no valid token, so look for a mean over the tokens"),
        (plants.wrong_backward_in_an_mlp, "shard 2", {}, Kind.BACKWARD, "backward diverges in model.layers.1.mlp: the gradient of its output agrees, that of its input is off by 0.1 on ranks 0, 1"),
        (plants.wrong_backward_in_an_mlp, "tp 2 seq", {"activation_checkpointing": "full"}, Kind.BACKWARD, "backward diverges in model.layers.1.mlp: the gradient of its output agrees, that of its input is off by 0.1 on ranks 0, 1"),
        (plants.wrong_backward_between_modules, "shard 2", {}, Kind.BACKWARD, "backward diverges behind model.layers.0: forward agrees and so does all that backward computed before"),
        (plants.other_rate_on_rank_1, "replicate 2", {}, Kind.REPLICAS, "replicas differ: values of all 21 parameters differs between ranks 0 and 1"),
        (plants.decays_vectors, "shard 2", {}, Kind.DECAY, "rank 0 applies weight decay to vectors, or to excepted parameters: model.layers.0.input_layernorm.weight"),
        (plants.decays_biases_of_experts, "ep 2", {"family": "gpt_oss"}, Kind.DECAY, "rank 0 applies weight decay to vectors, or to excepted parameters: model.layers.0.mlp.experts.down_proj_bias, model.layers.0.mlp.experts.gate_up_proj_bias"),
        (plants.plan_decays_by_dimensions, "shard 2", {"family": "gpt_oss"}, Kind.DECAY, "rank 0 applies weight decay to vectors, or to excepted parameters: model.layers.0.mlp.experts.down_proj_bias"),
        (plants.decays_nothing, "shard 2", {}, Kind.DECAY, "rank 0 applies no weight decay to matrices: lm_head.weight"),
        (plants.gathers_again, "shard 2", {}, Kind.COLLECTIVES, "where the plan has 3 of"),
        (plants.gathers_again_in_step_2, "shard 2", {}, Kind.COLLECTIVES, "rank 0 in step 2 made"),
        (plants.buffer_on_rank_1, "shard 2", {}, Kind.VALUES, "ranks 0 and 1 begin with different values of model.rotary_emb.inv_freq"),
        (plants.buffer_on_rank_1_in_the_end, "shard 2", {}, Kind.REPLICAS, "replicas differ: the buffer of model.rotary_emb.inv_freq"),
        (plants.buffer_off_after_step_1, "shard 2", {}, Kind.STATE, "the buffers of model.rotary_emb.inv_freq differ after step 1"),
        (plants.buffer_off_after_step_1_on_rank_1, "shard 2", {}, Kind.REPLICAS, "replicas differ: the buffer of model.rotary_emb.inv_freq"),
        (plants.parameter_by_another_name, "shard 2", {}, Kind.LOST, "only one process or only the ranks have model.norm.gain, model.norm.weight"),
        (plants.evaluation_mode_on_rank_1, "shard 2", {}, Kind.MODE, "rank 1 has"),
        (plants.half_the_loss_from_step_2, "shard 2", {}, Kind.LATER, "in step 2 is"),
        (plants.mask_dropped, "cp 2", {"context_parallel": "gather"}, Kind.FORWARD, "forward diverges in model.layers.1.self_attn: its inputs agree, its output is off by"),
        (plants.keys_not_reduced, "cp 2", {"context_parallel": "gather"}, Kind.BACKWARD, "backward diverges in model.layers.1.self_attn: the gradient of its output agrees, that of its input is off by"),
        (plants.contiguous_positions_under_zigzag, "cp 2", {"context_balance": "zigzag"}, Kind.DATA, "rank 0 was fed its own sequences, but with other position_ids than one process, put together from the 2 ranks of cp"),
        (plants.labels_shifted_after_the_cut, "cp 2", {}, Kind.DATA, "rank 0 was fed its own sequences, but with other labels than one process"),
        (plants.balance_of_each_rank_of_cp, "cp 2", {"family": "mixtral", "moe": {"aux_loss": 1.0}}, Kind.BACKWARD, "backward diverges behind model.layers.1.mlp.gate: forward agrees"),
        (plants.list_of_layers_cut, "pp 2", STAGES, Kind.FORWARD, "forward diverges before model.layers.2: all that was computed before agrees, but its input is off by 1 on rank 1 (stage 1)"),
        (plants.halves_of_resharded_units, "pp 2 x shard 2", {"model": {"num_hidden_layers": 4}, "sync": "reshard_each", "pipeline": {"schedule": "zbv"}}, Kind.GRADIENT, "lacks microbatch 1, 2 of 2 (stages 1, 2, 3)"),
        (plants.keyword_dropped, "pp 2", {"pipeline": {}}, Kind.FORWARD, "forward diverges before model.layers.1: all that was computed before agrees, but its input is off by 2 on rank 1 (stage 1)"),
        (plants.tied_gradients_not_added, "pp 2", {"pipeline": {}, "family": "qwen2"}, Kind.UNREDUCED, "the gradient of model.embed_tokens.weight (unit (root)) is another one on each stage that has a copy of it: the gradients of the copies are not added (stages 0, 1)"),
        (plants.divided_by_microbatches, "pp 2", {"pipeline": {}}, Kind.GRADIENT, "is 0.5 times that of one process, and right otherwise: divided by 2 (pp or the number of microbatches)"),
        (plants.gradients_lost_between_runs, "pp 2 x shard 2", {"pipeline": {"runs_per_step": 2}, "microbatches": 4}, Kind.GRADIENT, "lacks microbatch 1, 2 of 4"),
        (plants.soft_cap_of_hidden_states, "pp 2", STAGES, Kind.FORWARD, "forward diverges before model.layers.2: all that was computed before agrees, but its input is off by"),
        (plants.alpha_applied_twice, "shard 2", {"adapter": ADAPTER}, Kind.FORWARD, "forward diverges in model.layers.1.self_attn"),
        (plants.adapter_behind_the_sum_of_slices, "tp 2", {"adapter": ADAPTER}, Kind.FORWARD, "forward diverges in model.layers.1.self_attn"),
        (plants.never_reduced, "shard 2", {"adapter": ADAPTER}, Kind.UNREDUCED, "of unit model.layers.1 arrived on ranks 0, 1: it is never reduced"),
        (plants.tie_came_apart, "shard 2", {"family": "qwen2", "adapter": {**ADAPTER, "save_modules": ["lm_head", "embed_tokens"]}}, Kind.TIES, "tied parameters came apart"),
        (plants.multiplier_on_each_stage, "pp 2", STAGES, Kind.FORWARD, "on rank 1 (stage 1)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_each_bug_gets_its_own_verdict(
    auditor: Auditor, tmp_path: Path, plant: Callable[..., None], place: str, options: dict[str, Any], kind: Kind, words: str
) -> None:
    report = planted(auditor, tmp_path, plant, place, **options)
    assert not report.passed
    first = report.findings[0]
    assert (first.kind, words in first.message) == (kind, True), [finding.message for finding in report.findings]
    assert report.verdict.startswith("FAIL: ")
    if kind in (Kind.FORWARD, Kind.BACKWARD):
        wrong = [row for row in json.loads(report.to_json())["borders"] if not row["passed"]]
        assert wrong[0]["point"]["module"] == first.names[0]
        page = Console(width=200, file=io.StringIO())
        page.print(report.explain())
        assert "Borders of modules, around the first that is wrong" in page.file.getvalue()  # type: ignore[attr-defined]
        assert not any("foreign" in finding.message for finding in report.findings)


def test_what_the_user_excepts_is_not_decayed_on_either_side(auditor: Auditor, tmp_path: Path) -> None:
    built = case(tmp_path)
    settings = built.config.optimizer.model_copy(update={"no_decay": ["lm_head.weight"]})
    excepting = Case(built.config.model_copy(update={"optimizer": settings}), built.store, built.steps)
    assert auditor.audit(excepting, 2).passed
    report = auditor.audit(excepting, 2, plants=[plants.plan_decays_by_dimensions])
    assert [finding.kind for finding in report.findings] == [Kind.DECAY]
    assert report.findings[0].message == "rank 0 applies weight decay to vectors, or to excepted parameters: lm_head.weight"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("plant", "kind", "words"),
    [
        (plants.gradient_a_percent_off, Kind.GRADIENT, "is 1.01 times that of one process"),
        (plants.wrong_backward_in_an_mlp, Kind.BACKWARD, "backward diverges in model.layers.1.mlp"),
        (plants.slower_on_every_rank, Kind.STATE, "ratio 0."),  # how far below 1 depends on what it does to the second step
        (plants.stands_still_in_step_2, Kind.STATE, "the values of"),
        (plants.norm_without_optimizer, Kind.STATE, "model.norm.weight differ after "),
        (plants.second_moment_lost, Kind.STATE, "the optimizer's exp_avg_sq"),
        (plants.decays_vectors, Kind.DECAY, "applies weight decay to vectors"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_small_bugs_are_not_taken_for_rounding_in_any_dtype(
    auditor: Auditor, tmp_path: Path, plant: Callable[..., None], kind: Kind, words: str, dtype: str
) -> None:
    variant = Variant(SyncPolicy.DEFER, dtype, 2, False, False)
    built = family_case("llama", PLACES["shard 2"], variant, tmp_path)
    report = auditor.audit(built, 2, plants=[plant])
    messages = [finding.message for finding in report.findings]
    assert any(finding.kind is kind and words in finding.message for finding in report.findings), messages
    assert report.findings[0].kind is kind


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "steps"), [("llama", 2), ("diffusion_gemma", 1)])
def test_rounding_that_a_router_makes_much_of_is_told_from_a_bug(
    auditor: Auditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, steps: int
) -> None:
    # Whether a weight lies so near to the middle that one bit matters depends on the processor; 256 bits matter on any.
    monkeypatch.setattr(conduct, "measure_drift", partial(measure_drift, bits=256))
    variant = Variant(SyncPolicy.DEFER, "bfloat16", 2, False, False)
    built = family_case(family, PLACES["shard 2"], variant, tmp_path, packing="pad")
    report = auditor.audit(built, 2, plants=[plants.last_bits])
    assert report.passed, report.verdict
    assert report.steps == steps
    assert [change.after for change in report.changes if "last bits" in change.why] == [1] * (steps == 1)


def test_a_rank_in_another_collective_is_a_report_not_a_hang(tmp_path: Path) -> None:
    with Auditor(patience=4) as auditor, pytest.raises(HangError) as error:
        planted(auditor, tmp_path, plants.another_collective_on_rank_1)
    text = str(error.value)
    assert "all_reduce" in text
    assert "all_gather" in text
    assert "rank 0" in text
    assert "rank 1" in text


@pytest.mark.thorough
def test_a_balance_loss_that_is_counted_too_often_is_found(auditor: Auditor, tmp_path: Path) -> None:
    options = {"family": "mixtral", "moe": {"aux_loss": 0.1}}
    report = planted(auditor, tmp_path, plants.balance_loss_counted_by_each_rank_of_tp, "tp 2", **options)
    assert not report.passed
    report = planted(auditor, tmp_path, plants.balance_loss_over_tokens_of_the_rank, "ep 2", **options)
    assert not report.passed
    assert report.losses[0] == pytest.approx(auditor.audit(case(tmp_path, "ep 2", **options), 2).losses[0])
