"""transformers' own tensor parallel and FSDP2: a model loaded with a ``DistributedConfig``, and the loop of its Trainer.

    torchrun --standalone --nproc-per-node 4 benchmarks/run_transformers.py DIRECTORY OUTPUT

What its Trainer does with such a model is done here too: between microbatches of a step FSDP does not reduce (as in
``Trainer._defer_fsdp_gradient_reduction``), and the norm is taken mesh by mesh (as in ``Trainer._mixed_mesh_grad_norm``),
because ``torch.nn.utils.clip_grad_norm_`` refuses matrices on the mesh of FSDP and tensor parallel beside vectors on that of
FSDP. The Trainer itself is not imported: that would cost memory that a loop does not need.
"""

import torch
import torch.distributed as dist
from measure import job, measure
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig
from workload import CLIP, RANKS, TP, make_optimizer, read_tokens, share


def main() -> None:
    run = job(variants=("tp",))
    layout = DistributedConfig(fsdp_size=RANKS, tp_size=TP)
    model = LlamaForCausalLM.from_pretrained(run.directory / "model", distributed_config=layout)  # starts the process group
    model.train()
    optimizer = make_optimizer(model)
    tokens = read_tokens(run.directory)
    data_rank = dist.get_rank() // TP

    def train_step(step: int) -> float:
        batches = share(tokens, step, data_rank, run.microbatches)
        total = 0.0
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == len(batches) - 1)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.item()
        if step == 0:
            _check_refused(model)
        _clip([group["params"] for group in optimizer.param_groups])
        optimizer.step()
        optimizer.zero_grad()
        return total

    measure(run, model, train_step)
    dist.destroy_process_group()


def _clip(parameters_of_meshes: list[list[torch.nn.Parameter]]) -> None:
    """Matrices are on the mesh of both axes, vectors on that of FSDP."""
    norms = [get_total_norm([p.grad for p in parameters]).full_tensor() for parameters in parameters_of_meshes]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in parameters_of_meshes:
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
