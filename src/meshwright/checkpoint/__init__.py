"""Checkpoints that are complete or absent: DCP for resuming on any layout, safetensors for the hub."""
