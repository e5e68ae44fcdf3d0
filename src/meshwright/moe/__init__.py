"""Mixtures of experts: dispatch of tokens and balance of the load."""
