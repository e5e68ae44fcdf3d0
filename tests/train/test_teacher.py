"""A teacher beside the model: on its own layout it gives the losses and gradients that its columns in files give."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshwright.audit.case import digest
from meshwright.audit.conduct import audit
from meshwright.data.rows.columns import ROUTED_EXPERTS, TensorColumn
from meshwright.data.store import TokenStore
from meshwright.data.tokenizer import train_tokenizer
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.pipeline.stage_parts import models_of
from meshwright.distributed.slices import whole_tensor
from meshwright.errors import ConfigError, MeshwrightError, ModelError
from meshwright.plan.cost.hardware import load_hardware
from meshwright.plan.cost.price import totals
from meshwright.trace.few_layers import Traces
from meshwright.trace.layer_work import SHAPES
from meshwright.trace.show import show_time
from meshwright.trace.time import TimeForecast, forecast_time
from meshwright.trace.verdict import judge
from meshwright.train.config import RunConfig
from meshwright.train.engine import teacher as engine_teacher
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.resume import changes
from meshwright.train.start.setup import make_setup
from meshwright.train.start.teacher_setup import with_teacher
from meshwright.train.trainer import Trainer
from tests.diffusion_gemma import tiny_diffusion_gemma
from tests.harness import ROTATIONS, refuses, run_ranks
from tests.tiny import tiny_model
from tests.train.runs import CPU, eval_losses, tiny_run, train, trainer_on_rank, write_corpus

K = 5
FP64 = ("parallel.param_dtype=float64", "parallel.reduce_dtype=float64", "model.dtype=float64")
COLUMNS = {
    "teacher_ids": {"per": "token", "width": K, "dtype": "int64"},
    "teacher_log_probs": {"per": "token", "width": K},
}
"""The same from files."""

CELLS = {
    "tp 2, teacher pp 2": (2, ("layout.tp=2", "parallel.loss_parallel=true", "teacher.layout={pp: 2}")),
    "shard 2": (2, ()),
    "pp 2, teacher tp 2": (2, ("layout.pp=2", "teacher.layout={tp: 2}")),
}
PRODUCTS: dict[str, tuple[Any, ...]] = {
    "one": (1, ()),
    "shard 2, packed": (2, (), ("data.packing=pack",)),
    "tp 2, in chunks": (2, ("layout.tp=2", "parallel.loss_parallel=true", "parallel.loss_chunks=3", "teacher.layout={pp: 2}")),
    "tp 2, adapter": (2, ("layout.tp=2", "teacher.layout={pp: 2}"), ("adapter={rank: 2}",)),
    "shard 2, teacher replicated": (2, ("teacher.layout={dp_replicate: 2, dp_shard: 1}",)),
    "tp 2 x shard 2, teacher pp 2 x shard 2": (4, ("layout.tp=2", "teacher.layout={pp: 2}")),
    "pp 2 x shard 2, teacher tp 2 x replicate 2": (
        4,
        ("layout.pp=2", "teacher.layout={tp: 2, dp_replicate: 2, dp_shard: 1}"),
    ),
    "cp 2 x tp 2, teacher cp 2 x pp 2": (4, ("layout.cp=2", "layout.tp=2", "teacher.layout={cp: 2, pp: 2}")),
    "pp 2 x cp 2": (4, ("layout.pp=2", "layout.cp=2")),
    "tp 2 seq, teacher pp 2": (2, ("layout.tp=2", "parallel.sequence_parallel=true", "teacher.layout={pp: 2}")),
}


def teacher_in(folder: Path, family: str = "llama") -> PreTrainedModel:
    model = tiny_model(family, seed=7, vocab_size=320)  # wider than the vocabulary of the run
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # it is sure of some words
    model.save_pretrained(folder)
    model.set_experts_implementation("eager")  # others have no float64
    return model.double().eval()


def run(folder: Path, *overrides: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    corpus = write_corpus(folder / "words.jsonl", documents=40)
    sets = ("data.packing=pad", "data.long_documents=truncate", "data.sequence_length=64", *FP64)
    objective = "training.objective={use: distillation, with: {divergence: js, next_token_weight: 0.2}}"
    return tiny_run(folder, corpus, *sets, objective, *overrides)


def said(model: PreTrainedModel, store: TokenStore) -> dict[str, tuple[TensorColumn, np.ndarray]]:
    """The columns of a teacher by the plain model of transformers, a document after another."""
    ids, logs = (np.zeros((store.index.tokens, K), dtype) for dtype in (np.int64, np.float32))
    for begin, end in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        tokens = torch.from_numpy(store.tokens[begin:end].astype(np.int64))[None]
        with torch.no_grad():
            top = torch.log_softmax(model(input_ids=tokens).logits[0, :-1], -1).topk(K)
        ids[begin + 1 : end], logs[begin + 1 : end] = top.indices.numpy(), top.values.numpy()
    pairs = {"teacher_ids": ids, "teacher_log_probs": logs}
    return {name: (TensorColumn(**COLUMNS[name]), values) for name, values in pairs.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor).clone()


def found_of(trainer: Trainer) -> dict[str, Any]:
    """The loss of a step, its gradients and an evaluation."""
    gathered = trainer.run_microbatches(trainer.microbatches(0))
    named = [pair for part in models_of(trainer.model) for pair in part.named_parameters()]
    gradients = {name: whole(parameter.grad) for name, parameter in named if parameter.grad is not None}
    return {"means": {name: float(value) for name, value in trainer.means(gathered).items()}, "gradients": gradients}


def online_on_rank(rank: int, config: RunConfig, store: Path) -> dict[str, Any]:
    trainer = trainer_on_rank(config, store)
    teacher = trainer.runner.teach.model  # type: ignore[union-attr]
    before = [digest(parameter) for parameter in teacher.parameters()]
    found = found_of(trainer)
    trainer.train_step()
    found["eval"] = trainer.measure()
    assert [digest(parameter) for parameter in teacher.parameters()] == before
    assert not teacher.training
    batch = trainer.batches.to_device(trainer.microbatches(0)[0])
    routes = torch.zeros((*batch["labels"].shape, 2), dtype=torch.int64)  # of the model that learns
    (plain,), (routed,) = (trainer.runner.teach([one]) for one in (batch, {**batch, ROUTED_EXPERTS: routes}))  # type: ignore[misc]
    assert all(torch.equal(plain[name], routed[name]) for name in COLUMNS)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not any("teacher" in name for name in trainer.tensors_to_save())
    return found


def offline_on_rank(rank: int, config: RunConfig, store: Path, columns: Any) -> dict[str, Any]:
    trainer = Trainer(make_setup(config, 1), TokenStore.open(store).beside(columns), CPU)
    found = found_of(trainer)
    trainer.train_step()
    found["eval"] = trainer.measure()
    return found


def compare(folder: Path, ranks: int, overrides: tuple[str, ...], both: tuple[str, ...] = (), *, family: str = "llama") -> None:
    """Compare a step, and the evaluation after it, with one process that reads columns; ``both`` has overrides of both."""
    teacher = teacher_in(folder / "teacher", family)
    config = run(folder, f"teacher.path={folder}/teacher", f"teacher.top_k={K}", *overrides, *both)
    store = prepare_run(config, ranks)[2]
    online = run_ranks(online_on_rank, ranks, config, store.directory)
    content = run(folder / "files", *both).model_dump(mode="json")
    content["data"]["tensors"] = COLUMNS
    alone = RunConfig.model_validate(content)
    offline = run_ranks(offline_on_rank, 1, alone, store.directory, said(teacher, store))[0]
    gradients: dict[str, torch.Tensor] = {}
    for found in online:
        assert found["means"] == pytest.approx(offline["means"], abs=1e-11)
        assert found["eval"] == pytest.approx(offline["eval"], abs=1e-11)
        gradients |= found["gradients"]
    assert gradients.keys() == offline["gradients"].keys()
    for name, gradient in offline["gradients"].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-11, msg=name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("label", CELLS)
def test_a_teacher_gives_what_its_columns_give(tmp_path: Path, label: str) -> None:
    compare(tmp_path, *CELLS[label])


@pytest.mark.thorough
@pytest.mark.parametrize("label", PRODUCTS)
def test_products(tmp_path: Path, label: str) -> None:
    compare(tmp_path, *PRODUCTS[label])


@pytest.mark.thorough
def test_a_teacher_of_experts(tmp_path: Path) -> None:
    compare(tmp_path, 2, ("teacher.layout={ep: 2}",), family="mixtral")


def wrong_ranks_on_rank(rank: int, config: RunConfig, store: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_teacher, "mesh_beside", lambda mesh, layout: build_mesh(layout, mesh.device_type))
        return found_of(trainer_on_rank(config, store))


@pytest.mark.thorough
def test_ranks_in_their_plain_order_would_say_what_belongs_to_others(tmp_path: Path) -> None:
    """With other `pp` and `tp`, a mesh like that of a run gives a rank the data of another; the comparison notices it."""
    teacher_in(tmp_path / "teacher")
    layout = ("layout.tp=2", "teacher.layout={pp: 2}")
    config = run(tmp_path, f"teacher.path={tmp_path}/teacher", f"teacher.top_k={K}", *layout)
    store = prepare_run(config, 4)[2].directory
    right, wrong = (run_ranks(one, 4, config, store)[0]["means"] for one in (online_on_rank, wrong_ranks_on_rank))
    assert wrong["next_token_loss"] == pytest.approx(right["next_token_loss"], abs=1e-11)
    assert wrong["distillation_loss"] != pytest.approx(right["distillation_loss"], rel=1e-3)


@pytest.mark.thorough
def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher_in(tmp_path / "teacher")
    sets = (f"teacher.path={tmp_path}/teacher", "data.packing=pack", "training.eval_every=3", "checkpoint.every=3")
    sets = (*sets, "schedule.kind=constant")
    whole = run(tmp_path / "whole", *sets)
    at_once = train(whole, 2)
    assert len(at_once) == 6
    assert eval_losses(whole)[-1] < eval_losses(whole)[0]
    train(run(tmp_path / "cut", *sets, "training.steps=3"), 2)
    again = train(run(tmp_path / "cut", *sets, "layout.tp=2", "teacher.layout={pp: 2}", "training.global_batch_size=8"), 2)
    assert again == pytest.approx(at_once, rel=1e-9)
    assert "teacher" not in capsys.readouterr().out
    weights = tmp_path / "teacher" / "model.safetensors"
    save_file({name: 1.01 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    prepare_run(run(tmp_path / "cut", *sets), 2)
    assert "teacher: its weights are others than when the run began" in capsys.readouterr().out


def test_a_plan_says_what_a_teacher_costs(tmp_path: Path) -> None:
    teacher_in(tmp_path / "teacher")
    config = run(tmp_path, f"teacher.path={tmp_path}/teacher", "teacher.top_k=7", "teacher.dtype=float32")
    plain = make_setup(config, 2)
    setup = with_teacher(plain)
    assert setup.teacher is not None
    numbers = sum(row.numel for row in setup.teacher.plan.parameters)
    first, each, said_words = setup.plan.remarks[len(plain.plan.remarks) :]
    assert f"{numbers:,} parameters that are not trained, on dp_shard=2" in first
    assert each.startswith("before each step, one forward more of all its microbatches, without gradient")
    assert "7 words for each token: 21.0 KiB on a rank in a step" in said_words  # 12 bytes * 7 * 64 * 2 * 2 microbatches
    total = totals(setup.teacher.plan)
    assert total.parameter_bytes == pytest.approx(4 * numbers / 2, rel=0.01)
    hardware = load_hardware("h100")
    more, less = judge(setup, hardware), judge(plain, hardware)
    assert more.parts["teacher"] == total.parameter_bytes + total.gathered_peak_bytes + 12 * 7 * 64 * 2 * 2
    assert more.peak_bytes - less.peak_bytes == more.parts["teacher"]
    assert with_teacher(setup) is setup


@pytest.mark.parametrize(
    ("layout", "share", "axes"),
    [
        ("dp_shard: 2", 1.0, {"data ranks"}),
        pytest.param("tp: 2, dp_shard: 1", 0.5, {"tp"}, marks=pytest.mark.thorough),
        pytest.param("pp: 2, dp_shard: 1", None, {"pp", "bubble"}, marks=pytest.mark.thorough),
    ],
)
def test_a_forecast_has_the_pass_of_a_teacher(tmp_path: Path, layout: str, share: float | None, axes: set[str]) -> None:
    """Two operations for each weight and token, of the layers and the head; the rest of the step is as without it."""
    model, hardware = teacher_in(tmp_path / "teacher"), load_hardware("h100")
    fp32 = [f"{key}=float32" for key in ("parallel.param_dtype", "parallel.reduce_dtype", "model.dtype")]
    own = "layout.dp_shard=2" if "dp_shard: 2" in layout else "layout.tp=2"
    sets = (f"teacher={{path: {tmp_path}/teacher, dtype: float32, layout: {{{layout}}}}}", own, *fp32)
    setup = with_teacher(make_setup(run(tmp_path, *sets), 2))

    def forecasts(_: int) -> list[TimeForecast]:
        traces = Traces(setup)
        return [forecast_time(one, hardware, traces) for one in (setup, replace(setup, teacher=None))]

    ((found, plain),) = run_ranks(forecasts, 1, group=False)
    weights = sum(one.numel() for name, one in model.named_parameters() if one.ndim == 2 and "embed" not in name)
    data_ranks, microbatches = setup.layout.size("dp"), setup.plan.options.microbatches
    assert microbatches * data_ranks == 4  # each of 2 sequences of 64
    reached = hardware.fp32_tflops * hardware.achievable * SHAPES * 1e12
    all_of_it = microbatches * 2 * weights * 2 * 64 / reached
    if share is None:  # the fullest stage has some layers and the head
        assert all_of_it / 2 < found.teacher["products"] < all_of_it
    else:
        assert found.teacher["products"] == pytest.approx(share * all_of_it, rel=ROTATIONS)
    assert all(found.teacher[axis] > 0 for axis in axes)
    assert found.parts["teacher"] == pytest.approx(sum(found.teacher.values()))
    others = {name: seconds for name, seconds in found.parts.items() if name not in ("teacher", "beyond")}
    assert others == pytest.approx({name: seconds for name, seconds in plain.parts.items() if name != "beyond"})
    longer = found.parts["teacher"] * (1 + hardware.beyond)
    assert found.step_seconds - plain.step_seconds == pytest.approx(longer)
    assert found.tokens_per_second_per_device < plain.tokens_per_second_per_device
    assert sum(found.all_together.values()) == pytest.approx(found.step_seconds)
    assert found.all_together["products"] == pytest.approx(plain.parts["products"] + found.teacher["products"])
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(show_time(found, calibrated=False))
    assert "teacher" in console.export_text()


def test_a_teacher_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    teacher_in(tmp_path / "teacher")
    path = f"teacher.path={tmp_path}/teacher"

    def refused(code: str, *overrides: str, ranks: int = 2, teacher: str = path) -> str:
        with refuses(MeshwrightError, code) as caught:
            with_teacher(make_setup(run(tmp_path, teacher, *overrides), ranks))
        return str(caught.value)

    assert "does not read teacher_ids and teacher_log_probs" in refused("objective.teacher", "training.objective=next_token")
    columns = f"data.tensors={json.dumps(COLUMNS)}"
    assert "rows have a column teacher_ids" in refused("objective.teacher", columns, f"teacher.top_k={K}")
    assert "legal is pp x tp = 2" in refused("objective.teacher", "layout.tp=2", "teacher.layout={dp_shard: 2}")
    assert "legal is that of the run, 2" in refused("objective.teacher", "layout.cp=2", "teacher.layout={tp: 2}")
    assert "teacher: tp=3" in refused("layout.ranks", "layout.tp=2", "teacher.layout={tp: 3}")
    assert "teacher.top_k=321: the teacher has 320 words" in refused("objective.teacher", "teacher.top_k=321")
    assert "teacher.path=" in refused("config.directory", teacher=f"teacher.path={tmp_path}/absent")
    assert "teacher: data.sequence_length=" in refused("data.sequence_length", "data.sequence_length=80", LONGER)
    experts = teacher_in(tmp_path / "experts", "mixtral").config.num_local_experts
    assert experts % 2 == 0
    ep = ("layout.tp=2", "teacher.layout={pp: 2, ep: 2}")
    assert "legal is 1, or the sizes of the run" in refused(
        "objective.teacher", *ep, ranks=4, teacher=f"teacher.path={tmp_path}/experts"
    )
    tiny_diffusion_gemma(seed=7, vocab_size=320).save_pretrained(tmp_path / "other")
    assert "is not made to say the next token" in refused("objective.teacher", teacher=f"teacher.path={tmp_path}/other")


LONGER = "model.config.max_position_embeddings=80"


def test_another_vocabulary_or_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    folder, path = tmp_path / "teacher", f"teacher.path={tmp_path}/teacher"
    teacher_in(folder)
    with refuses(ConfigError, "objective.teacher") as caught:
        prepare_run(run(tmp_path, path, "tokenizer.vocab_size=330"), 2)
    assert "has 320 words, and the tokenizer of the run 330 tokens" in str(caught.value)
    other = train_tokenizer(["other words " * 40, *map(str, range(500))], 300)
    other.save_pretrained(folder)
    with refuses(ConfigError, "objective.teacher") as caught:
        prepare_run(run(tmp_path, path), 2)
    assert "its tokenizer gives other ids than that of the run" in str(caught.value)
    prepare_run(run(tmp_path / "own", path, f"tokenizer={{path: {folder}}}"), 2)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with refuses(ModelError, "model.weights.files") as missing:
        prepare_run(run(tmp_path / "own", path, f"tokenizer={{path: {folder}}}"), 2)
    assert str(missing.value).startswith("teacher: ")


def test_another_teacher_than_before_is_said() -> None:
    before, now = {"teacher": {"path": "a", "top_k": 8, "dtype": None}}, {"teacher": {"path": "b", "top_k": 8, "dtype": None}}
    assert changes(before, now) == ["teacher.path: a in the checkpoint, b now"]
    assert changes(before, {"teacher": None}) == ["teacher.path: a in the checkpoint, none now"]
    assert changes(before, before) == []


@pytest.mark.thorough
def test_a_teacher_is_audited_with_words_that_are_made_up(tmp_path: Path) -> None:
    """What is proven is the layout of the model that learns; the teacher does not run, and need not be there."""
    config = run(tmp_path, "teacher.path=absent", f"teacher.top_k={K}", "layout.tp=2", "parallel.loss_parallel=true")
    report = audit(config, nproc=2, steps=1)
    assert report.passed, report.verdict
