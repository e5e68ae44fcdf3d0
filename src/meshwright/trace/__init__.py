"""The real step of a run under fake tensors: what a rank holds at the worst moment, and what it computes."""
