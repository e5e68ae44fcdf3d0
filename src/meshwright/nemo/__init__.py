"""The interface of NeMo AutoModel, a thin layer over the rest of the package (docs/from-automodel.md).

Users import it from modules with the names that NeMo AutoModel has. These modules are façades: they offer what is here, and
nothing else in Meshwright imports them.

| here | façade |
|---|---|
| `parallelizer.py`, `megatron_fsdp.py` | `meshwright.distributed.parallelizer` |
| `fsdp2.py` | `meshwright.distributed.fsdp2` |
| `fsdp_mixin.py` | `meshwright.moe.fsdp_mixin` |
| `diffusion_gemma.py` | `meshwright.models.diffusion_gemma.fsdp` |
"""
