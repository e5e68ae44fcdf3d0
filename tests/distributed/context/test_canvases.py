"""Attention over canvases that ranks share, against attention over whole ones; and a plan's bytes against those of a step."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import PERFORMERS
from meshwright.distributed.context import ring
from meshwright.distributed.context.attend import attend, attend_over_ranks, share_of
from meshwright.distributed.context.canvases import Canvases, cut_columns, let_canvases_be_known
from meshwright.distributed.context.sequences import context_parallel as shared
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import UnsupportedError
from meshwright.layout import Layout
from meshwright.models.diffusion_gemma.block_diffusion import BlockDiffusion
from meshwright.models.diffusion_gemma.block_diffusion_options import DiffusionConfig
from meshwright.models.diffusion_gemma.canvas import HIDDEN
from meshwright.models.diffusion_gemma.masks import sees
from meshwright.models.specs.registry import spec_of
from meshwright.models.token_loss import IGNORE
from meshwright.plan.axes.context.sharing import attention_program
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.given.closed_choices import ContextBalance, ContextMethod
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.context.canvas_rows import CanvasRow, columns_of_rank
from meshwright.plan.result.program import Attend
from meshwright.train.start.run_plan import with_canvases
from tests.diffusion_gemma import TOKENS, texts, tiny_diffusion_gemma
from tests.harness import refuses, run_ranks

CLEAN, LENGTH = 24, 5
BLOCKS = torch.tensor(
    [
        [4] * 5 + [9] * 5 + [14] * 5 + [19] * 5,  # no cut between ranks is the border of a block
        [0] * 5 + [5] * 3 + [HIDDEN] * 12,  # one that begins the sequence, one that ends early, and nothing
    ]
)
COLUMNS = BLOCKS.shape[1]
METHODS = tuple(ContextMethod)


def drawn() -> dict[str, torch.Tensor]:
    """Queries of a canvas; keys and values of the clean sequence, and of the canvas. In fp64, as the function gets them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (2, 4, COLUMNS, 6), "key": (2, 2, CLEAN, 6), "value": (2, 2, CLEAN, 3),
        "own_key": (2, 2, COLUMNS, 6), "own_value": (2, 2, COLUMNS, 3),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def written_out(tensors: dict[str, torch.Tensor], window: int | None) -> torch.Tensor:
    """[batch, columns, heads, size], with a mask that is made entry by entry."""
    seen = torch.zeros(2, COLUMNS, CLEAN + COLUMNS, dtype=torch.bool)
    for row, column in itertools.product(range(2), range(COLUMNS)):
        block = int(BLOCKS[row, column])
        first = 0 if window is None else max(0, block - (window - 1))
        for place in range(first, block):
            seen[row, column, place] = True
        for other in range(COLUMNS):
            seen[row, column, CLEAN + other] = int(BLOCKS[row, other]) == block
    keys, values = (torch.cat([tensors[name], tensors[f"own_{name}"]], dim=2) for name in ("key", "value"))
    keys, values = (one.repeat_interleave(2, dim=1) for one in (keys, values))
    scores = (tensors["query"] @ keys.transpose(2, 3) * 0.3).masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2)


def columns_of(share: Any, tensor: torch.Tensor, count: int) -> list[int]:
    """The numbers of the columns, or positions, that a rank has; -1: padding."""
    return cut_columns(share, torch.arange(count)[None], -1)[0].tolist()


def check(rank: int, ranks: int, method: ContextMethod) -> None:
    mesh = build_mesh(Layout(dp_shard=1, cp=ranks), "cpu")
    for balance, window, kernel, recompute in itertools.product(ContextBalance, (None, 4), ("sdpa", "eager"), (False, True)):
        tensors = drawn()
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        truth = written_out(leaves, window)
        weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        weights[1, 8:] = 0  # hidden columns, which padding joins
        truth.backward(weights)
        row = CanvasRow("", method, kernel, 4, 2, 6, 3, False, window, False, recompute)
        module = nn.Module()
        attend_over_ranks(module, Attend(row, balance), mesh)
        share = share_of(module)
        positions, columns = columns_of(share, tensors["key"], CLEAN), columns_of(share, tensors["query"], COLUMNS)
        parts = {
            name: (tensor[:, :, positions] if name in ("key", "value") else tensor[:, :, columns]).clone().requires_grad_()
            for name, tensor in tensors.items()
        }
        missing = -COLUMNS % share.multiple
        blocks = nn.functional.pad(BLOCKS, (0, missing), value=HIDDEN)
        place = torch.zeros(2, len(columns), dtype=torch.int64)
        let_canvases_be_known(place, Canvases(CLEAN, COLUMNS + missing, partial(sees, blocks)))
        key, value = (torch.cat([parts[name], parts[f"own_{name}"]], dim=2) for name in ("key", "value"))
        output, _ = attend(module, parts["query"], key, value, None, scaling=0.3, position_ids=place, is_causal=False)
        real = [at for at, column in enumerate(columns) if column >= 0]
        here = [column for column in columns if column >= 0]
        learned = weights[:, here].abs().sum((2, 3)) > 0
        assert (output[:, real] - truth[:, here])[learned].abs().max() < 1e-14
        (output[:, real] * weights[:, here]).sum().backward()
        for name, part in parts.items():
            numbers = positions if name in ("key", "value") else columns
            assert part.grad is not None
            own = [at for at, number in enumerate(numbers) if number >= 0]
            error = (part.grad[:, :, own] - leaves[name].grad[:, :, [numbers[at] for at in own]]).abs().max()  # type: ignore
            assert error < 1e-13, (name, balance, window, kernel)
        with refuses(UnsupportedError, "cp.positions"):
            attend(module, parts["query"], key, value, None, scaling=0.3, position_ids=place.clone())


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_share_a_canvas(method: ContextMethod) -> None:
    run_ranks(check, 2, 2, method)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_four_ranks_share_a_canvas(method: ContextMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "MOST_SCORES", 1)
    monkeypatch.setattr(ring, "LEAST_QUERIES", 2)
    run_ranks(check, 4, 4, method)


def test_what_a_rank_has_of_a_canvas() -> None:
    row = CanvasRow("", ContextMethod.GATHER, "sdpa", 4, 2, 6, 6, False, 4, False, False, canvas=(20, 24))
    assert columns_of_rank(row, 2 * 24 // 4, 4, 8) == 2 * 24 // 4  # 20 columns are padded to 24
    assert columns_of_rank(row, 2 * 24 // 2, 2, 4) == 2 * 20 // 2
    assert row.mask == "own block, clean text before it, the last 3"


@pytest.mark.parametrize("length", [1, 2, 8])
def test_no_canvas_of_a_batch_is_cut_as_a_sequence_is(length: int) -> None:
    """With blocks of one column there are as many as tokens but one."""
    objective = BlockDiffusion(DiffusionConfig(), 0, length, TOKENS["vocab_size"], 16)
    [made] = objective.training([texts(2, 16)], [range(2)])
    canvases = [name for name in made if name.startswith("canvas_")]
    assert len(canvases) == 4
    assert all(made[name].shape == (2, -(-15 // length), length) for name in canvases)
    assert objective.counts([made])[0] == int((made["canvas_labels"] != IGNORE).sum())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["all_blocks", "one_block"])
@pytest.mark.parametrize("method", METHODS)
def test_collectives_and_bytes_are_those_of_the_plan(method: ContextMethod, mode: str) -> None:
    def on_rank(rank: int) -> None:
        model = tiny_diffusion_gemma()
        objective = BlockDiffusion(DiffusionConfig(mode=mode), 0, 8, TOKENS["vocab_size"], 32)
        spec = with_canvases(spec_of(model), objective)
        options = ParallelOptions(context_parallel=method, tokens=2 * 32 // 2, param_dtype="float32")
        plan = resolve(spec, model, Layout(dp_shard=1, cp=2), options)
        mesh = build_mesh(plan.layout, "cpu")
        for action in attention_program(plan):  # without units, whose collectives are over the same ranks
            PERFORMERS[type(action)](model, action, mesh)
        objective.attach(model)
        [batch] = objective.training([texts(2, 32)], [range(2)])
        with shared(plan, mesh, batch) as shard, CommCounter() as counter:
            sum(objective.sums(model, shard)).backward()  # type: ignore[union-attr]
        due = {item.kind: (item.calls, item.size) for item in activation_traffic(plan) if item.axis == "cp"}
        assert {kind: (counter.counts[kind], counter.bytes[kind]) for kind in counter.counts} == due
        assert sum(objective.counts([shard])) == (rank == 0) * int((batch["canvas_labels"] != IGNORE).sum()) + int(
            (shard["labels"] != IGNORE).sum()
        )

    run_ranks(on_rank, 2)
