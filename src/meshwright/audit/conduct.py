"""Runs audits: makes a configuration ready, runs one process for the reference and many for the layout, and reports."""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from meshwright.audit.borders import worst_of_ranks
from meshwright.audit.case import Case
from meshwright.audit.causes.diagnose import Kind, diagnose
from meshwright.audit.causes.origin import in_order
from meshwright.audit.checks import checks_of, whole_checks
from meshwright.audit.data import documents_of_run, draw_documents
from meshwright.audit.one_process.model_files import from_files, unwritten
from meshwright.audit.one_process.noise import measure_drift, measure_noise
from meshwright.audit.one_process.plain_libraries import PlainResult, compare_with_plain, finding_of
from meshwright.audit.one_process.reference import Reference, record_reference
from meshwright.audit.ranks import RankTrainer, audit_on_rank
from meshwright.audit.ready import make_ready
from meshwright.audit.report import AuditReport, row_checks
from meshwright.audit.result import RankResult, digest_of
from meshwright.audit.small_routes import Routes, fit_routes, without_routes
from meshwright.audit.tolerance import TOLERANCES, Tolerances, comparable_steps
from meshwright.device import Ability, able
from meshwright.errors import ConfigError, MeshwrightError, Refusal, WorkerError, described
from meshwright.plan.given.inspection import model_sizes
from meshwright.ranks.pool import Pool
from meshwright.shrink.run import MAX_PROCESSES, shrink
from meshwright.shrink.settle import copy_policies
from meshwright.shrink.small_config import Change
from meshwright.train.config import RunConfig
from meshwright.train.proofs.claim import claim_of, model_digest
from meshwright.train.proofs.records import Record, record
from meshwright.train.proofs.shipped_cells import today
from meshwright.train.start.processes import adapted, device_kind
from meshwright.train.start.setup import RunSetup, describe_run, make_setup

__all__ = ["Auditor", "audit"]


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
        say: is called with a line if the verdict cannot be recorded, or the device lacks something.

    Raises:
        HangError: the ranks wait for each other.
        MeshwrightError: `train` would refuse the configuration or the layout too.
    """
    if dtype not in TOLERANCES:
        raise ConfigError("config.value", f"dtype={dtype!r}: legal are {', '.join(TOLERANCES)}")
    if steps < 1:
        raise ConfigError("config.value", f"steps={steps}: must be at least 1")
    changes: tuple[Change, ...] = ()
    if full:
        routes = None
        small, world_size = config, nproc or config.launch.nproc or _fewest(config)
    else:
        small, world_size, changes = shrink(without_routes(config), nproc)
    kind = device_kind(config, world_size)
    if dtype == "float64" and not able(kind, Ability.FLOAT64):
        raise ConfigError("audit.dtype", f"--dtype=float64: {kind} has no double precision; legal are float32, bfloat16")
    small, lines = adapted(small, kind)
    for line in lines:
        say(line)
    with tempfile.TemporaryDirectory(prefix="meshwright-audit-") as folder:
        ready, more = make_ready(small, dtype, steps, Path(folder))
        setup = make_setup(ready, world_size)
        if not full:
            ready, settled = copy_policies(config, ready, setup)
            ready, routes, fitted = fit_routes(config, ready, setup)
            more = (*more, *settled, *fitted)
        store = _store(config, ready, setup, routes, Path(folder), steps, drawn)
        if not model_sizes(setup.spec, setup.model).experts:
            more = tuple(change for change in more if change.key != "model.experts_implementation")
        with Auditor(kind, patience) as auditor:
            report = auditor.audit(Case(ready, store, steps), world_size, changes=(*changes, *more), whole=True)
    _keep(config, setup, report, say)
    return report


def _keep(config: RunConfig, setup: RunSetup, report: AuditReport, say: Callable[[str], None]) -> None:
    """Record a verdict for the run's own model, if the audited model has the same structure.

    The comparison of structures ignores key/value heads: where ranks share them, the small model may have one while the run's
    model has several.
    """
    of = describe_run(config)
    large, small = (model_digest(*one, config.imports, with_heads=False) for one in (of, (setup.spec, setup.model)))
    if large != small:
        say("the verdict was not recorded: the audit's small model differs in structure from the run's; audit that with --full")
        return
    worst = report.worst_gradient if math.isfinite(report.worst_gradient) else None
    entry = Record(
        passed=report.passed,
        verdict=report.verdict,
        date=today(),
        dtype=report.dtype,
        layout=report.layout,
        world_size=report.world_size,
        steps=report.steps,
        worst=worst,
        seconds=report.seconds,
        code=report.claim.code,
    )
    record(replace(report.claim, model=model_digest(*of, config.imports)), entry, say)


def _fewest(config: RunConfig) -> int:
    """Return the smallest number of processes, at least 2, for which the layout of a run resolves."""
    count = config.layout.layout().fewest(2)
    return 2 if count is None or count > MAX_PROCESSES else count  # the refusal of 2 says what is legal


def _store(
    config: RunConfig, ready: RunConfig, setup: RunSetup, routes: Routes | None, folder: Path, steps: int, drawn: bool
) -> Path:
    vocabulary: int = setup.model.config.get_text_config().vocab_size
    data, training = ready.data, setup.config.training
    if drawn:
        # A document has about two fifths of a sequence's tokens, so these last for all steps.
        count, target = 4 * training.global_batch_size * steps, folder / "documents"
        size = data.sequence_length, count, training.seed
        return draw_documents(vocabulary, *size, target, tensors=data.values, pairs=data.pairs).directory
    if problems := config.data.problems():
        raise ConfigError([*problems, Refusal("data.source", "--drawn audits with random tokens instead of the run's data")])
    return documents_of_run(config, vocabulary, data.sequence_length, folder, routes).directory


class Auditor:
    """Runs cases on processes that are started once. All layouts with the same number of data ranks share one reference.

    Args:
        kind: kind of device, as in :mod:`meshwright.device`.
        patience: number of seconds without progress on any rank after which the ranks count as hanging.
    """

    def __init__(self, kind: str = "cpu", patience: float = 30.0) -> None:
        self.kind, self.patience = kind, patience
        self._pools: dict[int, Pool] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="meshwright-references-"))
        self._references: dict[str, tuple[Path, dict[str, float]]] = {}
        self._plains: dict[Path, PlainResult] = {}

    def audit(
        self,
        case: Case,
        world_size: int,
        *,
        changes: Sequence[Change] = (),
        plants: Iterable[Callable[[RankTrainer], None]] = (),
        whole: bool = False,
    ) -> AuditReport:
        """Audit one case.

        Args:
            case: the case.
            world_size: number of processes.
            changes: changes of the configuration, for the report.
            plants: see :func:`~meshwright.audit.ranks.audit_on_rank`.
            whole: also read the model from files, evaluate, go on from a checkpoint, and compare with plain libraries.
        """
        begun = time.perf_counter()
        setup = make_setup(case.config, world_size)
        steps = comparable_steps(setup.plan, case.dtype, case.steps)
        if steps < case.steps:
            why = "in bfloat16 steps after the first compare rounding"
            changes = (*changes, Change("training.steps", case.steps, steps, why))
            case = case.with_steps(steps)
        folder, noise = self._reference(case, setup.layout.size("dp"), whole)
        reading, unread = self._reading(case, folder, setup, world_size) if whole else (case, "")
        ranks: list[RankResult] = self._pool(world_size).run(audit_on_rank, reading, folder, noise, tuple(plants), whole)
        if any(result.plan != digest_of(setup.plan) for result in ranks):
            raise WorkerError(
                "audit.plan",
                "ranks carried out another plan than this process has: what it registered (such as strategies) must be in a "
                "module that workers import too, not in a notebook's cell or in a script's main",
            )
        reference = Reference(folder)
        tolerances = Tolerances(setup.plan, case.dtype, reference, noise, case.steps)
        findings = diagnose(setup.plan, reference, ranks, tolerances)
        plain = self._plain(case, folder) if whole else None
        if plain is not None and (differs := finding_of(plain)) is not None:
            findings.insert(0, differs)
        later = case.steps > 1 and {finding.kind for finding in findings} <= {Kind.STATE, Kind.LATER}
        if findings and later and case.dtype == "bfloat16" and (why := self._drift(case, folder, tolerances)):
            change = Change("training.steps", case.steps, 1, why)
            return self.audit(case.with_steps(1), world_size, changes=(*changes, change), plants=plants, whole=whole)
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
            checks=(
                *row_checks(rows, case.steps),
                *checks_of(setup.plan, reference, ranks, findings),
                *(() if plain is None else whole_checks(reference, ranks, findings, plain, unread)),
            ),
            findings=tuple(findings),
            seconds=time.perf_counter() - begun,
            claim=claim_of(setup),
        )

    def _reading(self, case: Case, folder: Path, setup: RunSetup, world_size: int) -> tuple[Case, str]:
        """Return the case whose ranks read the model from files, or the case itself and why they do not."""
        if why := unwritten(folder):
            return case, why
        reading = from_files(case, folder)
        try:
            again = make_setup(reading.config, world_size)
        except MeshwrightError as error:
            return case, f"the files of transformers cannot be trained from: {described(error)}"
        if again.plan.parameters != setup.plan.parameters:
            return case, "transformers reads its own files as another model"
        return reading, ""

    def _plain(self, case: Case, folder: Path) -> PlainResult:
        if folder not in self._plains:
            self._plains[folder] = self._pool(1).run(compare_with_plain, case, folder)[0]
        return self._plains[folder]

    def _reference(self, case: Case, readers: int, whole: bool) -> tuple[Path, dict[str, float]]:
        alone = case.on_one_process()
        content = {**alone.config.model_dump(mode="json"), "output": "", "store": str(case.store), "steps": case.steps}
        content["readers"] = readers  # the borders of their first microbatches are recorded
        content["whole"] = whole
        key = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self._references:
            folder = self._folder / key
            pool = self._pool(1)
            pool.run(record_reference, case, folder, readers, whole)
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
