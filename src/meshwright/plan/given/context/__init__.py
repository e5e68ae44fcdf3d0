"""The facts of a model that only context parallel needs."""
