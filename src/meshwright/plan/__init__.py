"""Resolve spec x model x layout x options to a frozen plan: what every rank stores and communicates. Starts no process."""
