"""The row of each module under tensor parallel: how it computes, and how its input and output are redistributed.

If the spec declares the *regions* of a layer (its attention, its MLP), each split or partial region has one move at its entry,
in place of those of the matrices inside, and one at its exit, as in Megatron-LM. The exit move of a split region is in the row
of its rowwise matrix. In a whole region the matrices keep their own moves.

| region  | inside                                       | entry, exit      | entry, exit with sequence parallel        |
|---------|----------------------------------------------|------------------|-------------------------------------------|
| split   | heads or features, ended by a rowwise matrix | `enter`, `leave` | `gather_sequence`, `scatter_sequence`     |
| partial | experts: the output is a sum over ranks      | `enter`, `leave` | `gather_sequence`, `scatter_sequence`     |
| whole   | every rank computes the same                 |                  | `gather_sequence_whole`, `split_sequence` |

Sequence parallel (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): between regions, each rank has its own slice of
the sequence, so that norms and residuals are computed, and their activations stored, only once.
"""

from collections.abc import Mapping, Sequence

from meshwright.errors import Refusal, coded
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.style_checks import slices_nobody_computes, style_problems
from meshwright.plan.axes.tensor.styles import DERIVED, FIRST, HEAD, PARTIAL, SECOND, STYLES, canonical, styles_of_parameters
from meshwright.plan.axes.tensor.with_adapters import adapted_rows, small_of_experts, styles_of_experts
from meshwright.plan.draft import Draft
from meshwright.plan.given.names import generalize, holder_of, inside, match_names, within
from meshwright.plan.given.sliced_code import mixes_features, reads_matrix
from meshwright.plan.given.spec import Structure
from meshwright.plan.result.sharding_plan import TensorParallelRow

__all__ = ["TensorParallelRows"]


class TensorParallelRows:
    """Derives the row of each module.

    Args:
        draft: the draft of the plan.
        around: where regions come from a trace, those that cannot be split over features; otherwise ``None``.
    """

    def __init__(self, draft: Draft, around: Sequence[str] | None = None) -> None:
        self.around, self.read = around, draft.pairs.read
        self.spec, self.options, self.sizes = draft.spec, draft.options, draft.model.sizes
        self.model, self.problems, self.names = draft.model, draft.problems, draft.model.names
        self.structure = draft.spec.structure or Structure()
        self.tp, self.ep = draft.layout.size("tp"), draft.layout.ep
        self.adapters = {name for name, module in self.model.modules.items() if module.wrapped == "adapter"}
        self.of_parameters: dict[str, str] = {}
        self.own_styles: dict[str, str] = {}
        self.of_modules: dict[str, str] = {}
        self.rows: dict[str, TensorParallelRow] = {}
        self.regions: dict[str, str] = {}
        self.left_whole: dict[str, str] = {}
        self.loss_parallel = False

    def assign(self, level: str, styles: Mapping[str, str]) -> None:
        """Assign styles to parameters and modules.

        Args:
            level: where the styles come from.
            styles: pattern to style.
        """
        given = level == "given"
        where = "tp_plan" if given else "tp_styles"
        self.of_parameters, unmatched = styles_of_parameters(where, styles, self.model.parameters)
        self.problems += unmatched
        own = self.structure.styles or self.spec.tp_styles
        self.own_styles, _ = styles_of_parameters(where, own if given else styles, self.model.parameters)
        styled = self._matched(tuple(styles))
        self.problems += [
            Refusal(
                "tp.adapter",
                f"tp={self.tp}: peft wraps {name!r}, which is no linear layer; only linear layers may have adapters under tp",
            )
            for name, module in self.model.modules.items()
            if module.wrapped == "other" and name in styled
        ]
        outside = [name for name in self.names if not self._in_adapter(name)]
        for pattern, style in styles.items():
            for name in match_names(pattern, outside):
                self.of_modules.setdefault(name, style)
        for name in [name for name, style in self.of_modules.items() if style == "mla_kv_a_proj"]:
            self._latent(name)
        if self.ep > 1:
            self._leave_experts(given)
        for name in [name for name, style in self.of_modules.items() if style == "moe_tp_experts"]:
            of_adapters = styles_of_experts(self.model, name, self.of_parameters)
            self.of_parameters |= of_adapters
            self.own_styles |= of_adapters
        if level != "derived":  # a trace shows more than the names that a module's code uses
            self._leave_statistics(given)
        self._leave_what_others_read(given)
        self._group_heads()

    def _leave_statistics(self, given: bool) -> None:
        """Keep modules whole if their code takes a statistic over sliced features.

        If the user gave the styles, or the module is the root or a layer, this is a problem instead.
        """
        layers = self._layers()
        for name in dict.fromkeys(holder_of(name) for name, style in self.of_modules.items() if style in FIRST):
            statistic = mixes_features(self.model, name)
            if not statistic:
                continue
            if given or not name or name in layers:
                self.problems.add(
                    "tp.style.misfit",
                    f"{'tp_plan' if given else 'tp_styles'}: {generalize(name)!r} is sliced over features, but its code takes "
                    f"their {statistic}, which differs on a slice; leave the module out",
                )
                continue
            self.left_whole[generalize(name)] = f"takes the {statistic} of its features"
            for other in [other for other in self.of_modules if inside(other, name)]:
                del self.of_modules[other]
            for other in [other for other in self.of_parameters if inside(canonical(other), name)]:
                del self.of_parameters[other]

    def _leave_what_others_read(self, given: bool) -> None:
        """Keep an embedding whole, with what is tied to it, if a module around it reads its matrix itself.

        If the user gave the styles, this is a problem instead.
        """
        for name in [name for name, style in self.of_modules.items() if style.startswith("embedding")]:
            if not (reads_matrix(self.model, name) if self.read is None else name in self.read):
                continue
            why = "another module reads its matrix"
            if given:
                self.problems.add("tp.style.tied", f"tp_plan: {name!r} is sliced, but {why}; leave it out")
                continue
            self.left_whole[name] = why
            for parameter in (self.model.parameter_of[f"{name}.{item}"] for item in self._own(name)):
                self.of_parameters.pop(parameter.name, None)
                for alias in parameter.names:
                    self.of_modules.pop(holder_of(alias), None)

    def _leave_experts(self, given: bool) -> None:
        """Take experts out of the styles: `ep` distributes whole experts, and they are not sliced in addition."""
        for name in self._matched(tuple(rule.pattern for rule in self.spec.experts)):
            of_parameters = [own for own in self.of_parameters if inside(own, name)]
            if given and (of_parameters or name in self.of_modules):
                self.problems.add(
                    "ep.tp_plan",
                    f"tp_plan: slices the experts {name!r}, but ep={self.ep} distributes whole experts; leave them out",
                )
            self.of_modules.pop(name, None)
            for own in of_parameters:
                del self.of_parameters[own]

    def _matched(self, patterns: Sequence[str]) -> list[str]:
        return [name for pattern in patterns for name in match_names(pattern, self.names)]

    def _group_heads(self) -> None:
        """If there are fewer key/value heads than ranks, let each rank store all and compute the one that its queries need."""
        if not self.sizes.kv_heads or self.sizes.kv_heads % self.tp == 0:
            return
        for name in self._matched(self.structure.kv_projections):
            if self.of_modules.get(name) == "colwise":
                self.of_modules[name] = "grouped_colwise"
                for parameter in list(self.of_parameters):
                    if inside(canonical(parameter), name) and self.of_parameters[parameter] == "colwise":
                        self.of_parameters[parameter] = "grouped_colwise"

    def derive(self, *, traced: bool) -> None:
        """Derive all rows.

        Args:
            traced: whether a trace of the model showed that its styles are right.
        """
        sequence, problems = self.options.sequence_parallel, self.problems
        if sequence:
            self._check_sequence()
        self._check_head()
        if problems:
            return
        if not traced:
            layers, head = self._layers(), self.structure.head
            problems += style_problems(
                self.model, layers, head, self.of_modules, self.of_parameters, self.own_styles, self.adapters
            )  # fmt: skip
        if problems:
            return
        self._draw_regions(sequence)
        for name in [name for name, style in self.of_modules.items() if style == "grouped_colwise"]:
            if not self._region_of(name) and (parts := self._heads_of(holder_of(name))):
                self._add(holder_of(name), "region", parts=parts)
        for name, style in self.of_modules.items():
            sliced_anyway = style == "local_params" and name in self.rows  # a region computes with its slices
            if style not in ("replicate", "sequence_parallel") and not sliced_anyway:
                self._style_row(name, style, sequence)
        if sequence:
            self._sequence_rows()
        for name, style in self.of_modules.items():
            if style == "sequence_parallel" and (name not in self.rows or self.rows[name].style != style):
                self._misfit(name, f"is not on the residual stream of {self.spec.family}")
        problems += slices_nobody_computes(self.rows, self.of_parameters, self.model.parameters)

    # -- facts of the model ------------------------------------------------------------------------------------------------

    def _check_sequence(self) -> None:
        if self.structure.no_sequence_parallel:
            why = coded(self.structure.no_sequence_parallel, "sp.module")
        elif not self.structure.regions or not self._matched(self.structure.tokenwise):
            text = f"the spec of {self.spec.family} does not say which modules need the whole sequence (ParallelSpec.structure)"
            why = Refusal("sp.structure", text)
        elif len({holder_of(name) for name in self._layers()}) != 1:
            why = Refusal("sp.stacks", f"{self.spec.family} has more than one stack of layers")
        else:
            return
        self.problems.append(why.within("sequence_parallel=True: ", "; the legal value is False"))

    def _check_head(self) -> None:
        """Decide whether logits stay sharded. ``None`` in the options means: if possible."""
        head = self.structure.head
        can = bool(head) and self.of_modules.get(head or "") in HEAD and head not in self.adapters
        if self.options.loss_parallel and not can:
            style = self.of_modules.get(head or "", "none")
            self.problems.add(
                "tp.loss_parallel",
                f"loss_parallel=True: the style of the output head {head!r} is {style}; legal are one of "
                f"{', '.join(sorted(HEAD))}, or loss_parallel=False",
            )
        self.loss_parallel = can and self.options.loss_parallel is not False

    def _misfit(self, name: str, why: str) -> None:
        self.problems.add("tp.style.misfit", f"tp_plan: {name!r} has the style {self.of_modules[name]}, but {why}")

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
            for name in self.model.inside(region) if kind == "partial" else ():
                if self.of_modules.get(name, "replicate") == "replicate" and not self._in_adapter(name):
                    self._upstream_of_a_sum(name)

    def _upstream_of_a_sum(self, name: str) -> None:
        """Add the row of a router in a partial region, where each rank has a partial sum of the router's gradient.

        Any other module there whose parameters are not sliced is a problem.
        """
        routes = {1, self.sizes.experts or 1}
        for own, shape in self.model.modules[name].parameters.items():
            if shape[0] not in routes:
                self.problems.add(
                    "tp.style.missing",
                    f"tp={self.tp}: {f'{name}.{own}'!r} is beside experts whose outputs are summed over tp, and is no router; "
                    "give it a style that slices it",
                )
        if own_names := self._own(name):
            self._add(name, "router", exit_=Move.COUNT_ONCE, sums=own_names)

    def _in_adapter(self, name: str) -> bool:
        return any(inside(name, adapter) for adapter in self.adapters)

    def _kind(self, region: str) -> str:
        inner = [(name, self.of_modules[name]) for name in self.model.inside(region) if name in self.of_modules]
        styles = {style for _, style in inner}
        if self.around is not None and (region in self.around or "moe_tp_experts" in styles):
            return "whole"  # a trace does not show that all that is beside the experts is a partial sum too
        if "moe_tp_experts" in styles:
            return "partial"
        plain = styles <= FIRST | SECOND | {"replicated_with_grad_allreduce"}
        unsliced = [
            f"{name}.{own}" for name in self.model.inside(region) for own in self._own(name)
            if not within(name, (styled for styled, _ in inner))
        ]  # fmt: skip
        unsliced += [f"{region}.{own}" for own in self._own(region) if f"{region}.{own}" not in self.of_parameters]
        return "split" if plain and styles & FIRST and styles & SECOND and not unsliced else "whole"

    def _heads_of(self, region: str) -> tuple[int, ...]:
        """Return the query heads and key/value heads that a rank computes, if the module cannot tell them from shapes."""
        styles = {self.of_modules.get(name) for name in self.model.inside(region)}
        patterns = (*self.structure.kv_projections, *self.structure.fused)
        is_attention = any(inside(name, region) for name in self._matched(patterns))
        if not is_attention or not styles & {"grouped_colwise", "fused_colwise"} or not self.sizes.heads:
            return ()
        return self.sizes.heads // self.tp, max(1, (self.sizes.kv_heads or self.sizes.heads) // self.tp)

    def _own(self, name: str) -> tuple[str, ...]:
        return tuple(self.model.modules[name].parameters)

    def _region_of(self, name: str) -> str:
        return next((kind for region, kind in self.regions.items() if inside(name, region)), "")

    # -- rows of styles -----------------------------------------------------------------------------------------------------

    def _style_row(self, name: str, style: str, sequence: bool) -> None:
        declared = STYLES.get(style) or DERIVED[style]
        entry, exit_, region = declared.entry, declared.exit, self._region_of(name)
        if region in ("split", "partial"):
            entry = Move.NONE if entry is Move.ENTER else entry
            if exit_ is Move.LEAVE:
                exit_ = Move.NONE if region == "partial" else Move.SCATTER_SEQUENCE if sequence else Move.LEAVE
        if name == self.structure.head and style in HEAD:
            exit_ = Move.VOCABULARY if self.loss_parallel else Move.GATHER_FEATURES
        parts: tuple[int, ...] = ()
        if style == "fused_colwise":
            parts = self._parts_of(name)
        elif style == "grouped_colwise":
            parts = (self.sizes.kv_heads or 1,)
        elif style == "mla_kv_a_proj":
            parts = self._shared_keys(name)
        sums: tuple[str, ...] = ()
        own = self._own(name)
        if style in ("replicated_with_grad_allreduce", "grouped_colwise"):
            sums = own
        elif style == "moe_tp_experts":
            sliced = styles_of_experts(self.model, name, self.of_parameters)
            sums = tuple(
                item
                for item in small_of_experts(self.model, name)
                if self.model.parameter_of[f"{name}.{item}"].name not in sliced
            )
        elif style in PARTIAL and "bias" in own and exit_ in (Move.SCATTER_SEQUENCE, Move.NONE):
            sums = ("bias",)  # each rank adds it to its slice of the sequence, or only the first rank adds it
        if name in self.adapters:
            self._adapted(name, style, entry, exit_, parts)
        else:
            self._add(name, style, entry, exit_, sums, parts)

    def _latent(self, name: str) -> None:
        """Give what is beside a latent projection and has no style the style ``replicate``: it computes with whole latents."""
        for other in self.model.inside(holder_of(name)):
            if self._own(other) and other not in self.of_modules and not self._in_adapter(other):
                self.of_modules[other] = "replicate"

    def _shared_keys(self, name: str) -> tuple[int, ...]:
        """Return how many of the last features of a latent projection all heads share: those that its matrix of keys lacks."""
        beside = [other for other in self.model.children(holder_of(name)) if other.endswith("kv_b_proj")]
        width, latent = (
            self.model.modules[of].parameters.get("weight", (0, 0)) for of in (name, beside[0] if beside else name)
        )
        if not 0 < width[0] - latent[1] < width[0]:
            self._misfit(name, "is no latent projection with a kv_b_proj beside it")
            return (1,)
        return (width[0] - latent[1],)

    def _parts_of(self, name: str) -> tuple[int, ...]:
        matching_parts = [parts for pattern, parts in self.structure.fused.items() if match_names(pattern, [name])]
        if not matching_parts:
            self._misfit(name, "ParallelSpec.structure does not say what it packs")
        return matching_parts[0] if matching_parts else ()

    def _adapted(self, name: str, style: str, entry: Move, exit_: Move, parts: tuple[int, ...]) -> None:
        """Add the rows of a matrix with an adapter of peft."""
        rows, of_parameters, problems = adapted_rows(self.model, self.tp, name, style, entry, exit_, parts)
        self.rows |= {row.module: row for row in rows}
        self.of_parameters |= of_parameters
        self.problems += problems

    # -- rows of sequence parallel ------------------------------------------------------------------------------------------

    def _sequence_rows(self) -> None:
        layers = self._layers()
        self._add(layers[0], "stack", Move.SPLIT_SEQUENCE, sums=self._own(layers[0]))
        for layer in layers[1:]:
            if own := self._own(layer):
                self._add(layer, "stack", sums=own)
        on_stream = [name for layer in layers for name in self.model.inside(layer) if not self._in_region(name)]
        for name in [*on_stream, *self._matched(self.structure.tokenwise)]:
            # After the last norm the hidden state is whole again, for the head and for everything else that uses it.
            last = name == self._matched(self.structure.tokenwise)[-1]
            own = self._own(name)
            if not own and not last:
                continue
            if (style := self.of_modules.get(name, "sequence_parallel")) != "sequence_parallel":
                self.problems.add(
                    "sp.module",
                    f"sequence_parallel=True: {name!r} has the style {style}, but no module around it gathers the sequence",
                )
                continue
            self._add(name, "sequence_parallel", exit_=Move.GATHER_SEQUENCE_WHOLE if last else Move.NONE, sums=own)

    def _in_region(self, name: str) -> bool:
        return within(name, self.regions)

    def _add(
        self, module: str, style: str, entry: Move = Move.NONE, exit_: Move = Move.NONE,
        sums: tuple[str, ...] = (), parts: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.rows[module] = TensorParallelRow(module, style, entry, exit_, sums, parts)

    def sorted_rows(self) -> tuple[TensorParallelRow, ...]:
        """Return the rows in model order."""
        order = {name: index for index, name in enumerate(self.names)}
        return tuple(sorted(self.rows.values(), key=lambda row: order[row.module]))
