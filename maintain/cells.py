"""The cells of the support matrix: families, layouts, options in all pairs of values, and the audit of one cell."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

from maintain.tiny import TINY_MODELS
from meshwright.audit.case import Case
from meshwright.audit.conduct import Auditor
from meshwright.audit.data import draw_documents
from meshwright.audit.ready import make_ready
from meshwright.audit.report import AuditReport
from meshwright.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.plan.given.closed_choices import ContextBalance, ContextMethod, PipelineSchedule, SyncPolicy
from meshwright.shrink.kinds import with_layers
from meshwright.train.config import RunConfig
from meshwright.train.proofs.claim import Claim

__all__ = [
    "LAYOUTS",
    "ON_EIGHT",
    "PROOFS",
    "VARIANTS",
    "Cell",
    "Outcome",
    "Place",
    "Variant",
    "audited",
    "context_options",
    "deepened",
    "family_case",
    "pipeline_options",
    "run_cell",
    "slice_of_matrix",
]

V = TypeVar("V")
PROOFS = Path("src/meshwright/train/proofs")
"""The data of both pages, which `plan` and `train` read."""
STEPS = 2
SEQUENCE_LENGTH = 32


@dataclass(frozen=True)
class Place:
    """A layout of the matrix, with the sizes of its mesh axes."""

    label: str
    world_size: int
    sizes: Mapping[str, int]
    experts: bool = False
    """Whether it is only for families that have experts."""
    sequence_parallel: bool = False
    """Whether the ranks of ``tp`` share the residual stream too."""


LAYOUTS = (
    Place("shard 2", 2, {"dp_shard": 2}),
    Place("replicate 2", 2, {"dp_replicate": 2, "dp_shard": 1}),
    Place("tp 2", 2, {"dp_shard": 1, "tp": 2}),
    Place("tp 2 seq", 2, {"dp_shard": 1, "tp": 2}, sequence_parallel=True),
    Place("cp 2", 2, {"dp_shard": 1, "cp": 2}),
    Place("cp 4", 4, {"dp_shard": 1, "cp": 4}),
    Place("cp 2 x shard 2", 4, {"dp_shard": 2, "cp": 2}),
    Place("cp 2 x tp 2", 4, {"dp_shard": 1, "cp": 2, "tp": 2}),
    Place("cp 2 x tp 2 seq", 4, {"dp_shard": 1, "cp": 2, "tp": 2}, sequence_parallel=True),
    Place("cp 2 x ep 2", 4, {"dp_shard": 2, "cp": 2, "ep": 2}, experts=True),
    Place("2 x cp 2 x shard 2", 8, {"dp_replicate": 2, "dp_shard": 2, "cp": 2}),
    Place("pp 2", 2, {"dp_shard": 1, "pp": 2}),
    Place("pp 4", 4, {"dp_shard": 1, "pp": 4}),
    Place("pp 2 x shard 2", 4, {"dp_shard": 2, "pp": 2}),
    Place("2 x pp 2 x shard 2", 8, {"dp_replicate": 2, "dp_shard": 2, "pp": 2}),
    Place("pp 2 x tp 2", 4, {"dp_shard": 1, "tp": 2, "pp": 2}),
    Place("pp 2 x tp 2 seq", 4, {"dp_shard": 1, "tp": 2, "pp": 2}, sequence_parallel=True),
    Place("pp 2 x ep 2", 4, {"dp_shard": 2, "ep": 2, "pp": 2}, experts=True),
    Place("pp 2 x cp 2", 4, {"dp_shard": 1, "cp": 2, "pp": 2}),
    Place("pp 2 x tp 2 x shard 2", 8, {"dp_shard": 2, "tp": 2, "pp": 2}),
    Place("ep 2", 2, {"dp_shard": 2, "ep": 2}, experts=True),
    Place("ep 4", 4, {"dp_shard": 4, "ep": 4}, experts=True),
    Place("ep 2 x shard 2", 4, {"dp_shard": 4, "ep": 2}, experts=True),
    Place("2 x ep 2", 4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, experts=True),
    Place("ep 2 = tp 2", 2, {"dp_shard": 1, "tp": 2, "ep": 2}, experts=True),
    Place("2 x ep 2 = tp 2", 4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "ep": 2}, experts=True),
    Place("ep 4 = tp 2 x 2", 4, {"dp_shard": 2, "tp": 2, "ep": 4}, experts=True),
    Place("ep 2, tp 2 seq, shard 2", 4, {"dp_shard": 2, "tp": 2, "ep": 2}, experts=True, sequence_parallel=True),
    Place("2 x ep 2 x shard 2, tp 2", 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2}, experts=True),
    Place("tp 4", 4, {"dp_shard": 1, "tp": 4}),
    Place("tp 4 seq", 4, {"dp_shard": 1, "tp": 4}, sequence_parallel=True),
    Place("tp 2 x shard 2", 4, {"dp_shard": 2, "tp": 2}),
    Place("tp 2 seq x shard 2", 4, {"dp_shard": 2, "tp": 2}, sequence_parallel=True),
    Place("2 x tp 2", 4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
    Place("2 x shard 2", 4, {"dp_replicate": 2, "dp_shard": 2}),
    Place("shard 4", 4, {"dp_shard": 4}),
    Place("replicate 4", 4, {"dp_replicate": 4, "dp_shard": 1}),
    Place("2 x tp 2 x shard 2", 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    Place("2 x tp 2 seq x shard 2", 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, sequence_parallel=True),
    Place("2 x shard 4", 8, {"dp_replicate": 2, "dp_shard": 4}),
    Place("4 x shard 2", 8, {"dp_replicate": 4, "dp_shard": 2}),
    Place("shard 8", 8, {"dp_shard": 8}),
)
"""The columns of the matrix. ``2 x shard 4``: two replicas of four shards each (HSDP). ``seq``: with sequence parallel."""


@dataclass(frozen=True)
class Variant:
    """The options of one audit of a cell."""

    sync: SyncPolicy
    dtype: str
    microbatches: int
    checkpointing: bool
    offload: bool
    loss_parallel: bool = False
    """Only used with tensor parallel."""
    twin_units: bool = False
    """Only used for families whose stack runs twice."""
    chunks: bool = False
    """Whether the loss is computed in chunks. Only used for families that predict the next token."""

    def __str__(self) -> str:
        """Return the options in words."""
        plural = "microbatch" if self.microbatches == 1 else "microbatches"
        options = (
            ("checkpointing", self.checkpointing),
            ("offload", self.offload),
            ("loss parallel", self.loss_parallel),
            ("twin units", self.twin_units),
            ("loss in chunks", self.chunks),
        )
        extra = [name for name, on in options if on]
        return ", ".join([self.sync, self.dtype, f"{self.microbatches} {plural}", *extra])


VARIANTS = (
    Variant(SyncPolicy.DEFER, "float64", 1, False, False, True),
    Variant(SyncPolicy.DEFER, "float32", 3, True, False, False, True),
    Variant(SyncPolicy.DEFER, "bfloat16", 3, False, True, False, False, True),
    Variant(SyncPolicy.RESHARD_EACH, "float64", 3, True, True, True),
    Variant(SyncPolicy.RESHARD_EACH, "float32", 1, False, True, False, True, True),
    Variant(SyncPolicy.RESHARD_EACH, "bfloat16", 3, False, False, True, True),
    Variant(SyncPolicy.REDUCE_EACH, "float64", 3, False, True, False, True, True),
    Variant(SyncPolicy.REDUCE_EACH, "float32", 3, False, False, True),
    Variant(SyncPolicy.REDUCE_EACH, "bfloat16", 1, True, False, True, False, True),
)
"""The variants combine every value of each option with every value of every other option (a test checks this)."""


ON_EIGHT = (VARIANTS[1], VARIANTS[2], VARIANTS[3], VARIANTS[8])
"""The variants for layouts of eight processes, which take long on few cores: they have every value of every option."""


def context_options(family: str, variant: Variant) -> dict[str, Any]:
    """Return the options of context parallel of an audit. Over the families, each meets each, and every value of a variant."""
    row, column = list(TINY_MODELS).index(family), VARIANTS.index(variant) if variant in VARIANTS else 0
    return {
        "context_parallel": tuple(ContextMethod)[(row + column) % 3],
        "context_balance": tuple(ContextBalance)[(row // 3 + column // 3) % 2],
        "context_recompute": (row + column) // 2 % 2 == 1,
    }


def pipeline_options(family: str, variant: Variant, pp: int) -> tuple[dict[str, Any], int]:
    """Return the section ``pipeline`` of an audit, and the microbatches of a step.

    Over the families, every schedule meets every value of a variant that it can have: one that splits backward recomputes
    nothing, and takes no layers that use a weight again on what they used it for, such as Gemma 3n's.
    """
    row, column = list(TINY_MODELS).index(family), VARIANTS.index(variant) if variant in VARIANTS else 0
    whole = variant.checkpointing or family == "gemma3n_text"
    legal = [schedule for schedule in PipelineSchedule if not (whole and schedule.splits)]
    schedule, runs = legal[(row + column) % len(legal)], 2 - (row + column) // 2 % 2
    return {"schedule": schedule, "runs_per_step": runs}, runs * schedule.least(pp, variant.microbatches)


def deepened(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a model's config with a multiple of its layers, at least so many. Lists of one entry a layer are repeated."""
    key = next(key for key in ("num_hidden_layers", "n_layer", "layers_block_type") if key in config)
    had = config[key] if isinstance(config[key], int) else len(config[key])
    return {**config, **with_layers(config, key, [*range(had)] * -(-layers // had))}


class Outcome(StrEnum):
    """The outcome of a family on a layout."""

    WORKS = "works"
    REFUSED = "refused"
    NOT_YET = "not yet"
    FAILS = "FAILS"


@dataclass(frozen=True)
class Cell:
    """A family on a layout.

    Attributes:
        outcome: the outcome of all variants together.
        worst: dtype to the largest error of a gradient.
        note: what a user would be told, or the verdict of the variant that failed.
        claims: the claims that were audited, one for each variant that came to a verdict.
        code: of the refusal or failure; of a wrong verdict ``audit.`` and the kind of its first finding; empty if it works.
    """

    outcome: Outcome
    worst: Mapping[str, float]
    note: str = ""
    claims: tuple[Claim, ...] = ()
    code: str = ""


def family_case(
    family: str,
    place: Place,
    variant: Variant,
    folder: Path,
    *,
    packing: str = "pack",
    sequence_length: int = SEQUENCE_LENGTH,
    model: Mapping[str, Any] | None = None,
    moe: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    **parallel: Any,
) -> Case:
    """Return the case of a family, on random documents.

    Args:
        family: name of the family in :data:`~maintain.tiny.TINY_MODELS`, which is its ``model_type``.
        place: the layout.
        variant: the options.
        folder: where the documents are written.
        packing: value of ``data.packing``.
        sequence_length: number of tokens of a sequence. A long one has many documents.
        model: values that replace those of the family's config.
        moe: the section ``moe`` of the configuration.
        adapter: the section ``adapter``; ``None``: the whole model is trained.
        parallel: further values of the section ``parallel``.
    """
    tiny = TINY_MODELS[family]
    config = {**tiny.config, **(model or {})}
    microbatches, pp = variant.microbatches, place.sizes.get("pp", 1)
    readers = place.sizes.get("dp_replicate", 1) * place.sizes["dp_shard"]
    if pp > 1 and tiny.twins:  # a stage in each pass, with one schedule; collectives of several backwards are not planned
        parallel = {"pipeline": {"schedule": PipelineSchedule.INTERLEAVED}, **parallel}
        microbatches = PipelineSchedule.INTERLEAVED.least(pp, microbatches)
        config = {**config, "text_config": deepened({"num_hidden_layers": 2, **config["text_config"]}, pp)}
        if readers * place.sizes.get("cp", 1) > 1:
            parallel = {"sync": SyncPolicy.DEFER, **parallel}
    elif pp > 1 and "text_config" not in config and "pipeline" not in parallel:
        parallel["pipeline"], microbatches = pipeline_options(family, variant, pp)
        config = deepened(config, pp * (1 if parallel["pipeline"]["schedule"].single else 2))
        if parallel["pipeline"]["schedule"].splits:  # the loss is not in chunks
            parallel.setdefault("loss_chunks", 0)
    vocabulary = int(config.get("text_config", config)["vocab_size"])
    run = RunConfig.model_validate(
        {
            "output": str(folder),
            "model": {"config": {"model_type": family, **config}},
            "layout": dict(place.sizes),
            "parallel": {
                "sync": variant.sync,
                "activation_checkpointing": "full" if variant.checkpointing else "none",
                "cpu_offload": variant.offload,
                "sequence_parallel": place.sequence_parallel,
                **({"twin_units": variant.twin_units} if tiny.twins else {}),
                "loss_chunks": 3 if variant.chunks and not tiny.twins else 0,
                "loss_parallel": variant.loss_parallel
                and place.sizes.get("tp", 1) > 1
                and not (tiny.twins or tiny.whole_logits),
                **(context_options(family, variant) if place.sizes.get("cp", 1) > 1 else {}),
                **parallel,
            },
            "data": {"files": ["drawn"], "sequence_length": sequence_length, "eval_fraction": 0.0, "packing": packing},
            "moe": dict(moe or {}),
            "adapter": None if adapter is None else dict(adapter),
            "training": {"steps": STEPS, "global_batch_size": microbatches * readers},
        }
    )
    ready, _ = make_ready(run, variant.dtype, STEPS, folder)
    store = folder / f"documents-{vocabulary}-{sequence_length}"
    if not (store / "index.json").is_file():
        draw_documents(vocabulary, sequence_length, 400, 0, store, longest=min(sequence_length, 8 * SEQUENCE_LENGTH))
    return Case(ready, store, STEPS)


def run_cell(auditor: Auditor, family: str, place: Place, variants: Iterable[Variant], folder: Path) -> Cell:
    """Audit a family on a layout with each of some variants, until one fails or is refused."""
    return audited(
        auditor, place, variants, lambda variant, packing: family_case(family, place, variant, folder, packing=packing)
    )


def audited(auditor: Auditor, place: Place, variants: Iterable[V], case: Callable[[V, str], Case]) -> Cell:
    """Audit cases on a layout, until one fails or is refused.

    Args:
        auditor: runs the audits.
        place: the layout.
        variants: what distinguishes the cases.
        case: returns the case of a variant and a value of ``data.packing``. Documents are padded where they cannot be packed.
    """
    worst: dict[str, float] = {}
    notes: list[str] = []
    claims: list[Claim] = []
    packing = "pack"

    def audit(variant: V) -> AuditReport:
        return auditor.audit(case(variant, packing), place.world_size)

    for variant in variants:
        try:
            report = None
            if packing == "pack":
                try:
                    report = audit(variant)
                except ConfigError as error:
                    if not any(code.startswith("data.packing.") for code in error.codes):
                        raise
                    notes.append(f"with data.packing=pad only: {error.problems[0]}")
                    packing = "pad"
            if report is None:
                report = audit(variant)
        except UnsupportedError as error:
            return Cell(Outcome.NOT_YET, {}, error.problems[0], code=error.codes[0])
        except MeshwrightError as error:
            if error.exit_code != 2:  # a worker that failed, or a hang, is not a refusal
                return Cell(Outcome.FAILS, {}, f"{variant}: {error}", code=error.codes[0])
            return Cell(Outcome.REFUSED, {}, error.problems[0], code=error.codes[0])
        claims.append(report.claim)
        if not report.passed:
            note, code = f"{variant}: {report.verdict}", f"audit.{report.findings[0].kind}"
            return Cell(Outcome.FAILS, {}, note, tuple(claims), code)
        worst[report.dtype] = max(worst.get(report.dtype, 0.0), report.worst_gradient)
    return Cell(Outcome.WORKS, worst, "; ".join(notes), tuple(claims))


def slice_of_matrix() -> Iterator[tuple[str, Place, Variant]]:
    """Yield a part of the matrix that has every family, every layout and every variant at least once."""
    families, left = list(TINY_MODELS), []
    sparse = cycle(family for family in families if TINY_MODELS[family].sparse)
    for index in range(max(len(families), len(LAYOUTS), len(VARIANTS))):
        place = LAYOUTS[index % len(LAYOUTS)]
        family = families[index % len(families)]
        if place.experts and not TINY_MODELS[family].sparse:
            left.append(family)
            family = next(sparse)
        yield family, place, VARIANTS[index % len(VARIANTS)]
    for index, family in enumerate(left):
        yield family, LAYOUTS[index], VARIANTS[index]
