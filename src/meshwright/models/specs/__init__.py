"""What a model declares of itself: the strategies, and the specs that they make."""
