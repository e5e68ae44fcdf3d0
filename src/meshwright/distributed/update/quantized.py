"""AdamW of torchao: its moments are in blocks of 8 or 4 bits, or of fp8, of the shard of a rank.

A block is a run of numbers of a shard, in order, with one scale. Small shards, and those that are no multiple of a block, keep
their moments in the dtype of the parameter. Checkpoints hold all moments in single precision, so that they can be read on
another layout, and by AdamW too. What is read is rounded to blocks again: to the same codes, where the blocks are the same.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.distributed._torch_compat import compiled_anew, with_local
from meshwright.distributed.update.flagged import local

__all__ = ["is_quantized", "on_host", "quantized_optimizer", "take"]

_CLASSES = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}


@cache
def quantized_optimizer(kind: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of torchao for a kind of optimizer. What it makes has its state from the beginning.

    Its further argument ``compiled`` says whether the step is compiled, or made of several operators.
    """
    import torchao.optim

    base: Any = vars(torchao.optim)[_CLASSES[kind]]

    class Quantized(base):
        def __init__(self, params: Any, *, compiled: bool, **options: Any) -> None:
            super().__init__(params, **options)
            self.compiled = compiled
            for group in self.param_groups:
                for parameter in group["params"]:  # as its first step would do, which also compiles
                    moments = {"exp_avg": self._new_buffer(parameter, True), "exp_avg_sq": self._new_buffer(parameter, False)}
                    self.state[parameter] = {"step": torch.tensor(0.0), **moments}

        def step(self, closure: None = None) -> None:
            with compiled_anew() if self.compiled else torch.compiler.set_stance("force_eager"):
                super().step()

    return Quantized


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether the local part of a tensor is in blocks of torchao."""
    return type(local(tensor)).__module__.startswith("torchao.")


@torch.no_grad()
def on_host(parameter: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Return a moment that is in blocks in single precision, on the host, sharded as its parameter is."""
    blocks: Any = local(moment)
    values = blocks.dequantize().float().cpu()
    return with_local(parameter, values) if isinstance(parameter, DTensor) else values


@torch.no_grad()
def take(moment: torch.Tensor, values: torch.Tensor) -> None:
    """Round the values of :func:`on_host`, or others, to the blocks of a moment. What was in such blocks stays the same."""
    blocks: Any = local(moment)
    numbers = local(values).to(blocks.device).flatten().view(-1, blocks.block_size)
    if "qmap" in blocks.tensor_attrs and (lowest := float(blocks.qmap[0])) < 0:
        # Codes reach from `lowest`, above -1, to 1, and torchao takes the largest size in a block as its scale. Where that is
        # the size of a negative number, what was stored of it is `lowest` times the scale.
        least, place = numbers.min(dim=1, keepdim=True)
        below = -least >= numbers.amax(dim=1, keepdim=True)
        numbers = numbers.scatter(1, place, torch.where(below, least / -lowest, least))
    blocks.copy_(numbers.view(blocks.shape))
