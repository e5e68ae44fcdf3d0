"""Carries a plan out on a model: one concern a file, ``conductor`` conducts."""
