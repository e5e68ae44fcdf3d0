"""Wan of diffusers: a tiny real WanTransformer3DModel on several ranks against one process, gradient by gradient."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.audit.precision import KeepFloat64
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import ModelError, PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import get_parallelization_strategy, spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import whole


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Here, once, for all ranks that are forked from this process."""
    pytest.importorskip("diffusers", reason="needs the extra [diffusers]").WanTransformer3DModel  # noqa: B018


SAMPLES, WORDS, IMAGE_TOKENS = 4, 6, 3
TINY: dict[str, Any] = {
    "num_attention_heads": 3,  # tp 2 does not divide them, and need not
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 37,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
IMAGE: dict[str, Any] = {"image_dim": 20, "added_kv_proj_dim": 36}


def wan(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(**{**TINY, **changes}).to(dtype)
    for parameter in model.parameters():  # none of zeros or ones only, which would hide what is wrong behind them
        parameter.data.add_(0.1 * torch.randn(parameter.shape).to(dtype))
    return model


def batch(image: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(SAMPLES, *shape, generator=generator).to(dtype)

    found = {
        "hidden_states": draw(4, 2, 4, 4),
        "timestep": torch.tensor([999, 3, 450, 71]),
        "encoder_hidden_states": draw(512 if image else WORDS, 16),  # diffusers fixes the length of the text next to an image
        "target": draw(4, 2, 4, 4),
    }
    return {**found, "encoder_hidden_states_image": draw(IMAGE_TOKENS, 20)} if image else found


def summed_loss(model: nn.Module, values: dict[str, torch.Tensor]) -> torch.Tensor:
    given = {name: value for name, value in values.items() if name != "target"}
    return ((model(**given, return_dict=False)[0] - values["target"]) ** 2).sum()


LAYOUTS = [
    (2, Layout(tp=2, dp_shard=1)),
    (2, Layout(dp_shard=2)),
    (4, Layout(tp=2, dp_shard=2)),
    (3, Layout(tp=3, dp_shard=1)),
]


def worst_error(ranks: int, layout: Layout, dtype: torch.dtype, changes: dict[str, Any], **options: Any) -> float:
    """Of all gradients, relative to the largest entry of each."""

    def on_rank(rank: int) -> float:
        alone, model = wan(dtype, **changes), wan(dtype, **changes)
        name = str(dtype).removeprefix("torch.")
        plan = resolve(spec_of(model, name), model, layout, ParallelOptions(param_dtype=name, reduce_dtype=name, **options))
        mesh = build_mesh(layout, "cpu")
        get_parallelization_strategy(model).carry_out(model, plan, mesh)
        values = batch("image_dim" in changes, dtype)
        share = SAMPLES // layout.size("dp")
        mine = {key: value[mesh.rank("dp") * share :][:share] for key, value in values.items()}
        with KeepFloat64() if dtype is torch.float64 else nullcontext():
            loss = summed_loss(model, mine)
            loss.backward()
            expected = summed_loss(alone, values)
            expected.backward()
        torch.testing.assert_close(mesh.sum(loss.detach()), expected.detach(), rtol=1e-5, atol=0)
        worst = 0.0
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert theirs.grad.abs().max() > 0, name
            worst = max(worst, float((whole(ours.grad) - theirs.grad).abs().max() / theirs.grad.abs().max()))
        return worst

    return max(run_ranks(on_rank, ranks))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=lambda value: str(value).replace(" ", "-"))
@pytest.mark.parametrize("changes", [{}, IMAGE], ids=["text", "image"])
def test_gradients_are_those_of_one_process(ranks: int, layout: Layout, changes: dict[str, Any]) -> None:
    assert worst_error(ranks, layout, torch.float32, changes) < 1e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["none", "full", "submodule", "selective"])
@pytest.mark.parametrize("changes", [{}, IMAGE], ids=["text", "image"])
def test_gradients_in_float64_whatever_is_recomputed(mode: str, changes: dict[str, Any]) -> None:
    assert worst_error(4, Layout(tp=2, dp_shard=2), torch.float64, changes, activation_checkpointing=mode) < 1e-10


def test_what_is_split_and_what_is_whole() -> None:
    model = wan(**IMAGE)
    plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1))
    split = {row.module: row.style for row in plan.tensor_parallel}
    assert {name for name in split if "attn" in name} == set()
    assert split["condition_embedder.time_proj"] == "colwise_gather_output"
    assert split["proj_out"] == "rowwise_split_input"
    pairs = [name for name, style in split.items() if style == "colwise"]
    assert len(pairs) == sum(style == "rowwise" for style in split.values()) == 2 + 3
    fp32 = {unit.name for unit in plan.units if unit.param_dtype == "float32"}
    assert {"condition_embedder.time_embedder", "blocks.0.norm2", "condition_embedder.image_embedder.norm1"} <= fp32
    assert plan.unit("condition_embedder").kind == "unit"


def test_bf16_runs_with_its_fp32_modules() -> None:
    def on_rank(rank: int) -> float:
        model = wan()
        plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions())
        get_parallelization_strategy(model).carry_out(model, plan, build_mesh(plan.layout, "cpu"))
        values = batch(False, torch.float32)
        loss = summed_loss(model, values)
        loss.backward()
        expected = float(summed_loss(wan(), values))
        assert all(bool(whole(parameter.grad).isfinite().all()) for parameter in model.parameters())
        return abs(float(loss) - expected) / expected

    assert all(0 < error < 0.02 for error in run_ranks(on_rank, 2))


def test_what_cannot_be_split_is_an_error() -> None:
    model = wan(ffn_dim=5)
    with pytest.raises(PlanError, match=r"tp=4: 'blocks\.0\.ffn\.net\.0\.proj\.weight' has 5 entries to slice"):
        resolve(spec_of(model), model, Layout(tp=4, dp_shard=1))
    model.blocks[0].attn1.fuse_projections()
    with pytest.raises(ModelError, match=r"blocks\.0\.attn1: holds its projections twice.*unfuse_projections"):
        spec_of(model)


def of_this_name(embedders: tuple[str, ...], layers: str = "blocks") -> nn.Module:
    """A model of the same name that is not of diffusers: with some of the embedders, or without any."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear_1, self.linear_2 = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear_2(nn.functional.gelu(self.linear_1(x)))

    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(self.proj(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = nn.Module()
            self.ffn.net = nn.Sequential(Gelu(), nn.Identity(), nn.Linear(12, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.ffn.net(x)

    class WanTransformer3DModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if embedders:
                self.condition_embedder = nn.ModuleDict({name: Pair() for name in embedders})
            setattr(self, layers, nn.ModuleList([Block(), Block()]))
            self.proj_out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in embedders:
                x = x + self.condition_embedder[name](x)
            for block in getattr(self, layers):
                x = block(x)
            return self.proj_out(x)

    torch.manual_seed(0)
    return WanTransformer3DModel()


@pytest.mark.parametrize(
    ("embedders", "layers"), [((), "blocks"), (("text_embedder",), "blocks"), (("time_embedder", "other"), "layers")]
)
def test_a_class_of_this_name_is_taken_as_it_is(embedders: tuple[str, ...], layers: str) -> None:
    def on_rank(rank: int) -> dict[str, str]:
        alone, model = of_this_name(embedders, layers), of_this_name(embedders, layers)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in alone.named_parameters()]
        plan = resolve(spec_of(model, None), model, Layout(tp=2, dp_shard=1), ParallelOptions(param_dtype=None))
        get_parallelization_strategy(model).carry_out(model, plan, build_mesh(plan.layout, "cpu"))
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
        for one in (alone, model):
            one(x).square().sum().backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, msg=name)
        assert [unit.name for unit in plan.units if unit.kind == "layer"] == [f"{layers}.0", f"{layers}.1"]
        return {row.module: row.style for row in plan.tensor_parallel}

    split = run_ranks(on_rank, 2)[0]
    pairs = [name for name in embedders if name != "other"]
    assert {name for name in split if "embedder" in name} == {
        f"condition_embedder.{name}.linear_{index}" for name in pairs for index in (1, 2)
    }
    assert split["proj_out"] == "rowwise_split_input"
