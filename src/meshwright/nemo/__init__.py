"""The interface of NeMo AutoModel, thin over the rest of the house (docs/from-automodel.md).

Users import it from the modules that have these names there, which are façades: they offer what is here, and nothing else in
Meshwright imports them.

| here | façade |
|---|---|
| `parallelizer.py`, `megatron_fsdp.py` | `meshwright.distributed.parallelizer` |
| `fsdp2.py` | `meshwright.distributed.fsdp2` |
| `fsdp_mixin.py` | `meshwright.moe.fsdp_mixin` |
| `diffusion_gemma.py` | `meshwright.models.diffusion_gemma.fsdp` |
"""
