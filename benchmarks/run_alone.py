"""One process, no parallelism: the whole batch of a step, one share after another. Its losses are the truth for the others.

torchrun --standalone --nproc-per-node 1 benchmarks/run_alone.py DIRECTORY OUTPUT
"""

import torch
import torch.distributed as dist
from measure import job, measure
from transformers import AutoModelForCausalLM
from workload import CLIP, RANKS, make_optimizer, read_tokens, share


def main() -> None:
    run = job(variants=("alone",))
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(run.directory / "model")
    model.train()
    optimizer = make_optimizer(model)
    tokens = read_tokens(run.directory)

    def train_step(step: int) -> float:
        batches = [batch for rank in range(RANKS) for batch in share(tokens, step, rank, run.microbatches)]
        total = 0.0
        for batch in batches:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    measure(run, model, train_step, sharded=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
