"""Which pairs of matrices can be sliced by columns and rows: read from one forward without values.

A pair is an MLP, an attention, or anything that computes like one: the features that a linear layer puts out pass operators
that treat each of them alone, or each head, and enter one other linear layer. Then each rank can compute its share of the
features (Megatron-LM, arXiv 1909.08053, section 3), and the second layer puts out partial sums. A statistic over features, a
norm, or an addition of something that is not sliced would compute another thing on a slice. Several linear layers may share
their second one, as a gate does, and as queries, keys and values do.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.models import _transformers_compat as compat
from meshwright.models.heads import is_other_task
from meshwright.models.reading.repeated_layers import RepeatedLayers
from meshwright.models.reading.tensor.features import FeatureTracer
from meshwright.models.reading.tracing import attributes, traced
from meshwright.plan.given.names import holder_of, within
from meshwright.plan.given.parameter_storage import is_conv1d, names_of_parameters
from meshwright.plan.given.sliceable_pairs import Pair, Pairs
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["pairs_of_all", "trace_pairs"]

_HEADS = r"(?!.*per_head)(.*_heads|n_head)"
_WIDTHS = ("embed_dim", "all_head_size", "hidden_size", "inner_dim", "d_model", "n_embd", "dim_model")
_COUNTED = tuple(map(re.compile, ("(?!)", _HEADS, f"{_HEADS}|{'|'.join(_WIDTHS)}")))
"""Names of attributes that count what is sliced, tried in this order: none; heads; heads, and the features of all heads."""


def trace_pairs(model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule] = ()) -> Pairs:
    """Return what can be sliced in the layers of a model, and the linear layers whose features an operator mixes as a whole.

    What the trace finds is tried: the model is called again with twice as many heads and features. An attention that reads its
    number of heads from an attribute, and not from shapes, needs the number of its rank.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        layers: names of its layers.
        experts: its mixtures. They are not called, because what they do depends on values.
    """
    names, modules = names_of_parameters(model), dict(model.named_modules())
    adapters = [name for name, module in modules.items() if hasattr(module, "base_layer")]
    linear = {
        name: module
        for name, module in modules.items()
        if (type(module) is nn.Linear or is_conv1d(module) or _computes_like_linear(module))
        and within(name, layers)
        and not within(name, adapters)
        and all(within(own, layers) for parameter in module.parameters() for own in names[parameter])
    }
    parameters = {  # norms of heads; what else holds parameters computes something with them
        first: not others and within(holder_of(first), layers) and not any(True for _ in modules[holder_of(first)].children())
        for own, (first, *others) in names.items()
        if own.requires_grad
    }
    embeddings = {
        name: names[own.weight] for name, own in modules.items() if isinstance(own, nn.Embedding) and own.weight in names
    }
    owners = {holder_of(own) for tied in embeddings.values() for own in tied}
    watched = {name: first for name, (first, *_) in embeddings.items()}
    norms = {name: own for name, module in modules.items() if (own := _of_norm(name, module, names)) and within(name, layers)}
    tracer = partial(FeatureTracer, linear, parameters, watched, owners, norms)
    whole, _ = traced(model, experts, tracer)
    if whole is None:
        return Pairs()
    several = (pair for pair in whole.pairs() if pair.blocks > 1)
    found = _alike([pair for pair in several if not (pair.norms and _is_narrow(pair, linear))], modules, names)
    plain = [pair for pair in found if pair.blocks == _width(linear[pair.second], 1)]
    for pairs, counted in [*((found, counted) for counted in _COUNTED), (plain, _COUNTED[0])]:
        tried = [_with_counts(pair, modules, counted) for pair in pairs]
        counts = ((modules[holder], {name: 2 * value}) for pair in tried for holder, name, value in pair.counts)
        with attributes(counts):
            tensors = _doubled(whole.inputs.tensors, linear, norms, tried)
            trial, _ = traced(model, experts, tracer, (whole.inputs.mask_device,), tensors=tensors)
        expected = {replace(pair, blocks=2 * pair.blocks) for pair in pairs}
        if trial is not None and trial.repeats(whole) and expected <= set(trial.pairs()):
            return Pairs(tuple(tried), whole.mixed, _vocabulary(model, names), tuple(whole.read))
    return Pairs(mixed=whole.mixed, read=tuple(whole.read))


def pairs_of_all(found: Pairs, repeated: RepeatedLayers) -> Pairs | None:
    """Return the pairs of all layers from those of the layers that ran; ``None``: what was found may differ in others."""
    pairs, mixed = repeated.spread(found.found), repeated.spread(tuple(found.mixed.items()))
    if found.read is None or pairs is None or mixed is None:
        return None
    return replace(found, found=pairs, mixed=dict(mixed))


def _is_narrow(pair: Pair, linear: Mapping[str, nn.Module]) -> bool:
    """Return whether a pair has fewer features inside than enter it, as the latents of queries: to sum what it puts out over
    ranks, beside the means of its norms, costs more than its small matrices.
    """
    return _width(linear[pair.second], 1) < min(_width(linear[name], 1) for name in pair.firsts)


def _of_norm(name: str, module: nn.Module, names: Mapping[torch.Tensor, Sequence[str]]) -> tuple[str, ...]:
    """Return the names of the parameters of a module that may be a norm: it has vectors of one size, for itself alone."""
    own = dict(module.named_parameters())
    apart = any(True for _ in chain(module.children(), module.buffers()))
    fits = own and not apart and len({tuple(item.shape) for item in own.values()}) == 1
    if not fits or any(item.ndim != 1 or len(names[item]) > 1 for item in own.values()):
        return ()
    return tuple(f"{name}.{item}" for item in own)


def _computes_like_linear(module: nn.Module) -> bool:
    """Return whether a module of a class of its own computes what ``nn.Linear`` does, of whatever sizes: tried with values."""
    if not isinstance(module, nn.Linear) or any(True for _ in chain(module.buffers(), module.children())):
        return False
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    values = {"weight": drawn(3, 5)} | ({} if module.bias is None else {"bias": drawn(3)})
    if values.keys() != dict(module.named_parameters()).keys():
        return False
    given = drawn(2, 4, 5)
    try:
        output = torch.func.functional_call(module, values, (given,))
    except Exception:  # whatever it does with sizes that are not its own
        return False
    expected = nn.functional.linear(given, values["weight"], values.get("bias"))
    alike = isinstance(output, torch.Tensor) and (output.shape, output.dtype) == (expected.shape, expected.dtype)
    return alike and torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


def _alike(pairs: list[Pair], modules: Mapping[str, nn.Module], names: Mapping[torch.Tensor, Sequence[str]]) -> list[Pair]:
    """Return the pairs whose matrices are on the same side of pairs in all layers that share them."""

    def others(name: str) -> set[str]:
        return {holder_of(own) for parameter in modules[name].parameters() for own in names[parameter]}

    while True:
        firsts, seconds = {name for pair in pairs for name in pair.firsts}, {pair.second for pair in pairs}
        kept = [
            pair for pair in pairs if others(pair.second) <= seconds and all(others(name) <= firsts for name in pair.firsts)
        ]
        if len(kept) == len(pairs):
            return pairs
        pairs = kept


def _with_counts(pair: Pair, modules: Mapping[str, nn.Module], names: re.Pattern[str]) -> Pair:
    """Return a pair with the attributes of modules, of these names, that count what is divided."""
    widths = {_width(modules[pair.second], 1), *(_width(modules[name], 0) for name in pair.firsts)}
    counts = [(name, "nf", _width(modules[name], 0)) for name in pair.firsts if is_conv1d(modules[name])]
    for holder in dict.fromkeys(map(holder_of, pair.firsts)):
        for name, value in vars(modules[holder]).items():
            fits = type(value) is int and (value in widths if name in _WIDTHS else value and value % pair.blocks == 0)
            if fits and names.fullmatch(name):
                counts.append((holder, name, value))
    return replace(pair, counts=tuple(counts))


def _doubled(
    tensors: Mapping[str, torch.Tensor],
    linear: Mapping[str, nn.Module],
    norms: Mapping[str, Sequence[str]],
    pairs: Sequence[Pair],
) -> dict[str, torch.Tensor]:
    """Return all tensors, with twice the features in those that belong to pairs.

    A number that is larger tells more than one that is smaller: one head has no dimension of its own.
    """
    tensors = dict(tensors)
    for pair in pairs:
        sides = [*((name, 0) for name in pair.firsts), (pair.second, 1)]
        dims = {f"{name}.weight": _dim(linear[name], side) for name, side in sides}
        vectors = [*(f"{name}.bias" for name in pair.firsts), *(own for norm, _ in pair.norms for own in norms[norm])]
        for name, dim in (dims | dict.fromkeys(vectors, 0)).items():
            if name in tensors:
                tensors[name] = torch.cat([tensors[name], tensors[name]], dim)
    return tensors


def _dim(linear: nn.Module, side: int) -> int:
    """Return the dimension of a linear layer's weight that counts its output features (side 0), or input features (side 1)."""
    return 1 - side if is_conv1d(linear) else side


def _width(linear: nn.Module, side: int) -> int:
    return linear.get_parameter("weight").shape[_dim(linear, side)]


def _vocabulary(model: "PreTrainedModel", names: Mapping[torch.Tensor, Sequence[str]]) -> tuple[str, ...]:
    """Return the names of embedding and head, if what they hold is used by nobody else."""
    embedding, head = compat.embedding_and_head(model)
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        return ()
    own = {module: name for name, module in model.named_modules()}
    tied = embedding.weight is head.weight
    alone = all(len(names[weight]) == 1 + tied for weight in (embedding.weight, head.weight))
    alone = alone and (head.bias is None or len(names[head.bias]) == 1)
    if is_other_task(model):  # its few labels stay whole
        return (own[embedding],) if alone else ()
    return (own[embedding], own[head]) if alone else ()
