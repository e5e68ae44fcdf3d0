"""What a module's own code would do with slices of features, judged by the names that its forward uses.

Styles say which matrices are sliced. The code between a sliced matrix and the next one was written for whole features. Two
kinds of code compute something else on slices, without an error:

- An attention that counts its heads. With half of the heads, ``x.view(batch, -1, self.num_heads, self.head_dim)`` makes a
  sequence of half the length. Code that reads heads from shapes, as in ``view(*x.shape[:-1], -1, self.head_dim)``, is right.
- An MLP that takes a statistic over its features, such as their mean: each rank would take the mean of its slice. If the
  features are first split into heads, a statistic over one head is right.

Only names are read, so there are errors both ways. A mean of the *input* of the MLP is taken for one of its features. A
statistic that is written out (``x.pow(2).sum(-1)``), or that is in a class that also reshapes, is not found. An audit decides.
"""

import re

from meshwright.plan.given.inspection import Inspection, ModuleFacts
from meshwright.plan.given.names import inside

__all__ = ["counts_heads", "mixes_features", "reads_matrix"]

_COUNTS = re.compile(
    r"(?!.*per_head).*heads|n_head|num_head|embed_dim|hidden_size|hidden_dim|d_model|n_embd|inner_dim|all_head_size|split_size"
)
_STATISTICS = {
    "amax", "amin", "argsort", "cosine_similarity", "cumprod", "cumsum", "kthvalue", "layer_norm", "log_softmax", "logsumexp",
    "mean", "median", "norm", "normalize", "quantile", "rms_norm", "softmax", "softmin", "sort", "std", "std_mean", "topk",
    "var", "var_mean", "vector_norm",
}  # fmt: skip
_TAKES_APART = {"reshape", "rearrange", "unflatten", "view"}


def counts_heads(module: ModuleFacts) -> str:
    """Return the attribute that a module's code reads its number of heads, or their total width, from; empty: it reads none."""
    return next((name for name in module.code if _COUNTS.fullmatch(name)), "")


def mixes_features(model: Inspection, name: str) -> str:
    """Return the statistic that a module, or a child without parameters, takes over whole features; empty: none."""
    module = model.modules[name]
    if _TAKES_APART & set(module.code):
        return ""
    children = module.children
    # A child called `norm` that has parameters has a style of its own.
    own = [used for used in module.code if used not in children or not model.holds_parameters(children[used])]
    bare = [child for child in children.values() if not model.holds_parameters(child)]
    code_of_children = [used for child in bare for used in model.modules[child].code]
    return next((used for used in [*own, *code_of_children] if used in _STATISTICS), "")


def reads_matrix(model: Inspection, embedding: str) -> bool:
    """Return whether a module around an embedding uses its matrix by itself."""
    own = embedding.rpartition(".")[2]
    around = (module for name, module in model.modules.items() if inside(embedding, name))
    return any({own, "weight"} <= set(module.code) for module in around)
