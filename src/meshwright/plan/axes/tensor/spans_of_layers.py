"""The rows of spans: parts of layers that need the whole sequence under sequence parallel and are no modules of their own.

A span goes from one module or several, whose hidden state is gathered, to a matrix, whose output becomes a slice again
(:class:`~meshwright.plan.given.traces.Span`). Its kinds are those of regions: ``split`` and ``whole``.
"""

from collections.abc import Collection, Iterable, Mapping

from meshwright.errors import Refusal
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.styles import FIRST, ON_SLICES, SECOND, SPAN
from meshwright.plan.given.names import holder_of, inside, within
from meshwright.plan.given.traces import Span
from meshwright.plan.result.sharding_plan import TensorParallelRow

__all__ = ["kind_of_span", "misfits", "rows_of_span"]


def kind_of_span(span: Span, styles: Mapping[str, str]) -> str:
    """Return ``split`` if ranks have heads or features in it, ``whole`` if each computes it all; empty: it is neither."""
    holders = dict.fromkeys(map(holder_of, span.parameters))
    styled = {styles[name] for name in styles if any(within(holder, [name]) for holder in holders)}
    if not styled:
        return "whole"
    complete = all(within(holder, styles) for holder in holders) and styles.get(span.exit) in SECOND
    return "split" if complete and styled & FIRST and styled <= ON_SLICES else ""


def misfits(spans: Mapping[Span, str], styles: Mapping[str, str]) -> Iterable[Refusal]:
    """Yield a problem for each span with matrices that are neither all sliced nor all whole."""
    for span, kind in spans.items():
        if not kind:
            own = {name: styles.get(name, "none") for name in dict.fromkeys(map(holder_of, span.parameters))}
            said = ", ".join(f"{name!r} {style}" for name, style in own.items())
            yield Refusal(
                "sp.module",
                f"sequence_parallel=True: from {span.entries[0]!r} to {span.exit!r} the whole sequence is needed, and the "
                f"styles there neither slice all that computes nor leave it whole ({said}); the legal value is False",
            )


def rows_of_span(
    span: Span, kind: str, styled: Collection[str], layers: Collection[str], heads: tuple[int, ...]
) -> Iterable[TensorParallelRow]:
    """Yield the rows of a span but those of the matrices with a style, which have its moves in their own rows.

    Args:
        span: the span.
        kind: its kind.
        styled: names of the modules with a style.
        layers: names of the layers, whose children an audit looks at.
        heads: of a rank, for modules that cannot tell them from shapes, see
            :attr:`~meshwright.plan.result.rows.TensorParallelRow.parts`.
    """
    style, entry = ("span", Move.GATHER_SEQUENCE) if kind == "split" else ("whole_span", Move.GATHER_SEQUENCE_WHOLE)
    for name in span.entries:
        if kind == "whole" or name not in styled:
            yield TensorParallelRow(name, "region" if inside(span.exit, name) else style, entry, parts=heads, flat=span.flat)
    if kind == "whole":
        yield TensorParallelRow(span.exit, style, exit=Move.SPLIT_SEQUENCE, flat=span.flat)
    ends = {*span.entries, span.exit}
    for name in span.inner:
        if holder_of(name) in layers and not within(name, ends) and not within(span.exit, [name]):
            yield TensorParallelRow(name, SPAN[style])
