"""Data parallel: the units of FSDP2, when they gather and reduce, and which parameters were used."""
