"""Keeps away from users what other libraries say to programmers."""

import logging
import os
import sys
import warnings

__all__ = ["is_quiet", "keep_bars_apart", "quiet"]

_QUIET = False


def quiet() -> None:
    """Silence warnings that no user can act on, in this process and in those that it forks later.

    These are notes that a name will change, which Python calls FutureWarning, what transformers and peft say about calls that
    Meshwright makes, the traceback that torch logs of an operator that fails where a step is traced, and what torchao logs of
    kernels for other machines. What must be known of them, Meshwright reports in its own words. Whoever sets
    ``PYTHONWARNINGS``, ``TRANSFORMERS_VERBOSITY`` or ``TORCH_LOGS`` decides for himself.
    """
    global _QUIET
    _QUIET = True
    if not sys.warnoptions:
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("ignore", module=r"(transformers|peft)\b")
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        if "transformers" in sys.modules:
            from transformers.utils import logging as of_transformers

            of_transformers.set_verbosity_error()
    if "TORCH_LOGS" not in os.environ:
        for name in ("torch._subclasses.fake_tensor", "torch.utils._pytree", "torchao"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def is_quiet() -> bool:
    """Return whether this process was silenced, so that those that it starts anew should be."""
    return _QUIET


def keep_bars_apart() -> None:
    """Let the progress bars of this process share no lock with those of other processes.

    tqdm makes a semaphore for that. Of a process that was started anew and is ended from outside, Python says that it leaked.
    """
    from tqdm.std import TqdmDefaultWriteLock  # type: ignore[import-untyped]

    if not hasattr(TqdmDefaultWriteLock, "mp_lock"):  # a forked process has that of its parent
        TqdmDefaultWriteLock.mp_lock = None
