"""Work is counted as the formulas say it; time adds up, and falls and rises as it should."""

from collections import Counter
from dataclasses import replace

import pytest

from maintain.tiny import TINY_MODELS
from meshwright.layout import Layout
from meshwright.plan.cost.hardware import load_hardware
from meshwright.plan.cost.links import collective_seconds
from meshwright.plan.cost.price import totals_of_rank
from meshwright.trace.few_layers import Traces
from meshwright.trace.kept_traces import TraceStore
from meshwright.trace.layer_work import PER_OPERATOR, PER_UNIT, PER_UNIT_AND_STEP, SHAPES, WATCHED, LayerWork, Rates
from meshwright.trace.step import FORWARD, LOSS, UPDATE, StepTrace, trace_step
from meshwright.trace.time import TimeForecast, forecast_time
from meshwright.trace.work import Work
from meshwright.train.forecast import operations_of_step
from meshwright.train.start.setup import RunSetup
from tests.harness import ROTATIONS, run_ranks
from tests.trace.test_memory import setup_of

H100 = load_hardware("h100")
TOKENS = 128


def traced(setup: RunSetup) -> StepTrace:
    (found,) = run_ranks(lambda _: trace_step(setup, device=True), 1, group=False)
    return found


def forecast(setup: RunSetup) -> TimeForecast:
    (found,) = run_ranks(lambda _: forecast_time(setup, H100), 1, group=False)
    return found


@pytest.mark.parametrize(("ranks", "sync", "copies"), [(2, "reshard_each", 4), (2, "defer", 1), (1, "reshard_each", 2 * 8)])
def test_shards_in_host_memory_are_copied_without_other_ranks_too(ranks: int, sync: str, copies: int) -> None:
    """FSDP2 copies what nothing shards to the device in place of a gather (`wait_for_unshard` of torch), on a single rank again
    for each backward.
    """
    layout = {"dp_replicate": ranks, "dp_shard": 1}
    setup = setup_of(ranks, layers=2, layout=layout, parallel={"cpu_offload": True, "sync": sync})
    shards = totals_of_rank(setup.plan, 0)
    moved = (copies * shards.parameter_bytes + shards.gradient_bytes) / (H100.host_gb_s * 1e9)
    assert setup.plan.options.microbatches == 8 // ranks
    assert forecast(setup).parts["host"] == pytest.approx(moved)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("recomputation", "forwards"), [("none", 1), ("full", 2)])
def test_the_work_of_a_dense_model(recomputation: str, forwards: int) -> None:
    """Two operations for each weight and token forward, four backward, two more where a layer is recomputed."""
    setup = setup_of(2, layers=3, packing="pad", parallel={"activation_checkpointing": recomputation})
    config, trace = setup.model.config, traced(setup)
    layer = sum(row.numel for row in setup.plan.parameters if row.name.startswith("model.layers.1.") and len(row.shape) == 2)
    head = config.vocab_size * config.hidden_size
    last, microbatches = config.hidden_size * config.intermediate_size, trace.microbatches
    forward = microbatches * 3 * 2 * layer * TOKENS
    assert trace.work[FORWARD][Work.PRODUCTS_FP32] == pytest.approx(forward, rel=ROTATIONS)
    assert trace.work[LOSS][Work.PRODUCTS_FP32] == microbatches * 6 * head * TOKENS
    for name in setup.plan.layers:
        again = 2 * (forwards - 1) * (layer - last)  # torch stops before the last product, whose output nobody needs
        assert trace.work[name][Work.PRODUCTS_FP32] == microbatches * (4 * layer + again) * TOKENS
    scores = config.num_attention_heads * config.hidden_size // config.num_attention_heads * TOKENS * 64 // 2  # half of 64 keys
    assert trace.work[FORWARD][Work.ATTENTION] == microbatches * 3 * 4 * scores
    assert trace.work[UPDATE][Work.PRODUCTS_FP32] == 0


def test_experts_compute_the_tokens_that_are_routed_to_them() -> None:
    def of(rows: int) -> StepTrace:
        batch = {"microbatch_size": rows, "global_batch_size": 2 * rows}
        return traced(setup_of(2, "qwen3_moe", layers=2, packing="pad", parallel={"param_dtype": "bfloat16"}, training=batch))

    few, many = of(1), of(2)
    assert many.work[FORWARD][Work.PRODUCTS] == 2 * few.work[FORWARD][Work.PRODUCTS] > 0


def test_a_few_layers_say_the_time_of_many() -> None:
    setup = setup_of(2, layers=9)
    found = forecast(setup)

    def of_all(_: int) -> TimeForecast:
        traces = Traces(setup)
        traces.first = 9  # all layers are traced
        return forecast_time(setup, H100, traces)

    (whole,) = run_ranks(of_all, 1, group=False)
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)
    assert found.step_seconds == pytest.approx(sum(found.parts.values()))
    assert found.mfu == pytest.approx(found.model_tflops_per_device / H100.fp32_tflops)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_small_models_have_the_work_of_their_layers(layers: int) -> None:
    found = forecast(setup_of(2, layers=layers, parallel={"compile": True}))
    more = forecast(setup_of(2, layers=9))
    assert 0 < found.parts["products"] < more.parts["products"]
    trace = traced(setup_of(2, layers=layers))
    products = sum(work[Work.PRODUCTS_FP32] for work in trace.work.values())
    peak = H100.fp32_tflops * H100.achievable * SHAPES * 1e12
    assert found.parts["products"] == pytest.approx(products / trace.microbatches * 4 / peak)


@pytest.mark.thorough
def test_recomputation_costs_time_and_no_model_operations() -> None:
    none, full = (forecast(setup_of(2, layers=6, parallel={"activation_checkpointing": mode})) for mode in ("none", "full"))
    assert full.parts["products"] > 1.15 * none.parts["products"]
    assert full.model_tflops_per_device * full.step_seconds == pytest.approx(none.model_tflops_per_device * none.step_seconds)


def test_a_pipeline_waits() -> None:
    found = {
        schedule: forecast(
            setup_of(2, layers=8, layout={"pp": 2}, parallel={"pipeline": {"schedule": schedule}})
        )
        for schedule in ("1f1b", "interleaved_1f1b")
    }  # fmt: skip
    assert found["1f1b"].parts["bubble"] > found["interleaved_1f1b"].parts["bubble"] > 0
    one = forecast(setup_of(2, layers=8))
    operations = [item.model_tflops_per_device * item.step_seconds for item in (one, found["1f1b"])]
    assert operations[0] == pytest.approx(operations[1], rel=1e-6)


def test_the_update_is_that_of_the_rank_that_stores_the_most() -> None:
    """Here the last rank of `pp` computes the most, for the head of a large vocabulary, and the first one has most layers."""
    model = {"config": {"model_type": "llama", **TINY_MODELS["llama"].config, "num_hidden_layers": 8, "vocab_size": 65536}}
    setup = setup_of(2, model=model, layout={"pp": 2}, parallel={"pipeline": {"cuts": [7]}, "cpu_offload": False})
    quick = replace(H100, launch_us=0.0)
    (found,) = run_ranks(lambda _: forecast_time(setup, quick), 1, group=False)
    sizes = [totals_of_rank(setup.plan, rank) for rank in (0, 1)]
    first, last = (2 * size.parameter_bytes + size.gradient_bytes + 2 * size.optimizer_bytes for size in sizes)
    assert found.rank == 1
    assert first > last
    assert found.parts["update"] == pytest.approx(first / Rates.of(setup, quick).bandwidth)


@pytest.mark.parametrize("recomputation", ["none", "selective"])
def test_a_step_with_little_to_compute_takes_what_the_host_takes(recomputation: str) -> None:
    setup = setup_of(2, layers=3, parallel={"activation_checkpointing": recomputation})

    def found(_: int) -> tuple[TimeForecast, Counter[Work]]:
        return forecast_time(setup, H100), LayerWork.of(Traces(setup)).on_rank(setup.plan, 0)

    ((time, work),) = run_ranks(found, 1, group=False)
    microbatches = setup.plan.options.microbatches
    assert work[Work.UNITS] == 4  # three layers and the root
    operators = PER_OPERATOR + (WATCHED if recomputation == "selective" else 0)
    starts = operators * work[Work.STARTED] + (PER_UNIT + PER_UNIT_AND_STEP / microbatches) * work[Work.UNITS]
    spent = sum(time.parts[name] for name in ("products", "attention", "elementwise", "launches"))
    assert spent == pytest.approx(microbatches * starts * H100.launch_us * 1e-6)


@pytest.mark.thorough
def test_stages_of_several_passes_have_the_work_of_their_layers_once() -> None:
    """The stages of a rank share their layers, and the traced work of a layer is that of all passes."""
    model = {"config": {"model_type": "diffusion_gemma", **TINY_MODELS["diffusion_gemma"].config}}
    run = {"packing": "pad", "model": model, "training": {"objective": "block_diffusion", "microbatch_size": 1}}
    sync, schedule = {"sync": "defer"}, {"pipeline": {"schedule": "interleaved_1f1b"}}
    whole = setup_of(2, "diffusion_gemma", layout={"dp_shard": 2}, parallel=sync, **run)
    staged = setup_of(4, "diffusion_gemma", layout={"pp": 2, "dp_shard": 2}, parallel=sync | schedule, **run)

    def work(setup: RunSetup) -> Counter[Work]:
        found = LayerWork.of(Traces(setup))
        return sum((found.on_rank(setup.plan, rank) for rank in range(setup.layout.size("pp"))), Counter[Work]())

    one, two = (run_ranks(lambda _, setup=setup: work(setup), 1, group=False)[0] for setup in (whole, staged))
    assert two[Work.PRODUCTS_FP32] <= one[Work.PRODUCTS_FP32] * 1.001


def test_collectives() -> None:
    """In a node a link, between nodes the cards of all ranks of the node that take part; an all-reduce goes round twice."""
    layout = Layout(dp_shard=16, tp=8).resolve(128)
    size, reached = 2**30, 0.8e9
    inside = collective_seconds(layout, H100, "tp", "all_gather", 1, size)
    assert inside == pytest.approx(3 * 8e-6 + size * 7 / 8 / (450 * reached))
    assert collective_seconds(layout, H100, "tp", "all_reduce", 1, size) == pytest.approx(2 * inside)
    between = collective_seconds(layout, H100, "dp_shard_cp", "all_gather", 1, size)
    assert between == pytest.approx(4 * 15e-6 + size * 15 / 16 / (50 * reached))  # one rank of the group in each node
    wide = Layout(dp_shard=16).resolve(16)
    assert collective_seconds(wide, H100, "dp_shard_cp", "all_gather", 1, size) < between / 7  # eight cards
    assert collective_seconds(layout, H100, "cp", "all_gather", 5, size) == 0
    slow = replace(H100, nic_gb_s=25)
    assert collective_seconds(layout, slow, "dp_shard_cp", "all_gather", 1, size) > 1.9 * between


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "phi3", "gpt2", "olmo2"])
def test_operations_by_formula_and_by_trace(family: str) -> None:
    """The formula knows matrices and attentions; of a causal kernel with a mask, both count half of the scores."""
    setup = setup_of(2, family, packing="pad", parallel={"loss_chunks": 0})
    (counted,) = run_ranks(lambda _: LayerWork.of(Traces(setup)).whole_model(), 1, group=False)
    formula = operations_of_step(setup)
    assert formula == pytest.approx(counted * 2 * setup.plan.options.microbatches, rel=0.02)


def test_one_trace_tells_the_work_of_each_kind_of_layer() -> None:
    """DeepSeek-V3 begins with a dense layer. Experts of a mixture compute more than it does here."""
    setup = setup_of(2, "deepseek_v3", layers=9)

    def found(_: int) -> tuple[int, list[float], list[float]]:
        store = TraceStore(setup)
        few = LayerWork.of(Traces(setup, store=store))
        traces = Traces(setup)
        traces.first = 9
        whole = LayerWork.of(traces)
        dense, mixture = ([work.layers[kind][Work.MOVED] for work in (few, whole)] for kind in (0, 1))
        return store.made, dense, mixture

    ((made, dense, mixture),) = run_ranks(found, 1, group=False)
    assert made <= 1
    assert dense[0] == dense[1] != mixture[0] == mixture[1]


def test_what_is_frozen_has_no_gradient_of_its_own() -> None:
    whole = operations_of_step(setup_of(2))
    setup = setup_of(2, parallel={"freeze": ["model.layers.**"]})
    frozen = sum(row.numel for row in setup.plan.parameters if not row.trainable and len(row.shape) == 2)
    assert whole is not None
    assert operations_of_step(setup) == whole - 2 * frozen * 16 * 64


@pytest.mark.thorough
def test_compute_by_kind_of_layer() -> None:
    """DeepSeek-V3 begins with a dense layer."""
    found = forecast(setup_of(2, "deepseek_v3", layers=6))
    compute = sum(found.parts[name] for name in ("products", "attention", "elementwise"))
    assert sum(found.layers.values()) == pytest.approx(compute)
    assert list(found.layers) == ["1 x model.layers.0", "5 x model.layers.1", "the rest"]
    assert all(seconds > 0 for seconds in found.layers.values())
    stages = forecast(setup_of(2, layers=8, layout={"pp": 2}))
    assert next(label.partition(" x ")[0] for label in stages.layers) == "4"
