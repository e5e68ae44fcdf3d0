"""A loop that was written for NeMo AutoModel. Run it on two processes:

    torchrun --standalone --nproc-per-node 2 examples/from_automodel/train.py

One of the two blocks of imports below is commented out; nothing else of this file belongs to either library.
"""

# from nemo_automodel.components.distributed.fsdp2 import FSDP2Manager
# from nemo_automodel.components.distributed.parallelizer import (
#     DefaultParallelizationStrategy,
#     ParallelizationStrategy,
#     apply_fsdp2_sharding_recursively,
#     get_lm_ac_layers,
#     register_parallel_strategy,
#     unshard_fsdp2_model,
# )
# from nemo_automodel.components.models.diffusion_gemma.fsdp import fully_shard_diffusion_gemma
# from nemo_automodel.components.moe.fsdp_mixin import MoEFSDPSyncMixin

from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.parallelizer import (
    DefaultParallelizationStrategy,
    ParallelizationStrategy,
    apply_fsdp2_sharding_recursively,
    get_lm_ac_layers,
    register_parallel_strategy,
    unshard_fsdp2_model,
)
from meshwright.models.diffusion_gemma.fsdp import fully_shard_diffusion_gemma
from meshwright.moe.fsdp_mixin import MoEFSDPSyncMixin

import copy
import os

import torch
import torch.distributed as dist
from meshwright import clip_grad_norm_  # torch's fails after tensor parallel: it cannot stack norms of two meshes
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from transformers import AutoConfig, DiffusionGemmaForBlockDiffusion, LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers import MixtralForCausalLM

VOCABULARY, LENGTH, MICROBATCHES = 97, 16, 3
FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": VOCABULARY}  # fmt: skip


def tokens(seed: int) -> torch.Tensor:
    """A microbatch of this rank."""
    rank = dist.get_rank()
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1000 * seed + rank))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean loss of the next tokens."""
    output = model(ids)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def check(what: str, model: nn.Module, alone: nn.Module, losses: list) -> None:
    """Gradients of the sharded model against those of a copy that computes everything in one process."""
    for loss in losses:
        loss(alone).backward()
    worst = 0.0
    theirs = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert theirs[name].grad is None, name
            continue
        ours = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        expected = theirs[name].grad
        worst = max(worst, float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-8)))
    if dist.get_rank() == 0:
        print(f"{what}: gradients differ by {worst:.1e} from one process", flush=True)
    assert worst < 1e-4, what


def everybody(seed: int, loss=loss_of) -> list:
    """The average over ranks and microbatches of what one process would compute."""

    def of(step: int, rank: int):
        ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1000 * (seed + step) + rank))
        return lambda model: loss(model, ids) / (dist.get_world_size() * MICROBATCHES)

    return [of(step, rank) for step in range(MICROBATCHES) for rank in range(dist.get_world_size())]


def accumulate(model: nn.Module, seed: int, loss=loss_of) -> None:
    """One optimizer step of some microbatches; only the last backward syncs."""
    for step in range(MICROBATCHES):
        value = loss(model, tokens(seed + step)) / MICROBATCHES
        if step < MICROBATCHES - 1:
            with model.no_sync():
                value.backward()
        else:
            value.backward()


# -- the manager -------------------------------------------------------------------------------------------------------------


def with_the_manager() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    alone = copy.deepcopy(model)
    manager = FSDP2Manager(
        dp_size=None, tp_size=1, sequence_parallel=False, mp_policy=FP32, backend="gloo", world_size=dist.get_world_size(),
        activation_checkpointing=True,
    )  # fmt: skip
    assert manager.dp_size == manager.dp_shard_size == dist.get_world_size()
    assert manager.device_mesh["dp_shard_cp"].size() == dist.get_world_size()
    assert len(get_lm_ac_layers(model)) == 2
    model = manager.parallelize(model)
    for step in range(MICROBATCHES):  # no accumulation: each backward reduces, and gradients add up
        (loss_of(model, tokens(10 + step)) / MICROBATCHES).backward()
    check("the manager", model, alone, everybody(10))
    with unshard_fsdp2_model(model):
        assert model.lm_head.weight.shape == (VOCABULARY, 32)


def with_tensor_parallel() -> None:
    """Clipping and a step, as in a loop of one's own."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    alone = copy.deepcopy(model)
    manager = FSDP2Manager(tp_size=dist.get_world_size(), mp_policy=FP32, backend="gloo", world_size=dist.get_world_size())
    model = manager.parallelize(model)
    # AdamW would divide a gradient by its own size, and make rounding large that way.
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(2):
        ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(15 + step))
        norms = []
        for each, optimizer, clip in zip((model, alone), optimizers, (clip_grad_norm_, nn.utils.clip_grad_norm_), strict=True):
            optimizer.zero_grad()
            loss_of(each, ids).backward()
            norms.append(clip(each.parameters(), 0.5))
            optimizer.step()
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0)
    check("tensor parallel, clipped", model, alone, [])


# -- strategies of one's own -------------------------------------------------------------------------------------------------


class MyLlama(LlamaForCausalLM):
    """A model that is to be sharded in a way of its own."""


class MyMixtral(MoEFSDPSyncMixin, MixtralForCausalLM):
    """A mixture whose units a loop tells where an accumulation begins and ends."""


@register_parallel_strategy(name="MyLlama")
class MyStrategy(ParallelizationStrategy):
    """All of it by hand."""

    def parallelize(self, model, device_mesh, mp_policy=None, offload_policy=None, **kwargs):
        mesh = device_mesh["dp_replicate", "dp_shard_cp"]
        apply_fsdp2_sharding_recursively(model, mesh, mp_policy, offload_policy)
        return fully_shard(model, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=False)


@register_parallel_strategy(name="MyMixtral")
class MyMixtralStrategy(DefaultParallelizationStrategy):
    """The default one, and something before it."""

    def parallelize(self, model, device_mesh, **kwargs):
        if dist.get_rank() == 0:
            print(f"{len(get_lm_ac_layers(model))} layers over {device_mesh.size()} ranks", flush=True)
        return super().parallelize(model, device_mesh, **kwargs)


def with_a_strategy() -> None:
    torch.manual_seed(0)
    model = MyLlama(LlamaConfig(**SIZES, use_cache=False))
    alone = copy.deepcopy(model)
    model = FSDP2Manager(mp_policy=FP32, backend="gloo", world_size=dist.get_world_size()).parallelize(model)
    for step in range(MICROBATCHES):
        (loss_of(model, tokens(20 + step)) / MICROBATCHES).backward()
    check("a strategy of one's own", model, alone, everybody(20))


# -- a module of one's own ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def with_a_module() -> None:
    torch.manual_seed(0)
    model = Tiny()
    alone = copy.deepcopy(model)
    model = FSDP2Manager(mp_policy=FP32, backend="gloo", world_size=dist.get_world_size()).parallelize(model)
    for step in range(MICROBATCHES):
        (loss_of(model, tokens(30 + step)) / MICROBATCHES).backward()
    check("a module of one's own", model, alone, everybody(30))


# -- the mixin, in a loop that accumulates -----------------------------------------------------------------------------------


def with_the_mixin() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, use_cache=False)
    model = MyMixtral(config)
    alone = copy.deepcopy(model)
    model = FSDP2Manager(mp_policy=FP32, backend="gloo", world_size=dist.get_world_size()).parallelize(model)
    model.prepare_for_grad_accumulation(pp_enabled=False)
    for step in range(MICROBATCHES):
        if step == MICROBATCHES - 1:
            model.prepare_for_final_backward(pp_enabled=False)
        (loss_of(model, tokens(40 + step)) / MICROBATCHES).backward()
    check("the mixin", model, alone, everybody(40))


# -- DiffusionGemma ----------------------------------------------------------------------------------------------------------


def diffusion_gemma() -> DiffusionGemmaForBlockDiffusion:
    text = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 32, "num_global_key_value_heads": 1, "global_head_dim": 16, "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "eos_token_id": 1,
            "bos_token_id": 2}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    config = AutoConfig.for_model("diffusion_gemma", text_config=text, vision_config=vision, canvas_length=8)
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion._from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    return model


def denoising_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The second half of a sequence as a canvas, given the first."""
    half = LENGTH // 2
    logits = model(input_ids=ids[:, :half], decoder_input_ids=ids[:, half:]).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, half:].flatten())


def with_diffusion_gemma() -> None:
    mesh = FSDP2Manager(mp_policy=FP32, backend="gloo", world_size=dist.get_world_size()).device_mesh["dp_shard_cp"]
    model, alone = diffusion_gemma(), diffusion_gemma()
    for layer in (*model.model.encoder.language_model.layers, *model.model.decoder.layers):
        fully_shard_diffusion_gemma(layer, mesh, FP32)
    fully_shard_diffusion_gemma(model, mesh, FP32, reshard_after_forward=False)
    for step in range(MICROBATCHES):
        (denoising_loss(model, tokens(50 + step)) / MICROBATCHES).backward()
    check("DiffusionGemma by hand", model, alone, everybody(50, denoising_loss))

    model, alone = diffusion_gemma(), diffusion_gemma()
    model = FSDP2Manager(mp_policy=FP32, backend="gloo", world_size=dist.get_world_size()).parallelize(model)
    accumulate(model, 60, denoising_loss)
    check("DiffusionGemma by the manager, with no_sync", model, alone, everybody(60, denoising_loss))


def main() -> None:
    dist.init_process_group("gloo")
    try:
        for part in (
            with_the_manager,
            with_tensor_parallel,
            with_a_strategy,
            with_a_module,
            with_the_mixin,
            with_diffusion_gemma,
        ):
            part()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
