"""AdamW of torchao on shards: the same numbers as in one process where the blocks are the same, bytes, and other layouts."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.checkpoint import storage
from meshwright.checkpoint.state import optimizer_tensors, take_moments
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.update.flagged import local
from meshwright.distributed.update.quantized import is_quantized
from meshwright.layout import Layout
from meshwright.plan.cost.price import totals
from meshwright.plan.update.states import in_blocks
from meshwright.train.config import OptimizerConfig
from meshwright.train.host import host_lines
from meshwright.train.learning_rate import set_learning_rate
from meshwright.train.optimizer import build_optimizer
from meshwright.train.schema.optimizer_kinds import QUANTIZED
from meshwright.train.start.setup import make_setup
from tests.harness import run_ranks
from tests.train.runs import tiny_run, train, write_corpus
from tests.train.test_groups import goes_on

pytest.importorskip("torchao", reason="pip install 'meshwright[torchao]'")

RATE, STEPS = 0.01, 4
SHAPES = {"even": (64, 320), "uneven": (33, 512), "small": (8, 16), "vector": (512,)}


class Model(torch.nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, torch.nn.Parameter(tensor))


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer_of(model: Model, kind: str) -> torch.optim.Optimizer:
    from meshwright.plan.result.rows import ParameterRow

    config = OptimizerConfig(kind=kind, lr=RATE, weight_decay=0.1)  # type: ignore[arg-type]
    rows = [
        ParameterRow(name, (), SHAPES[name], "float32", "", (), SHAPES[name], 0, 0, 0, True, decayed=True, update=kind)
        for name in SHAPES
    ]
    optimizer = build_optimizer(model, config, rows)
    set_learning_rate(optimizer, RATE)
    return optimizer


def trained(kind: str, spread: Any = lambda tensor: tensor) -> tuple[Model, torch.optim.Optimizer]:
    model = Model({name: spread(tensor) for name, tensor in drawn(99).items()})
    optimizer = optimizer_of(model, kind)
    for step in range(STEPS):
        for name, gradient in drawn(step).items():
            getattr(model, name).grad = spread(gradient)
        optimizer.step()
    return model, optimizer


def on_rank(kind: str, layout: Layout, folder: Path, rank: int) -> None:
    mesh, (alone, _) = build_mesh(layout, "cpu"), trained(kind)
    tp = layout.size("tp") > 1
    axes, placements = (["dp_shard_cp", "tp"], [Shard(0), Shard(1)]) if tp else (["dp_shard_cp"], [Shard(0)])

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        own = [one if one.dim < tensor.ndim else Replicate() for one in placements]
        return distribute_tensor(tensor, mesh.submesh(axes), own)

    model, optimizer = trained(kind, spread)
    for name, parameter in model.named_parameters():
        truth, moved = getattr(alone, name).detach(), parameter.full_tensor().detach()
        if not tp or name in ("small", "vector"):
            torch.testing.assert_close(moved, truth, rtol=0, atol=1e-6)  # blocks of whole rows are those of one process
        elif name == "even":  # other blocks, other scales: bounds that were measured, as a share of the largest movement
            error = float((moved - truth).abs().max() / (truth - drawn(99)[name]).abs().max())
            assert 0 < error < {"adamw8bit": 0.5, "adamw4bit": 2.0, "adamwfp8": 0.5}[kind]
    # The bytes are those of the plan.
    for parameter in model.parameters():
        state, shape = optimizer.state[parameter], tuple(local(parameter).shape)
        block = {"adamw4bit": 128}.get(kind, 256)
        row = type("Row", (), {"local_shape": shape})
        assert in_blocks(row, {"block_size": block}) == type(local(state["exp_avg"])).__module__.startswith("torchao.")  # type: ignore[arg-type]
    # A checkpoint on this layout, read in one process, has the same moments; what is read back has the same codes.
    saved = optimizer_tensors(model, optimizer)
    storage.write(folder / "checkpoint", saved)
    before = {name: local(saved[name]).clone() for name in saved}
    take_moments(model, optimizer, saved)
    for name, value in optimizer_tensors(model, optimizer).items():
        torch.testing.assert_close(local(value), before[name], rtol=1e-6, atol=0)
    if rank == 0:
        whole = {f"optimizer.{name}.exp_avg": torch.empty(SHAPES[name]) for name in SHAPES}
        storage.read(folder / "checkpoint", whole, alone=True)
        for name in SHAPES:
            mine, part = local(saved[f"optimizer.{name}.exp_avg"]), whole[f"optimizer.{name}.exp_avg"]
            assert torch.equal(mine, part[tuple(slice(size) for size in mine.shape)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("layout", "ranks"), [(Layout(dp_shard=2), 2), (Layout(dp_shard=1, tp=2), 2)], ids=["shard", "tp"])
def test_shards_are_updated_as_in_one_process(tmp_path: Path, kind: str, layout: Layout, ranks: int) -> None:
    run_ranks(partial(on_rank, kind, layout, tmp_path), ranks)


@pytest.mark.parametrize("kind", [QUANTIZED[0], *(pytest.param(kind, marks=pytest.mark.thorough) for kind in QUANTIZED[1:])])
def test_the_plan_has_the_bytes_of_the_states(tmp_path: Path, kind: str) -> None:
    setup = make_setup(
        tiny_run(tmp_path, write_corpus(tmp_path / "words.jsonl"), f"optimizer.kind={kind}", "model.config.hidden_size=128"), 1
    )
    model = setup.model.to_empty(device="cpu")
    optimizer = build_optimizer(model, setup.config.optimizer, setup.plan.parameters)

    def size(value: Any) -> int:
        held = [getattr(value, name) for name in value.tensor_attrs] if is_quantized(value) else [value]
        return sum(one.numel() * one.element_size() for one in held)

    found = [size(value) for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert sum(found) == totals(setup.plan).optimizer_bytes
    assert any(is_quantized(value) for state in optimizer.state.values() for value in state.values())
    assert any("where a shard has" in remark for remark in host_lines(setup.config, setup.plan))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_run_resumes_on_another_layout(tmp_path: Path, kind: str) -> None:
    goes_on(tmp_path, f"optimizer.kind={kind}", "optimizer.lr=0.001", "model.config.hidden_size=128")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", QUANTIZED)
def test_experts_on_several_ranks_learn_as_in_one_process(tmp_path: Path, kind: str) -> None:
    corpus = write_corpus(tmp_path / "words.jsonl")
    sizes = "hidden_size: 128, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2"
    model = f"model.config={{model_type: mixtral, {sizes}, num_local_experts: 4, vocab_size: 300}}"
    sets = (model, f"optimizer.kind={kind}", "optimizer.lr=0.001", "training.steps=4")
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    for folder in (alone, spread):
        folder.mkdir()
    truth = train(tiny_run(alone, corpus, *sets))
    # The blocks of a rank's experts are those of one process: each expert has a multiple of a block.
    assert train(tiny_run(spread, corpus, *sets, "layout.ep=2"), 2) == pytest.approx(truth, rel=1e-4)
