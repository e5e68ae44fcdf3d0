"""What every rank will hold and send: spec x model x layout x options, resolved to a frozen plan. Starts no process."""
