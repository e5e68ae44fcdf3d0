"""Mixtures of experts: dispatch of tokens, balance of the load, and the sync mixin."""
