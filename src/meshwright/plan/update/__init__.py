"""How the optimizer changes each parameter."""
