"""What pipeline stages must know of a model."""
