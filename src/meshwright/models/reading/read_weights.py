"""Which weights of linear layers other code reads itself, as kernels of Mamba do, instead of calling the layer.

An adapter around such a layer would never run, and 4 bits would be taken for numbers. So the source of every module is looked
through for ``.NAME.weight`` and ``.NAME.bias``, and for layers that get another name, or are passed on, where weights are read.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

__all__ = ["read_by_others"]

_OWN = {"weight", "bias"}
_FIRST = {"__init__", "_init_weights", "init_weights", "reset_parameters"}
"""Methods that run before weights have their values."""

_ASKED = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.If, ast.IfExp, ast.Subscript)
"""Where a layer is only asked for, as in ``if self.norm is not None``."""

_HARMLESS = {"device"}
"""Attributes of a weight that are the same whatever it is stored as."""


def read_by_others(model: nn.Module) -> set[str]:
    """Return the names of the modules whose weight or bias the code of a module around them reads."""
    modules = dict(model.named_modules())
    found = set()
    for name in modules:
        own = next((part for part in reversed(name.split(".")) if not part.isdigit()), "")  # of a list, the name of the list
        path = name.split(".")
        around = (".".join(path[:length]) for length in range(len(path)))
        if any(own in _reads(type(modules[outer])) for outer in around if outer in modules):  # type: ignore[arg-type]
            found.add(name)
    return found


@lru_cache(maxsize=4096)
def _reads(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of attributes whose weight or bias the methods of a class read."""
    found: set[str] = set()
    for function in _methods(kind):
        code = getattr(inspect.unwrap(function), "__code__", None)  # a partial has none, nor has what is not Python
        if code is not None and not _names_some(code):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):  # code without a source
            continue
        found.update(_read_in(tree))
    return frozenset(found)


def _methods(kind: type[nn.Module]) -> Iterator[Any]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != "torch":
            yield from (item for name, item in vars(base).items() if inspect.isfunction(item) and name not in _FIRST)


def _names_some(code: CodeType) -> bool:
    """Return whether compiled code reads an attribute of such a name: most does not, and its source takes long to parse."""
    return not _OWN.isdisjoint(code.co_names) or any(_names_some(one) for one in code.co_consts if isinstance(one, CodeType))


def _read_in(tree: ast.AST) -> Iterator[str]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    chains = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    reads_some = any(node.attr in _OWN for node in chains)
    for node in chains:
        outer = parents[node]
        if isinstance(outer, ast.Subscript) and outer.value is node:  # an entry of a list of layers
            outer = parents[outer]
        if isinstance(outer, ast.Attribute):
            further = parents[outer]
            device = isinstance(further, ast.Attribute) and further.attr in _HARMLESS
            if outer.attr in _OWN and not device:
                yield node.attr
        elif reads_some and not isinstance(outer, _ASKED) and not (isinstance(outer, ast.Call) and outer.func is node):
            yield node.attr  # given another name, or passed on, maybe to what reads it
