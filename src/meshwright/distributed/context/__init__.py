"""Context parallel: attention over sequences that ranks share."""
