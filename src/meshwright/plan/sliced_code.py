"""What a module's own code would do with slices of features, read from the names that its forward uses.

Styles say which matrices are sliced. The code between a sliced matrix and the next one was written for whole features. Two
kinds of code compute something else on slices, without an error:

- An attention that counts its heads. ``x.view(batch, -1, self.num_heads, self.head_dim)`` of half the heads makes a sequence
  of half the length. One that reads heads from shapes, as in ``view(*x.shape[:-1], -1, self.head_dim)``, is right.
- An MLP that takes a statistic over its features, such as their mean: each rank would take the mean of its slice. Where
  features are first taken apart into heads, a statistic over one head is right.

Names are all that is read, so this errs both ways: a mean of what goes *into* the MLP is taken for one of its features, and a
statistic that is written out (``x.pow(2).sum(-1)``), or stands in a class that also reshapes, is not seen. An audit decides.
"""

import inspect
import re
from collections.abc import Callable
from types import CodeType, FunctionType

from torch import nn

__all__ = ["counts_heads", "mixes_features"]

_COUNTS = re.compile(
    r"(?!.*per_head).*heads|n_head|num_head|embed_dim|hidden_size|hidden_dim|d_model|n_embd|inner_dim|all_head_size|split_size"
)
_STATISTICS = {
    "amax", "amin", "argsort", "cosine_similarity", "cumprod", "cumsum", "kthvalue", "layer_norm", "log_softmax", "logsumexp",
    "mean", "median", "norm", "normalize", "quantile", "rms_norm", "softmax", "softmin", "sort", "std", "std_mean", "topk",
    "var", "var_mean", "vector_norm",
}  # fmt: skip
_TAKES_APART = {"reshape", "rearrange", "unflatten", "view"}


def counts_heads(module: nn.Module) -> str:
    """The attribute that a module's code reads its number of heads, or their whole width, from; empty: it reads none."""
    return next((name for name in _names_of(type(module)) if _COUNTS.fullmatch(name)), "")


def mixes_features(module: nn.Module) -> str:
    """The statistic that a module, or a child of its without parameters, takes over whole features; empty: none."""
    names = _names_of(type(module))
    if _TAKES_APART & set(names):
        return ""
    held = {name: next(child.parameters(), None) is not None for name, child in module.named_children()}
    bare = [child for name, child in module.named_children() if not held[name]]
    of_children = [name for child in bare for name in _names_of(type(child))]
    # A child called `norm` that holds parameters has a style of its own.
    own = [name for name in names if not held.get(name, False)]
    return next((name for name in [*own, *of_children] if name in _STATISTICS), "")


def _names_of(kind: type[nn.Module]) -> list[str]:
    """Attributes and globals that the forward of a class uses, and the methods that it calls."""
    found: list[str] = []
    todo: list[Callable[..., object]] = [kind.forward]
    seen: set[str] = set()
    while todo:
        function = inspect.unwrap(todo.pop())
        code = getattr(function, "__code__", None)
        for name in _names_in(code) if isinstance(code, CodeType) else ():
            found.append(name)
            method = inspect.getattr_static(kind, name, None)
            if isinstance(method, FunctionType) and name not in seen and not hasattr(nn.Module, name):
                seen.add(name)
                todo.append(method)
    return found


def _names_in(code: CodeType) -> list[str]:
    """Of a function, and of those inside it."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names_in(constant)]
    return [*code.co_names, *inner]
