"""Shrinks a large run to a small one whose audit proves it: the same structure, with smaller numbers."""
