"""Tensor parallel: the style of each module, the moves around it, and the checks of both."""
