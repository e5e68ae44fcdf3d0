"""A façade: the names that NeMo AutoModel has here (docs/from-automodel.md). Nothing else in Meshwright imports it."""

from meshwright.nemo.diffusion_gemma import (
    _fully_shard_once,
    _has_fsdp_state,
    fully_shard_diffusion_gemma,
    register_diffusion_gemma_parallel_strategy,
)

__all__ = [
    "_fully_shard_once",
    "_has_fsdp_state",
    "fully_shard_diffusion_gemma",
    "register_diffusion_gemma_parallel_strategy",
]
