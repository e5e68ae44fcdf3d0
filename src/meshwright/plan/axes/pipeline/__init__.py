"""Pipeline parallel: which rank has which stage, and the order of a schedule."""
