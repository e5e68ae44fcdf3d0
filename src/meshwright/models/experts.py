"""Mixtures of experts of transformers, from what their modules declare of themselves, and from a table of their routers.

Every experts module of transformers 5 goes through one interface (``use_experts_implementation``), and most models say which of
their modules are routers (``router_logits`` of what they can record). Neither is found by the name of a module.

What a router makes of its logits is declared nowhere, so their classes are listed here with what their forward does. Of a class
that is not in the table nothing is guessed: its scores are unknown, which only the balance loss has to know.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.models import _transformers_compat as compat
from meshwright.plan.names import generalize, holder_of
from meshwright.plan.spec import ExpertsRule, Scores

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["experts_of"]

_SCORES: dict[Scores, tuple[str, ...]] = {
    # Softmax before or after the choice: the weights of the chosen are in the same ratio.
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
"""What the first output of a router is, to the classes of transformers that are so.

Left out: DeepSeek-V4's hash router, which does not choose; Zaya's, which has one score more than experts; Ernie 4.5 VL's, which
see the tokens of one modality each.
"""

_SET_BY_CONFIG = {
    "Cohere2MoeTopKRouter": "expert_selection_fn",
    "DeepseekV4TopKRouter": "score_fn",
    "Inkling2TopKRouter": "score_fn",
}
"""Routers whose config says what they make of logits, to the attribute that holds it: its name, or the module that does it."""

_CHOICES = {"softmax": Scores.SOFTMAX, "Softmax": Scores.SOFTMAX, "sigmoid": Scores.SIGMOID, "Sigmoid": Scores.SIGMOID}
"""What such an attribute may be; DeepSeek-V4's own, the root of a softplus, has no normalised score in the formula."""

_BIASES = ("e_score_correction_bias", "expert_bias")
"""Buffers that known routers add for the choice alone. Some are the router's own, some the block's that holds it. Laguna, AFMoE
and Ernie 4.5 have a parameter instead, which is sharded and belongs to the optimizer."""


def experts_of(model: "PreTrainedModel") -> tuple[ExpertsRule, ...]:
    """A rule for each kind of mixture in a model."""
    modules = dict(model.named_modules())
    routers = compat.router_classes(model)
    rules: dict[str, dict[str, ExpertsRule]] = {}
    for name, module in modules.items():
        if not compat.is_experts(module):
            continue
        parent = holder_of(name)
        beside = {
            f"{parent}.{child}" if parent else child: router
            for child, router in modules[parent].named_children()
            if isinstance(router, routers) or _is_known(router)
        }
        rule = _rule(name, modules[parent], beside)
        rules.setdefault(rule.pattern, {})[name] = rule
    found = []
    for alike in rules.values():
        if len(set(alike.values())) == 1:
            found.append(next(iter(alike.values())))
        else:  # layers that route in different ways, as the first ones of DeepSeek-V4 do
            found += [replace(rule, pattern=name) for name, rule in alike.items()]
    return tuple(found)


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
    """Whether a module is a router, even where the release does not list it (5.17 leaves out that of DeepSeek-V3)."""
    return _scores(module) is not None and compat.router_class(module) not in compat.TURNED_ROUTERS


def _scores(router: "nn.Module") -> Scores | None:
    """What the scores of a router are; ``None``: nothing is known of its class."""
    kind = compat.router_class(router)
    if kind in _SET_BY_CONFIG:
        chosen = getattr(router, _SET_BY_CONFIG[kind], None)
        return _CHOICES.get(chosen if isinstance(chosen, str) else type(chosen).__name__, Scores.UNKNOWN)
    return next((scores for scores, kinds in _SCORES.items() if kind in kinds), None)
