"""Random initialisation: the same values in one process and on every layout, and nothing left without a value."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import ModelError
from meshwright.layout import Layout
from meshwright.models.model_config import ModelConfig
from meshwright.models.weights.build import build_on_meta, pretrained_config
from meshwright.models.weights.initial_values import derive_seed, initialize, initialize_buffers
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import refuses, run_ranks
from tests.tiny import FAMILIES, Plain, make, tiny_model

CPU = torch.device("cpu")


def layers_of(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in model.named_modules() if re.fullmatch(r".*(layers|h|blocks)\.\d+", name))


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_and_buffers_are_those_of_transformers(family: str) -> None:
    ours = tiny_model(family, meta=True, hidden_size=64) if family != "gpt2" else tiny_model(family, meta=True)
    initialize(ours, CPU, 0, layers_of(ours))
    theirs = tiny_model(family, hidden_size=64) if family != "gpt2" else tiny_model(family)
    for (name, mine), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if expected.numel() >= 1000:
            assert float(mine.detach().std()) == pytest.approx(float(expected.detach().std()), rel=0.15, abs=1e-6), name
        elif float(expected.detach().std()) == 0:
            assert torch.equal(mine, expected), name
    for (name, mine), expected in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(mine, expected), name
    if ours.config.tie_word_embeddings:
        assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    padding = ours.get_input_embeddings().padding_idx
    if padding is not None:
        assert float(ours.get_input_embeddings().weight[padding].detach().abs().max()) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "world"), [(Layout(), 2), (Layout(), 3), (Layout(dp_replicate=2), 4)])
def test_every_layout_draws_what_one_process_draws(layout: Layout, world: int) -> None:
    def on_rank(rank: int) -> None:
        for family in ("llama", "gpt2", "gemma3_text", "plain"):
            alone, _ = make(family, meta=True)
            initialize(alone, CPU, 7, layers_of(alone))
            sharded, spec = make(family, meta=True)
            plan = resolve(spec, sharded, layout, ParallelOptions(param_dtype="float32"), world_size=world)
            parallelize(sharded, plan, build_mesh(plan.layout, "cpu"))
            initialize(sharded, CPU, 7, plan.layers)
            locals_ = set()
            for (name, mine), expected in zip(sharded.named_parameters(), alone.parameters(), strict=True):
                assert isinstance(mine, DTensor)
                assert torch.equal(mine.full_tensor(), expected), (family, name)
                locals_.add(name)
            if family in ("gemma3_text", "gpt2"):
                assert sharded.get_output_embeddings().weight is sharded.get_input_embeddings().weight

    run_ranks(on_rank, world)


def test_shards_differ_between_ranks() -> None:
    """Torch's own way gives all ranks of a CPU mesh the same shard of every matrix."""

    def on_rank(rank: int) -> list[float]:
        model, spec = make("llama", meta=True)
        plan = resolve(spec, model, Layout(), ParallelOptions(), world_size=2)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        initialize(model, CPU, 0, plan.layers)
        return [float(p.to_local().double().sum()) for p in model.parameters() if p.ndim == 2]

    first, second = run_ranks(on_rank, 2)
    assert len(first) > 10
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_seeds_matter_and_modules_have_streams_of_their_own() -> None:
    def drawn(seed: int, **changes: int) -> dict[str, torch.Tensor]:
        model = tiny_model("llama", meta=True, **changes)
        initialize(model, CPU, seed, layers_of(model))
        return dict(model.named_parameters())

    base, deeper, other = drawn(0), drawn(0, num_hidden_layers=3), drawn(1)
    weight = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(base[weight], deeper[weight])
    assert not torch.equal(base[weight], other[weight])
    assert not torch.equal(base[weight], base[weight.replace("1", "0")])
    assert derive_seed(1, "a") != derive_seed(1, "b")


def test_the_callers_random_stream_is_left_alone() -> None:
    with torch.device("meta"):
        model = Plain()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    initialize(model, CPU, 0)
    assert torch.equal(torch.rand(4), expected)


def test_what_a_model_forgets_is_named() -> None:
    class Forgetful(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3))

    with torch.device("meta"):
        model = Forgetful()
    with refuses(ModelError, "model.initial_values"):
        initialize(model, CPU, 0)

    class NoReset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(2, 2), NoReset())
    with refuses(ModelError, "model.initial_values"):
        initialize(bare, CPU, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_alone_get_their_values_and_nothing_is_drawn(family: str) -> None:
    model = tiny_model(family, meta=True)
    state = torch.get_rng_state()
    initialize_buffers(model, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, mine), expected in zip(model.named_buffers(), tiny_model(family).buffers(), strict=True):
        assert torch.equal(mine, expected), name
    if model.config.tie_word_embeddings:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_evaluation_does_not_scale_weights() -> None:
    """RWKV divides some by powers of 2 then, until the next step: a checkpoint between the two would have these."""
    model_config = ModelConfig(config={"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2, "rescale_every": 1})
    model = build_on_meta(model_config, pretrained_config(model_config, {"vocab_size": 29}))
    initialize(model, CPU, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = [model.train(training)(torch.arange(6)[None]).logits for training in (True, False, True)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert torch.equal(logits[0], logits[2])


def test_what_only_a_constructor_sets_is_what_it_sets() -> None:
    def apertus() -> PreTrainedModel:
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("apertus", vocab_size=32, **sizes), dtype=torch.float32)

    with torch.device("meta"):
        model = apertus()
    before = torch.nn.Linear.__init__, torch.are_deterministic_algorithms_enabled()
    initialize(model, CPU, 0)
    assert before == (torch.nn.Linear.__init__, torch.are_deterministic_algorithms_enabled())
    expected = apertus()
    slope = "model.layers.1.mlp.act_fn.alpha_p"  # of xIELU: no _init_weights names it
    for name, mine in (*model.named_parameters(), *model.named_buffers()):
        if "act_fn" in name:
            assert torch.equal(mine, {**dict(expected.named_parameters()), **dict(expected.named_buffers())}[name]), name
    assert bool(model.get_parameter(slope).isfinite().all())


def test_what_only_a_constructor_draws_has_a_stream_of_its_own() -> None:
    def drawn(seed: int, layers: int = 2) -> dict[str, torch.Tensor]:
        config = AutoConfig.for_model("openai-gpt", vocab_size=32, n_embd=16, n_layer=layers, n_head=2, n_positions=8)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        initialize(model, CPU, seed)
        return dict(model.named_parameters())

    base, deeper, other = drawn(0), drawn(0, 3), drawn(1)
    matrix = "transformer.h.1.mlp.c_fc.weight"  # a Conv1D, which _init_weights leaves to its constructor
    assert float(base[matrix].detach().std()) == pytest.approx(0.02, rel=0.15)
    assert torch.equal(base[matrix], deeper[matrix])
    assert not torch.equal(base[matrix], other[matrix])
    assert not torch.equal(base[matrix], base[matrix.replace("1", "0", 1)])


def test_memory_that_a_constructor_does_not_set_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def unset(self: nn.Module, nf: int, nx: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))
        self.nf, self.nx = nf, nx

    monkeypatch.setattr(Conv1D, "__init__", unset)
    config = AutoConfig.for_model("openai-gpt", vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with refuses(ModelError, "model.initial_values") as raised:
        initialize(model, CPU, 0)
    assert "c_fc.weight" in str(raised.value)
    assert "bias" not in str(raised.value)
