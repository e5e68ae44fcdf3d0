"""What one rank recorded of an audit."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from meshwright.audit.borders import BorderRow
from meshwright.audit.causes.callback_notes import CallbackNotes
from meshwright.audit.compare import Row
from meshwright.audit.timeline import Divergence
from meshwright.plan.result.sharding_plan import ParameterRow, ShardingPlan

__all__ = ["RankResult", "digest_of", "placements_in_words"]


@dataclass
class RankResult:
    """What one rank recorded.

    Attributes:
        rows: comparisons with the reference; on the first rank of each stage only.
        losses: loss of each step, over all ranks, as this rank reports it.
        norms: norm of the gradient in each step, before clipping, as this rank reports it.
        gathered_norm: norm of the first step's gradients that were gathered to be compared; on those ranks only.
        clipped_norm: norm of the whole gradient in the first step, after clipping.
        sequences: for each step, the digests of the sequences that this rank was fed.
        digests: ``initial value``, ``gradient``, ``parameter``, ``buffer`` or an optimizer state to a dict of names to the
            digest of the part that this rank holds.
        without_gradient: names of the trained parameters that got no gradient in the first step.
        frozen_moved: names of the parameters that are not trained, but have a gradient or another value.
        decayed: names of the parameters that the optimizer of this rank decays.
        come_apart: groups of names that are one parameter in the plan, but several in the model after the steps.
        lost: names of the parameters and buffers that only one side has after the steps.
        evaluating: names of the modules that were in evaluation mode in the first step.
        drew: whether forward or backward generated random numbers.
        counts: for each step, axis to the number of collectives of the microbatches by kind. FSDP's axes are counted as one,
            ``dp``. Axes over the same ranks are counted as one, such as ``dp+ep``. A group that is no axis has its ranks as its
            name. Empty if layers are compiled.
        bytes: the bytes of these collectives, in the same form.
        borders: comparisons at the borders of modules in the first microbatch, in the order of recording. Empty if layers are
            compiled, or if rounding is not that of one process.
        borders_left_out: number of tensors at borders that were not kept, because there were too many.
        divergences: which parameters, and which gradients of later steps, were not those of one process; on the first rank of
            each stage only, in float64 only.
        evaluation: loss of an evaluation after the steps; ``None``: there was none.
        resumed: name of each tensor of a checkpoint to how far it is, on this rank, from where a new trainer ends that goes on
            from a checkpoint after the first step; ``loss`` to how far its losses are. Empty if that was not tried.
        callbacks: what the callbacks did.
        plan: digest of the plan that the rank carried out, as of :func:`digest_of`.
        seconds: duration of the steps, with the comparisons.
    """

    rank: int
    rows: list[Row] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gathered_norm: float = 0.0
    clipped_norm: float = 0.0
    sequences: list[list[str]] = field(default_factory=list)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    without_gradient: list[str] = field(default_factory=list)
    frozen_moved: list[str] = field(default_factory=list)
    decayed: list[str] = field(default_factory=list)
    come_apart: list[tuple[str, ...]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    evaluating: list[str] = field(default_factory=list)
    drew: bool = False
    counts: list[dict[str, Counter[str]]] = field(default_factory=list)
    bytes: list[dict[str, Counter[str]]] = field(default_factory=list)
    borders: list[BorderRow] = field(default_factory=list)
    borders_left_out: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    evaluation: float | None = None
    resumed: dict[str, float] = field(default_factory=dict)
    callbacks: CallbackNotes = field(default_factory=CallbackNotes)
    plan: str = ""
    seconds: float = 0.0


def placements_in_words(row: ParameterRow) -> str:
    """Return where the plan places a parameter, for people."""
    return " ".join(f"{axis}:{placement}" for axis, placement in row.placements) or "whole"


def digest_of(plan: ShardingPlan) -> str:
    """Return a digest of the rows of a plan: a worker without the user's own strategies would carry out another one."""
    return hashlib.sha256(repr((plan.parameters, plan.units)).encode()).hexdigest()
