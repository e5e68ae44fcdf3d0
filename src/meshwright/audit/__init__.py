"""One process against many, parameter by parameter."""
