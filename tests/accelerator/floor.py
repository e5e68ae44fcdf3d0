"""FSDP2 by hand: the loop that a good engineer would write with torch alone, to count what Meshwright launches beside it.

The loop trains on the microbatches of a run, on the same first weights, so that its losses can be compared with the run's.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

Batch = dict[str, torch.Tensor]


def train_by_hand(
    device: torch.device,
    weights: str,
    steps: Sequence[list[Batch]],
    lr: float,
    *,
    param_dtype: torch.dtype,
    recompute: bool,
    begin_step: Callable[[], None],
) -> list[torch.Tensor]:
    """Train, and return the loss of each step.

    Args:
        device: device of this rank.
        weights: directory of the model.
        steps: the microbatches of each step, on the host.
        lr: learning rate.
        param_dtype: dtype of the gathered parameters, and so of the computation.
        recompute: whether layers are recomputed in backward.
        begin_step: called at the begin of each step, and at the end.
    """
    model = AutoModelForCausalLM.from_pretrained(weights).to(device).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all ranks
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

    losses = []
    for microbatches in steps:
        begin_step()
        tokens = torch.tensor(float(sum((batch["labels"] != -100).sum() for batch in microbatches))).pin_memory()
        tokens = tokens.to(device, non_blocking=True)
        dist.all_reduce(tokens)
        total = torch.zeros((), device=device)
        for index, on_host in enumerate(microbatches):
            batch = {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in on_host.items()}
            model.set_requires_gradient_sync(index == len(microbatches) - 1)
            logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits.float()
            summed = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            loss = summed / tokens
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total)
    begin_step()
    return losses
