"""How a plan shares a model over `tp`: whose styles are taken, what each rank holds, and what moves between ranks.

Styles are in the words of transformers (`base_model_tp_plan`). They come from the first of four levels that has any: given by
the user, written for the family, declared by the model, or, for a model whose layers are those of a Llama, generic.

Where the spec knows the *regions* of a layer (its attention, its MLP), the moves of the matrices inside become those of the
region, as in Megatron-LM: one move in, one move out.

| region  | inside                                       | in, out          | in, out with sequence parallel            |
|---------|----------------------------------------------|------------------|-------------------------------------------|
| split   | heads or features, ended by a rowwise matrix | `enter`, `leave` | `gather_sequence`, `scatter_sequence`     |
| partial | experts: the output is a sum over ranks      | `enter`, `leave` | `gather_sequence`, `scatter_sequence`     |
| whole   | every rank computes the same                 |                  | `gather_sequence_whole`, `split_sequence` |

Sequence parallel (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): between regions a rank holds its own part of the
sequence, so that norms and residuals are computed, and their activations held, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import nn

from meshwright.layout import Layout, ModelSizes, divisors
from meshwright.plan.given_styles import load_styles
from meshwright.plan.options import ParallelOptions
from meshwright.plan.sharding_plan import Move, TensorParallelRow
from meshwright.plan.spec import ParallelSpec, Structure, generalize, match_names

__all__ = [
    "STYLES",
    "Style",
    "TensorParallelChoice",
    "resolve_tensor_parallel",
    "styles_of_parameters",
    "tp_dim",
    "tp_placement",
]


class Style(NamedTuple):
    """What a style does where no region says otherwise.

    Attributes:
        dim: dimension of the weight that is sliced; ``None``: each rank holds it whole. Of biases, which have one dimension,
            those of a style that slices rows are sliced.
        entry: how the input comes in.
        exit: how the output leaves.
        pieces: matrices that the weight holds one after another (gate and up); each of them is sliced.
    """

    dim: int | None
    entry: Move = Move.NONE
    exit: Move = Move.NONE
    pieces: int = 1


STYLES: dict[str, Style] = {
    "colwise": Style(-2, Move.ENTER),
    "colwise_gather_output": Style(-2, Move.ENTER, Move.GATHER_FEATURES),
    "colwise_rep": Style(-2, Move.ENTER, Move.GATHER_FEATURES),
    "packed_colwise": Style(-2, Move.ENTER, pieces=2),
    "fused_colwise": Style(-2, Move.ENTER, Move.EXCHANGE_FEATURES),
    "rowwise": Style(-1, exit=Move.LEAVE),
    "rowwise_split_input": Style(-1, Move.SPLIT_FEATURES, Move.LEAVE),
    "rowwise_rep": Style(-1, Move.SPLIT_FEATURES, Move.LEAVE),
    "embedding_rowwise": Style(-2, exit=Move.LEAVE),
    "embedding_colwise": Style(-1, exit=Move.GATHER_FEATURES),
    "replicated_with_grad_allreduce": Style(None),
    "moe_tp_experts": Style(None, Move.ENTER, Move.LEAVE),
    "replicate": Style(None),
}
"""Tensor parallel styles that are carried out."""

_DERIVED = {"grouped_colwise": Style(None, Move.ENTER)}
"""Styles that the resolver makes of others."""

_FIRST = {"colwise", "packed_colwise", "fused_colwise", "grouped_colwise"}
_HEAD = {"colwise", "colwise_gather_output", "colwise_rep"}

GENERIC = {
    "**.self_attn.q_proj": "colwise", "**.self_attn.k_proj": "colwise", "**.self_attn.v_proj": "colwise",
    "**.self_attn.o_proj": "rowwise", "**.mlp.gate_proj": "colwise", "**.mlp.up_proj": "colwise", "**.mlp.down_proj": "rowwise",
}  # fmt: skip
"""For layers that have these modules in their attention and MLP and no others with parameters."""


class Claim(Protocol):
    """A parameter of the model."""

    @property
    def name(self) -> str:
        """Its first name."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its other names."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        ...


@dataclass
class TensorParallelChoice:
    """What was resolved.

    Attributes:
        level: whose styles were taken: ``given``, ``family``, ``model`` or ``generic``; empty where ``tp`` is 1.
        passed_over: the levels above it, each with the reason that it was not taken.
        styles: of each parameter that has one.
        rows: of each module that computes with slices or moves something.
    """

    level: str = ""
    passed_over: tuple[tuple[str, str], ...] = ()
    styles: dict[str, str] = field(default_factory=dict)
    rows: tuple[TensorParallelRow, ...] = ()


def tp_dim(style: str | None, shape: Sequence[int]) -> int | None:
    """The dimension of a parameter that a style slices."""
    dim = STYLES[style].dim if style in STYLES else None
    if dim is None:
        return None
    if len(shape) == 1:
        return 0 if dim == -2 else None
    return dim % len(shape)


def tp_placement(style: str | None, dim: int) -> str:
    """In words of the plan."""
    pieces = STYLES[style].pieces if style in STYLES else 1
    return f"StridedShard({dim}, {pieces})" if pieces > 1 else f"Shard({dim})"


def resolve_tensor_parallel(
    spec: ParallelSpec,
    model: nn.Module,
    layout: Layout,
    options: ParallelOptions,
    sizes: ModelSizes,
    claims: Sequence[Claim],
    problems: list[str],
) -> TensorParallelChoice:
    """Choose the styles, give them to parameters and modules, and derive what moves.

    Args:
        spec: declares styles and structure.
        model: to read names from.
        layout: resolved.
        options: ``tp_plan``, ``sequence_parallel`` and ``loss_parallel`` are read.
        sizes: heads of the model.
        claims: its parameters.
        problems: what is wrong is added to it.
    """
    tp = layout.size("tp")
    if tp == 1:
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(options, name):
                problems.append(f"{name}=True: is a matter of tensor parallel, and tp is 1; the legal value is False")
        if options.tp_plan is None:  # a model's own declaration is checked on the laptop, not first on the cluster
            styles_of_parameters("tp_styles", spec.tp_styles, claims, problems)
        return TensorParallelChoice()
    level, styles, passed_over = _choose(spec, model, options, tp, problems)
    for pattern, style in styles.items():
        if style not in STYLES and style != "sequence_parallel":
            problems.append(f"tp={tp}: the style {style!r} of {pattern!r} is not carried out; legal are {', '.join(STYLES)}")
    where = "tp_plan" if level == "given" else "tp_styles"
    builder = _Rows(spec, model, layout, options, sizes)
    builder.assign(where, styles, claims, problems)
    if not problems:
        builder.derive(problems)
    _check_slices(builder.of_parameters, claims, layout, problems)
    return TensorParallelChoice(level, tuple(passed_over), builder.of_parameters, builder.sorted_rows())


def _choose(
    spec: ParallelSpec, model: nn.Module, options: ParallelOptions, tp: int, problems: list[str]
) -> tuple[str, Mapping[str, str], list[tuple[str, str]]]:
    """The first level that has styles, and why those above have not."""
    passed_over: list[tuple[str, str]] = []
    if options.tp_plan is not None:
        return "given", load_styles(options.tp_plan, model, options.sequence_parallel, problems), passed_over
    passed_over.append(("given", "no tp_plan is set"))
    if spec.structure is not None and spec.structure.styles:
        return "family", spec.structure.styles, passed_over
    passed_over.append(("family", f"none is written for {spec.family}"))
    if spec.tp_styles:
        return "model", spec.tp_styles, passed_over
    passed_over.append(("model", f"{spec.family} declares no tp_styles (base_model_tp_plan of its config)"))
    unfit = _not_generic(spec, model)
    if not unfit:
        names = [name for name, _ in model.named_modules()]
        return "generic", {pattern: style for pattern, style in GENERIC.items() if match_names(pattern, names)}, passed_over
    passed_over.append(("generic", unfit))
    problems.append(
        f"tp={tp}: no tensor parallel styles: "
        + "; ".join(f"{name}: {why}" for name, why in passed_over)
        + "; the legal value is 1"
    )
    return "", {}, passed_over


def _not_generic(spec: ParallelSpec, model: nn.Module) -> str:
    """Why the generic styles do not fit a model; empty where they do."""
    expected = {"self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"}, "mlp": {"gate_proj", "up_proj", "down_proj"}}
    layers = [name for pattern in spec.layers for name in match_names(pattern, [name for name, _ in model.named_modules()])]
    for layer in layers:
        for part, matrices in expected.items():
            module = model.get_submodule(layer)
            if not hasattr(module, part):
                return f"{generalize(layer)} has no {part}, so it is not the layer of a Llama"
            found = {name.partition(".")[0] for name, _ in getattr(module, part).named_parameters()}
            if found != matrices:
                held, wanted = (", ".join(sorted(names)) for names in (found, matrices))
                return f"{generalize(layer)}.{part} holds {held}; a Llama's holds {wanted}"
    return "" if layers else "there are no layers"


def styles_of_parameters(
    where: str, patterns: Mapping[str, str], claims: Sequence[Claim], problems: list[str]
) -> dict[str, str]:
    """Parameter name to style: a pattern names a module or a parameter; the first that matches counts."""
    styles: dict[str, str] = {}
    names = {_canonical(name): claim.name for claim in claims for name in (claim.name, *claim.aliases)}
    for pattern, style in patterns.items():
        matched = [
            own for name, own in names.items()
            if match_names(pattern, [name]) or match_names(pattern, [name.rpartition(".")[0]])
        ]  # fmt: skip
        if not matched:
            problems.append(f"{where} pattern {pattern!r} matches no parameter")
        styles.update((name, style) for name in matched if name not in styles)
    return styles


def _canonical(name: str) -> str:
    """A name as it was before peft put an adapter around a module."""
    return name.replace(".base_layer", "")


def _check_slices(styles: Mapping[str, str], claims: Sequence[Claim], layout: Layout, problems: list[str]) -> None:
    tp, shards = layout.size("tp"), layout.size("dp_shard_cp")
    for claim in claims:
        style = styles.get(claim.name)
        if (cut := tp_dim(style, claim.shape)) is None:
            continue
        size, pieces = claim.shape[cut], STYLES[style or ""].pieces
        if size % pieces or _empty_slices(size // pieces, tp):
            problems.append(f"tp={tp}: {claim.name!r} has {size} entries to slice, too few for each rank")
        if pieces > 1 and (size // pieces) % tp:
            problems.append(
                f"tp={tp}: {claim.name!r} holds {pieces} matrices of {size // pieces} rows; legal are "
                f"{', '.join(map(str, divisors(size // pieces)))}"
            )
        if pieces > 1 and cut == 0 and shards > 1 and (len(claim.shape) == 1 or claim.shape[1] % shards):
            what = f"its {claim.shape[1]} columns" if len(claim.shape) > 1 else "nothing else"
            problems.append(
                f"dp_shard={shards}: {claim.name!r} is packed along its rows, so FSDP shards {what}, and not evenly"
            )


def _empty_slices(size: int, ranks: int) -> bool:
    """Whether slices of one width leave a rank with nothing."""
    return -(-size // ranks) * (ranks - 1) >= size


# -- rows ------------------------------------------------------------------------------------------------------------------


class _Rows:
    """Derives the row of each module."""

    def __init__(
        self, spec: ParallelSpec, model: nn.Module, layout: Layout, options: ParallelOptions, sizes: ModelSizes
    ) -> None:
        self.spec, self.options, self.sizes = spec, options, sizes
        self.structure = spec.structure or Structure()
        self.tp = layout.size("tp")
        self.modules = dict(model.named_modules())
        self.names = [name for name in self.modules if name]
        self.adapters = {name for name, module in self.modules.items() if _is_adapter(module)}
        self.of_parameters: dict[str, str] = {}
        self.of_modules: dict[str, str] = {}
        self.rows: dict[str, TensorParallelRow] = {}
        self.regions: dict[str, str] = {}
        self.loss_parallel = False

    def assign(self, where: str, styles: Mapping[str, str], claims: Sequence[Claim], problems: list[str]) -> None:
        """Styles of parameters and modules."""
        self.of_parameters = styles_of_parameters(where, styles, claims, problems)
        outside = [name for name in self.names if not any(name.startswith(f"{adapter}.") for adapter in self.adapters)]
        for pattern, style in styles.items():
            for name in match_names(pattern, outside):
                self.of_modules.setdefault(name, style)
        self._group_heads()

    def _matched(self, patterns: Sequence[str]) -> list[str]:
        return [name for pattern in patterns for name in match_names(pattern, self.names)]

    def _group_heads(self) -> None:
        """Fewer key/value heads than ranks: each rank holds all of them, and computes the one that its queries need."""
        if not self.sizes.kv_heads or self.sizes.kv_heads % self.tp == 0:
            return
        for name in self._matched(self.structure.kv_projections):
            if self.of_modules.get(name) == "colwise":
                self.of_modules[name] = "grouped_colwise"
                for parameter in list(self.of_parameters):
                    if _canonical(parameter).startswith(f"{name}.") and self.of_parameters[parameter] == "colwise":
                        self.of_parameters[parameter] = "grouped_colwise"

    def derive(self, problems: list[str]) -> None:
        """All rows."""
        sequence = self.options.sequence_parallel
        if sequence:
            self._check_sequence(problems)
        self._check_head(problems)
        if problems:
            return
        self._draw_regions(sequence)
        for name, style in self.of_modules.items():
            if style not in ("replicate", "sequence_parallel"):
                self._style_row(name, style, sequence)
        if sequence:
            self._sequence_rows(problems)
        for name, style in self.of_modules.items():
            if style == "sequence_parallel" and (name not in self.rows or self.rows[name].style != style):
                problems.append(
                    f"tp_plan: {name!r} is given sequence_parallel, but is not on the residual stream of {self.spec.family}"
                )

    # -- what is known of the model ----------------------------------------------------------------------------------------

    def _check_sequence(self, problems: list[str]) -> None:
        where = "sequence_parallel=True"
        if self.structure.no_sequence_parallel:
            problems.append(f"{where}: {self.structure.no_sequence_parallel}; the legal value is False")
        elif not self.structure.regions or not self.structure.head:
            problems.append(
                f"{where}: nothing is known of the regions of {self.spec.family} that need the whole sequence (structure of "
                "its ParallelSpec); the legal value is False"
            )
        elif len({name.rpartition(".")[0] for name in self._layers()}) != 1:
            problems.append(f"{where}: {self.spec.family} has more than one stack of layers; the legal value is False")

    def _check_head(self, problems: list[str]) -> None:
        """Whether logits stay sharded; ``None`` in the options: wherever that can be."""
        head = self.structure.head
        can = bool(head) and self.of_modules.get(head or "") in _HEAD and head not in self.adapters
        if self.options.loss_parallel and not can:
            style = self.of_modules.get(head or "", "none")
            problems.append(
                f"loss_parallel=True: the style of the output head {head!r} is {style}; legal are one of "
                f"{', '.join(sorted(_HEAD))}, or loss_parallel=False"
            )
        self.loss_parallel = can and self.options.loss_parallel is not False

    def _layers(self) -> list[str]:
        return self._matched(self.spec.layers)

    def _draw_regions(self, sequence: bool) -> None:
        for region in self._matched(self.structure.regions):
            kind = self._kind(region)
            self.regions[region] = kind
            if kind == "whole" and not sequence:
                continue
            entry, exit_ = {
                ("split", False): (Move.ENTER, Move.NONE),
                ("split", True): (Move.GATHER_SEQUENCE, Move.NONE),
                ("partial", False): (Move.ENTER, Move.LEAVE),
                ("partial", True): (Move.GATHER_SEQUENCE, Move.SCATTER_SEQUENCE),
                ("whole", True): (Move.GATHER_SEQUENCE_WHOLE, Move.SPLIT_SEQUENCE),
            }[kind, sequence]
            sums = self._own(region) if kind == "partial" else ()
            self._add(region, "region", entry, exit_, sums, self._heads_of(region))
            for name in self._inside(region) if kind == "partial" else ():
                if name not in self.of_modules and not any(name.startswith(f"{adapter}.") for adapter in self.adapters):
                    unstyled = tuple(own for own in self._own(name) if f"{name}.{own}" not in self.of_parameters)
                    if unstyled:  # what is upstream of a sum gets a part of its gradient on each rank
                        self._add(name, "replicated_with_grad_allreduce", sums=unstyled)

    def _kind(self, region: str) -> str:
        inside = [(name, self.of_modules[name]) for name in self._inside(region) if name in self.of_modules]
        styles = {style for _, style in inside}
        if "moe_tp_experts" in styles:
            return "partial"
        plain = styles <= _FIRST | {"rowwise", "replicated_with_grad_allreduce"}
        whole = [
            f"{name}.{own}" for name in self._inside(region) for own in self._own(name)
            if not any(name == styled or name.startswith(f"{styled}.") for styled, _ in inside)
        ]  # fmt: skip
        whole += [f"{region}.{own}" for own in self._own(region) if f"{region}.{own}" not in self.of_parameters]
        return "split" if plain and styles & _FIRST and "rowwise" in styles and not whole else "whole"

    def _heads_of(self, region: str) -> tuple[int, ...]:
        """Heads of queries and of keys that a rank computes, where the module cannot tell them from shapes."""
        styles = {self.of_modules.get(name) for name in self._inside(region)}
        patterns = (*self.structure.kv_projections, *self.structure.heads_from_config)
        is_attention = any(name.startswith(f"{region}.") for name in self._matched(patterns))
        if not is_attention or not styles & {"grouped_colwise", "fused_colwise"} or not self.sizes.heads:
            return ()
        return self.sizes.heads // self.tp, max(1, (self.sizes.kv_heads or self.sizes.heads) // self.tp)

    def _inside(self, region: str) -> list[str]:
        return [name for name in self.names if name.startswith(f"{region}.")]

    def _own(self, name: str) -> tuple[str, ...]:
        return tuple(own for own, _ in self.modules[name].named_parameters(recurse=False))

    def _region_of(self, name: str) -> str:
        return next((kind for region, kind in self.regions.items() if name.startswith(f"{region}.")), "")

    # -- rows of styles -----------------------------------------------------------------------------------------------------

    def _style_row(self, name: str, style: str, sequence: bool) -> None:
        declared = STYLES.get(style) or _DERIVED[style]
        entry, exit_, region = declared.entry, declared.exit, self._region_of(name)
        if region in ("split", "partial"):
            entry = Move.NONE if entry is Move.ENTER else entry
            if exit_ is Move.LEAVE:
                exit_ = Move.NONE if region == "partial" else Move.SCATTER_SEQUENCE if sequence else Move.LEAVE
        if name == self.structure.head and style in _HEAD:
            entry = Move.GATHER_SEQUENCE if sequence else Move.ENTER
            exit_ = Move.VOCABULARY if self.loss_parallel else Move.GATHER_FEATURES
        parts: tuple[int, ...] = ()
        if style == "fused_colwise":
            parts = self._parts_of(name)
        elif style == "grouped_colwise":
            parts = (self.sizes.kv_heads or 1,)
        sums: tuple[str, ...] = ()
        own = self._own(name)
        if style in ("replicated_with_grad_allreduce", "grouped_colwise"):
            sums = own
        elif declared.dim == -1 and "bias" in own and exit_ in (Move.SCATTER_SEQUENCE, Move.NONE):
            sums = ("bias",)  # added on each rank to its part of the sequence, or by the first rank alone
        if name in self.adapters:
            self._adapted(name, style, entry, exit_, parts)
        else:
            self._add(name, style, entry, exit_, sums, parts)

    def _parts_of(self, name: str) -> tuple[int, ...]:
        return next(parts for pattern, parts in self.structure.fused.items() if match_names(pattern, [name]))

    def _adapted(self, name: str, style: str, entry: Move, exit_: Move, parts: tuple[int, ...]) -> None:
        """A matrix that peft put a low-rank one beside: what was moved for the matrix is moved around both."""
        self._add(name, "region", entry, exit_, parts=parts if style == "fused_colwise" else ())
        inner = "colwise" if style == "fused_colwise" else style
        rows_sliced = STYLES.get(style, _DERIVED.get(style, Style(None))).dim != -1
        base = f"{name}.base_layer"
        parts = parts if style == "grouped_colwise" else ()
        bias = ("bias",) if not rows_sliced and "bias" in self._own(base) else ()
        self._add(base, inner, sums=self._own(base) if style == "grouped_colwise" else bias, parts=parts)
        for which in ("lora_A", "lora_B"):
            for adapter, module in getattr(self.modules[name], which).items():
                child, own = f"{name}.{which}.{adapter}", tuple(own for own, _ in module.named_parameters(recurse=False))
                if (which == "lora_B") == rows_sliced:
                    self._add(child, inner, sums=own if style == "grouped_colwise" else (), parts=parts)
                    self.of_parameters.update((f"{child}.{item}", inner) for item in own)
                else:
                    self._add(child, "replicated_with_grad_allreduce", sums=own)

    # -- rows of the sequence -----------------------------------------------------------------------------------------------

    def _sequence_rows(self, problems: list[str]) -> None:
        layers = self._layers()
        self._add(layers[0], "stack", Move.SPLIT_SEQUENCE, sums=self._own(layers[0]))
        for layer in layers[1:]:
            if own := self._own(layer):
                self._add(layer, "stack", sums=own)
        on_stream = [name for layer in layers for name in self._inside(layer) if not self._in_region(name)]
        for name in [*on_stream, *self._matched(self.structure.tokenwise)]:
            if not (own := self._own(name)):
                continue
            if (style := self.of_modules.get(name, "sequence_parallel")) != "sequence_parallel":
                problems.append(f"sequence_parallel=True: {name!r} has the style {style} and stands outside of every region")
                continue
            self._add(name, "sequence_parallel", sums=own)
        head = self.structure.head or ""
        if head not in self.rows:  # computed whole on every rank
            self._add(head, "region", Move.GATHER_SEQUENCE_WHOLE)

    def _in_region(self, name: str) -> bool:
        return any(name == region or name.startswith(f"{region}.") for region in self.regions)

    def _add(
        self, module: str, style: str, entry: Move = Move.NONE, exit_: Move = Move.NONE,
        sums: tuple[str, ...] = (), parts: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.rows[module] = TensorParallelRow(module, style, entry, exit_, sums, parts)

    def sorted_rows(self) -> tuple[TensorParallelRow, ...]:
        """In the order of the model."""
        order = {name: index for index, name in enumerate(self.names)}
        return tuple(sorted(self.rows.values(), key=lambda row: order[row.module]))


def _is_adapter(module: Any) -> bool:
    """Whether peft wrapped a linear layer here."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in ("base_layer", "lora_A", "lora_B"))
