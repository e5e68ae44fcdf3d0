"""Tiny models and batches for the tests."""

from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from maintain.tiny import TINY_MODELS
from meshwright.distributed.slices import whole_tensor
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.spec import ParallelSpec
from tests.diffusion_gemma import tiny_diffusion_gemma

FAMILIES = {family: tiny.config for family, tiny in TINY_MODELS.items() if family != "diffusion_gemma"}
"""Those that are causal language models; the other one is in `tests/diffusion_gemma.py`."""

SPARSE = {family for family, tiny in TINY_MODELS.items() if tiny.sparse}
"""Those with experts."""

UNPACKED = {"gpt_oss", "nemotron_h", "opt", "diffusion_gemma"}
"""Those in which a document changes the one that is packed after it, or that take one document a sequence: data are padded."""


def needs_norm_of_groups(kind: str) -> None:
    """Skip a test of Mamba-2 where transformers (5.17) takes the norm at its end over all heads: then its mixers stay whole."""
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    if kind.startswith("mamba2") and "group_size" not in signature(MambaRMSNormGated).parameters:
        pytest.skip("in this transformers the norm of Mamba-2 is over all heads")


def tiny_config(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    config = {"model_type": family, **FAMILIES[family], **changes}
    return AutoConfig.for_model(config.pop("model_type"), **config)


def tiny_model(family: str = "llama", *, meta: bool = False, seed: int = 0, **changes: Any) -> Any:
    """A tiny model of transformers, in fp32, materialised under a seed or on the meta device."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **changes)
    with torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    return model


class Plain(nn.Module):
    """A plain module of five units: four blocks and the root, which holds embedding, norm and head."""

    def __init__(self, vocab: int = 29, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                                    for _ in range(blocks))  # fmt: skip
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


PLAIN_SPEC = ParallelSpec("plain", layers=("blocks.*",))


def make(family: str, *, meta: bool = False, seed: int = 0, **changes: Any) -> tuple[nn.Module, ParallelSpec]:
    """A tiny model with its spec; ``plain`` is the plain module."""
    if family == "plain":
        with torch.device("meta" if meta else "cpu"):
            torch.manual_seed(seed)
            return Plain(**changes), PLAIN_SPEC
    if family == "diffusion_gemma":
        with torch.device("meta" if meta else "cpu"):
            model = tiny_diffusion_gemma(seed=seed, **changes)
        return model, spec_of(model)
    model = tiny_model(family, meta=meta, seed=seed, **changes)
    return model, spec_of(model)


def batches(count: int, rows: int = 2, length: int = 12, vocab: int = 29, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Microbatches with uneven numbers of valid tokens; labels are shifted already, -100 is ignored."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        ids = torch.randint(3, vocab, (rows, length + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[:, length - 1 - (5 * index + seed) % (length - 2) :] = -100
        found.append({"input_ids": ids[:, :-1].clone(), "labels": labels})
    return found


def logits_of(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    output = model(input_ids)
    return output if isinstance(output, torch.Tensor) else output.logits


def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = logits_of(model, batch["input_ids"])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def valid_tokens(items: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["labels"] != -100).sum()) for batch in items)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global values of a tensor that may be sharded; all ranks take part."""
    return whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor
