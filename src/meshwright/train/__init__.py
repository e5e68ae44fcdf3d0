"""Training: from a configuration to a trained, saved and exported model."""
