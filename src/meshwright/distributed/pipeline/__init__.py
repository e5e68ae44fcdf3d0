"""Pipeline parallel: stages cut out of a model, and the schedules that run them."""
