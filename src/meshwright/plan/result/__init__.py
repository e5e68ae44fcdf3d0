"""The plan itself: rows, the program, and the differences of two plans."""
