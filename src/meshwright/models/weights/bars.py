"""One progress bar where transformers would draw one in every process."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["one_bar"]


@contextmanager
def one_bar(words: str) -> Iterator[None]:
    """Inside this context, rank 0 draws the progress bars of transformers under our words, in a terminal only, until it ends.

    Args:
        words: what is done, such as ``reading weights``.
    """
    from transformers.utils import logging

    shown = os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()

    def draw(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return factory(*args, **{**options, "desc": words, "leave": False, "disable": not shown})

    before = logging.set_tqdm_hook(draw)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
