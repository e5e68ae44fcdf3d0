"""accelerate with FSDP2, through ``Accelerator.accumulate``.

Without a GPU, accelerate never chooses FSDP: with ``cpu=True`` it silently makes DDP of a request for FSDP2. So its state
is told after construction that it is distributed by FSDP, and from there on its own code runs. It proves what that code
does, not that its makers support it; ``measure`` refuses the run if parameters are not sharded.
"""

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from measure import job, measure
from transformers import LlamaForCausalLM
from workload import CLIP, make_optimizer, read_tokens, share


def main() -> None:
    run = job(variants=("accumulate", "lora"))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=run.microbatches)
    # Both: each look at AcceleratorState copies PartialState over it, and would quietly undo the first half of this.
    PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin

    model = LlamaForCausalLM.from_pretrained(run.directory / "model")
    if run.variant == "lora":
        import peft

        model = peft.PeftModel.from_pretrained(model, run.directory / "adapter", is_trainable=True)
    model.train()
    optimizer = make_optimizer(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = read_tokens(run.directory)

    def train_step(step: int) -> float:
        total = 0.0
        for batch in share(tokens, step, accelerator.process_index, run.microbatches):
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                accelerator.backward(loss)  # divides by the microbatches
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item() / run.microbatches
        return total

    measure(run, model, train_step)
    if not accelerator.is_fsdp2:
        raise SystemExit("accelerate fell back from FSDP2 during the run")
    accelerator.end_training()


if __name__ == "__main__":
    main()
