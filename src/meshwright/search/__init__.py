"""The search for the best layout of a run: which there are, which cannot win, what the others cost, and the best few."""
