"""The traces of a causal language model of transformers: each question has a module of its own beside this one."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.models.reading.context.mixers_of_model import trace_mixers
from meshwright.models.reading.context.trace_context import attentions_of_all, trace_attentions
from meshwright.models.reading.fused_matrices import trace_fused
from meshwright.models.reading.module_runs import count_runs
from meshwright.models.reading.output_layer import trace_head
from meshwright.models.reading.pipeline.cut_trace import stages_of_all, trace_stages
from meshwright.models.reading.pipeline.halved_backward import halves_backward
from meshwright.models.reading.pipeline.halves import with_halves
from meshwright.models.reading.pipeline.traced_slices import trace_carried
from meshwright.models.reading.repeated_layers import RepeatedLayers
from meshwright.models.reading.router_choices import count_choices
from meshwright.models.reading.tensor.mixer_parameters import trace_mixer_parameters
from meshwright.models.reading.tensor.pairs import pairs_of_all, trace_pairs
from meshwright.models.reading.tensor.regions import trace_regions
from meshwright.plan.given.attentions import Attentions
from meshwright.plan.given.cut_points import Carried, RankSlices, StageFacts
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.given.sliceable_pairs import Pairs
from meshwright.plan.given.spec import ExpertsRule
from meshwright.plan.given.traces import HeadFacts, RegionFacts, Traces
from meshwright.plan.update.matrices import Apart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelTraces"]

T = TypeVar("T")


class ModelTraces(Traces):
    """Calls a model without values, once for each question that is asked. The model is not changed.

    Args:
        model: the model, on any device; it may be inside a ``PeftModel``.
        experts: its mixtures, which are not called, because what they do depends on values.
        counts_runs: whether modules may run several times or not at all. The structure of a known family says that they do not.
        reads_all: whether all layers are read: one that looks like another may compute something else.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        experts: Sequence[ExpertsRule] = (),
        *,
        counts_runs: bool = True,
        reads_all: bool = True,
    ) -> None:
        self.model, self.experts, self.counts_runs, self.reads_all = model, experts, counts_runs, reads_all
        self._mixers: dict[int, Mapping[str, MixerShare]] = {}
        self._mixer_parameters: dict[int, Mapping[str, tuple[str, ...]]] = {}
        self._halves: dict[tuple[frozenset[str], str, str], bool] = {}
        self._found: dict[tuple[str, tuple[str, ...]], Any] = {}

    def _once(self, question: str, layers: Sequence[str], trace: Callable[..., T]) -> T:
        """Return what a trace finds for some layers. It is made once: one model is planned for many layouts."""
        key = (question, tuple(layers))
        if key not in self._found:
            self._found[key] = trace(self.model, layers, self.experts)
        found: T = self._found[key]
        return found

    def _of_few(self, trace: Callable[[], T], of_all: Callable[[T, RepeatedLayers], T | None]) -> T:
        """Return what a trace finds. If it passes over layers that repeat others, it may find nothing that holds for all."""
        if not self.reads_all and self._repeated:
            with self._repeated.passed_over():
                found = trace()
            if (whole := of_all(found, self._repeated)) is not None:
                return whole
        return trace()

    @cached_property
    def _repeated(self) -> RepeatedLayers:
        return RepeatedLayers(self.model)

    @cached_property
    def attentions(self) -> Attentions:
        """See :func:`~meshwright.models.reading.context.trace_context.trace_attentions`."""
        return self._of_few(partial(trace_attentions, self.model, self.experts), attentions_of_all)

    def mixers(self, ranks: int) -> Mapping[str, MixerShare]:
        """See :func:`~meshwright.models.reading.context.mixers_of_model.trace_mixers`."""
        if ranks not in self._mixers:
            self._mixers[ranks] = trace_mixers(self.model, self.experts, self.attentions.states, ranks)
        return self._mixers[ranks]

    def mixer_parameters(self, ranks: int) -> Mapping[str, tuple[str, ...]]:
        """See :func:`~meshwright.models.reading.tensor.mixer_parameters.trace_mixer_parameters`."""
        if ranks not in self._mixer_parameters:
            self._mixer_parameters[ranks] = trace_mixer_parameters(self.model, self.experts, self.mixers(ranks))
        return self._mixer_parameters[ranks]

    @cached_property
    def head(self) -> HeadFacts:
        """See :func:`~meshwright.models.reading.output_layer.trace_head`."""
        return self._of_few(partial(trace_head, self.model, self.experts), lambda found, _: None if found.problem else found)

    @cached_property
    def runs(self) -> Mapping[str, tuple[int, int]]:
        """See :func:`~meshwright.models.reading.module_runs.count_runs`."""
        return count_runs(self.model, self.experts) if self.counts_runs else {}

    def choices(self, routers: Mapping[str, int]) -> Mapping[str, int]:
        """See :func:`~meshwright.models.reading.router_choices.count_choices`."""
        return count_choices(self.model, self.experts, routers)

    def stages(self, layers: Sequence[str]) -> StageFacts:
        """See :func:`~meshwright.models.reading.pipeline.cut_trace.trace_stages`."""
        return self._once("stages", layers, self._stages)

    def _stages(self, model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule]) -> StageFacts:
        found = self._of_few(partial(trace_stages, model, layers, experts), stages_of_all)
        return with_halves(model, found, experts, reads_all=self.reads_all)

    def carried(self, layers: Sequence[str], slices: RankSlices) -> tuple[Carried, ...] | None:
        """See :func:`~meshwright.models.reading.pipeline.traced_slices.trace_carried`."""
        return self._once(
            f"carried {slices}", layers, lambda model, layers, experts: trace_carried(model, layers, experts, slices)
        )

    def halves_backward(self, layers: Sequence[str], trained: AbstractSet[str], first: str, last: str) -> bool:
        """See :func:`~meshwright.models.reading.pipeline.halved_backward.halves_backward`."""
        key = (frozenset(trained), first, last)
        if key not in self._halves:
            self._halves[key] = halves_backward(self.model, self.stages(layers), self.experts, *key)
        return self._halves[key]

    def regions(self, layers: Sequence[str]) -> RegionFacts:
        """See :func:`~meshwright.models.reading.tensor.regions.trace_regions`."""
        return self._once("regions", layers, partial(trace_regions, pairs=lambda: self.pairs(layers)))

    def pairs(self, layers: Sequence[str]) -> Pairs:
        """See :func:`~meshwright.models.reading.tensor.pairs.trace_pairs`."""
        return self._once("pairs", layers, lambda *given: self._of_few(partial(trace_pairs, *given), pairs_of_all))

    def fused(self, layers: Sequence[str]) -> Mapping[str, Apart]:
        """See :func:`~meshwright.models.reading.fused_matrices.trace_fused`."""
        return self._once("fused", layers, trace_fused)
