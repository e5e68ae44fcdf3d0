"""The spec of a model of transformers, derived from what the model declares."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from meshwright.distributed.class_names import class_name
from meshwright.errors import ModelError
from meshwright.models import _transformers_compat as compat
from meshwright.models.heads import causal_twin, head_of
from meshwright.models.reading.model_traces import ModelTraces
from meshwright.models.specs.decoder import declared_structure, structure_of
from meshwright.models.specs.plain_module import INFERRED, inferred_layers, inferred_spec
from meshwright.models.specs.strategy import ParallelizationStrategy
from meshwright.plan.axes.tensor.styles import HEAD, STYLES, canonical
from meshwright.plan.given.names import generalize, holder_of, match_names
from meshwright.plan.given.spec import ParallelSpec, Structure, UnitRule, under_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DefaultParallelizationStrategy", "base_of_peft", "derived_spec", "is_transformers"]

_SIZES = {
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
"""Field of ModelSizes to the names that configs of transformers use for it. The first name whose value is an integer is taken.
"""


class DefaultParallelizationStrategy(ParallelizationStrategy):
    """The strategy of every model whose family has none of its own.

    The spec of a model of transformers is derived from what it declares; that of another model is inferred.

    Args:
        adapted: strategy of the model inside a ``PeftModel``; ``None``: its spec is derived too.
    """

    def __init__(self, adapted: ParallelizationStrategy | None = None) -> None:
        self.adapted = adapted

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """See :func:`derived_spec` and :func:`inferred_spec`. The spec of a ``PeftModel`` is that of the model inside it."""
        wrapped = base_of_peft(model)
        if wrapped is None or self.adapted is None:
            by_transformers = is_transformers(model if wrapped is None else wrapped)
            return derived_spec(model, param_dtype) if by_transformers else inferred_spec(model)
        return _around(self.adapted.spec(wrapped, param_dtype))


def _around(spec: ParallelSpec) -> ParallelSpec:
    """Return the spec of a ``PeftModel`` from that of the model inside it. A forward need not use all of its adapters."""
    around = replace(under_prefix(spec, "base_model.model."), uses_all_parameters=False)
    if isinstance(spec.traces, partial) and "experts" in spec.traces.keywords:
        return replace(around, traces=partial(spec.traces, experts=around.experts))
    return around


def base_of_peft(model: nn.Module) -> nn.Module | None:
    """Return the model inside a ``PeftModel``; ``None`` if a model is no ``PeftModel``."""
    inner = getattr(getattr(model, "base_model", None), "model", None)
    return (
        inner if hasattr(model, "peft_config") and hasattr(model, "get_base_model") and isinstance(inner, nn.Module) else None
    )


def derived_spec(model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
    """Derive the spec of a model of transformers, which may be inside a ``PeftModel``.

    Args:
        model: the model, on any device.
        param_dtype: dtype of compute. Some models ask for fp32 modules only if the rest is fp16.

    Raises:
        ModelError: it is no model of transformers, or does not declare its layers; the message says what to declare.
    """
    if (wrapped := base_of_peft(model)) is not None:
        return _around(derived_spec(wrapped, param_dtype))
    if not is_transformers(model):
        raise ModelError(
            "model.layers",
            f"{class_name(model)} is not a model of transformers, so its layers are unknown: "
            "pass a ParallelSpec that names its layers, such as ParallelSpec(family='mine', layers=('blocks.*',)), or register "
            "a strategy for its class (docs/adding-a-family.md)",
        )
    from meshwright.models.reading.experts import experts_of

    declared = compat.declarations(model)
    modules = dict(model.named_modules())
    no_split = [name for name, module in modules.items() if class_name(module) in declared.no_split and name]
    # A stage that was cut elsewhere holds its layers in a dict, under their numbers in the whole model.
    layers = [name for name in no_split if isinstance(modules[holder_of(name)], nn.ModuleList | nn.ModuleDict)]
    patterns = _patterns(layers) or inferred_layers(model)
    if not patterns:
        raise ModelError(
            "model.layers",
            f"{class_name(model)} declares no layers, and has no list of modules of one class: set _no_split_modules on the "
            f"class to the class name of its layer (it is {sorted(declared.no_split) or None}), or pass a ParallelSpec",
        )
    known, head = structure_of([kind.__name__ for kind in type(model).__mro__], model.config), head_of(model)
    if head and (twin := causal_twin(model)) is not None:
        known = structure_of([twin], model.config)
        if known is not None:
            known = replace(known, head=head, styles={name: one for name, one in known.styles.items() if name != known.head})
    experts = experts_of(model)
    styles = dict(declared.tp)
    if styles and known is not None:
        # In transformers 5.17, these families do not declare the style of the embedding.
        styles = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output", **styles}
    styles |= _style_of_tied_embedding(model, modules, styles)
    fp32 = declared.fp32_strict | (declared.fp32 if param_dtype == "float16" else frozenset())
    return ParallelSpec(
        family=class_name(model),
        layers=patterns,
        units=tuple(UnitRule(pattern) for pattern in _patterns(name for name in no_split if name not in layers)),
        remarks=() if layers else (INFERRED,),
        experts=experts,
        fp32=_patterns(name for name, module in modules.items() if _wants_fp32(name, module, fp32)),
        tied=_tied_groups(declared.tied),
        tp_styles=_matching(styles, model),
        sizes=_sizes(model),
        structure=known or _shared_heads(modules, styles),
        # A subclass has the structure of its family, but may have further parameters that some microbatches do not use.
        uses_all_parameters=known is not None and known.uses_all_parameters and (bool(head) or declared_structure(type(model))),
        traces=partial(
            ModelTraces,
            experts=experts,
            counts_runs=known is None,
            reads_all=known is None or not declared_structure(type(model)),
        ),
    )


def _style_of_tied_embedding(model: "PreTrainedModel", modules: dict[str, nn.Module], styles: dict[str, str]) -> dict[str, str]:
    """Return the style of an embedding that has none, but is tied to a head that is sliced over the vocabulary."""
    embedding, head = compat.embedding_and_head(model)
    names = {id(module): name for name, module in modules.items()}
    one, other = names.get(id(embedding), ""), names.get(id(head), "")
    tied = isinstance(embedding, nn.Embedding) and getattr(head, "weight", None) is embedding.weight
    sliced = any(style in HEAD and match_names(pattern, [other]) for pattern, style in styles.items())
    return {one: "embedding_rowwise"} if tied and sliced and not any(match_names(item, [one]) for item in styles) else {}


def _shared_heads(modules: dict[str, nn.Module], styles: dict[str, str]) -> Structure | None:
    """Return what ranks need to share a key/value head, if the model declares keys and values sliced beside queries."""
    sliced = {name for item, style in styles.items() if style == "colwise" for name in match_names(item, modules)}
    found = [
        f"{holder_of(name)}.{own}" for name in sliced if name.endswith(".q_proj") for own in ("k_proj", "v_proj")
        if f"{holder_of(name)}.{own}" in sliced
    ]  # fmt: skip
    return Structure(kv_projections=_patterns(sorted(found))) if found else None


def is_transformers(model: nn.Module) -> bool:
    """Return whether a model is a model of transformers."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return False
    return isinstance(model, PreTrainedModel)


def _patterns(names: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(generalize(name) for name in names))


def _wants_fp32(name: str, module: nn.Module, declared: frozenset[str]) -> bool:
    """Return whether a declared name is the end of this module's name (its last components), and the module has parameters."""
    dotted = f".{name}."
    named = any(dotted.endswith(f".{item}.") for item in declared)
    return named and any(True for _ in module.parameters())


def _tied_groups(tied: dict[str, str]) -> tuple[tuple[str, ...], ...]:
    groups: dict[str, list[str]] = {}
    for target, source in tied.items():
        groups.setdefault(source, [source]).append(target)
    return tuple(tuple(names) for names in groups.values())


def _matching(styles: dict[str, str], model: nn.Module) -> dict[str, str]:
    """Return the declared styles that match a name of the model: transformers declares them for all variants of a family.

    A module without parameters counts if its style is unknown here, because then the plan is refused for it.
    """
    names = [canonical(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    candidates = {*names, *(holder_of(name) for name in names)}
    modules = {name for name, _ in model.named_modules()}
    return {
        pattern: style for pattern, style in styles.items()
        if match_names(pattern, candidates if style in STYLES else candidates | modules)
    }  # fmt: skip


def _sizes(model: "PreTrainedModel") -> dict[str, str]:
    config = model.config
    text = config.get_text_config()
    prefix = next((f"{name}." for name, value in vars(config).items() if value is text and value is not config), "")
    sizes = {}
    for field, attributes in _SIZES.items():
        for attribute in attributes:
            if isinstance(_read(text, attribute), int):
                sizes[field] = prefix + attribute
                break
    return sizes


def _read(config: Any, attribute: str) -> Any:
    """Return a value of a config; ``None`` if there is none, or not one for all layers (Gemma 4's config raises then)."""
    try:
        return getattr(config, attribute, None)
    except RuntimeError:
        return None
