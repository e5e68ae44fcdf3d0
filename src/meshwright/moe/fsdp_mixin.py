"""A façade: the names that NeMo AutoModel has here (docs/from-automodel.md). Nothing else in Meshwright imports it."""

from meshwright.nemo.sync_mixin import (
    MoEFSDPSyncMixin,
    _configure_fsdp_module,
    _disable_fsdp_for_moe_module,
    _iter_fsdp_modules,
    _run_post_backward_for_moe_module,
    _run_post_backward_hooks,
    patch_stage,
    patched_backward_maybe_with_nosync,
)

__all__ = [
    "MoEFSDPSyncMixin",
    "_configure_fsdp_module",
    "_disable_fsdp_for_moe_module",
    "_iter_fsdp_modules",
    "_run_post_backward_for_moe_module",
    "_run_post_backward_hooks",
    "patch_stage",
    "patched_backward_maybe_with_nosync",
]
