"""For maintainers: the support matrix, the coverage of transformers, and the small models that they are made with."""
