"""Which bug it is, from what an audit measured: the finding, its cause, and the module where it begins."""
