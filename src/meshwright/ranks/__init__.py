"""Worker processes that are forked and reused, and reports of where ranks hang; for the tests, the audit and runs."""
