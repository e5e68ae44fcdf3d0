"""What a search answers: the best few with what they cost and what they lack, why the user's own layout is not the best."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.layout import Layout, divisors
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.show.summary import human_bytes
from meshwright.search.candidate_price import Price, Pricer, limit_of
from meshwright.search.find import MOST, Tally, find_best
from meshwright.search.space import Candidate, Space
from meshwright.trace.few_layers import Traces
from meshwright.trace.in_time.part_words import longer_in
from meshwright.trace.kept_traces import TraceStore
from meshwright.trace.verdict import fit
from meshwright.train.config import RunConfig
from meshwright.train.proofs.records import Source, standing_of
from meshwright.train.start.setup import RunSetup, change_setup, make_setup

__all__ = ["Answer", "Option", "Own", "base_of", "search"]

INDISTINCT = {False: 0.1, True: 0.05}
"""Share of a step's time by which the forecasts of two layouts err from each other, without and with calibration: assumed from
the median error of docs/measurements.md, most of which two layouts of one run on one machine share."""

BILLION = 1e9


@dataclass(frozen=True)
class Option:
    """One of the best layouts.

    Attributes:
        layout: its sizes above 1, in words.
        overrides: what to append to the command.
        step_seconds: an optimizer step.
        tokens_per_second: of all devices.
        tokens_per_second_per_device: of one.
        mfu: model operations, as a share of the peak.
        peak_bytes: of the fullest rank.
        margin_bytes: memory that is left.
        limit: the largest part of the step that is no product and no attention, in words.
        as_fast: whether the forecast cannot tell it from the fastest one.
        proven: what is known about the layout: ``proven``, ``unproven``, ``FAIL`` or ``one process``.
        standing: the same in a sentence, with the command that audits it.
        gpu_hours: of the whole run; ``None``: the run counts epochs, and its number of steps is not known yet.
        gpu_hours_per_billion: for 10^9 tokens.
    """

    layout: str
    overrides: tuple[str, ...]
    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu: float
    peak_bytes: int
    margin_bytes: int
    limit: str
    as_fast: bool
    proven: str
    standing: str
    gpu_hours: float | None
    gpu_hours_per_billion: float

    def to_dict(self, price: float | None = None) -> dict[str, Any]:
        """Return it as plain values, for JSON.

        Args:
            price: of a device for an hour; ``None``: no money is shown.
        """
        if price is None:
            return asdict(self)
        cost = None if self.gpu_hours is None else price * self.gpu_hours
        return {**asdict(self), "cost": cost, "cost_per_billion": price * self.gpu_hours_per_billion}


@dataclass(frozen=True)
class Own:
    """The layout of the configuration, if it is legal on these ranks.

    Attributes:
        layout: its sizes above 1, in words.
        step_seconds: an optimizer step.
        peak_bytes: of the fullest rank.
        fits: whether it fits.
        words: why it is not the best, or that it is.
    """

    layout: str
    step_seconds: float
    peak_bytes: int
    fits: bool
    words: str

    def is_option(self, option: Option) -> bool:
        """Return whether one of the best layouts is this one."""
        return (option.layout, option.step_seconds, option.peak_bytes) == (self.layout, self.step_seconds, self.peak_bytes)


@dataclass(frozen=True)
class Answer:
    """The outcome of a search on a number of ranks.

    Attributes:
        world_size: number of ranks.
        hardware: name of the devices.
        options: the best layouts, the fastest first; empty: nothing fits, or nothing is legal.
        front: of all that was priced and fits, that than which nothing is both faster and smaller, the fastest first.
        own: the configuration's own layout; ``None``: it is not legal on these ranks.
        own_refused: why, in words; empty: it is legal.
        nearest: if nothing fits, what came nearest, in words; otherwise empty.
        tally: what became of all candidates.
        prices: the best, as they were priced.
        advice: if there are no candidates, what to change so that there are some; otherwise empty.
    """

    world_size: int
    hardware: str
    options: tuple[Option, ...]
    front: tuple[Option, ...]
    own: Own | None
    own_refused: str
    nearest: str
    tally: Tally
    prices: tuple[Price, ...] = ()
    advice: str = ""

    @property
    def lacks(self) -> str:
        """Why there are no options, in words; empty: there are some."""
        if self.options:
            return ""
        too_large = self.nearest or self.tally.too_large or self.tally.do_not_fit
        return "nothing fits" if too_large else "no layout is legal"

    def to_dict(self, price: float | None = None) -> dict[str, Any]:
        """Return the answer as plain values, for JSON.

        Args:
            price: of a device for an hour; ``None``: no money is shown.
        """
        names = ("world_size", "hardware", "own_refused", "nearest", "advice")
        return {
            **{name: getattr(self, name) for name in names},
            "options": [one.to_dict(price) for one in self.options],
            "front": [one.to_dict(price) for one in self.front],
            "own": None if self.own is None else asdict(self.own),
            "tally": asdict(self.tally),
        }


def base_of(run: RunConfig) -> RunSetup:
    """Return a run on one rank, whose model and facts all layouts share, with the configuration as it was given.

    Raises:
        MeshwrightError: its model, objective, data or optimizer are refused on any layout.
    """
    alone = Candidate(Layout(dp_shard=1).resolve(1), ()).config(run)
    return replace(make_setup(alone, 1, planning=True), config=run)


def search(
    setup: RunSetup,
    world_size: int,
    hardware: Hardware,
    *,
    free: Sequence[str] = (),
    source: Source | None = None,
    load: float = 1.0,
    most: int = MOST,
    store: TraceStore | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Answer:
    """Return the best layouts of a run on a number of ranks.

    Args:
        setup: the run, as :func:`base_of` returns it; no process group may exist.
        world_size: number of ranks.
        hardware: the devices.
        free: names of :data:`~meshwright.search.space.FREE` that may change although the configuration sets them.
        source: where the configuration came from, for commands.
        load: tokens of the experts of the fullest rank of ``ep``, over an even share.
        most: number of layouts to return.
        store: traces; ``None``: those of the user's cache.
        say: called with a line for a person who waits.

    Raises:
        ConfigError: an unknown name in ``free``; a run with a teacher.
    """
    if setup.config.teacher is not None:
        raise ConfigError(
            "search.teacher", "--search: a teacher has a layout of its own, which is not searched; set teacher=null"
        )
    store = store or TraceStore(setup)
    space, pricer = Space(setup, world_size, hardware.gpus_per_node, free), Pricer(setup, hardware, store, load)
    own, refused = _own(setup, world_size, hardware, store, load)
    found = find_best(space, hardware, pricer, most, say, own)
    best = found.best[0].seconds if found.best else 0.0
    margin = INDISTINCT[hardware.calibrated]

    def option(price: Price) -> Option:
        return _option(price, setup, source, as_fast=price.seconds <= (1 + margin) * best)

    nearest = ""
    if (smallest := found.smallest) is not None:
        how = " ".join(smallest.candidate.overrides(setup.config)) or "the configuration as it is"
        nearest = f"{how}: {_too_much(smallest)}"
    return Answer(
        world_size,
        hardware.name,
        tuple(map(option, found.best)),
        tuple(map(option, found.front)),
        None if own is None else _as_own(own, found.best),
        refused,
        nearest,
        found.tally,
        tuple(_with_program(setup, price) for price in found.best),
        "" if found.best or found.tally.candidates else _advice(space, free),
    )


def _advice(space: Space, free: Sequence[str]) -> str:
    """Say what to change if no layout is legal."""

    def legal(ranks: int, names: Sequence[str]) -> bool:
        return any(True for _ in Space(space.setup, ranks, space.node, names).branches())

    for more in (("microbatch",), ("layout",), ("layout", "microbatch")):
        names = tuple(dict.fromkeys((*free, *more)))
        if legal(space.world_size, names):
            return f"--free {','.join(names)} frees what the configuration sets"
    batch, ranks = space.setup.config.training.global_batch_size, space.world_size
    sizes = [size for size in divisors(batch) if legal(size, free)]
    near = [size for size in sizes if size < ranks][-1:] + [size for size in sizes if size > ranks][:1]
    words = f"; legal are, among others, {' or '.join(f'{size:,}' for size in near)} ranks" if near else ""
    return f"no layout divides the model and training.global_batch_size={batch:,} over {ranks:,} ranks{words}"


def _with_program(base: RunSetup, price: Price) -> Price:
    return replace(price, setup=change_setup(base, price.setup.config, price.setup.layout.world_size))


def _option(price: Price, base: RunSetup, source: Source | None, *, as_fast: bool) -> Option:
    setup, verdict, training = price.setup, price.verdict, price.setup.config.training
    overrides = price.candidate.overrides(base.config)
    whose = Source(source.path, (*source.overrides, *overrides)) if source else None
    standing = standing_of(setup, whose, lambda line: None)
    ranks = setup.layout.world_size
    each = price.time.tokens_per_second_per_device
    hours = None if training.steps is None else training.steps * price.seconds * ranks / 3600
    return Option(
        str(setup.layout),
        overrides,
        price.seconds,
        each * ranks,
        each,
        price.time.mfu,
        verdict.peak_bytes,
        verdict.limit_bytes - verdict.peak_bytes,
        limit_of(price),
        as_fast,
        standing.state.value,
        standing.line,
        hours,
        BILLION / each / 3600,
    )


def _own(setup: RunSetup, world_size: int, hardware: Hardware, store: TraceStore, load: float) -> tuple[Price | None, str]:
    """Return what the configuration costs on these ranks as it is; or why it is refused."""
    try:
        own = change_setup(setup, setup.config, world_size, program=False)
        traces = Traces(own, load=load, store=store)
        verdict = fit(own, hardware, traces)
    except MeshwrightError as error:
        return None, str(error.problems[0])
    return Price(Candidate(own.layout, ()), own, verdict, traces, hardware), ""


def _as_own(own: Price, best: Sequence[Price]) -> Own:
    """Return the layout of the configuration, and why it is not the best."""
    verdict = own.verdict
    words = _words(own, best[0]) if verdict.fits else f"does not fit: {_too_much(own)}"
    return Own(str(own.candidate.layout), own.seconds, verdict.peak_bytes, verdict.fits, words)


def _too_much(price: Price) -> str:
    """Return by how much a layout does not fit."""
    return f"{human_bytes(price.verdict.peak_bytes - price.verdict.limit_bytes)} too much"


def _words(own: Price, best: Price) -> str:
    """Say why a layout is slower than the best one: the parts of its step that take longer."""
    if own.seconds <= best.seconds * 1.0001:
        return "is the best that was found"
    return f"takes {own.seconds / best.seconds:.2f} times the best: {longer_in(own.time.parts, best.time.parts, 'more')}"
