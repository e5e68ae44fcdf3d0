"""Forecasts as tables for people."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.show.summary import human_bytes, seconds_text, two_digits
from meshwright.trace.speedups import Speedup
from meshwright.trace.time import TimeForecast
from meshwright.trace.verdict import Verdict

__all__ = ["show_remarks", "show_speedups", "show_time", "show_verdict"]

_WORDS = {
    "parameters": "shards, as stored",
    "gradients": "shards, at this moment",
    "optimizer": "its state",
    "gathered": "whole parameters",
    "unsharded_gradients": "of whole parameters",
    "activations": "what backward needs, and what is computed for a moment",
    "logits": "with their gradients, and sums over chunks",
    "communication": "buffers of collectives, and of what stages receive",
    "buffers": "of the model",
    "update": "what the step of the optimizer holds beside its state",
    "teacher": "shards, what it gathers, what it says: estimated, without what its layers compute for a moment",
    "allocator": "rounding and fragments: assumed; what its streams keep apart",
    "reserved": "context of the device, workspaces, collectives: assumed",
}


def show_verdict(verdict: Verdict, hardware: Hardware) -> RenderableType:
    """Return a verdict as a table, and a sentence."""
    table = Table(title=f"Memory of the fullest rank, {verdict.moment}", title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, size in verdict.parts.items():
        if size:
            table.add_row(name.replace("_", " "), human_bytes(size), _WORDS[name])
    table.add_row("peak", human_bytes(verdict.peak_bytes), "")
    left = abs(verdict.limit_bytes - verdict.peak_bytes)
    how = f"{human_bytes(left)} to spare" if verdict.fits else f"{human_bytes(left)} too much"
    word = "[green]fits[/green]" if verdict.fits else "[red]does not fit[/red]"
    lines = [f"{word} into {escape(hardware.name)} ({human_bytes(verdict.limit_bytes)}): {how}"]
    if verdict.changes:
        lines.append("What would help, the cheapest first:" if verdict.changes[0].fits else "No single change found that fits:")
    for change in verdict.changes:
        fits = "fits" if change.fits else "does not fit"
        lines.append(f"  {escape(' '.join(change.overrides))}: {human_bytes(change.peak_bytes)}, {fits}; cost: {change.cost}")
    return Group(table, *lines)


def show_time(forecast: TimeForecast, *, calibrated: bool) -> RenderableType:
    """Return the time of a step as a table, and two sentences."""
    table = Table(title="Time of a step", title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    for name, seconds in sorted(forecast.parts.items(), key=lambda part: -part[1]):
        share = seconds / forecast.step_seconds
        if share >= 0.0005:
            words = name if name not in ("tp", "cp", "ep", "pp") else f"communication over {name}"
            words = "gathers of the objective" if name == "dp" else words
            table.add_row(
                words.replace("data ranks", "communication over data ranks"), seconds_text(seconds, 2), f"{share:.1%}"
            )
    layers = ", ".join(
        f"{escape(label)} {seconds_text(seconds, 2)}" for label, seconds in forecast.layers.items() if seconds > 0
    )
    low, high = seconds_text(forecast.low, 2), seconds_text(forecast.high, 2)
    tokens, operations = two_digits(forecast.tokens_per_second_per_device), two_digits(forecast.model_tflops_per_device)
    return Group(
        table,
        f"compute by layers: {layers}",
        f"a step takes {low} to {high}, on devices that are {'calibrated' if calibrated else 'not calibrated'}",
        f"about {tokens} tokens/s and {operations} model TFLOP/s a device (MFU {forecast.mfu:.0%})",
    )


def show_speedups(changes: Sequence[Speedup]) -> RenderableType:
    """Return the changes that save most time, a line each; empty if there are none."""
    lines = [
        f"  {escape(' '.join(one.overrides))}: {seconds_text(one.step_seconds, 2)}, {one.saved:.0%} less; "
        f"{human_bytes(one.peak_bytes)}; {one.reason}"
        for one in changes
    ]
    return Group(*(["What would save most time, one at a time:", *lines] if lines else ()))


def show_remarks(hardware: Hardware) -> RenderableType:
    """Return what a forecast cannot know of a device, a line each; empty if nothing is on record."""
    lines = [f"  {escape(remark)}" for remark in hardware.remarks]
    return Group(*([f"What this cannot know of {escape(hardware.name)}:", *lines] if lines else ()))
