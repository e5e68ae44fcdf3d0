"""An objective is tried when a run is planned: on batches without meaning, with a model that stands in."""
