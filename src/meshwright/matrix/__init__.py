"""The support matrix: which family works on which layout, according to audits."""
