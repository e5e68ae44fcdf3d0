"""Runs audits: makes a configuration ready, runs one process for the reference and many for the layout, and reports."""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from meshwright.audit.borders import worst_of_ranks
from meshwright.audit.case import Case, in_dtype
from meshwright.audit.data import documents_of_run, draw_documents
from meshwright.audit.diagnose import Finding, Kind, diagnose
from meshwright.audit.origin import in_order
from meshwright.audit.ranks import RankResult, RankTrainer, audit_on_rank
from meshwright.audit.reference import Reference, measure_drift, measure_noise, record_reference
from meshwright.audit.report import AuditReport, Check, row_checks
from meshwright.audit.tolerance import TOLERANCES, Tolerances, comparable_steps
from meshwright.errors import ConfigError, LayoutError
from meshwright.plan.inspection import model_sizes
from meshwright.plan.sharding_plan import ShardingPlan
from meshwright.ranks.pool import Pool
from meshwright.shrink.run import MAX_PROCESSES, shrink
from meshwright.shrink.settle import settle
from meshwright.shrink.small_config import Change
from meshwright.train.claim import claim_of, model_digest
from meshwright.train.config import CheckpointConfig, LaunchConfig, MetricsConfig, RunConfig, SampleConfig, ScheduleConfig
from meshwright.train.launch import device_kind
from meshwright.train.proof import Record, record, today
from meshwright.train.setup import RunSetup, describe_model, make_setup

__all__ = ["Auditor", "audit"]

LEAST_RATE = 1e-3
"""Smallest learning rate of an audit: a step has to be visible in the parameters."""

SMOOTH_EPS = 1e-3
"""Smallest eps of Adam in float32 and bfloat16. Adam divides a gradient by its own size. With a small eps, the sign of a
gradient that is only rounding moves a weight by the whole learning rate, and the next gradient depends on that."""


def audit(
    config: RunConfig,
    *,
    nproc: int | None = None,
    steps: int = 3,
    dtype: str = "float64",
    full: bool = False,
    drawn: bool = False,
    patience: float = 30.0,
    say: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """Audit a configuration: compare its layout on many processes with one process. The verdict is recorded.

    Args:
        config: the configuration, as for `train`.
        nproc: number of processes; ``None``: ``launch.nproc``, or as few as the layout needs.
        steps: number of optimizer steps.
        dtype: dtype of compute: ``float64``, ``float32`` or ``bfloat16``.
        full: audit the model as it is; otherwise a small one of the same kind.
        drawn: feed random tokens instead of documents of the run's source.
        patience: number of seconds without progress on any rank after which the ranks count as hanging.
        say: is called with a line if the verdict cannot be recorded.

    Raises:
        HangError: the ranks wait for each other.
        MeshwrightError: `train` would refuse the configuration or the layout too.
    """
    if dtype not in TOLERANCES:
        raise ConfigError(f"dtype={dtype!r}: legal are {', '.join(TOLERANCES)}")
    if steps < 1:
        raise ConfigError(f"steps={steps}: must be at least 1")
    changes: tuple[Change, ...] = ()
    if full:
        small, world_size = config, nproc or config.launch.nproc or _fewest(config)
    else:
        small, world_size, changes = shrink(config, nproc)
    with tempfile.TemporaryDirectory(prefix="meshwright-audit-") as folder:
        ready, more = make_ready(small, dtype, steps, Path(folder))
        setup = make_setup(ready, world_size)
        if not full:
            ready, settled = settle(config, ready, setup)
            more = (*more, *settled)
        store = _store(config, setup, Path(folder), steps, drawn)
        if not model_sizes(setup.spec, setup.model).experts:
            more = tuple(change for change in more if change.key != "model.experts_implementation")
        with Auditor(device_kind(config, world_size), patience) as auditor:
            report = auditor.audit(Case(ready, store, steps), world_size, changes=(*changes, *more))
    _keep(config, setup, report, say)
    return report


def _keep(config: RunConfig, setup: RunSetup, report: AuditReport, say: Callable[[str], None]) -> None:
    """Record a verdict for the run's own model, if the audited model has the same structure.

    The comparison of structures ignores key/value heads: where ranks share them, the small model may have one while the run's
    model has several.
    """
    spec, model = describe_model(config)
    large, small = (model_digest(*of, config.imports, with_heads=False) for of in ((spec, model), (setup.spec, setup.model)))
    if large != small:
        say("the verdict was not recorded: the audit's small model differs in structure from the run's; audit that with --full")
        return
    worst = report.worst_gradient if math.isfinite(report.worst_gradient) else None
    entry = Record(report.passed, report.verdict, today(), report.dtype, report.layout, report.world_size, report.steps, worst)
    record(replace(report.claim, model=model_digest(spec, model, config.imports)), entry, say)


def _fewest(config: RunConfig) -> int:
    """Return the smallest number of processes, at least 2, for which the layout of a run resolves."""
    for count in range(2, MAX_PROCESSES + 1):
        try:
            config.layout.layout().resolve(count)
        except LayoutError:
            continue
        return count
    return 2  # its refusal says what is legal


def make_ready(config: RunConfig, dtype: str, steps: int, folder: Path) -> tuple[RunConfig, tuple[Change, ...]]:
    """Return a configuration that runs some steps in a dtype and writes only inside a folder, and the changes made for it."""
    changed = in_dtype(config, dtype, store=None if dtype == "bfloat16" else dtype)
    parallel, model, optimizer = changed.parallel, changed.model, config.optimizer
    if dtype == "float64" and parallel.compile:
        parallel = parallel.model_copy(update={"compile": False})
    if model.attn_implementation not in (None, "eager", "sdpa"):
        model = model.model_copy(update={"attn_implementation": "sdpa"})
    smooth = {"eps": max(optimizer.eps, SMOOTH_EPS)} if dtype != "float64" else {}
    optimizer = optimizer.model_copy(update={"lr": max(optimizer.lr, LEAST_RATE), **smooth})
    ready = changed.model_copy(
        update={
            "output": str(folder / "run"),
            "parallel": parallel,
            "model": model,
            "optimizer": optimizer,
            "data": config.data.model_copy(update={"eval_fraction": 0.0, "eval_files": []}),
            "schedule": ScheduleConfig(kind="constant"),
            "training": config.training.model_copy(
                update={"steps": steps, "epochs": None, "eval_every": 0, "on_nonfinite": "skip"}
            ),
            "checkpoint": CheckpointConfig(),
            "metrics": MetricsConfig(jsonl=False, tensorboard=False),
            "launch": LaunchConfig(),
            "export": False,
            "sample": SampleConfig(),
        }
    )
    reasons = {
        "model.dtype": "the arithmetic of the audit (--dtype)",
        "model.attn_implementation": "other kernels need a GPU",
        "model.experts_implementation": "kernels for many experts at once have no float64",
        "parallel.param_dtype": "the arithmetic of the audit (--dtype)",
        "parallel.reduce_dtype": "the arithmetic of the audit (--dtype)",
        "parallel.output_dtype": "the arithmetic of the audit (--dtype)",
        "parallel.compile": "compiled code rounds by itself; --dtype float32 audits it",
        "optimizer.lr": "steps have to be seen in the parameters",
        "optimizer.eps": "rounding is not to decide the sign of an update",
        "schedule.kind": "the first steps are to count",
        "schedule.warmup_steps": "the first steps are to count",
    }
    before, after = config.model_dump(), ready.model_dump()
    changes = []
    for key, why in reasons.items():
        section, _, field = key.partition(".")
        if before[section][field] != after[section][field]:
            changes.append(Change(key, before[section][field], after[section][field], why))
    return ready, tuple(changes)


def _store(config: RunConfig, setup: RunSetup, folder: Path, steps: int, drawn: bool) -> Path:
    vocabulary: int = setup.model.config.get_text_config().vocab_size
    data, training = setup.config.data, setup.config.training
    if drawn:
        # A document has about two fifths of a sequence's tokens, so these last for all steps.
        count = 4 * training.global_batch_size * steps
        return draw_documents(vocabulary, data.sequence_length, count, training.seed, folder / "documents").directory
    if problems := config.data.problems():
        raise ConfigError([*problems, "--drawn audits with random tokens instead of the run's data"])
    return documents_of_run(config, vocabulary, data.sequence_length, folder).directory


class Auditor:
    """Runs cases on processes that are started once. All layouts with the same number of data ranks share one reference.

    Args:
        kind: kind of device, ``cpu`` or ``cuda``.
        patience: number of seconds without progress on any rank after which the ranks count as hanging.
    """

    def __init__(self, kind: str = "cpu", patience: float = 30.0) -> None:
        self.kind, self.patience = kind, patience
        self._pools: dict[int, Pool] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="meshwright-references-"))
        self._references: dict[str, tuple[Path, dict[str, float]]] = {}

    def audit(
        self,
        case: Case,
        world_size: int,
        *,
        changes: Sequence[Change] = (),
        plants: Iterable[Callable[[RankTrainer], None]] = (),
    ) -> AuditReport:
        """Audit one case.

        Args:
            case: the case.
            world_size: number of processes.
            changes: changes of the configuration, for the report.
            plants: see :func:`~meshwright.audit.ranks.audit_on_rank`.
        """
        begun = time.perf_counter()
        setup = make_setup(case.config, world_size)
        steps = comparable_steps(setup.plan, case.dtype, case.steps)
        if steps < case.steps:
            why = "in bfloat16 steps after the first compare rounding"
            changes = (*changes, Change("training.steps", case.steps, steps, why))
            case = case.with_steps(steps)
        folder, noise = self._reference(case, setup.layout.size("dp"))
        ranks: list[RankResult] = self._pool(world_size).run(audit_on_rank, case, folder, noise, tuple(plants))
        reference = Reference(folder)
        tolerances = Tolerances(setup.plan, case.dtype, reference, noise, case.steps)
        findings = diagnose(setup.plan, reference, ranks, tolerances)
        later = case.steps > 1 and {finding.kind for finding in findings} <= {Kind.STATE, Kind.LATER}
        if findings and later and case.dtype == "bfloat16" and (why := self._drift(case, folder, tolerances)):
            change = Change("training.steps", case.steps, 1, why)
            return self.audit(case.with_steps(1), world_size, changes=(*changes, change), plants=plants)
        rows = [row for result in ranks for row in result.rows]
        return AuditReport(
            family=setup.plan.family,
            layout=str(setup.layout),
            world_size=world_size,
            dtype=case.dtype,
            steps=case.steps,
            microbatches=setup.plan.options.microbatches,
            changes=tuple(changes),
            losses=tuple(ranks[0].losses),
            norms=tuple(ranks[0].norms),
            counts={axis: dict(counts) for axis, counts in next(iter(ranks[0].counts), {}).items()},
            bytes={axis: dict(sizes) for axis, sizes in next(iter(ranks[0].bytes), {}).items()},
            rows=tuple(rows),
            borders=tuple(in_order(setup.plan, worst_of_ranks(row for result in ranks for row in result.borders))),
            checks=(*row_checks(rows, case.steps), *_checks(setup.plan, reference, ranks, findings)),
            findings=tuple(findings),
            seconds=time.perf_counter() - begun,
            claim=claim_of(setup),
        )

    def _reference(self, case: Case, readers: int) -> tuple[Path, dict[str, float]]:
        alone = case.on_one_process()
        content = {**alone.config.model_dump(mode="json"), "output": "", "store": str(case.store), "steps": case.steps}
        content["readers"] = readers  # the borders of their first microbatches are recorded
        key = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self._references:
            folder = self._folder / key
            pool = self._pool(1)
            pool.run(record_reference, case, folder, readers)
            self._references[key] = (folder, pool.run(measure_noise, case, folder)[0])
        return self._references[key]

    def _drift(self, case: Case, folder: Path, tolerances: Tolerances) -> str:
        """Return why later steps prove nothing: one process does not reproduce its own result either. Empty if it does."""
        drift: dict[str, tuple[float, float]] = self._pool(1).run(measure_drift, case, folder)[0]
        for name, (error, scale) in drift.items():
            if error > tolerances.state(name, tolerances.gradient(name, scale)):
                return f"one process differs as much from itself if the last bits of its weights change: {name} by {error:.2g}"
        return ""

    def _pool(self, world_size: int) -> Pool:
        """Return the processes of a world size.

        If several ranks are asked for, pools of other sizes end, except the single process of references: while they wait,
        gloo uses CPU time.
        """
        for other in [size for size in self._pools if size not in (1, world_size) and world_size != 1]:
            self._pools.pop(other).close()
        if world_size not in self._pools:
            self._pools[world_size] = Pool(world_size, self.kind, self.patience)
        return self._pools[world_size]

    def close(self) -> None:
        """End all processes, and remove the references."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Auditor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _checks(
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
    yield Check("nothing lost", "parameters and buffers", "", Kind.LOST not in wrong)
    shown = []
    for axis, counts in next(iter(first.counts), {}).items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        shown.append(f"{axis}: {kinds} of {sum(first.bytes[0][axis].values()):,} bytes")
    compared = "; ".join(shown) or ("none" if first.counts else "not counted: layers are compiled")
    yield Check("collectives of every step's microbatches as planned", compared, "", Kind.COLLECTIVES not in wrong)


def _border_check(reference: Reference, ranks: Sequence[RankResult], passed: bool) -> Check:
    """Return the line of the summary that says how many tensors at borders of modules were compared."""
    rows = [row for result in ranks for row in result.borders]
    left_out = reference.borders_left_out + sum(result.borders_left_out for result in ranks)
    compared = f"{len(rows)} tensors at borders of {len({row.point.module for row in rows})} modules"
    compared += f"; {left_out} were too many to be kept" if left_out else ""
    worst = max(rows, key=lambda row: row.error, default=None)
    shown = f"{worst.error:.1e} {worst.point.module}" if worst else ""
    return Check("activations and their gradients, of each rank's first microbatch", compared, shown, passed)
