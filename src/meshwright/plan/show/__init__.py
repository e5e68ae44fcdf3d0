"""A plan for people: tables and pictures."""
