"""The command line: plan, train, export, generate, doctor."""
