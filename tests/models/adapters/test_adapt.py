"""Which matrices get an adapter, what is frozen and in which dtype, and what is refused."""

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from maintain.tiny import TINY_MODELS
from meshwright.errors import ConfigError, ModelError, PlanError, UnsupportedError
from meshwright.layout import Layout
from meshwright.models.adapters.adapt import adapt, initialize_adapters, merge, unit_of_adapters, without_adapters
from meshwright.models.adapters.adapter_files import is_adapter_name, write_adapter
from meshwright.models.model_config import AdapterConfig
from meshwright.models.reading.read_weights import read_by_others
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.tiny import batches, logits_of, make, summed_loss, tiny_model

LAYER = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(family: str = "llama", param_dtype: str | None = None, meta: bool = True, **options: Any) -> nn.Module:
    model = tiny_model(family, meta=meta, **options.pop("config", {}))
    adapt(model, AdapterConfig(**{"rank": 3, "alpha": 6, **options}), param_dtype)
    return model


def ends(model: nn.Module) -> set[str]:
    """The last components of the names of the matrices that have an adapter."""
    return {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize(
    ("family", "targets", "found"),
    [
        ("llama", "all-linear", LAYER),
        ("qwen3_moe", "all-linear", LAYER),  # a dense MLP too; no router, no head
        ("gpt2", "all-linear", {"c_attn", "c_proj", "c_fc"}),  # stored transposed
        ("llama", ["q_proj", "lm_head"], {"q_proj", "lm_head"}),
        ("llama", ["embed_tokens"], {"embed_tokens"}),
        ("llama", ["model.layers.*.mlp.**"], {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_targets(family: str, targets: Any, found: set[str]) -> None:
    model = adapted(family, targets=targets)
    assert ends(model) == found
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"targets": ["q_prj"]},
            r"adapter\.targets: 'q_prj' matches no matrix; did you mean 'q_proj'\? legal are all-linear, down",
        ),
        (
            {"targets": ["lm_head"], "config": {"tie_word_embeddings": True}},
            r"'lm_head.weight' is also 'model.embed_tokens.weight', which would compute without the adapter",
        ),
        (
            {"targets": ["lm_head", "embed_tokens"], "config": {"tie_word_embeddings": True}},
            r"'lm_head.weight', of a module of another kind, which cannot share its adapter; name neither",
        ),
        ({"targets": ["embed_tokens"], "kind": "dora"}, r"'model.embed_tokens' is an embedding, which has no dora"),
        (
            {"targets": ["lm_head"], "save_modules": ["lm_head"]},
            r"adapter\.save_modules: 'lm_head' is trained whole, and is among adapter\.targets; name it in one of them",
        ),
        ({"save_modules": ["head"]}, r"adapter\.save_modules: 'head' is no module of LlamaForCausalLM"),
        (
            {"save_modules": ["lm_head"], "config": {"tie_word_embeddings": True}},
            r"'lm_head.weight' is tied to 'model.embed_tokens.weight'; name both, so that they stay tied, or neither",
        ),
    ],
)
def test_names_that_do_not_fit_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        adapted(**options)


def test_tied_modules_are_trained_together() -> None:
    model = adapted(save_modules=["lm_head", "embed_tokens"], config={"tie_word_embeddings": True})
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name}
    assert trained == {"model.embed_tokens.weight"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_frozen_parameters_have_the_dtype_of_compute_and_trained_ones_fp32() -> None:
    model = adapted(param_dtype="bfloat16", save_modules=["lm_head"])
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    plan = resolve(spec_of(model), model, Layout(dp_shard=2), ParallelOptions(param_dtype="bfloat16"))
    rows = {row.name: row for row in plan.parameters}
    assert not rows["model.layers.0.self_attn.q_proj.base_layer.weight"].trainable
    assert rows["model.layers.0.self_attn.q_proj.lora_A.default.weight"].trainable
    assert rows["lm_head.weight"].trainable


def test_without_its_wrappers_a_model_has_the_names_of_its_files() -> None:
    model, plain = adapted(), tiny_model("llama", meta=True)
    with without_adapters(model):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert ends(model) == LAYER


def over(plain: nn.Module, family: str, **options: Any) -> tuple[nn.Module, AdapterConfig]:
    """A model with the weights of a plain one, and a new adapter."""
    config = AdapterConfig(**{"rank": 3, "alpha": 6, **options})
    model = make(family, meta=True)[0]
    adapt(model, config, None)
    with without_adapters(model):
        model.to_empty(device="cpu")
        model.tie_weights()
        model.load_state_dict(plain.state_dict())
        for own, other in zip(model.buffers(), plain.buffers(), strict=True):
            own.copy_(other)
    initialize_adapters(model, torch.device("cpu"), 0)
    return model, config


def draw(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_name(name):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


ADAPTERS = [
    ("llama", {"targets": ["embed_tokens", "lm_head", "q_proj"]}),
    *((family, {"kind": kind, "scaling": "rs"}) for family in ("llama", "gpt2") for kind in ("lora", "dora")),
    *((family, {"experts": True}) for family in TINY_MODELS if TINY_MODELS[family].sparse and family != "diffusion_gemma"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "options"), ADAPTERS, ids=str)
def test_a_new_adapter_changes_nothing_and_others_compute_the_same_in_peft_and_merged(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    plain = make(family, seed=3)[0]
    model, config = over(plain, family, **options)
    (batch,) = batches(1, length=12)
    torch.testing.assert_close(summed_loss(model, batch), summed_loss(plain, batch), rtol=1e-5, atol=1e-5)
    draw(model)
    before = logits_of(model, batch["input_ids"])
    assert (before - logits_of(plain, batch["input_ids"])).abs().max() > 1e-2
    write_adapter(model, config, None, tmp_path)
    beside = peft.PeftModel.from_pretrained(copy.deepcopy(plain), str(tmp_path))
    torch.testing.assert_close(logits_of(beside, batch["input_ids"]), before, rtol=1e-6, atol=1e-6)
    again, _ = over(plain, family, **options)
    initialize_adapters(again, torch.device("cpu"), 0, path=str(tmp_path))
    torch.testing.assert_close(logits_of(again, batch["input_ids"]), before, rtol=0, atol=0)
    merge(model)
    assert not ends(model)
    assert not any(is_adapter_name(name) for name, _ in model.named_parameters())
    torch.testing.assert_close(logits_of(model, batch["input_ids"]), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora", "experts"])
def test_modules_that_share_a_matrix_share_one_adapter(kind: str, tmp_path: Path) -> None:
    """DiffusionGemma has its matrices in both of its stacks."""
    plain = make("diffusion_gemma", seed=3)[0]
    options: dict[str, Any] = {"experts": True} if kind == "experts" else {"kind": kind}
    model, config = over(plain, "diffusion_gemma", **options)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_adapter_name(name):
            names.setdefault(id(parameter), []).append(name)
    assert names
    assert all(len(shared) == 2 and "encoder" in shared[0] and "decoder" in shared[1] for shared in names.values())
    draw(model)
    write_adapter(model, config, None, tmp_path)
    adapted = model.model.decoder.layers[0].self_attn.q_proj
    delta = adapted.scaling["default"] * adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    expected = plain.model.decoder.layers[0].self_attn.q_proj.weight + delta
    merge(model)
    if kind != "dora":
        torch.testing.assert_close(model.model.decoder.layers[0].self_attn.q_proj.weight, expected)
    again, _ = over(plain, "diffusion_gemma", **options)
    initialize_adapters(again, torch.device("cpu"), 0, path=str(tmp_path))
    merge(again)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name

    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "decoder" in name)
    save_file({**tensors, name: tensors[name] + 1}, file)
    fresh, _ = over(plain, "diffusion_gemma", **options)
    with pytest.raises(ModelError, match=r"has two values; DiffusionGemma.* shares it with model\.encoder\.language_model"):
        initialize_adapters(fresh, torch.device("cpu"), 0, path=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"experts": True}, r"adapter\.experts: LlamaForCausalLM has no experts with the interface of transformers"),
        ({"experts": True, "kind": "dora"}, r"adapter\.experts: kind: dora is not for experts"),
        ({"experts": True, "dropout": 0.1}, r"adapter\.experts: dropout: 0\.1 is not for experts"),
    ],
)
def test_adapters_of_experts_that_cannot_be_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=problem):
        adapted(**options)


@pytest.mark.parametrize(
    ("family", "packed", "whole"),
    [
        ("llama", LAYER, {"lm_head"}),
        ("qwen3_moe", LAYER | {"gate_up_proj", "down_proj"}, {"lm_head", "gate"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}, {"lm_head"}),
        ("nemotron_h", {"q_proj", "in_proj", "up_proj", "down_proj"}, {"out_proj"}),  # which kernels of Mamba read
    ],
)
def test_which_frozen_matrices_are_in_4_bits(family: str, packed: set[str], whole: set[str]) -> None:
    """Not what is trained, what chooses experts, embeddings, heads, norms, or a matrix that other code reads."""
    model = adapted(family, base="nf4", save_modules=["model.layers.1.self_attn.o_proj"] if family == "llama" else [],
                    targets=["q_proj"] if family != "gpt2" else "all-linear")  # fmt: skip
    names = {
        f"{name}.{own}".removesuffix(".weight").replace(".base_layer", "")
        for name, module in model.named_modules()
        for own in getattr(module, "packed_weights", ())
    }
    found = {name.rpartition(".")[2] for name in names}
    assert packed <= found
    assert not found & whole
    assert not any(word in name for name in names for word in ("embed", "norm", "lora"))
    if family == "llama":
        assert "model.layers.0.self_attn.o_proj" in names
        assert "model.layers.1.self_attn.o_proj" not in names


class Reader(nn.Module):
    """Calls some layers, reads the weights of others, and asks where one is, and whether one is there."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read, self.passed, self.placed, self.named, self.there = (nn.Linear(4, 4) for _ in range(6))
        self.entries, self.walked = (nn.ModuleList([nn.Linear(4, 4)]) for _ in range(2))
        self.inner = nn.ModuleDict({"deep": nn.Linear(4, 4), "other": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = self.named
        x = x @ other.weight + x @ self.entries[0].weight + sum(x @ layer.weight for layer in self.walked)
        x = self.there(x) if self.there is not None else x
        x = self.placed(x.to(self.placed.weight.device)) + nn.functional.linear(x, self.read.weight)
        return self.called(x) + self.inner.other(x) + apply_linear(x, layer=self.passed) + x @ self.inner.deep.weight

    def _init_weights(self, module: nn.Module) -> None:
        nn.init.zeros_(module.called.weight)


def apply_linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return x @ layer.weight.T


def test_weights_that_other_code_reads_are_found() -> None:
    found = read_by_others(nn.Sequential(Reader()))
    linear = {f"0.{name}" for name, module in Reader().named_modules() if isinstance(module, nn.Linear)}
    assert found & linear == {"0.read", "0.passed", "0.named", "0.inner.deep", "0.entries.0", "0.walked.0"}


def test_a_method_around_what_is_not_python_is_passed_over() -> None:
    class Kernel(Reader):
        """Of a method that wraps a partial, as kernels do, no source can be read."""

        wrapped = functools.wraps(functools.partial(apply_linear))(lambda self, x: x @ self.called.weight)

    assert read_by_others(Kernel()) == read_by_others(Reader())


@pytest.mark.parametrize(
    ("family", "target", "why"),
    [
        ("nemotron_h", "out_proj", "other code reads its weight"),
        ("deepseek_v4", "o_a_proj", "it is no plain linear layer or embedding"),
    ],
)
def test_layers_that_an_adapter_cannot_be_on_are_left_out_or_refused(family: str, target: str, why: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    def model() -> nn.Module:
        if family in TINY_MODELS:
            return tiny_model(family, meta=True)
        config = AutoConfig.for_model(family, hidden_size=64, num_hidden_layers=2, vocab_size=32, moe_intermediate_size=32)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    of_all = model()
    adapt(of_all, AdapterConfig(rank=2), None)
    assert ends(of_all)
    assert target not in ends(of_all)
    with pytest.raises(ConfigError, match=rf"adapter\.targets: .*{target}' cannot be adapted: {why}"):
        adapt(model(), AdapterConfig(rank=2, targets=[target]), None)


def test_modules_that_are_trained_whole_are_neither_packed_nor_adapted() -> None:
    model = tiny_model("qwen3_moe", meta=True, hidden_size=128, intermediate_size=128, head_dim=32)
    adapt(model, AdapterConfig(base="nf4", save_modules=["experts"]), None)
    plan = resolve(spec_of(model), model, Layout(dp_shard=1))
    experts = [row for row in plan.parameters if ".experts." in row.name]
    assert experts
    assert all(row.trainable and row.dtype == "float32" for row in experts)
    assert any(row.dtype == "nf4" for row in plan.parameters)
    with pytest.raises(ConfigError, match=r"adapter\.save_modules: .*experts' is trained whole, and is among adapter\.experts"):
        adapt(tiny_model("qwen3_moe", meta=True), AdapterConfig(experts=True, save_modules=["experts"]), None)


def test_only_experts_may_have_adapters() -> None:
    model = tiny_model("qwen3_moe", meta=True)
    adapt(model, AdapterConfig(experts=True, targets=[]), None)
    assert not ends(model)
    assert all("experts" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    with pytest.raises(ConfigError, match=r"adapter\.targets: names no matrix; legal are all-linear, or a list of names"):
        adapt(tiny_model("qwen3_moe", meta=True), AdapterConfig(targets=[]), None)


def test_4_bits_for_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.base=nf4: LlamaForCausalLM has no frozen matrix that can be in 4 bits"):
        adapted(base="nf4", targets=["lm_head"], save_modules=["mlp", "self_attn"])


def test_what_is_trained_whole_needs_a_dtype_of_compute() -> None:
    model = tiny_model("llama", meta=True).to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"adapter\.save_modules: .* without parallel\.param_dtype nothing casts their input"):
        adapt(model, AdapterConfig(save_modules=["lm_head"]), None)


def test_the_norms_of_dora_are_in_fp32() -> None:
    """So a new adapter changes no weight when it is merged, whatever the dtype of the base."""
    plain = tiny_model("llama", seed=3).to(torch.bfloat16)
    model = tiny_model("llama", meta=True).to(torch.bfloat16)
    adapt(model, AdapterConfig(kind="dora"), "bfloat16")
    with without_adapters(model):
        model.to_empty(device="cpu")
        model.load_state_dict(plain.state_dict())
    initialize_adapters(model, torch.device("cpu"), 0)
    merge(model)
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_adapted_modules_can_be_pickled() -> None:
    model = tiny_model("qwen3_moe", meta=True)
    adapt(model, AdapterConfig(experts=True, base="nf4"), None)
    again = pickle.loads(pickle.dumps(model.model.layers[1].mlp))
    assert type(again.experts) is type(model.model.layers[1].mlp.experts)
    assert again.experts.packed_weights == ("gate_up_proj", "down_proj")


def test_a_torch_that_does_not_gather_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPParam, "init_dtype_attrs", lambda self, policy: policy.param_dtype)
    with pytest.raises(UnsupportedError, match=r"adapter\.base=nf4: FSDP2 of torch .* shards numbers alone"):
        adapted(base="nf4")


def test_adapters_that_are_reduced_together_must_be_there() -> None:
    model = tiny_model("qwen3_moe", meta=True)
    adapt(model, AdapterConfig(experts=True, targets=[], reduce="once"), None)
    with pytest.raises(ConfigError, match=r"adapter\.reduce=once: no linear layer has an adapter; the legal value is unit"):
        unit_of_adapters(model)


def test_parameters_of_bitsandbytes_are_refused() -> None:
    class Params4bit(nn.Parameter):
        pass

    model = tiny_model("llama", meta=True)
    own = model.model.layers[0].mlp.up_proj
    own.weight = Params4bit(own.weight.data, requires_grad=False)
    with pytest.raises(
        PlanError, match=r"layers\.0\.mlp\.up_proj\.weight' is of bitsandbytes, and FSDP2 would lose its scales"
    ):
        resolve(spec_of(model), model, Layout(dp_shard=2))


def test_an_implementation_of_experts_that_has_no_adapters_is_refused() -> None:
    model = tiny_model("qwen3_moe", meta=True)
    model.set_experts_implementation("batched_mm")
    with pytest.raises(ConfigError, match=r"under model\.experts_implementation=batched_mm; legal are grouped_mm, eager"):
        adapt(model, AdapterConfig(experts=True), None)
