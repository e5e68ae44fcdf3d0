"""A model with styles, and what follows from them before any module has a row."""

from dataclasses import dataclass
from functools import cached_property

from meshwright.plan.axes.tensor.assignment import Assignment
from meshwright.plan.axes.tensor.channels import shared_mixers
from meshwright.plan.axes.tensor.spans_of_layers import kind_of_span
from meshwright.plan.axes.tensor.styles import FIRST, HEAD, ON_SLICES, SECOND
from meshwright.plan.draft import Draft
from meshwright.plan.given.names import inside, nearest, outermost, within
from meshwright.plan.given.spec import Structure
from meshwright.plan.given.traces import RegionFacts, Span, Stretch

__all__ = ["SlicedModel"]


@dataclass(frozen=True)
class SlicedModel:
    """A model with styles, and what follows from them before any module has a row.

    Attributes:
        draft: the draft of the plan.
        structure: the inside of its layers, as the spec declares it or a trace shows it.
        styles: the styles by name.
        traced: where regions come from a trace, what it found; otherwise ``None``.
    """

    draft: Draft
    structure: Structure
    styles: Assignment
    traced: RegionFacts | None = None

    @property
    def tp(self) -> int:
        """The number of ranks that share the slices."""
        return self.draft.layout.size("tp")

    @property
    def sequence(self) -> bool:
        """Whether the ranks share the sequence between regions."""
        return self.draft.options.sequence_parallel

    @cached_property
    def layers(self) -> list[str]:
        """Names of the layers."""
        return self.draft.matched(self.draft.spec.layers)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The parts of the stream that are sliced, each from its first layer to what follows its last."""
        if self.traced:
            return self.traced.stretches
        return (Stretch(tuple(self.layers), tuple(self.draft.matched(self.structure.tokenwise))),)

    @cached_property
    def stream(self) -> list[str]:
        """Names of the layers that run, in this order: the sequence is sliced in all of them."""
        return [name for stretch in self.stretches for name in stretch.layers]

    @cached_property
    def on_slices(self) -> tuple[str, ...]:
        """Names of the mixtures that take tokens of a slice of the sequence, and their routing."""
        return self.traced.mixtures if self.traced and self.sequence else ()

    @cached_property
    def spans(self) -> dict[Span, str]:
        """The kind of each span."""
        found = self.traced.spans if self.traced and self.sequence else ()
        return {span: kind_of_span(span, self.styles.modules) for span in found}

    @cached_property
    def regions(self) -> dict[str, str]:
        """The kind of each region, by name: ``split``, ``partial`` or ``whole``."""
        return {region: self._kind(region) for region in self.draft.matched(self.structure.regions)}

    def takes_slices(self, mixture: str) -> bool:
        """Return whether a mixture can compute tokens of slices: its features are sliced over `tp`, or `ep` has its experts."""
        sliced = self.styles.modules.get(mixture) == "moe_tp_experts" and mixture not in self.draft.model.adapters
        return sliced or self.draft.layout.ep > 1

    @cached_property
    def logits_can_stay_sharded(self) -> bool:
        """Whether the style of the output head slices the vocabulary."""
        head = self.structure.head or ""
        return self.styles.modules.get(head) in HEAD and head not in self.draft.model.adapters

    @property
    def shards_logits(self) -> bool:
        """Whether logits stay sharded. ``None`` in the options means: if possible."""
        return self.logits_can_stay_sharded and self.draft.options.loss_parallel is not False

    def own(self, name: str) -> tuple[str, ...]:
        """Return the names of a module's own parameters."""
        return tuple(self.draft.model.modules[name].parameters)

    def region_around(self, name: str) -> str:
        """Return the kind of the region that a module is inside of, or of the span whose matrix it is; empty: of none."""
        entries, exits = self._borders_of_spans
        entry = name if name in entries else nearest(name, entries)
        return exits.get(name) or entries.get(entry) or self.regions.get(outermost(name, self.regions), "")

    @cached_property
    def _borders_of_spans(self) -> tuple[dict[str, str], dict[str, str]]:
        """The kind of each span by its entries, and by its exit."""
        entries = {name: kind for span, kind in self.spans.items() for name in span.entries}
        return entries, {span.exit: kind for span, kind in self.spans.items()}

    def heads_of(self, region: str) -> tuple[int, ...]:
        """Return the query heads and key/value heads that a rank computes, if the module cannot tell them from shapes."""
        sizes, styles = self.draft.model.sizes, {self.styles.modules.get(name) for name in self.draft.model.inside(region)}
        patterns = (*self.structure.kv_projections, *self.structure.fused)
        is_attention = any(inside(name, region) for name in self.draft.matched(patterns))
        if not is_attention or not styles & {"grouped_colwise", "fused_colwise"} or not sizes.heads:
            return ()
        return sizes.heads // self.tp, max(1, (sizes.kv_heads or sizes.heads) // self.tp)

    def _kind(self, region: str) -> str:
        inner = self.draft.model.inside(region)
        if any(within(name, [region]) for name in shared_mixers(self.draft)):
            return "whole"
        styled = {name: self.styles.modules[name] for name in inner if name in self.styles.modules}
        styles = set(styled.values())
        if self.traced is not None and (
            region in (*self.traced.with_residual, *self.traced.flat) or "moe_tp_experts" in styles
        ):
            return "whole"  # a trace does not show that all that is beside the experts is a partial sum too
        if "moe_tp_experts" in styles:
            return "partial"
        plain = styles <= ON_SLICES
        unsliced = any(self.own(name) and not within(name, styled) for name in inner)
        unsliced = unsliced or any(f"{region}.{own}" not in self.styles.parameters for own in self.own(region))
        return "split" if plain and styles & FIRST and styles & SECOND and not unsliced else "whole"
