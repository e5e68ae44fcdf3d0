"""transformers' own FSDP2, tensor and expert parallel: a model loaded with a ``DistributedConfig``, in its Trainer's loop.

    torchrun --standalone --nproc-per-node 4 benchmarks/run_transformers.py DIRECTORY OUTPUT --variant tp

What its Trainer does with such a model is done here too: between microbatches of a step FSDP does not reduce (as in
``Trainer._defer_fsdp_gradient_reduction``), and the norm is taken mesh by mesh (as in ``Trainer._mixed_mesh_grad_norm``),
because ``torch.nn.utils.clip_grad_norm_`` refuses matrices on the mesh of FSDP and tensor parallel beside vectors on that of
FSDP. The Trainer itself is not imported: that would cost memory that a loop does not need.
"""

import torch
import torch.distributed as dist
from measure import job, measure
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from workload import CLIP, RANKS, TP, make_optimizer, read_tokens, share

LAYOUTS = {
    "tp": {"fsdp_size": RANKS, "tp_size": TP},
    "fsdp": {"fsdp_size": RANKS},
    "ep": {"fsdp_size": RANKS, "ep_size": RANKS},
}
"""Variants: fields of the ``DistributedConfig``."""


def main() -> None:
    run = job(variants=tuple(LAYOUTS))
    layout = DistributedConfig(**LAYOUTS[run.variant])
    model = AutoModelForCausalLM.from_pretrained(run.directory / "model", distributed_config=layout)  # starts the process group
    model.train()
    optimizer = make_optimizer(model)
    tokens = read_tokens(run.directory)
    data_rank = dist.get_rank() // LAYOUTS[run.variant].get("tp_size", 1)

    def train_step(step: int) -> float:
        batches = share(tokens, step, data_rank, run.microbatches)
        total = 0.0
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == len(batches) - 1)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.item()
        if step == 0 and run.variant != "fsdp":
            _check_refused(model)
        _clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return total

    measure(run, model, train_step)
    dist.destroy_process_group()


def _clip(model: torch.nn.Module) -> None:
    """Mesh by mesh: with tensor parallel matrices are on another than vectors, with expert parallel experts than the rest."""
    meshes: dict[DeviceMesh, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        meshes.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [get_total_norm([p.grad for p in parameters]).full_tensor() for parameters in meshes.values()]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in meshes.values():
        clip_grads_with_norm_(parameters, CLIP, total)


def _check_refused(model: torch.nn.Module) -> None:
    """That torch's clipping is left out for a reason; it raises before it changes a gradient."""
    try:
        clip_grad_norm_(model.parameters(), CLIP)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if "mesh" not in str(error):
            raise
    else:
        raise SystemExit("torch.nn.utils.clip_grad_norm_ works over both meshes now: use it here")


if __name__ == "__main__":
    main()
