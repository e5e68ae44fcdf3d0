"""A façade: the name that NeMo AutoModel has here (docs/from-automodel.md). Nothing else in Meshwright imports it."""

from meshwright.nemo.fsdp2_manager import FSDP2Manager

__all__ = ["FSDP2Manager"]
