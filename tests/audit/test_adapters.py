"""Gradients, steps and collectives of adapters against one process. The audit draws B: zeros would hide the gradient of A."""

from pathlib import Path
from typing import Any

import pytest

from maintain.cells import LAYOUTS, VARIANTS, Outcome, audited, family_case
from maintain.tiny import TINY_MODELS
from meshwright.audit.conduct import Auditor

KINDS: dict[str, dict[str, Any]] = {
    "lora": {}, "dora": {"kind": "dora"}, "experts": {"experts": True}, "nf4": {"base": "nf4"}, "once": {"reduce": "once"},
    "embeddings": {"targets": ["embed_tokens", "o_proj"]},
    "nf4 dora": {"base": "nf4", "kind": "dora"}, "nf4 experts": {"base": "nf4", "experts": True},
}  # fmt: skip
"""Name to the section ``adapter``."""

PLACES = ("shard 2", "2 x shard 2", "tp 2", "tp 2 seq", "ep 2", "cp 2", "pp 2", "tp 2 x shard 2", "ep 2 x shard 2")
FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "diffusion_gemma", "mixtral")
WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
"""Sizes of a model whose rows have whole blocks of 64 numbers."""

CELLS = [
    (kind, label, FAMILIES[(row + 2 * column) % len(FAMILIES)], VARIANTS[(2 * row + column) % len(VARIANTS)])
    for row, kind in enumerate(KINDS)
    for column, label in enumerate(PLACES)
    if (kind, label) != ("once", "pp 2")  # refused
]
"""Every kind on every layout, with families and options in turn."""


def fitting(kind: str, label: str, family: str) -> str:
    """The family, or one that has what the cell needs."""
    if "nf4" in kind and family in ("deepseek_v3", "diffusion_gemma"):  # latents of 16 numbers; a config in sections
        family = "gpt_oss"
    if family == "diffusion_gemma" and (label in ("cp 2", "pp 2") or kind == "once"):
        family = "llama"
    if "dora" in kind and "tp" in label and family == "gpt_oss":  # rowwise, with a bias
        family = "mixtral"
    if kind == "embeddings" and family in ("diffusion_gemma", "gemma4_moe"):  # tied to the head
        family = "mixtral"
    return "qwen3_moe" if family == "llama" and ("experts" in kind or "ep" in label) else family


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "label", "family", "variant"), CELLS, ids=lambda item: str(item).replace(" ", "-"))
def test_gradients_are_those_of_one_process(
    auditor: Auditor, folder: Path, kind: str, label: str, family: str, variant: Any
) -> None:
    place = next(place for place in LAYOUTS if place.label == label)
    family = fitting(kind, label, family)
    section = {"rank": 3, "alpha": 6, **KINDS[kind]}
    known = TINY_MODELS[family].config
    model = {key: value for key, value in WIDE.items() if key in known} if "nf4" in kind else {}
    cell = audited(
        auditor,
        place,
        [variant],
        lambda one, packing: family_case(family, place, one, folder, packing=packing, model=model, adapter=section),
    )
    assert cell.outcome is Outcome.WORKS, cell.note
