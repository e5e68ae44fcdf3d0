"""What a trace says that a rank holds is what a rank holds; a few layers say it of all; a verdict adds up."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from maintain.cells import LAYOUTS
from maintain.tiny import TINY_MODELS
from meshwright.cli.main import app
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.plan.cost.hardware import known_hardware, load_hardware
from meshwright.plan.cost.price import totals
from meshwright.trace.changes import with_values
from meshwright.trace.few_layers import Traces
from meshwright.trace.fewer import kinds_of_layers, with_fewer, world_of
from meshwright.trace.held.memory import MemoryForecast, forecast_memory, memory_moments
from meshwright.trace.layer_work import LayerWork
from meshwright.trace.live import Kind
from meshwright.trace.step import FORWARD, LOSS, UPDATE, run_step, trace_step
from meshwright.trace.time import forecast_time
from meshwright.trace.verdict import ALLOCATOR, Verdict, _candidates, fit, judge
from meshwright.trace.work import Work
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.setup import RunSetup, change_setup, make_setup
from tests.harness import run_ranks


def setup_of(world: int, family: str = "llama", layers: int | None = None, packing: str = "pack", **sections: Any) -> RunSetup:
    config = {"model_type": family, **TINY_MODELS[family].config}
    if layers is not None:
        config["num_hidden_layers"] = layers
    run = {
        "output": "runs/x",
        "model": {"config": config},
        "parallel": {"param_dtype": None, **sections.pop("parallel", {})},
        "data": {"files": ["drawn"], "sequence_length": 64, "packing": packing},
        "training": {"steps": 1, "microbatch_size": 2, "global_batch_size": 16, **sections.pop("training", {})},
        **sections,
    }
    return make_setup(RunConfig.model_validate(run), world)


def forecast(setup: RunSetup) -> MemoryForecast:
    """In a process of its own: a forecast makes process groups of a world that is not there."""
    (found,) = run_ranks(lambda _: forecast_memory(setup), 1, group=False)
    return found


# -- fake and real -----------------------------------------------------------------------------------------------------------


SIX = [place for place in LAYOUTS if place.label in ("shard 2", "replicate 2", "tp 2", "tp 2 seq", "cp 2", "2 x shard 2")]
RUNS = 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "phi3", "olmo2", "mistral"])
@pytest.mark.parametrize("place", SIX, ids=lambda place: place.label)
def test_a_rank_holds_what_the_trace_says(place: Any, family: str) -> None:
    """The lowest of a few real runs: threads of gloo let go of buffers late. None is more than 4 % above the trace."""
    parallel = {"sequence_parallel": place.sequence_parallel, "loss_parallel": False}
    setup = setup_of(place.world_size, family, layout=dict(place.sizes), parallel=parallel)
    (fake,) = run_ranks(lambda _: trace_step(setup), 1, group=False)
    real = [run_ranks(lambda _: run_step(setup, None), place.world_size)[0] for _ in range(RUNS)]
    assert {step.state for step in real} == {fake.state}
    lowest = min(step.peak for step in real)
    assert 0.96 * lowest <= fake.peak <= 1.1 * lowest
    assert list(fake.moments) == list(real[0].moments)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("adapter", [{"base": "nf4"}, {"base": "nf4", "experts": True}, {"reduce": "once"}], ids=str)
def test_a_rank_with_an_adapter_holds_what_the_trace_says(adapter: dict[str, Any]) -> None:
    family = "qwen3_moe" if "experts" in adapter else "llama"
    wide = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
    changed = {key: value for key, value in wide.items() if key in TINY_MODELS[family].config}
    model = {"config": {"model_type": family, **TINY_MODELS[family].config, **changed}}
    setup = setup_of(2, family, model=model, layout={"dp_shard": 2}, adapter={"rank": 4, **adapter})
    (fake,) = run_ranks(lambda _: trace_step(setup), 1, group=False)
    lowest = min(run_ranks(lambda _: run_step(setup, None), 2)[0].peak for _ in range(RUNS))
    assert 0.96 * lowest <= fake.peak <= 1.1 * lowest


# -- some layers for all -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"activation_checkpointing": "full", "sync": "reduce_each"}),
        ("llama", {"activation_checkpointing_layers": {"model.layers.1": "full"}, "freeze": ["model.layers.0.**"]}),
        ("deepseek_v3", {"sync": "reduce_each"}),  # a dense layer, then mixtures
        ("qwen3", {"loss_chunks": 4}),
    ],
)
def test_a_few_layers_say_what_many_hold(family: str, options: dict[str, Any]) -> None:
    setup = setup_of(4, family, layers=9, parallel={"param_dtype": "bfloat16", **options}, layout={"dp_replicate": 2})
    found = forecast(setup)
    (whole,) = run_ranks(lambda _: trace_step(with_fewer(setup, 9), device=True), 1, group=False)
    assert found.traced < 9
    assert found.peak == pytest.approx(whole.peak, rel=0.01)


PREFERENCES = {"adapter": {"rank": 4}, "training": {"objective": {"use": "preference"}}}
"""Before the step, the reference goes through the model without adapters."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", ["defer", "reduce_each"])
@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("family", "sections"),
    [
        ("llama", {}), ("llama", {"layout": {"tp": 2}}), ("llama", {"layout": {"cp": 2}}), ("llama", {"adapter": {"rank": 4}}),
        ("llama", {"adapter": {"rank": 4, "reduce": "once"}}), ("gpt2", {}), ("deepseek_v3", {}),
        ("qwen3_moe", {"layout": {"ep": 2}}), ("llama", PREFERENCES),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_layer_adds_is_by_how_much_one_more_is_more(
    family: str, sections: dict[str, Any], recomputed: str, sync: str
) -> None:
    """To the byte and to the operation: in one trace as between two, of which one has a layer more.

    With `defer`, the backward of the second layer holds the most in another microbatch where there are more layers. A layer
    adds no more to it than to the loss.
    """
    late = "backward of layer 1"
    moments = (LOSS, UPDATE) if sync == "defer" else (LOSS, late, UPDATE)
    parallel = {"param_dtype": "bfloat16", "activation_checkpointing": recomputed, "sync": sync}
    setup = setup_of(4, family, layers=10, parallel=parallel, **sections)

    def found(_: int) -> list[tuple[Any, Any]]:
        one, fewer, more = (Traces(setup) for _ in range(3))
        fewer.first, more.first = one.first + 1, one.first + 2
        kind, pairs = one.kinds[-1], list[tuple[Any, Any]]()
        for moment in moments:
            parts = [part for part in Kind if part not in (Kind.STATE, Kind.GATHERED)]  # the last layer is always gathered
            added = [more.moments[moment][part] - fewer.moments[moment][part] for part in parts]
            pairs.append((added, [one.of_layer(moment, kind)[part] for part in parts]))
        at_loss, later = (more.moments[one].total() - fewer.moments[one].total() for one in (LOSS, late))
        pairs.append((True, later <= at_loss))
        works = [traces.trace.step.work for traces in (fewer, more)]
        all_works = [sum((Counter(dict(done)) for name, done in work.items() if name != UPDATE), Counter()) for work in works]
        own, microbatches = LayerWork.of(one).layers[kind], one.trace.step.microbatches
        counted = [work for work in Work if work is not Work.UNITS]
        pairs.append(
            ([all_works[1][work] - all_works[0][work] for work in counted], [own[work] * microbatches for work in counted])
        )
        pairs.append((len(setup.plan.fsdp_units), LayerWork.of(one).on_rank(setup.plan, 0)[Work.UNITS]))
        return pairs

    (pairs,) = run_ranks(found, 1, group=False)
    for added, own in pairs:
        assert own == added


def test_adapters_outside_of_layers_are_no_share_of_a_layer() -> None:
    """Where one unit holds all adapters: what it holds grows with a layer by that layer's adapters."""

    def found(_: int) -> list[int]:
        adapter = {"rank": 4, "reduce": "once", "targets": ["q_proj", "lm_head"]}
        traces = Traces(setup_of(4, layers=10, adapter=adapter))
        rows = [row for row in traces.setup.plan.parameters if row.trainable and row.name.startswith("model.layers.4.")]
        return [traces.of_layer(UPDATE, traces.kinds[-1])[Kind.REDUCED], sum(row.reduced_bytes for row in rows)]

    ((reduced, of_rows),) = run_ranks(found, 1, group=False)
    assert 2 * reduced == of_rows  # on two ranks


def test_a_kind_of_which_no_layer_ran_in_the_trace_counts_as_the_one_that_keeps_most() -> None:
    """As with a layer that a model leaves out at random."""

    def found(_: int) -> dict[int, str]:
        traces = Traces(setup_of(2, "deepseek_v3", layers=3))
        step = traces.trace.step
        ran = {name: work for name, work in step.works[FORWARD].items() if name != "model.layers.0"}
        traces._uncompiled = replace(traces.trace, step=replace(step, works={**step.works, FORWARD: ran}))
        return traces.examples

    (examples,) = run_ranks(found, 1, group=False)
    assert examples == {0: "model.layers.1", 1: "model.layers.1"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "pattern"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 3}),  # the second to last of four layers would be a dense one
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),  # every other layer
    ],
)
def test_what_the_last_layers_hold_is_that_of_their_kind(family: str, pattern: dict[str, Any]) -> None:
    """The backward of a mixture beside that of a dense layer is no growth by a layer, and is not multiplied."""
    wide = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    model = {"config": {"model_type": family, **TINY_MODELS[family].config, "num_hidden_layers": 10, **wide, **pattern}}
    options = {"activation_checkpointing": "full", "sync": "reduce_each"}
    setup = setup_of(4, family, model=model, parallel={"param_dtype": "bfloat16", **options}, layout={"dp_replicate": 2})
    found = forecast(setup)
    (whole,) = run_ranks(lambda _: trace_step(with_fewer(setup, 10), device=True), 1, group=False)
    assert found.traced < 9
    assert found.moment.startswith("backward of layer")
    assert found.peak == pytest.approx(whole.peak, rel=0.001)


def test_kinds_of_layers() -> None:
    setup = setup_of(2, "deepseek_v3", layers=5)
    assert kinds_of_layers(setup.plan) == [0, 1, 1, 1, 1]
    assert kinds_of_layers(setup_of(2, layers=3).plan) == [0, 0, 0]
    mixed = setup_of(2, layers=4, parallel={"activation_checkpointing_layers": {"model.layers.2": "full"}})
    assert kinds_of_layers(mixed.plan) == [0, 0, 1, 0]


def test_the_smallest_world_keeps_what_a_rank_computes() -> None:
    batch = {"global_batch_size": 128}
    layout = setup_of(64, "mixtral", layout={"dp_replicate": 2, "tp": 2, "ep": 4}, training=batch).layout
    small = world_of(layout)
    assert (small.size("tp"), small.ep, small.world_size) == (2, 4, 16)
    assert small.ep_shard > 1  # experts are sharded too, as in the large one
    assert world_of(setup_of(64, training=batch).layout).world_size == 2


def test_shards_are_those_of_the_whole_world() -> None:
    for world in (4, 64):
        setup = setup_of(world, layers=8, training={"global_batch_size": 2 * world})
        found, plan = forecast(setup), totals(setup.plan)
        assert (found.parts["parameters"], found.parts["optimizer"]) == (plan.parameter_bytes, plan.optimizer_bytes)
        assert 0 <= found.parts["gradients"] <= plan.gradient_bytes
    assert found.parts["activations"] > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [{"dp_shard": 1}, {"dp_replicate": 2}, {"dp_shard": 2}], ids=str)
def test_gradients_are_no_activations(layout: dict[str, int]) -> None:
    """Those of all layers, at the end: also where nobody shards them, and FSDP only copies what it would reduce."""
    setup = setup_of(2 if 2 in layout.values() else 1, layers=8, layout=layout)
    (moments,) = run_ranks(lambda _: memory_moments(setup), 1, group=False)
    update = next(found for found in moments if found.moment == UPDATE)
    assert update.parts["gradients"] == totals(setup.plan).gradient_bytes
    assert update.parts["activations"] + update.parts["communication"] < update.parts["gradients"] / 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_a_pipeline_holds_the_activations_of_all_microbatches_alive(schedule: str) -> None:
    few, many = (
        forecast(
            setup_of(
                2, layers=8, layout={"pp": 2}, parallel={"pipeline": {"schedule": schedule}},
                training={"global_batch_size": 2 * microbatches},
            )
        )
        for microbatches in (4, 16)
    )  # fmt: skip
    grows = many.parts["activations"] > 2 * few.parts["activations"]
    assert grows == (schedule == "gpipe")
    assert sum(few.parts.values()) == few.peak


@pytest.mark.thorough
def test_a_model_of_several_stacks_is_traced_whole() -> None:
    """Fewer layers in its config would not be its first layers: those of encoder, tower and decoder are one list."""
    example = Path(__file__).parents[2] / "examples" / "diffusion_gemma_quickstart.yaml"
    setup = make_setup(load_config(example), 2)
    found = forecast(setup)
    assert found.traced == len(setup.plan.layers)
    assert found.parts["activations"] > 0


# -- the verdict -------------------------------------------------------------------------------------------------------------


def verdict(setup: RunSetup, gpu: str | Path) -> Verdict:
    (found,) = run_ranks(lambda _: judge(setup, load_hardware(str(gpu))), 1, group=False)
    return found


def device(folder: Path, **values: Any) -> Path:
    text = {**vars(load_hardware("h100")), "reserved_gib": 0, **values}
    path = folder / "device.yaml"
    path.write_text(json.dumps(text))
    return path


def test_what_fits_and_what_would_make_it_fit(tmp_path: Path) -> None:
    setup = setup_of(2, layers=6, parallel={"activation_checkpointing": "none"}, training={"microbatch_size": 4})
    fits = verdict(setup, "h100")
    assert fits.fits
    assert fits.changes == ()
    assert fits.peak_bytes == sum(fits.parts.values())
    tight = device(tmp_path, memory_gib=0.9 * (fits.peak_bytes - fits.parts["reserved"]) / 2**30)
    found = verdict(setup, tight)
    assert not found.fits
    assert len(found.changes) == 3
    assert all(change.fits and change.peak_bytes <= found.limit_bytes for change in found.changes)
    for change in found.changes:  # each is what a run with it would be told
        values = dict(override.split("=") for override in change.overrides)
        parallel = {key.partition(".")[2]: value for key, value in values.items() if key.startswith("parallel.")}
        training = {key.partition(".")[2]: int(value) for key, value in values.items() if key.startswith("training.")}
        changed = setup_of(
            2, layers=6, parallel={"activation_checkpointing": "none", **parallel}, training={"microbatch_size": 4, **training}
        )
        assert verdict(changed, tight).peak_bytes == change.peak_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_have_memory_of_their_own_stream(layout: dict[str, int], offload: bool) -> None:
    """Where they are not there yet, and on the device. Reserved memory is that of all streams."""
    setup = setup_of(2, layers=6, layout=layout, parallel={"cpu_offload": offload, "sync": "reduce_each"})

    def found(_: int) -> tuple[dict[str, int], int, int]:
        traces = Traces(setup)
        result = fit(setup, load_hardware("h100"), traces)
        held = {(one.rank, one.moment): one.parts["gradients"] for one in memory_moments(setup, traces)}
        return result.parts, held[result.rank, result.moment], held[result.rank, UPDATE]

    ((parts, there, all_of_them),) = run_ranks(found, 1, group=False)
    state = ("parameters", "gradients", "optimizer", "allocator", "reserved")
    rest = sum(size for name, size in parts.items() if name not in state)
    assert all_of_them > 0
    assert parts["allocator"] == round(ALLOCATOR * rest) + (0 if offload else max(0, all_of_them - there))


def test_compiling_is_named_where_it_makes_a_run_fit(tmp_path: Path) -> None:
    setup = setup_of(2, layers=6, parallel={"activation_checkpointing": "none"}, training={"microbatch_size": 4})
    compiled = with_values(setup.config, [("parallel.compile", True)])
    peaks = [verdict(one, "h100") for one in (setup, change_setup(setup, compiled, 2))]
    eager, less = (found.peak_bytes - found.parts["reserved"] for found in peaks)
    assert less < eager
    found = verdict(setup, device(tmp_path, memory_gib=(eager + less) / 2 / 2**30))
    assert ("parallel.compile=true",) in [change.overrides for change in found.changes]


@pytest.mark.thorough
def test_the_worst_moment_is_that_of_the_device() -> None:
    """State in host memory is held in another moment than most activations, and the allocator adds nothing to state."""
    parallel = {"cpu_offload": True, "sync": "reduce_each", "activation_checkpointing": "full"}
    training = {"microbatch_size": 1, "global_batch_size": 8}
    setup = setup_of(2, layers=4, layout={"pp": 2, "dp_shard": 1}, parallel=parallel, training=training)

    def needed(one: MemoryForecast) -> int:
        rest = sum(size for name, size in one.parts.items() if name not in ("parameters", "gradients", "optimizer"))
        return rest + round(ALLOCATOR * rest)

    def found(_: int) -> tuple[int, list[int], int]:
        traces, device = Traces(setup), replace(load_hardware("h100"), reserved_gib=0.0)
        moments = memory_moments(setup, traces)
        return fit(setup, device, traces).peak_bytes, [*map(needed, moments)], needed(forecast_memory(setup, traces))

    ((peak, of_moments, of_most_with_state),) = run_ranks(found, 1, group=False)
    assert peak == max(of_moments) > of_most_with_state


def test_where_nothing_fits_the_best_is_said(tmp_path: Path) -> None:
    found = verdict(setup_of(2, layers=6, training={"microbatch_size": 4}), device(tmp_path, memory_gib=1e-4))
    assert not found.fits
    assert found.changes
    assert not any(change.fits for change in found.changes)
    assert list(found.changes) == sorted(found.changes, key=lambda change: change.peak_bytes)


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    def on_rank(_: int) -> None:
        setup = setup_of(2)
        inner = setup.model.model.layers[0].mlp.forward
        setup.model.model.layers[0].mlp.forward = lambda hidden: inner(hidden) * float(hidden.sum())
        with pytest.raises(UnsupportedError, match=r"cannot be traced without values: it fails in model.layers.0.mlp \("):
            trace_step(setup)

    run_ranks(on_rank, 1, group=False)


# -- hardware ----------------------------------------------------------------------------------------------------------------


def test_the_devices_that_are_known() -> None:
    data_center = {"a100", "a100-40gb", "a10g", "b200", "gb200", "h100", "h20", "h200", "l4", "l40s", "mi300x"}
    assert {*data_center, "rtx-4090", "rtx-5090", "rtx-6000-ada", "rtx-pro-6000"} == set(known_hardware())
    devices = {name: load_hardware(name) for name in known_hardware()}
    assert len({device.torch_name for device in devices.values()}) == len(devices)
    for name, device in devices.items():
        assert 0.3 < device.achievable < 1, name
        assert device.attention < device.achievable or name == "mi300x", name
        (size,) = re.findall(r"(\d+) GB$", device.name)  # as its maker counts: what torch has is less, and by little
        assert 0.9 * float(size) < device.memory_gib < float(size), name
        reads = 1000 * device.hbm_tb_s / device.memory_gib  # of its whole memory, in a second
        assert 18 < reads < 60 or name == "l4", name
        assert 30 < device.bf16_tflops / device.hbm_tb_s < 500, name  # operations for a byte
        assert 1.9 < device.bf16_tflops / device.fp32_tflops <= 32, name
        assert device.nic_gb_s < device.link_gb_s < 1000 * device.hbm_tb_s, name
        assert device.host_gb_s <= device.link_gb_s or "through host" in str(device.remarks), name
        assert bool(device.remarks) == (device.link_gb_s < 100 or name in ("a100-40gb", "h20")), name
    # half rate with fp32 sums: a GeForce has less than a card of the same chip that is not
    assert devices["rtx-4090"].bf16_tflops < 0.5 * devices["rtx-6000-ada"].bf16_tflops
    assert devices["rtx-5090"].bf16_tflops < 0.5 * devices["rtx-pro-6000"].bf16_tflops


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("4090", "'rtx-4090'"),
        ("RTX_4090", "'rtx-4090'"),
        ("h100-sxm", "'h100'"),
        ("A100", "'a100'?"),
        ("rtx-4080", "'rtx-4090'"),
        ("4080", "'rtx-4090'"),
        ("b300", "'b200' or 'gb200'"),
    ],
)
def test_an_unknown_device_gets_near_names_and_all(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--gpu={name}: unknown; did you mean {near}")) as caught:
        load_hardware(name)
    assert "legal are a100, a100-40gb, a10g, b200, " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- 1", "must be a mapping"),
        ("name: x", "memory_gib is missing"),
        ("{", "is no YAML"),
        ("speed: 3", "speed: unknown key; legal are name, memory_gib"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_hardware(str(tmp_path / "x.yaml"))


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    for key, value in (
        ("memory_gib", "80 GB"),
        ("memory_gib", 0),
        ("achievable", 1.5),
        ("reserved_gib", 500),
        ("hbm_tb_s", True),
        ("gpus_per_node", 2.5),
        ("remarks", "slow"),
    ):
        with pytest.raises(ConfigError, match=key):
            load_hardware(str(device(tmp_path, **{key: value})))
    with pytest.raises(ConfigError, match="--gpu=nothing: unknown; legal are a100, "):
        load_hardware("nothing")


@pytest.mark.parametrize(
    ("world", "sections", "expected"),
    [
        (
            6,
            {"layout": {"dp_replicate": 3, "dp_shard": 2}, "training": {"global_batch_size": 24}},
            {"layout.dp_replicate": 1, "layout.dp_shard": 6},
        ),
        (4, {"layout": {"dp_replicate": 2, "dp_shard": 2, "tp": None}}, {"layout.dp_replicate": 1, "layout.dp_shard": 4}),
        (4, {"layout": {"dp_replicate": None, "dp_shard": 2}}, {"layout.tp": 2}),
        (4, {"layout": {"dp_replicate": 2, "dp_shard": 2}}, {"layout.tp": 2, "layout.dp_shard": None}),
        (2, {"training": {"microbatch_size": 9, "global_batch_size": 18}}, {"training.microbatch_size": 3}),
    ],
    ids=["three replicas", "null slices", "null replicas", "all written", "nine sequences"],
)
def test_a_change_that_would_fit_is_legal_for_any_size(world: int, sections: dict[str, Any], expected: dict[str, Any]) -> None:
    setup = setup_of(world, layers=6, **sections)
    assert expected in [dict(overrides) for overrides, _ in _candidates(setup)]
    change_setup(setup, with_values(setup.config, list(expected.items())), world, program=False)


def test_the_command_says_it() -> None:
    def on_rank(_: int) -> tuple[str, str, str]:
        example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
        runner = CliRunner()
        return tuple(
            runner.invoke(app, ["plan", example, *more]).output for more in (["--gpu", "h100"], [], ["--gpu", "h100", "--json"])
        )  # type: ignore[return-value]

    ((shown, without, as_json),) = run_ranks(on_rank, 1, group=False)
    assert "fits into NVIDIA H100 SXM 80 GB (79.1 GiB)" in " ".join(shown.split())
    assert "Whether it fits, and how long a step takes: --gpu h100" in without
    assert "tokens/s and" in shown
    answer = json.loads(as_json)
    time, found = answer["time"], answer["verdict"]
    assert time["step_seconds"] == pytest.approx(sum(time["parts"].values()))
    assert time["low"] < time["step_seconds"] < time["high"]
    assert found["fits"]
    assert found["peak_bytes"] == sum(found["parts"].values()) < found["limit_bytes"]


def test_a_card_without_fast_links_gets_remarks() -> None:
    def on_rank(_: int) -> tuple[str, ...]:
        example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
        asked = (["--gpu", "rtx-4090"], ["--gpu", "rtx-4090", "--json"])
        return tuple(CliRunner().invoke(app, ["plan", example, *more]).output for more in asked)

    ((shown, as_json),) = run_ranks(on_rank, 1, group=False)
    assert "fits into NVIDIA GeForce RTX 4090 24 GB (23.6 GiB)" in shown
    assert "What this cannot know of NVIDIA GeForce RTX 4090 24 GB:\n  no NVLink, and the driver allows no peer" in shown
    assert json.loads(as_json)["remarks"] == list(load_hardware("rtx-4090").remarks)


@pytest.mark.parametrize("other", ["--program", "--timeline"])
def test_a_forecast_beside_what_prints_none_is_refused(other: str) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "pipeline_quickstart.yaml")
    result = CliRunner().invoke(app, ["plan", example, "--gpu", "h100", other])
    with pytest.raises(ConfigError, match=f"--gpu: {other} prints no forecast; leave one of them out"):
        raise result.exception or AssertionError(result.output)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_kernels_that_are_not_here_can_be_planned(kernel: str) -> None:
    """A laptop has no flash_attn; a run is refused there."""
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    more = [f"model.attn_implementation={kernel}", "layout.cp=2", "layout.dp_shard=1", "parallel.param_dtype=bfloat16"]
    result = CliRunner().invoke(app, ["plan", example, *more, "--world-size", "2", "--gpu", "h100"])
    assert result.exit_code == 0, result.exception
    assert "fits into NVIDIA H100" in result.output


@pytest.mark.thorough
def test_experts_with_more_than_their_share() -> None:
    """Twice the tokens on a rank of ep: more activations, more products, more to receive."""

    def of(load: float) -> tuple[Verdict, float, float]:
        setup = setup_of(2, "qwen3_moe", layers=6, layout={"ep": 2})

        def both(_: int) -> tuple[Verdict, float, float]:
            traces = Traces(setup, load=load)
            time = forecast_time(setup, load_hardware("h100"), traces)
            return judge(setup, load_hardware("h100"), traces), time.parts["products"], time.parts["ep"]

        (found,) = run_ranks(both, 1, group=False)
        return found

    even, more = of(1.0), of(2.0)
    assert more[0].parts["activations"] > 1.2 * even[0].parts["activations"]
    assert more[1] > 1.1 * even[1]
    assert more[2] == pytest.approx(2 * even[2])
    result = CliRunner().invoke(
        app, ["plan", str(Path(__file__).parents[2] / "examples" / "quickstart.yaml"), "--expert-load", "2"]
    )
    with pytest.raises(ConfigError, match="--expert-load=2: is for forecasts; add --gpu"):
        raise result.exception or AssertionError(result.output)
