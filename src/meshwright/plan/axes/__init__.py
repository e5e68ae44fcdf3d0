"""The axes of a layout: what each decides, its actions, and what it sends."""
