"""The command line: plan, audit, train, export, generate, doctor."""
