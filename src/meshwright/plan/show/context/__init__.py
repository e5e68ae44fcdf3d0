"""What is shown of plans with context parallel alone."""
