"""Values that a model of transformers gives some of its tensors in constructors alone, and in no ``_init_weights``.

A model that is built on the meta device loses them: the learned slopes of xIELU, the matrices of OpenAI-GPT's ``Conv1D``. Here
the module is constructed once more, on the CPU, with the arguments that it got. These are noted while the model is built again
on the meta device. What a constructor leaves as ``torch.empty`` made it is no value.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["constructors"]

Constructor = Callable[[], nn.Module]


def constructors(model: nn.Module, names: Collection[str]) -> dict[str, Constructor]:
    """Return what constructs modules of a model again, on the CPU, by name.

    Args:
        model: a model of transformers. Of another one nothing is known, and of a module that its class does not build neither.
        names: names of modules.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "_init_weights"):
        return {}
    kinds = {_own_class(model.get_submodule(name)) for name in names}
    try:
        with torch.device("meta"), _noting(kinds) as calls:
            again = dict(_own_class(model)(config).named_modules())
    except Exception:  # its class is not built of a config alone
        return {}
    found: dict[str, Constructor] = {}
    for name in names:
        module = again.get(name)
        if module in calls and type(module) is _own_class(model.get_submodule(name)):
            found[name] = _constructor(type(module), *calls[module])
    return found


def _own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; FSDP gives a unit a class of its own."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule))
    return next(kinds)


def _constructor(kind: type[nn.Module], args: Any, kwargs: Any) -> Constructor:
    def construct() -> nn.Module:
        with torch.device("cpu"), _empty_is_nan():
            return kind(*args, **kwargs)

    return construct


@contextmanager
def _noting(kinds: Collection[type[nn.Module]]) -> Iterator[dict[Any, tuple[Any, Any]]]:
    """Inside, the arguments of constructors of these classes are noted, by module."""
    calls: dict[Any, tuple[Any, Any]] = {}
    before = {kind: vars(kind).get("__init__") for kind in kinds}

    def noting(kind: type[nn.Module], construct: Callable[..., None]) -> Callable[..., None]:
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            if type(self) is kind:
                calls[self] = args, kwargs

        return init

    try:
        for kind in kinds:
            kind.__init__ = noting(kind, kind.__init__)  # type: ignore[method-assign]
        yield calls
    finally:
        for kind, own in before.items():
            if own is None:
                del kind.__init__
            else:
                kind.__init__ = own  # type: ignore[method-assign]


@contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Inside, torch fills memory that it does not initialize (``torch.empty``) with NaN, or the largest integer."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
