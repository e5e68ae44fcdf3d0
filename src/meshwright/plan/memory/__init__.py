"""What a plan does to need less memory: recomputation, a loss in chunks; and what is compiled."""
