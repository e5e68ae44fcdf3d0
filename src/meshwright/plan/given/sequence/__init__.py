"""The facts of what runs along the sequence: mixers, whose heads ranks of `cp` or `tp` divide, and canvases."""
