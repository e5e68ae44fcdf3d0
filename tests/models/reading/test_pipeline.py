"""Where models are cut into stages: chained stages against the whole model, in one process."""

import copy
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from maintain.cells import deepened
from maintain.tiny import TINY_MODELS
from meshwright.distributed.pipeline.cut import crossing_of, cut_model
from meshwright.errors import MeshwrightError, PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.pipeline.stage_plan import crossing_bytes, cut_of, pipeline_messages
from meshwright.plan.given.cut_points import POSITIONS, ROWS, StageFacts
from meshwright.plan.given.names import match_names
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve

LENGTH = 40
"""Tokens of a row: more than every window of the models below."""

FAMILIES = [name for name in TINY_MODELS if name != "diffusion_gemma"]
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "sliding_window"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "ssm_state_size", "mamba_d_state", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "n_groups", "mamba_n_groups"), 1),
    "vocab_size": 67, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "mamba_d_head": 16, "rotary_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "layerdrop": 0.0, "is_decoder": True,
    **dict.fromkeys(
        ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "dropout", "activation_dropout",
         "hidden_dropout_prob", "attention_probs_dropout_prob", "embedding_dropout", "residual_dropout"), 0.0),
    "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
    # What a model does to embeddings and logits, set away from 1.
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3, "logits_scaling": 2.0,
    "logit_scale": 0.5, "mup_enabled": True, "final_logit_softcapping": 2.0, "use_mup": True,
}  # fmt: skip


def built(model_type: str, **config: Any) -> nn.Module:
    """A model with drawn weights, in fp64, that drops nothing."""
    built_config = AutoConfig.for_model(model_type, **config)
    try:
        model = AutoModelForCausalLM.from_config(built_config, experts_implementation="eager")
    except ValueError:  # it has no choice of kernels
        model = AutoModelForCausalLM.from_config(built_config)
    model = model.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    return model.train()


def tiny(family: str, layers: int) -> nn.Module:
    config = deepened({key: value for key, value in TINY_MODELS[family].config.items() if key != "model_type"}, layers)
    return built(TINY_MODELS[family].config.get("model_type", family), **config)


def facts_of(model: nn.Module) -> StageFacts:
    spec = spec_of(model)
    names = [name for name, _ in model.named_modules()]
    assert spec.traces is not None
    facts = spec.traces(model).stages([name for pattern in spec.layers for name in match_names(pattern, names)])
    assert facts is not None
    return facts


def compare(model: nn.Module, facts: StageFacts, stages: int, packed: bool) -> None:
    """Chain stages by hand: logits, the gradient of every parameter, and which stage holds what."""
    documents = (15, 25) if packed else (LENGTH,)
    ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in documents]).expand(2, LENGTH)
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    truth = model(**inputs).logits
    weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    count = len(facts.layers)
    parts, hidden, passed = [], None, []
    legal = [index for index in range(1, count) if index not in facts.uncut]
    cuts = [min(legal, key=lambda index: abs(index - count * part // stages)) for part in range(1, stages)]
    for begin, end in pairwise((0, *cuts, count)):
        part = copy.deepcopy(model)
        cut_model(part, cut_of(facts, begin, end))
        received = None if hidden is None else hidden.detach().requires_grad_()
        crossing_of(part).received = received
        hidden = part(**inputs)
        parts.append(part)
        passed.append((received, hidden))
    torch.testing.assert_close(hidden.logits, truth, rtol=0, atol=1e-9 * float(truth.abs().max()))
    (truth * weights).sum().backward()
    gradient = weights
    for received, sent in reversed(passed):
        getattr(sent, "logits", sent).backward(gradient)
        gradient = None if received is None else received.grad
    sums: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            sums[name] = sums.get(name, torch.zeros_like(parameter)) + (0 if parameter.grad is None else parameter.grad)
    whole = dict(model.named_parameters())
    assert sums.keys() == whole.keys()
    for name, parameter in whole.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scale = max(float(expected.abs().max()), 1e-12)
        torch.testing.assert_close(
            sums[name], expected, rtol=0, atol=1e-8 * scale, msg=lambda text, name=name: f"{name}: {text}"
        )
    held = [sum(p.numel() for p in part.parameters()) for part in parts]
    twice = sum(whole[name].numel() for name, sides in facts.used.items() if len(sides) > 1)
    assert sum(held) == sum(p.numel() for p in whole.values()) + twice


@pytest.mark.sampled(12)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_what_the_model_does(family: str, packed: bool, stages: int) -> None:
    model = tiny(family, 4)
    facts = facts_of(model)
    assert facts.problems == ()
    compare(model, facts, stages, packed)


@pytest.mark.parametrize("family", ["granite", "hyperclovax", "afmoe", "cohere2", "gemma2", "minicpm3"])
def test_what_happens_to_embeddings_and_logits_happens_once(family: str) -> None:
    """Multipliers of embeddings, residuals and logits, and soft caps."""
    model = built(family, **known(family))
    compare(model, facts_of(model), 2, packed=False)


def known(model_type: str) -> dict[str, Any]:
    """The small sizes that a family's config knows."""
    kind = CONFIG_MAPPING[model_type]
    names = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", {}), *kind.attribute_map}
    return {key: value for key, value in SMALL.items() if key in names}


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_causal_model_is_exact_or_refused(model_type: str) -> None:
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **known(model_type)))
        if sum(parameter.numel() for parameter in empty.parameters()) > 3e6:
            pytest.skip("its config has no small sizes that are known here")
        model = built(model_type, **known(model_type))
        model(input_ids=torch.ones((1, 4), dtype=torch.long), position_ids=torch.arange(4)[None], use_cache=False)
        copy.deepcopy(model)  # models that keep computed tensors cannot be copied, and the comparison copies them
    except Exception as error:
        pytest.skip(f"does not build or run from a tiny config: {type(error).__name__}")
    try:
        facts = facts_of(model)
    except MeshwrightError as error:
        pytest.skip(str(error))  # it declares no layers
    if not facts.problems:
        compare(model, facts, 2, packed=False)


class OddLayer(LlamaDecoderLayer):
    """Reads an embedding of its own and what the layer before it left, and leaves something itself."""

    keys_of: tuple[int, ...] = ()

    def forward(self, hidden_states: torch.Tensor, words: torch.Tensor, left: dict[str, Any], **given: Any) -> Any:  # type: ignore[override]
        seen = left["state"][0].movedim(1, 2).flatten(2) if left else 1.0
        hidden_states = hidden_states + words * (seen[..., :1] if left and self.keys_of else seen)
        hidden_states = super().forward(hidden_states, **given)
        left["state"] = (self.state(hidden_states).movedim(2, 1),)
        return hidden_states, hidden_states.mean()

    def state(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.keys_of:
            return self.mlp(hidden_states).unflatten(2, (4, -1))
        return self.self_attn.k_proj(hidden_states).view(*hidden_states.shape[:2], *self.keys_of)


class OddModel(LlamaModel):
    doubles = scaled = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(OddLayer(config, index) for index in range(config.num_hidden_layers))
        self.words = nn.Embedding(config.vocab_size, config.num_hidden_layers * config.hidden_size)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        hidden = self.embed_tokens(input_ids) * self.scale
        words = self.words(input_ids).unflatten(-1, (len(self.layers), -1))
        rotary, left = self.rotary_emb(hidden, position_ids), dict[str, Any]()
        mask = create_causal_mask(self.config, hidden, attention_mask, None, position_ids)
        for index, layer in enumerate(self.layers):
            given = {"position_embeddings": rotary, "attention_mask": mask}
            hidden, mean = layer(hidden, words=words[:, :, index] * 2.0, left=left, **given)
            if self.doubles:
                mean * 2
            if self.scaled:
                hidden.mul_(2.0)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class OddForCausalLM(LlamaForCausalLM):
    """Of no family: what layers read beside their hidden state crosses, from wherever it is in their calls."""

    _no_split_modules = ("OddLayer",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = OddModel(config)


def odd() -> Any:
    model = OddForCausalLM(LlamaConfig(**known("llama"))).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.train()


class Routed(nn.Module):
    """Experts that a family does not declare: how many tokens each gets depends on values."""

    def __init__(self, inner: nn.Module, hidden: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(hidden, 2, dtype=torch.float64), Ones(inner)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(hidden).flatten(0, 1).softmax(-1).topk(1)
        return self.experts(hidden.flatten(0, 1), index, weights).view_as(hidden)


class Ones(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        chosen = top_k_index[:, 0].nonzero()[:, 0]
        return torch.zeros_like(hidden).index_add(0, chosen, self.inner(hidden[chosen]) * top_k_weights[chosen])


def test_experts_that_a_family_does_not_declare_are_passed_over() -> None:
    model = tiny("llama", 4)
    for layer in model.model.layers:
        layer.mlp = Routed(layer.mlp, model.config.hidden_size)
    facts = facts_of(model)
    assert facts.problems == ()
    compare(model, facts, 2, packed=False)


def test_what_layers_read_beside_their_hidden_state_crosses_in_a_family_that_nobody_knows() -> None:
    model = odd()
    facts = facts_of(model)
    assert (facts.problems, facts.uncut, facts.blank) == ((), {}, ("model.scale",))
    own = [(sizes, after, [layer for layer, _ in readers]) for sizes, after, readers in facts.carried]
    words, states = [item for item in own if item[1] < 0], [item for item in own if item[1] >= 0]
    assert words == [((ROWS, POSITIONS, 32), -1, [layer]) for layer in (1, 2, 3)]
    assert states == [((ROWS, 4, POSITIONS, 8), layer - 1, [layer]) for layer in (1, 2, 3)]
    assert facts.carried[-1][2][0][1] == ((("left", 0), ("state", 0), (0, 1)),)
    for stages in (2, 4):
        compare(odd(), facts, stages, packed=True)


def test_a_layer_that_reads_what_its_call_does_not_give_it_is_refused_by_name() -> None:
    """The model hands the layer's words over behind its back."""
    model = odd()
    layer = model.model.layers[2]
    model.model.words.register_forward_hook(lambda module, args, output: vars(layer).update(seen=output))
    inner = layer.mlp.forward
    layer.mlp.forward = lambda hidden: inner(hidden) + layer.seen.mean()
    (problem,) = facts_of(model).problems
    assert problem.startswith("layer 'model.layers.2' reads more than its hidden state of what runs before the first layer")


def test_what_crosses_with_the_hidden_state_is_priced_at_each_cut() -> None:
    """The embeddings of later layers and one state: fewer at each cut. Slices of the sequence are refused with it."""
    model = odd()
    options = ParallelOptions(microbatches=4, tokens=64)
    plan = resolve(spec_of(model), model, Layout(pp=4, dp_shard=1), options, world_size=4)
    assert [crossing_bytes(plan, stage) for stage in (1, 2, 3)] == [64 * 2 * 32 * (1 + words + 1) for words in (3, 2, 1)]
    sent = pipeline_messages(plan, 1)
    assert sent == (8, 4 * (crossing_bytes(plan, 2) + crossing_bytes(plan, 1)))
    sliced = ParallelOptions(microbatches=4, sequence_parallel=True)
    with pytest.raises(PlanError, match="reads more of earlier stages than its hidden state, and whether that is sliced too"):
        resolve(spec_of(model), model, Layout(pp=2, tp=2, dp_shard=1), sliced, world_size=4)


def test_what_crosses_on_a_rank_of_tp_is_what_its_slices_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of as many heads as the features are; of code that counts all heads, the plan does not know what a rank has."""

    def states(tp: int) -> list[tuple[int, ...]]:
        options = ParallelOptions(microbatches=4)
        cut = resolve(spec_of(model := odd()), model, Layout(pp=2, tp=tp, dp_shard=1), options, world_size=2 * tp).cut
        assert cut is not None
        return [sizes for sizes, after, _ in cut.carried if after >= 0]

    assert states(1) == states(2) == [(ROWS, 4, POSITIONS, 8)] * 3
    monkeypatch.setattr(OddLayer, "keys_of", (-1, 8))
    assert (states(1), states(2)) == ([(ROWS, 4, POSITIONS, 8)] * 3, [(ROWS, 2, POSITIONS, 8)] * 3)
    monkeypatch.setattr(OddLayer, "keys_of", (4, 8))
    assert states(1) == [(ROWS, 4, POSITIONS, 8)] * 3
    with pytest.raises(PlanError, match=r"'model.layers.1' reads more of an earlier layer.* is not known; legal are tp=1, "):
        states(2)


def test_what_does_not_run_in_parts_is_refused() -> None:
    """The model computes with what a layer returns beside its hidden state: a layer of another stage returns none of it."""
    model = odd()
    model.model.doubles = True
    (problem,) = facts_of(model).problems
    assert problem.startswith("cut in two, it does not run, or cannot be initialised (TypeError")


def test_a_hidden_state_that_is_changed_between_layers_is_refused() -> None:
    """Each stage would change it again."""
    model = odd()
    model.model.scaled = True
    assert any("the output of layer 'model.layers.0' is changed after it" in problem for problem in facts_of(model).problems)


@pytest.mark.parametrize(("model_type", "sizes"), [("xlnet", (POSITIONS, ROWS, 32)), ("deepseek_v4", (ROWS, POSITIONS, 4, 32))])
def test_a_hidden_state_crosses_whatever_its_dimensions_are(model_type: str, sizes: tuple[int, ...]) -> None:
    model = built(model_type, **known(model_type))
    facts = facts_of(model)
    assert (facts.problems, facts.hidden) == ((), sizes)
    compare(model, facts, 2, packed=False)


def test_what_both_ends_use_is_held_inside_of_what_stands_for_its_module() -> None:
    """BERT's embeddings have a norm beside the matrix that its head uses; CamemBERT's head has the first of its names."""
    for model_type, name in (("bert", "bert.embeddings.word_embeddings.weight"), ("camembert", "lm_head.decoder.weight")):
        model = built(model_type, **known(model_type))
        facts = facts_of(model)
        assert facts.problems == ()
        ends = [copy.deepcopy(model) for _ in range(2)]
        for part, begin in zip(ends, (0, 2), strict=True):
            cut_model(part, cut_of(facts, begin, begin + 2))
            assert name in dict(part.named_parameters())
        assert not [own for own, _ in ends[1].named_parameters() if "embeddings" in own and "word" not in own]
        compare(model, facts, 4, packed=False)


@pytest.mark.thorough
def test_what_does_not_run_is_with_the_first_stage() -> None:
    """The tower of Gemma 3, and the layers of Mllama that read images, among others."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3"))
    facts = facts_of(model)
    assert (facts.problems, facts.body) == ((), "model")
    assert set(facts.idle) == {"model.vision_tower", "model.multi_modal_projector"}
    assert {facts.used[name] for name, _ in model.named_parameters() if "vision" in name} == {("first",)}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mllama"))
    facts = facts_of(model)
    assert facts.problems == ()
    assert {name for name in facts.idle if "layers" in name}.isdisjoint(layer.name for layer in facts.layers)
    assert (
        len(facts.layers) + sum(".layers." in name for name in facts.idle) == model.config.get_text_config().num_hidden_layers
    )


def test_a_model_is_cut_where_no_later_layer_reads_more_of_an_earlier_one() -> None:
    """Layers of HY V4 attend to the tokens that the layer before them chose, unless they choose their own."""
    own = {**known("hy_v4"), "num_hidden_layers": 6, "indexer_types": ["full", "full", "shared", "shared", "full", "shared"]}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("hy_v4", **own))
    facts = facts_of(model)
    assert (facts.problems, sorted(facts.uncut)) == ((), [2, 3, 5])
    assert facts.uncut[3].startswith("layer 'model.layers.3' reads more than its hidden state of layer 'model.layers.1' at ")

    def stages(pp: int, **options: Any) -> list[int]:
        layout = Layout(pp=pp, dp_shard=1)
        plan = resolve(spec_of(model), model, layout, ParallelOptions(microbatches=4, **options), world_size=pp)
        return [len(row.layers) for row in plan.stages]

    assert stages(2) == [4, 2]
    with pytest.raises(PlanError, match=r"pipeline_cuts=\[3\].*legal are 1, 4"):
        stages(2, pipeline_cuts=(3,))
    with pytest.raises(PlanError, match="the model can be cut before 2 layers only"):
        stages(4)


def test_a_model_with_a_module_in_two_places_is_not_changed() -> None:
    """After a trace it held tensors without values in place of the parameters."""
    model = tiny("llama", 4)
    model.model.layers[3].mlp = model.model.layers[2].mlp
    before = dict(model.named_parameters())
    assert list(facts_of(model).uncut) == [3]
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is own for name, own in before.items())


def test_a_mask_has_the_rows_of_its_batch() -> None:
    """MVP checks the shape of its mask."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mvp"))
    assert not facts_of(model).problems


def test_a_model_that_computes_between_its_layers_is_refused() -> None:
    model = tiny("llama", 2)
    facts = facts_of(model)
    body = model.model
    own = type(body).forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        first = body.layers[0].register_forward_hook(lambda module, args, output: output * 0.5)
        try:
            return own(body, *args, **kwargs)
        finally:
            first.remove()

    body.forward = scaled
    assert facts.problems == ()
    (problem,) = facts_of(model).problems
    assert problem == "the input of layer 'model.layers.1' is not the output of 'model.layers.0'"
