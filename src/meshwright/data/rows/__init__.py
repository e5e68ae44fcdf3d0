"""From files and sources to documents: what the rows are, and what of a row means what."""
