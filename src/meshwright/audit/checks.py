"""The lines of an audit's summary that do not compare parameters."""

import math
from collections.abc import Iterator, Sequence

from meshwright.audit.causes.findings import Finding, Kind
from meshwright.audit.one_process.plain_libraries import PlainResult
from meshwright.audit.one_process.reference import Reference
from meshwright.audit.report import Check
from meshwright.audit.result import RankResult
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["checks_of", "whole_checks"]


def checks_of(
    plan: ShardingPlan, reference: Reference, ranks: Sequence[RankResult], findings: Sequence[Finding]
) -> Iterator[Check]:
    """Yield the lines of the summary that do not compare tensors."""
    wrong = {finding.kind for finding in findings}

    def relative(value: float, truth: float) -> float:
        return abs(value - truth) / abs(truth) if truth else math.inf

    first = ranks[0]
    losses = max(relative(*pair) for result in ranks for pair in zip(result.losses, reference.losses, strict=True))
    yield Check(
        "loss of every step", ", ".join(f"{loss:.6g}" for loss in first.losses), f"{losses:.1e}", Kind.LOSS not in wrong
    )
    norms = max(relative(*pair) for result in ranks for pair in zip(result.norms, reference.norms, strict=True))
    clipped = max(relative(result.clipped_norm, reference.clipped_norm) for result in ranks)
    shown_norms = ", ".join(f"{norm:.6g}" for norm in first.norms)
    yield Check("gradient norm of every step", shown_norms, f"{norms:.1e}", Kind.NORM not in wrong)
    if reference.clip_norm is not None:
        yield Check("norm after clipping", f"to {reference.clip_norm:.6g}", f"{clipped:.1e}", Kind.NORM not in wrong)
    tensors = sum(map(len, first.digests.values()))
    yield Check("replicas bitwise equal", f"{tensors} tensors on {len(ranks)} ranks", "", Kind.REPLICAS not in wrong)
    frozen = sum(not row.trainable for row in plan.parameters)
    yield Check("frozen parameters unmoved", str(frozen), "", Kind.FROZEN not in wrong)
    tied = sum(bool(row.aliases) for row in plan.parameters)
    yield Check("tied parameters are one", str(tied), "", Kind.TIES not in wrong)
    sequences = sum(map(len, reference.sequences))
    tokens = reference.microbatch_tokens
    compared = (
        f"{sequences} sequences; in the first step {min(tokens)} to {max(tokens)} valid tokens a microbatch, and "
        f"{reference.boundaries} boundaries between documents"
    )
    if reference.unlabelled_step is not None:
        compared += f"; a microbatch of step {reference.unlabelled_step + 1} has no valid token"
    yield Check("each rank was fed its share", compared, "", Kind.DATA not in wrong)
    compared = f"{reference.words_fed} of {reference.words}, as inputs and as labels of the first step"
    yield Check("words at the edges of slices of the vocabulary, and padding", compared, "", True)
    if reference.experts:
        compared = f"{reference.idle_experts} of {reference.experts}, in the first step"
        yield Check("experts without a token in a microbatch", compared, "", True)
    yield _border_check(reference, ranks, not {Kind.FORWARD, Kind.BACKWARD} & wrong)
    yield Check("no random numbers drawn, modules in training mode", "", "", not {Kind.RANDOM, Kind.MODE} & wrong)
    if first.callbacks.names:
        names = ", ".join(first.callbacks.names)
        yield Check("callbacks leave parameters and random numbers alone", names, "", Kind.CALLBACK not in wrong)
    yield Check("nothing lost", "parameters and buffers", "", Kind.LOST not in wrong)
    shown = []
    for axis, counts in next(iter(first.counts), {}).items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        shown.append(f"{axis}: {kinds} of {sum(first.bytes[0][axis].values()):,} bytes")
    compared = "; ".join(shown) or ("none" if first.counts else "not counted: layers are compiled")
    yield Check("collectives of every step's microbatches as planned", compared, "", Kind.COLLECTIVES not in wrong)


def whole_checks(
    reference: Reference, ranks: Sequence[RankResult], findings: Sequence[Finding], plain: PlainResult, unread: str
) -> Iterator[Check]:
    """Yield the lines of what a run does besides its steps."""
    wrong, first = {finding.kind for finding in findings}, ranks[0]
    yield Check("the model was read from files", f"not: {unread}" if unread else "by each rank its slices", "", True)
    if first.evaluation is not None and reference.evaluation is not None:
        error = abs(first.evaluation - reference.evaluation) / abs(reference.evaluation)
        yield Check("loss of an evaluation", f"{first.evaluation:.6g}", f"{error:.1e}", Kind.EVALUATION not in wrong)
    if resumed := {name: error for result in ranks for name, error in result.resumed.items()}:
        worst = max(resumed, key=lambda name: resumed[name])
        what = f"{len(resumed)} tensors and losses, saved after step 1"
        yield Check("steps after resuming", what, f"{resumed[worst]:.1e} {worst}", Kind.RESUMED not in wrong)
    compared = (
        f"not compared: {plain.problem}"
        if plain.problem
        else (f"loss, gradients and update of a step of {plain.documents} documents, each alone")
    )
    row = max(plain.rows, key=lambda row: row.error, default=None)
    yield Check(
        "one process beside plain libraries", compared, f"{row.error:.1e} {row.name}" if row else "", Kind.PLAIN not in wrong
    )


def _border_check(reference: Reference, ranks: Sequence[RankResult], passed: bool) -> Check:
    """Return the line of the summary that says how many tensors at borders of modules were compared."""
    rows = [row for result in ranks for row in result.borders]
    left_out = reference.borders_left_out + sum(result.borders_left_out for result in ranks)
    compared = f"{len(rows)} tensors at borders of {len({row.point.module for row in rows})} modules"
    compared += f"; {left_out} were too many to be kept" if left_out else ""
    worst = max(rows, key=lambda row: row.error, default=None)
    shown = f"{worst.error:.1e} {worst.point.module}" if worst else ""
    return Check("activations and their gradients, of each rank's first microbatch", compared, shown, passed)
