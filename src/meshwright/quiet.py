"""Keeps away from users what other libraries say to programmers."""

import os
import sys
import warnings

__all__ = ["quiet"]


def quiet() -> None:
    """Silence warnings that no user can act on, in this process and in those that it forks later.

    These are notes that a name will change, which Python calls FutureWarning, and what transformers and peft say about calls
    that Meshwright makes. What must be known of them, Meshwright reports in its own words. Whoever sets ``PYTHONWARNINGS`` or
    ``TRANSFORMERS_VERBOSITY`` decides for himself.
    """
    if not sys.warnoptions:
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("ignore", module=r"(transformers|peft)\b")
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        if "transformers" in sys.modules:
            from transformers.utils import logging

            logging.set_verbosity_error()
