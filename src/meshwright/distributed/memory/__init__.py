"""What needs less memory: recomputation, a loss in chunks, 4 bits; and what is compiled."""
