"""What comes into a plan: names, options, the spec of a family, and the facts of a model."""
