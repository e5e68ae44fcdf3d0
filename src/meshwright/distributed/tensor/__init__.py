"""Tensor parallel: slices of modules, the moves between them, and the loss over a sliced vocabulary."""
