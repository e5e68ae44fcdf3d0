"""The floor: FSDP2 by hand, as a competent user of torch and transformers writes it. It knows nothing of Meshwright.

    torchrun --standalone --nproc-per-node 2 benchmarks/floor.py DIRECTORY OUTPUT --microbatches 4 --variant deferred

``naive`` accumulates as the loop stands: each microbatch gathers and reduces. ``deferred`` reduces in the last one only.
"""

import torch
import torch.distributed as dist
from measure import job, measure
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM
from workload import CLIP, make_optimizer, read_tokens, share


def main() -> None:
    run = job(variants=("naive", "deferred"))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    model = LlamaForCausalLM.from_pretrained(run.directory / "model")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.train()

    optimizer = make_optimizer(model)
    tokens = read_tokens(run.directory)

    def train_step(step: int) -> float:
        batches = share(tokens, step, rank, run.microbatches)
        total = 0.0
        for index, batch in enumerate(batches):
            if run.variant == "deferred":
                model.set_requires_gradient_sync(index == len(batches) - 1)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    measure(run, model, train_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
