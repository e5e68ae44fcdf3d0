"""Model families: what each declares, and how a model is built, initialized and read from a checkpoint."""
