"""What only plans with context parallel have."""
