"""Expert parallel: where experts are, how tokens get there and back, and the balance of the load."""
