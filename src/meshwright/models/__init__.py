"""Model families: what each declares, and how a model is built, initialised and read from a checkpoint."""
