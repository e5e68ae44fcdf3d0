"""What compiled layers keep for backward is what torch's compiler keeps."""

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from meshwright.errors import UnsupportedError
from meshwright.plan.given.names import nearest
from meshwright.plan.result.program import Compile
from meshwright.trace.few_layers import Traces
from meshwright.trace.held.compiled import _forward_of, _kept, as_compiled
from meshwright.trace.held.memory import memory_moments
from meshwright.trace.live import Kind
from meshwright.trace.step import BEFORE_LOSS, FORWARD, LOSS, UPDATE, StepTrace, prepared_step
from meshwright.train.start.setup import RunSetup
from tests.harness import run_ranks
from tests.trace.test_memory import setup_of


def compiled(family: str, rows: int = 2, world: int = 2, **sections: Any) -> RunSetup:
    parallel = {"compile": True, **sections.pop("parallel", {})}
    return setup_of(world, family, packing="pad", parallel=parallel, training={"microbatch_size": rows}, **sections)


def spared(setup: RunSetup, *, device: bool = True) -> list[int]:
    """What layers keep less, one of each kind; in a process of its own."""

    def found(_: int) -> list[int]:
        traces = Traces(setup, device=device)
        before, after = (step.of_layers[BEFORE_LOSS] for step in (traces._uncompiled.step, traces.trace.step))
        return [before[name][Kind.ACTIVATIONS] - after[name][Kind.ACTIVATIONS] for name in traces.examples.values()]

    (result,) = run_ranks(found, 1, group=False)
    return result


def really_kept(rank: int, setup: RunSetup, names: list[str]) -> list[int]:
    """The bytes that autograd keeps of some modules in a step with values."""
    step, found = prepared_step(setup, "cpu", None), dict[str, int]()

    def called(name: str, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with _kept(module) as kept:
            result = forward(*args, **kwargs)
        found.setdefault(name, sum(kept.values()))
        return result

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_forward_of(setup.model.get_submodule(name), partial(called, name)))
        step()
    return [found[name] for name in names]


SLICED: dict[str, Any] = {"layout": {"tp": 2}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "sections"),
    [
        ("llama", {}), ("gpt2", {}), ("gemma3_text", {}), ("llama", SLICED), ("gpt2", SLICED),
        ("llama", SLICED | {"parallel": {"sequence_parallel": False}}), ("llama", {"adapter": {"rank": 4}}),
        ("deepseek_v3", {}), ("qwen3_moe", {}), ("qwen3_moe", {"layout": {"ep": 2}}),
    ],
    ids=str,
)  # fmt: skip
def test_layers_keep_what_torch_keeps_once_they_are_compiled(family: str, sections: dict[str, Any]) -> None:
    """As two ranks really do, whose layers dynamo traces and torch's partitioner cuts. Mixtures are compiled in parts.

    What is there once, and not for each sequence, such as Gemma's weights of norms with one added, is counted for each.
    """
    setup = compiled(family, **sections)
    names = [action.module for action in setup.plan.program if isinstance(action, Compile)]
    kept = []
    for changes in ({"compile": False}, {"compile_backend": "aot_eager_decomp_partition"}):
        parallel = {**sections.get("parallel", {}), **changes}
        kept.append(run_ranks(really_kept, 2, compiled(family, **{**sections, "parallel": parallel}), names)[0])
    layers = Counter[str]()
    for name, before, after in zip(names, *kept, strict=True):
        layers[nearest(f"{name}.", setup.plan.layers)] += before - after
    ours = spared(setup, device=False)
    assert min(ours) > 0
    assert sorted({*layers.values()}) == pytest.approx(sorted({*ours}), rel=0.005)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sections", [{}, {"layout": {"pp": 2}}, {"adapter": {"rank": 4}}], ids=str)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_few_compiled_layers_say_what_many_hold(family: str, sections: dict[str, Any]) -> None:
    setup = compiled(family, layers=9, **sections)

    def found(_: int) -> list[tuple[str, int, int]]:
        few, whole = Traces(setup), Traces(setup)
        whole.first = 9
        assert few.first < 9
        known, other = ({(one.rank, one.moment): one.peak for one in memory_moments(setup, own)} for own in (few, whole))
        # A traced layer between the first and the last ones stands for others than itself.
        return [(moment, size, other[rank, moment]) for (rank, moment), size in known.items() if "layers." not in moment]

    (moments,) = run_ranks(found, 1, group=False)
    assert len(moments) >= 6
    for moment, few, whole in moments:
        assert few == pytest.approx(whole, rel=0.01), moment


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"activation_checkpointing": "full"}},  # keeps its input
        {"parallel": {"activation_checkpointing": "selective"}},
        {"layout": {"cp": 2}},  # attention is in no graph
    ],
    ids=str,
)
def test_what_the_compiler_does_not_cut_is_kept(sections: dict[str, Any]) -> None:
    assert spared(compiled("llama", **sections)) == [0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=str)
def test_a_pass_without_gradients_says_nothing(adapter: Any) -> None:
    """A reference goes through the layers first."""
    sections = {"training": {"objective": {"use": "preference"}, "microbatch_size": 2}}
    (ours,) = spared(setup_of(2, packing="pad", parallel={"compile": True}, adapter=adapter, **sections))
    assert ours > 0


def test_a_microbatch_of_which_a_sequence_cannot_be_run_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError("model.values", "an odd number of sequences")

    monkeypatch.setattr("meshwright.trace.kept_traces.spared_by_compiler", refuse)
    assert spared(compiled("llama", layers=3)) == [0]


def test_more_sequences_keep_so_many_times_less() -> None:
    one, four = (spared(compiled("llama", rows))[0] for rows in (1, 4))
    assert four == 4 * one > 0


def test_a_layer_at_work_holds_what_it_did() -> None:
    """In forward the last one, in backward its own; what is over holds nothing that could be less."""
    layers = ("a", "b", "c")
    held = {Kind.ACTIVATIONS: 100, Kind.LOGITS: 7}
    step = StepTrace(
        moments=dict.fromkeys((FORWARD, LOSS, *layers, UPDATE), held),
        works={}, microbatches=1, noted={BEFORE_LOSS: held}, of_layers={LOSS: {"b": held}, "b": {"a": held, "b": held}},
        state=0, batch=0, peak=0,
    )  # fmt: skip
    found = as_compiled(step, layers, {"a": 1, "b": 2, "c": 4})
    moments = {name: 100 - of_moment[Kind.ACTIVATIONS] for name, of_moment in found.moments.items()}
    assert moments == {FORWARD: 3, LOSS: 7, "a": 0, "b": 1, "c": 3, UPDATE: 0}
    assert found.noted[BEFORE_LOSS] == {Kind.ACTIVATIONS: 93, Kind.LOGITS: 7}
    of_layers = {
        moment: {name: 100 - of[Kind.ACTIVATIONS] for name, of in own.items()} for moment, own in found.of_layers.items()
    }
    assert of_layers == {LOSS: {"b": 2}, "b": {"a": 1, "b": 0}}
