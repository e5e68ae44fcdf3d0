"""A small run that proves a large one: the same structure, smaller numbers."""
