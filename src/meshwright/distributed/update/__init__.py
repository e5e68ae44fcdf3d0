"""Optimizers that torch lacks, or has for one process only: each changes the shards of a rank."""
