"""Data parallel: the units of FSDP, the parameters that they hold, and when they are gathered."""
