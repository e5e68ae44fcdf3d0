"""From a configuration to a trained, saved and exported model."""
