"""From numbers to words: what is wrong, causes first. The first finding is the verdict."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.audit.causes.callback_notes import callback_findings
from meshwright.audit.causes.findings import CONSEQUENCES, Finding, Kind, described, in_ranks, listed
from meshwright.audit.causes.gradients import averages, gradient_findings
from meshwright.audit.causes.origin import origin_findings
from meshwright.audit.causes.replicas import differing, replica_findings, sharded_over
from meshwright.audit.compare import Row
from meshwright.audit.counted_collectives import wrong_counts
from meshwright.audit.data import unlike
from meshwright.audit.one_process.reference import Reference
from meshwright.audit.result import RankResult
from meshwright.audit.timeline import Moment, earliest
from meshwright.audit.tolerance import TOLERANCES, Tolerances
from meshwright.errors import number_of
from meshwright.layout import Layout
from meshwright.plan.axes.pipeline.stage_plan import stages_with
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["Finding", "Kind", "diagnose"]


def diagnose(plan: ShardingPlan, reference: Reference, ranks: Sequence[RankResult], tolerances: Tolerances) -> list[Finding]:
    """Return what is wrong, causes first and without their consequences; empty if the layout computes what one process does."""
    rows = [row for result in ranks for row in result.rows]
    findings = [
        *_callbacks(reference, rows, ranks, tolerances),
        *_values(plan, rows, ranks),
        *_data(plan.layout, reference, ranks),
        *_random(ranks),
        *_ties(ranks),
        *_frozen(ranks),
        *_origin(plan, rows, ranks, tolerances),
        *gradient_findings(plan, reference, rows, ranks),
        *_later_gradients(plan, rows, ranks),
        *replica_findings(plan, ranks),
        *_modes(reference, ranks),
        *_lost(ranks),
        *_loss(plan.layout, reference, ranks, tolerances),
        *_norms(reference, ranks, rows, tolerances),
        *_decay(reference, ranks),
        *_state(plan, rows, ranks),
        *_evaluation(reference, ranks, tolerances),
        *_resumed(ranks, tolerances),
        *wrong_counts(plan, ranks),
    ]
    there = {finding.kind for finding in findings}
    follows = {kind for cause in there for kind in CONSEQUENCES.get(cause, ())}
    order = list(Kind)
    causes = sorted((item for item in findings if item.kind not in follows), key=lambda finding: order.index(finding.kind))
    return [_with_stage(plan, finding) for finding in causes]


def _with_stage(plan: ShardingPlan, finding: Finding) -> Finding:
    """Say which stages have what a finding is about, unless it is about all of a model with stages."""
    stages = sorted({stage for name in finding.names for stage in stages_with(plan, name)})
    if not stages or (len(stages) == len(plan.stages) and len(finding.names) > 1):
        return finding
    words = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
    return replace(finding, message=f"{finding.message} ({words})")


def _callbacks(
    reference: Reference, rows: Sequence[Row], ranks: Sequence[RankResult], tolerances: Tolerances
) -> Iterator[Finding]:
    """Yield what callbacks do. The gradients that they change are compared where those before were right."""
    right = tolerances.dtype == "float64" and all(row.passed for row in rows if row.what == "gradient")
    allowed = tolerances.steps * TOLERANCES[tolerances.dtype] if right else None
    yield from callback_findings(reference.callbacks, [result.callbacks for result in ranks], allowed)


# -- before the gradient -----------------------------------------------------------------------------------------------------


def _values(plan: ShardingPlan, rows: Sequence[Row], ranks: Sequence[RankResult]) -> Iterator[Finding]:
    sharded = sharded_over(plan)
    for name in dict.fromkeys(name for result in ranks for name in result.digests.get("initial value", {})):
        if pairs := differing(plan.layout, sharded.get(name, set()), name, "initial value", ranks):
            (first, other), *_ = pairs
            yield Finding(Kind.VALUES, f"ranks {first} and {other} begin with different values of {name}", (name,))
    compared = {row.name for row in rows if row.what == "initial value"}
    if lost := tuple(row.name for row in plan.parameters if row.name not in compared):
        yield Finding(Kind.LOST, f"no rank has {listed(lost)}", lost)
    wrong = [row for row in rows if row.what == "initial value" and not row.passed]
    if wrong:
        names = tuple(row.name for row in wrong)
        yield Finding(
            Kind.VALUES, f"the ranks begin with other values than one process: {listed(names)}; nothing else can agree", names
        )


def _data(layout: Layout, reference: Reference, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    readers = layout.size("dp")
    for step, truth in enumerate(reference.sequences):
        share = len(truth) // readers
        for result in ranks:
            place = layout.coordinates(result.rank)
            reader = place["dp_replicate"] * layout.size("dp_shard") + place["dp_shard"]
            due = truth[reader * share : (reader + 1) * share]
            fed = result.sequences[step] if step < len(result.sequences) else []
            if fed == due:
                continue
            others = [
                other for other in range(readers) if other != reader and fed == truth[other * share : (other + 1) * share]
            ]
            data = f"the data of data rank {others[0]}" if others else _strange(layout, fed, due, truth)
            yield Finding(
                Kind.DATA,
                f"rank {result.rank} was fed {data} in step {step + 1}; it is data rank {reader}",
                (f"rank {result.rank}",),
            )
            return


def _strange(layout: Layout, fed: Sequence[str], due: Sequence[str], truth: Sequence[str]) -> str:
    if len(fed) != len(due):
        return f"{len(fed)} sequences where {len(due)} are due"
    differences = [unlike(one, other) for one, other in zip(fed, due, strict=True)]
    names = sorted({name for difference in differences for name in difference})
    if "input_ids" not in names:
        cut = f", put together from the {layout.size('cp')} ranks of cp" if layout.size("cp") > 1 else ""
        return f"its own sequences, but with other {' and '.join(names)} than one process{cut},"
    foreign = sum(digest not in truth for digest in fed)
    if foreign:
        return f"{number_of(foreign, 'sequence')} that {'is' if foreign == 1 else 'are'} not in this step"
    return "its sequences in another order, or others' among them"


def _random(ranks: Sequence[RankResult]) -> Iterator[Finding]:
    drew = [result.rank for result in ranks if result.drew]
    if drew:
        yield Finding(
            Kind.RANDOM,
            f"{in_ranks(drew)} drew random numbers in the step (dropout, or noise in a router): no two runs of it agree, and "
            "ranks that share a sample do not either",
            tuple(f"rank {rank}" for rank in drew),
        )


def _modes(reference: Reference, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    for result in ranks:
        if other := sorted(set(result.evaluating) ^ set(reference.evaluating)):
            names = tuple(name or "(root)" for name in other)
            yield Finding(
                Kind.MODE, f"rank {result.rank} has {len(names)} modules in another mode (train, eval): {listed(names)}", names
            )
            return


def _lost(ranks: Sequence[RankResult]) -> Iterator[Finding]:
    names = tuple(dict.fromkeys(name for result in ranks for name in result.lost))
    if names:
        yield Finding(Kind.LOST, f"after the steps, only one process or only the ranks have {listed(names)}", names)


def _ties(ranks: Sequence[RankResult]) -> Iterator[Finding]:
    for group in dict.fromkeys(group for result in ranks for group in result.come_apart):
        yield Finding(
            Kind.TIES,
            f"tied parameters came apart: {' and '.join(group)} are one parameter in the plan, and several now",
            group,
        )


def _frozen(ranks: Sequence[RankResult]) -> Iterator[Finding]:
    names = tuple(dict.fromkeys(name for result in ranks for name in result.frozen_moved))
    if names:
        yield Finding(Kind.FROZEN, f"frozen parameters moved or got a gradient: {listed(names)}", names)


def _origin(plan: ShardingPlan, rows: Sequence[Row], ranks: Sequence[RankResult], tolerances: Tolerances) -> Iterator[Finding]:
    """Yield where the difference begins. In float64 borders alone can fail an audit; else they only explain wrong gradients."""
    if tolerances.dtype == "float64" or not all(row.passed for row in rows if row.what == "gradient"):
        yield from origin_findings(plan, ranks)


def _decay(reference: Reference, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    for result in ranks:
        due = {name for name in reference.decayed if name in result.digests["parameter"]}
        for wrong, words in (
            (set(result.decayed) - due, "applies weight decay to vectors, or to excepted parameters"),
            (due - set(result.decayed), "applies no weight decay to matrices"),
        ):
            if wrong:
                names = tuple(sorted(wrong))
                yield Finding(Kind.DECAY, f"rank {result.rank} {words}: {listed(names)}", names)
                return


# -- after the gradient ------------------------------------------------------------------------------------------------------


def _loss(layout: Layout, reference: Reference, ranks: Sequence[RankResult], tolerances: Tolerances) -> Iterator[Finding]:
    for step, truth in enumerate(reference.losses):
        for result in ranks:
            loss = result.losses[step]
            if _near(loss, truth, tolerances.scalar("loss", step)):
                continue
            how = f"{loss / truth:.4g} times it" if math.isfinite(loss) else f"not finite{_unlabelled(reference, step)}"
            tokens = sum(reference.microbatch_tokens)
            for averaged_over, weights in averages(reference, layout.size("dp")) if step == 0 else ():
                parts = zip(weights, reference.microbatch_losses, strict=True)
                average = sum(weight * part for weight, part in parts if not math.isnan(weight)) / tokens
                if _near(loss, average, max(tolerances.scalar("loss", step), 1e-6)):
                    how = f"averaged over {averaged_over}, not over tokens"
            where = f"rank {result.rank} in step {step + 1}"
            kind = Kind.LATER if step and math.isfinite(loss) else Kind.LOSS
            yield Finding(kind, f"the loss on {where} is {loss:.9g}, that of one process {truth:.9g}: {how}")
            return


def _norms(reference: Reference, ranks: Sequence[RankResult], rows: Sequence[Row], tolerances: Tolerances) -> Iterator[Finding]:
    right = all(row.passed for row in rows if row.what == "gradient")
    compared = [(0, "after clipping", [result.clipped_norm for result in ranks], reference.clipped_norm)]
    # If the ranks round differently from one process, the first step's norm is compared with that of the gathered gradients.
    own = tolerances.rounded() and not reference.callbacks
    for step, truth in enumerate(
        [math.hypot(*(result.gathered_norm for result in ranks)), *reference.norms[1:]] if own else reference.norms
    ):
        compared.insert(step, (step, "before clipping", [result.norms[step] for result in ranks], truth))
    for step, when, values, truth in compared:
        for result, value in zip(ranks, values, strict=True):
            exact = own and step == 0 and when.startswith("before")
            if _near(value, truth, TOLERANCES[tolerances.dtype] if exact else tolerances.scalar("norm", step)):
                continue
            why = "" if math.isfinite(value) else _unlabelled(reference, step)
            if right and step == 0 and value < truth and len({round(other, 12) for other in values}) > 1:
                why = "; the gradients are right and the ranks have different norms, each that of its own shards: not summed"
            elif right and step == 0 and math.isfinite(value):
                why = "; the gradients are right, so it is the norm itself, or the scaling"
            yield Finding(
                Kind.LATER if step and math.isfinite(value) else Kind.NORM,
                f"the norm of the gradient {when} is {value:.6g} on rank {result.rank} in step {step + 1}, {truth:.6g} "
                f"{'of the gathered gradients' if exact else 'in one process'}{why}",
            )
            return


def _evaluation(reference: Reference, ranks: Sequence[RankResult], tolerances: Tolerances) -> Iterator[Finding]:
    truth = reference.evaluation
    if truth is None:
        return
    for result in ranks:
        if result.evaluation is None or _near(result.evaluation, truth, tolerances.scalar("loss", tolerances.steps)):
            continue
        yield Finding(
            Kind.EVALUATION,
            f"the loss of an evaluation is {result.evaluation:.9g} on rank {result.rank}, {truth:.9g} in one process "
            f"({result.evaluation / truth:.4g} times it), though the steps agree",
        )
        return


def _resumed(ranks: Sequence[RankResult], tolerances: Tolerances) -> Iterator[Finding]:
    allowed = tolerances.steps * TOLERANCES[tolerances.dtype]
    for result in ranks:
        if wrong := {name: error for name, error in result.resumed.items() if not error <= allowed}:
            worst = sorted(wrong, key=lambda name: -wrong[name])
            yield Finding(
                Kind.RESUMED,
                f"a trainer that goes on from the checkpoint of step 1 ends elsewhere on rank {result.rank}, the worst first: "
                f"{listed(worst)} (error {wrong[worst[0]]:.2g})",
                tuple(worst),
            )
            return


def _unlabelled(reference: Reference, step: int) -> str:
    """Return a possible cause of a number that is not finite, as the end of a sentence."""
    mean = "; a microbatch of that step has no valid token, so look for a mean over the tokens of a microbatch"
    return mean if step == reference.unlabelled_step else ""


def _near(value: float, truth: float, tolerance: float) -> bool:
    return abs(value - truth) <= tolerance * abs(truth)


def _later_gradients(plan: ShardingPlan, rows: Sequence[Row], ranks: Sequence[RankResult]) -> Iterator[Finding]:
    """Yield which gradients are wrong in a later step, if all was right until then, on all replicas and in buffers too."""
    first = earliest(item for result in ranks for item in result.divergences)
    wrong = any(row.what in ("gradient", "buffer") and not row.passed for row in rows)
    if not first or first[0].moment is not Moment.GRADIENT or wrong or any(replica_findings(plan, ranks)):
        return
    worst, step, names = first[0], first[0].step, tuple(dict.fromkeys(item.name for item in first))
    yield Finding(
        Kind.GRADIENT,
        f"the gradient of {described(plan, names)} is wrong in step {step} and in no step before: that of {worst.name} has "
        f"{worst.ratio:.4g} times its norm in one process, though the parameters agreed when step {step} began. Look at what "
        "the step before left behind: gradients that are not cleared, buffers, states of gradient sync",
        names,
    )


def _state(plan: ShardingPlan, rows: Sequence[Row], ranks: Sequence[RankResult]) -> Iterator[Finding]:
    """Yield what is wrong after the steps, for parameters whose gradient is right. Otherwise it follows from the gradient."""
    first = earliest(item for result in ranks for item in result.divergences if item.moment is Moment.PARAMETER)
    first_wrong = {item.name: item.step for item in first}
    blamed = {row.name for row in rows if row.what in ("gradient", "initial value") and not row.passed}
    wrong: dict[str, list[Row]] = {}
    for row in rows:
        if row.what not in ("gradient", "initial value") and not row.passed and row.name not in blamed:
            wrong.setdefault(row.what, []).append(row)
    for same_kind in wrong.values():
        same_kind.sort(key=lambda row: -row.severity)
    for kind, same_kind in sorted(wrong.items(), key=lambda item: -item[1][0].severity):
        causes = [row for row in same_kind if row.name in first_wrong] or same_kind  # the others follow from these
        worst, names = causes[0], tuple(row.name for row in causes)
        step = worst.step or first_wrong.get(worst.name, 0)
        more = f", and {len(same_kind) - len(causes)} more after later ones" if len(causes) < len(same_kind) else ""
        noun = {"parameter": "the values", "buffer": "the buffers"}.get(kind, f"the optimizer's {kind}")
        yield Finding(
            Kind.STATE,
            f"{noun} of {listed(names)} differ after {f'step {step}' if step else 'the steps'}{more}, the worst first (error "
            f"{worst.error:.2g}, ratio {worst.ratio:.4g}), though the first gradients agree{_by_user(plan, worst)}",
            names,
        )


def _by_user(plan: ShardingPlan, row: Row) -> str:
    """Return what is to be said of a wrong row if an optimizer of the user is its cause."""
    rule = next((plan.options.rules[own.update] for own in plan.parameters if own.name == row.name and own.trainable), None)
    if rule is None or rule.kind:
        return ""
    return f"; optimizer {rule.name} changes it: of shards it computes something else than of the whole parameter"
