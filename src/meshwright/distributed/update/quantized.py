"""AdamW of torchao: its moments are in blocks of 8 or 4 bits, or of fp8, of the shard of a rank.

A block is a run of numbers of a shard, in order, with one scale. Small shards, and those that are no multiple of a block, keep
their moments in at least single precision, so that all shards of a moment look alike. Checkpoints hold all moments in single
precision, so that they can be read on another layout, and by AdamW too. What is read is rounded to blocks again: to the same
codes, where the blocks are the same.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor, Replicate

from meshwright.device import fork_rng, seed_generators
from meshwright.distributed._torch_compat import compiled_anew, with_local
from meshwright.distributed.update.flagged import local

__all__ = ["is_quantized", "on_host", "quantized_optimizer", "take"]

_CLASSES = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}


@cache
def quantized_optimizer(kind: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of torchao for a kind of optimizer. What it makes has its state from the beginning.

    Its further arguments: ``compiled``, whether the step is compiled, or made of several operators; ``names`` of parameters,
    which ranks with copies of a parameter have alike. If parameters in bf16 are rounded by chance, the numbers depend on the
    name, the step and the shard: from the generators of the ranks, copies would be rounded differently, and drift apart.
    """
    import torchao.optim

    base: Any = vars(torchao.optim)[_CLASSES[kind]]

    class Quantized(base):
        param_groups: list[dict[str, Any]]

        def __init__(
            self, params: Any, *, compiled: bool, names: Mapping[torch.Tensor, str] | None = None, **options: Any
        ) -> None:
            super().__init__(params, **options)
            self.compiled, self._names = compiled, dict(names or {})
            for group in self.param_groups:
                for parameter in group["params"]:  # as its first step would do, which also compiles
                    moments = {"exp_avg": self._new_buffer(parameter, True), "exp_avg_sq": self._new_buffer(parameter, False)}
                    self.state[parameter] = {"step": torch.tensor(0.0), **moments}

        def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
            values = local(super()._new_buffer(p, signed))
            if not is_quantized(values):
                values = values.to(torch.promote_types(values.dtype, torch.float32))
            # That of torchao says that blocks are of the dtype of the parameter, which in bf16 its step then fails of.
            return with_local(p, values) if isinstance(p, DTensor) else values

        def step(self, closure: None = None) -> None:
            with compiled_anew() if self.compiled else torch.compiler.set_stance("force_eager"):
                if self.bf16_stochastic_round:
                    self._step_by_chance()
                else:
                    super().step()

        def _step_by_chance(self) -> None:
            groups = self.param_groups
            try:
                for number, (group, parameter) in enumerate((own, one) for own in groups for one in own["params"]):
                    self.param_groups = [{**group, "params": [parameter]}]
                    device = local(parameter).device
                    with fork_rng(device):
                        name, step = self._names.get(parameter, str(number)), int(self.state[parameter]["step"])
                        seed_generators(crc32(f"{name} {step} {_shard_of(parameter)}".encode()), device)
                        super().step()
            finally:
                self.param_groups = groups

    return Quantized


def _shard_of(parameter: torch.Tensor) -> list[int]:
    """Return which shard of a parameter a rank has: its index on each axis that shards it."""
    if not isinstance(parameter, DTensor):
        return []
    at = parameter.device_mesh.get_coordinate()
    return [place for place, one in zip(at or (), parameter.placements, strict=True) if not isinstance(one, Replicate)]


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
