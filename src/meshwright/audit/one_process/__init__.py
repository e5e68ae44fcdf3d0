"""One process: what it computes, what plain libraries compute, and how far rounding alone leads it."""
