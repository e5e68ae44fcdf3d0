"""What a plan decides of sequences that the ranks of `cp` share."""
