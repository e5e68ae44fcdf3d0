"""The answer of a search as tables for people."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.plan.show.summary import human_bytes, seconds_text, two_digits
from meshwright.search.answer import Answer, Option
from meshwright.search.measure import STEPS, Trial

__all__ = ["show_answer", "show_scaling", "show_trials"]

_WORDS = {"one process": "nothing to prove"}


def show_answer(answer: Answer, command: str, price: float | None = None) -> RenderableType:
    """Return the best layouts, the front of time and memory, why the own layout loses, and what became of the others.

    Args:
        answer: the answer.
        command: the command without overrides, such as ``meshwright train run.yaml``.
        price: of a device for an hour; ``None``: no money is shown.
    """
    lines: list[RenderableType] = []
    if answer.options:
        title = f"The fastest layouts on {answer.world_size:,} x {escape(answer.hardware)}"
        lines += [_table(answer.options, title, price), *_overrides(answer.options, command)]
        alike = sum(one.as_fast for one in answer.options)
        if alike > 1:
            lines.append(f"the forecast cannot tell the first {alike} apart (=): measure them, --try {min(alike, 3)}")
        sizes = {human_bytes(one.peak_bytes): one for one in (*reversed(answer.front), answer.options[0])}
        front = [one for one in answer.front if sizes.get(human_bytes(one.peak_bytes)) is one]  # of the same size, the fastest
        if front:
            lines.append("Slower, and smaller (of all that were priced):")
            lines += [
                f"  {seconds_text(one.step_seconds)}, {human_bytes(one.peak_bytes)}: "
                f"{escape(' '.join(one.overrides)) or '(nothing)'}"
                for one in front
            ]
    else:
        lines.append(f"[red]{answer.lacks}[/red] on {answer.world_size:,} x {escape(answer.hardware)}")
        if answer.nearest:
            lines.append(f"nearest: {escape(answer.nearest)}")
        if answer.advice:
            lines.append(answer.advice)
    if answer.own is not None:
        lines.append(f"your own layout ({escape(answer.own.layout)}) {escape(answer.own.words)}")
    else:
        lines.append(f"your own layout is not legal on {answer.world_size:,} ranks: {escape(answer.own_refused)}")
    tally = answer.tally
    cut = f"{tally.too_large:,} too large and {tally.too_slow:,} too slow by their bounds, {tally.refused:,} refused"
    priced = f"{tally.priced:,} priced, of which {tally.do_not_fit:,} do not fit"
    lines.append(f"{tally.candidates:,} candidates in {tally.seconds:.0f} s: {cut}, {priced}; {tally.traces} traces were made")
    if tally.codes and not answer.options and not tally.priced:
        most = sorted(tally.codes.items(), key=lambda one: -one[1])[:3]
        lines.append(f"what refused most (docs/errors.md): {', '.join(f'{code} ({number:,})' for code, number in most)}")
    return Group(*lines)


def _table(options: Sequence[Option], title: str, price: float | None) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    money = ["cost"] if price is not None else []
    for column in ("", "layout", "step", "tokens/s", "a device", "MFU", "peak", "to spare", "GPU hours", *money, "", ""):
        table.add_column(column, justify="left" if column in ("", "layout") else "right")
    for place, one in enumerate(options, 1):
        hours = one.gpu_hours if one.gpu_hours is not None else one.gpu_hours_per_billion
        unit = "" if one.gpu_hours is not None else " per 10^9 tokens"
        table.add_row(
            f"{place}{'=' if one.as_fast and place > 1 else ''}",
            escape(one.layout),
            seconds_text(one.step_seconds),
            two_digits(one.tokens_per_second),
            two_digits(one.tokens_per_second_per_device),
            f"{one.mfu:.0%}",
            human_bytes(one.peak_bytes),
            human_bytes(one.margin_bytes),
            f"{two_digits(hours)}{unit}",
            *([f"{two_digits(hours * price)}{unit}"] if price is not None else []),
            escape(one.limit),
            _WORDS.get(one.proven, one.proven),
        )
    return table


def _overrides(options: Sequence[Option], command: str) -> list[str]:
    lines = ["To take one, append to the command:"]
    lines += [f"  {place}: {escape(' '.join(one.overrides)) or '(nothing)'}" for place, one in enumerate(options, 1)]
    best = options[0]
    lines.append(f"the first: {escape(' '.join([command, *best.overrides]))}")
    if best.proven not in ("proven", "one process"):
        lines.append(escape(best.standing))
    return lines


def show_scaling(answers: Sequence[Answer], price: float | None = None) -> RenderableType:
    """Return how the best layout grows with the number of ranks.

    Args:
        answers: one for each number of ranks, ascending.
        price: of a device for an hour; ``None``: no money is shown.
    """
    table = Table(title="The best layout by number of ranks", title_justify="left", box=None)
    money = ["cost"] if price is not None else []
    for column in ("ranks", "layout", "step", "tokens/s", "a device", "scaling", "GPU hours", *money):
        table.add_column(column, justify="left" if column == "layout" else "right")
    first = next((answer.options[0] for answer in answers if answer.options), None)
    for answer in answers:
        if not answer.options or first is None:
            table.add_row(f"{answer.world_size:,}", answer.lacks)
            continue
        one = answer.options[0]
        hours = one.gpu_hours if one.gpu_hours is not None else one.gpu_hours_per_billion
        table.add_row(
            f"{answer.world_size:,}",
            escape(one.layout),
            seconds_text(one.step_seconds),
            two_digits(one.tokens_per_second),
            two_digits(one.tokens_per_second_per_device),
            f"{one.tokens_per_second_per_device / first.tokens_per_second_per_device:.0%}",
            two_digits(hours),
            *([two_digits(hours * price)] if price is not None else []),
        )
    return table


def show_trials(trials: Sequence[Trial], command: str) -> RenderableType:
    """Return what was measured beside what was forecast, and the winner.

    Args:
        trials: the trials, the fastest first.
        command: the command without overrides.
    """
    table = Table(title=f"Measured here: {STEPS} steps of each", title_justify="left", box=None)
    for column in ("layout", "measured", "forecast", ""):
        table.add_column(column, justify="left" if column in ("layout", "") else "right")
    for trial in trials:
        measured = "failed" if trial.seconds is None else seconds_text(trial.seconds)
        table.add_row(
            escape(" ".join(trial.option.overrides) or trial.option.layout),
            measured,
            seconds_text(trial.option.step_seconds),
            escape(trial.problem),
        )
    best = trials[0]
    if best.seconds is None:
        return Group(table, "[red]none of them ran[/red]")
    return Group(table, f"take: {escape(' '.join([command, *best.option.overrides]))}")
