"""The families of models that differ from a causal language model of transformers."""
