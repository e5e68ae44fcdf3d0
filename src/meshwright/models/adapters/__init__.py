"""Adapters of peft: where they are put, and how they are read and written."""
