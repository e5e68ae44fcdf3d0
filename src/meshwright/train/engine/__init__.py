"""What runs optimizer steps: the microbatches of one, in one process or on stages, and an engine for a loop of one's own."""
