"""Models are built, and get their values: at random, or from files."""
