"""Rules for the mixtures of experts of a model of transformers, from its declarations and from a table of routers.

Every experts module of transformers 5 uses one interface (``use_experts_implementation``). Most models declare which of their
modules are routers (``router_logits`` among the outputs that they can record). So neither is found by the name of a module.

Nothing declares how a router computes scores from its logits. So the classes of routers are listed here, with what their
forward does. For a class that is not in the table nothing is guessed: its scores are unknown, which only matters for the
balance loss.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.models import _transformers_compat as compat
from meshwright.plan.given.names import generalize, holder_of
from meshwright.plan.given.spec import ExpertsRule, Scores

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["experts_of"]

_SCORES: dict[Scores, tuple[str, ...]] = {
    # Softmax before or after the choice: the weights of the chosen experts are in the same ratio.
    Scores.SOFTMAX: (
        "AriaTextTopKRouter", "DeepseekOcr2TextTopkRouter", "DeepseekV2TopkRouter", "Ernie4_5_MoeTopKRouter",
        "FlexOlmoTopKRouter", "GptOssTopKRouter", "GraniteMoeHybridTopKRouter", "GraniteMoeSWATopKRouter",
        "GraniteMoeSharedTopKRouter", "GraniteMoeTopKRouter", "HunYuanMoEV1Gate", "JambaTopKRouter", "MellumTopKRouter",
        "MiniMaxTopKRouter", "Mistral4TopkRouter", "MistralLarge4TextTopkRouter", "MixtralTopKRouter", "OlmoeTopKRouter",
        "OpenAIPrivacyFilterTopKRouter", "PhimoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter",
        "Qwen3NextTopKRouter", "Qwen3OmniMoeTalkerTextTopKRouter", "Qwen3OmniMoeTextTopKRouter",
        "Qwen3OmniMoeThinkerTextTopKRouter", "Qwen3VLMoeTextTopKRouter", "Qwen3_5MoeTopKRouter", "Qwen4ExpTextTopKRouter",
        "UnlimitedOcrTextTopkRouter",
    ),
    Scores.SIGMOID: (
        "AXK1TopkRouter", "AXK2TopkRouter", "AfmoeTokenChoiceRouter", "BailingHybridTopkRouter", "BeamTopKRouter",
        "DeepseekV32TopkRouter", "DeepseekV3TopkRouter", "Dots1TopkRouter", "Dots3NoteTextTopkRouter", "ExaoneMoeTopkRouter",
        "FlintTopKRouter", "Glm4MoeLiteTopkRouter", "Glm4MoeTopkRouter", "Glm4vMoeTextTopkRouter", "Glm5NextTextTopkRouter",
        "GlmMoeDsaTopkRouter", "HYV3TopKRouter", "HYV4TopkRouter", "InklingTopkRouter", "KimiLinearTopkRouter",
        "Kolibri1TopKRouter", "LagunaTopKRouter", "Lfm2MoeTopKRouter", "MiMoV2FlashTopkRouter", "MiniMaxM2TopKRouter",
        "MiniMaxM3VLTopKRouter", "MuseSparkTopkRouter", "NemotronHTopkRouter", "SolarOpenTopkRouter",
    ),
    Scores.PROBABILITIES: ("DiffusionGemmaTextRouter", "Gemma4TextRouter"),
}  # fmt: skip
"""What the first output of a router is, to the classes of transformers for which this is true.

Left out are the hash router of DeepSeek-V4, which does not choose; that of Zaya, which has one score more than experts; and
those of Ernie 4.5 VL, each of which gets the tokens of one modality."""

_SET_BY_CONFIG = {
    "Cohere2MoeTopKRouter": "expert_selection_fn",
    "DeepseekV4TopKRouter": "score_fn",
    "Inkling2TopKRouter": "score_fn",
}
"""Routers whose config selects the function of the logits, to the attribute that has the choice: the function's name, or its
module."""

_CHOICES = {"softmax": Scores.SOFTMAX, "Softmax": Scores.SOFTMAX, "sigmoid": Scores.SIGMOID, "Sigmoid": Scores.SIGMOID}
"""Value of such an attribute to the kind of scores. The function of DeepSeek-V4, the root of a softplus, is left out: the
formula has no normalized score for it."""

_BIASES = ("e_score_correction_bias", "expert_bias")
"""Buffers that known routers add to the scores only for the choice. The buffer is in the router, or in the block around it.
Laguna, AFMoE and Ernie 4.5 have a parameter instead, which is sharded and belongs to the optimizer."""


def experts_of(model: "PreTrainedModel") -> tuple[ExpertsRule, ...]:
    """Return a rule for each kind of mixture in a model."""
    modules = dict(model.named_modules())
    routers = compat.router_classes(model)
    rules: dict[str, dict[str, ExpertsRule]] = {}
    for inner, module in modules.items():
        if not compat.is_experts(module):
            continue
        name = _outermost(inner, modules)
        parent = holder_of(name)
        beside = {
            f"{parent}.{child}" if parent else child: router
            for child, router in modules[parent].named_children()
            if isinstance(router, routers) or _is_known(router)
        }
        rule = _rule(name, modules[parent], beside)
        rules.setdefault(rule.pattern, {})[name] = rule
    experts = []
    for alike in rules.values():
        if len(set(alike.values())) == 1:
            experts.append(next(iter(alike.values())))
        else:  # layers with different routing, such as the first ones of DeepSeek-V4
            experts += [replace(rule, pattern=name) for name, rule in alike.items()]
    return tuple(experts)


def _outermost(name: str, modules: "dict[str, nn.Module]") -> str:
    """Return the name of the outermost wrapper of peft around a mixture. It changes the parameters before it calls the mixture,
    so they must be gathered around the wrapper.
    """
    while name.endswith(".base_layer") and hasattr(modules[holder_of(name)], "lora_A"):
        name = holder_of(name)
    return name


def _rule(name: str, block: "nn.Module", routers: "dict[str, nn.Module]") -> ExpertsRule:
    if len(routers) != 1:
        return ExpertsRule(generalize(name))
    ((path, router),) = routers.items()
    scores = _scores(router)
    bias = None
    if scores is not None:
        buffers = {*dict(router.named_buffers(recurse=False)), *dict(block.named_buffers(recurse=False))}
        bias = next((own for own in _BIASES if own in buffers), None)
    return ExpertsRule(generalize(name), generalize(path), scores or Scores.UNKNOWN, bias)


def _is_known(module: "nn.Module") -> bool:
    """Return whether a module is a router, even if this release does not list it (5.17 leaves out that of DeepSeek-V3)."""
    return _scores(module) is not None and compat.router_class(module) not in compat.TURNED_ROUTERS


def _scores(router: "nn.Module") -> Scores | None:
    """Return what the scores of a router are; ``None``: its class is unknown."""
    kind = compat.router_class(router)
    if kind in _SET_BY_CONFIG:
        chosen = getattr(router, _SET_BY_CONFIG[kind], None)
        return _CHOICES.get(chosen if isinstance(chosen, str) else type(chosen).__name__, Scores.UNKNOWN)
    return next((scores for scores, kinds in _SCORES.items() if kind in kinds), None)
