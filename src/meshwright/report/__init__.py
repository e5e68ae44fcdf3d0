"""Pages about plans, audits and runs: one HTML file each, which asks the network for nothing."""
