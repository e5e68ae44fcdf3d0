"""How a run begins and ends: setup, preparation, launchers, workers, and signals."""
