"""The support matrix: which family works on which layout, as audits say."""
