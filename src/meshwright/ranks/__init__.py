"""Processes that are forked and reused, and where they wait when they hang: for the tests, the audit and a run."""
