"""What a plan must know of a model: read from one forward without values, or from its code."""
