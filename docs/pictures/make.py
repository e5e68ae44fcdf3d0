"""Make the pictures of the documentation: ``python docs/pictures/make.py`` writes SVG files beside this one."""

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from meshwright.plan.axes.pipeline.replay import Phase, order_of, replay
from meshwright.plan.given.options import PipelineSchedule
from meshwright.plan.show.pipeline_picture import drawing

HERE = Path(__file__).parent
COLOURS = {"shard": "#cfe3f7", "whole": "#1f6fb2", "gradient": "#e8a33d", "line": "#444", "text": "#222", "other": "#f3d9d9"}
FONT = "font-family='sans-serif' font-size='13'"


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = COLOURS["text"], size: int = 13) -> str:
    """A line of words."""
    return (
        f"<text x='{x}' y='{y}' text-anchor='{anchor}' fill='{colour}' font-family='sans-serif' font-size='{size}'>"
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = COLOURS["line"]) -> str:
    """A rectangle."""
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='3' fill='{fill}' stroke='{stroke}'/>"


def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "stroke-width='3'") -> str:
    """A straight line."""
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{colour}' {more}/>"


def picture(name: str, width: int, height: int, parts: Iterator[str]) -> None:
    """Write an SVG file on a white ground."""
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>"
    body = "\n".join([head, box(0, 0, width, height, "white", "white"), *parts, "</svg>"])
    (HERE / name).write_text(body + "\n")


def mesh() -> Iterator[str]:
    """Eight ranks as dp_replicate 2 x dp_shard 2 x tp 2, and the groups of each axis."""
    yield text(20, 28, "8 ranks: dp_replicate=2, dp_shard=2, tp=2", size=15)
    places: dict[tuple[int, int, int], tuple[float, float]] = {}
    for replica in range(2):
        x = 40 + 330 * replica
        yield box(x - 15, 50, 300, 190, "#fafafa", "#bbb")
        yield text(x, 70, f"replica {replica}: holds the whole model")
        for shard in range(2):
            for slice_ in range(2):
                rank = 4 * replica + 2 * shard + slice_
                left, top = x + 140 * slice_, 85 + 75 * shard
                places[replica, shard, slice_] = (left, top)
                yield box(left, top, 115, 55, COLOURS["shard"])
                yield text(left + 57, top + 22, f"rank {rank}", anchor="middle")
                yield text(left + 57, top + 42, f"shard {shard}, slice {slice_}", anchor="middle", size=11)
    for replica in range(2):
        for index in range(2):
            left, top = places[replica, index, 0]
            yield line(left + 115, top + 27, left + 140, top + 27, "#b5342c")
            left, top = places[replica, 0, index]
            yield line(left + 57, top + 55, left + 57, top + 75, "#1f6fb2")
    (first, top), (second, _) = places[0, 0, 0], places[1, 0, 0]
    yield f"<path d='M {first + 57} {top} V {top - 8} H {second + 57} V {top}' stroke='#3c8d40' stroke-width='3' fill='none'/>"
    for index, (colour, words) in enumerate(
        (
            ("#b5342c", "tp: ranks that share the matrices of a layer, and the same tokens (all-reduce of activations)"),
            ("#1f6fb2", "dp_shard: ranks that share the parameters, with other tokens (all-gather, reduce-scatter)"),
            ("#3c8d40", "dp_replicate: the same part of each replica (all-reduce of gradients; one of four groups is shown)"),
        )
    ):
        yield line(30, 262 + 22 * index, 60, 262 + 22 * index, colour)
        yield text(70, 266 + 22 * index, words, size=12)


POLICIES = {
    "defer": ((1, 0), (1, 0), (1, 0), (1, 1)),
    "reshard_each": ((2, 0), (2, 0), (2, 0), (2, 1)),
    "reduce_each": ((2, 1), (2, 1), (2, 1), (2, 1)),
}
"""For each of four microbatches, how often a unit is unsharded (1: all the time), and whether it reduces."""


def sync() -> Iterator[str]:
    """The life of a unit in a step of four microbatches, under each policy."""
    yield text(20, 28, "A unit in an optimizer step of four microbatches", size=15)
    width = 150
    for index in range(4):
        x = 130 + width * index
        yield text(x + width / 2, 52, f"microbatch {index}", anchor="middle")
        yield text(x + width / 4, 68, "forward", anchor="middle", size=11)
        yield text(x + 3 * width / 4, 68, "backward", anchor="middle", size=11)
        yield line(x, 40, x, 272, "#ddd", "")
    for row, (policy, steps) in enumerate(POLICIES.items()):
        y = 82 + 66 * row
        yield text(20, y + 20, policy)
        for index, (gathers, reduces) in enumerate(steps):
            x = 130 + width * index
            if gathers == 1:
                yield box(x, y, width, 24, COLOURS["whole"], COLOURS["whole"])
            else:
                yield box(x, y, width, 24, COLOURS["shard"], COLOURS["shard"])
                yield box(x + 22, y, 40, 24, COLOURS["whole"])
                yield box(x + 90, y, 44, 24, COLOURS["whole"])
            kept = not reduces and policy != "reduce_each"
            if kept or (index and policy != "reduce_each"):
                begin = x if index else x + 100
                length = x + width - begin - (12 if reduces else 0)
                yield box(begin, y + 30, length, 10, COLOURS["gradient"], COLOURS["gradient"])
            elif policy == "reduce_each":
                yield box(x + 100, y + 30, 38, 10, COLOURS["gradient"], COLOURS["gradient"])
            if reduces:
                yield text(x + width - 12, y + 40, "R", anchor="start", colour="#b5342c", size=14)
    for index, (colour, words) in enumerate(
        (("whole", "parameters unsharded"), ("shard", "parameters sharded"), ("gradient", "unsharded gradient kept"))
    ):
        yield box(130 + 190 * index, 284, 22, 12, COLOURS[colour])
        yield text(158 + 190 * index, 295, words, size=12)
    yield text(700, 295, "R: reduced", colour="#b5342c", size=12)


def twins() -> Iterator[str]:
    """A layer that two stacks share: as one unit, and as twin units."""
    title = "A stack that runs twice: layer i of the encoder and layer i of the decoder have the same parameters"
    yield text(20, 28, title, size=15)
    for index, (title, lines) in enumerate(
        (
            (
                "one unit of both layers",
                (
                    "one unsharded copy for each pass",
                    "one gradient, complete after both backwards",
                    "one reduction; the gradients of the whole",
                    "stack wait for it",
                ),
            ),
            (
                "twin units",
                (
                    "each layer is a unit",
                    "each pass unshards and reduces for itself",
                    "both reductions add to one sharded gradient",
                    "one layer's gradients are held; twice the traffic",
                ),
            ),
        )
    ):
        x = 30 + 400 * index
        yield text(x, 58, title, size=14)
        if index == 0:
            yield box(x, 70, 340, 66, "white", "#1f6fb2")
        for position, layer in enumerate(("encoder layer i", "decoder layer i")):
            left = x + 15 + 165 * position
            if index == 1:
                yield box(left - 7, 70, 160, 66, "white", "#1f6fb2")
            yield box(left, 84, 145, 38, COLOURS["whole"])
            yield text(left + 72, 108, layer, anchor="middle", colour="white")
            yield line(left + 72, 136, x + 170, 170, "#444", "stroke-dasharray='4 3'")
        yield box(x + 95, 170, 150, 34, COLOURS["shard"])
        yield text(x + 170, 191, "sharded parameters", anchor="middle")
        for number, words in enumerate(lines):
            yield text(x, 232 + 18 * number, words, size=12)


def zigzag() -> Iterator[str]:
    """The chunks of a sequence that each of four ranks has, and which keys their queries see under a causal mask."""
    yield text(20, 28, "A sequence of 8 chunks, cp=4: which rank has which chunk", size=15)
    colours = ("#cfe3f7", "#d9ecd3", "#f7e3c4", "#e6d5ef")
    orders = {"zigzag": (0, 1, 2, 3, 3, 2, 1, 0), "contiguous": (0, 0, 1, 1, 2, 2, 3, 3)}
    for row, (name, owners) in enumerate(orders.items()):
        top = 50 + 62 * row
        yield text(20, top + 25, name)
        for chunk, owner in enumerate(owners):
            yield box(110 + 60 * chunk, top, 60, 40, colours[owner])
            yield text(140 + 60 * chunk, top + 25, f"rank {owner}", anchor="middle", size=11)
    yield text(20, 195, "Pairs of query and key chunks under a causal mask (a diagonal one is half):")
    for row, (name, owners) in enumerate(orders.items()):
        work = [sum(chunk + 0.5 for chunk, owner in enumerate(owners) if owner == rank) for rank in range(4)]
        for rank, pairs in enumerate(work):
            top = 212 + 22 * rank
            left = 110 + 250 * row
            yield text(left - 8, top + 14, f"rank {rank}", anchor="end", size=11) if row == 0 else text(left, top, "")
            yield box(left, top, 14 * pairs, 16, colours[rank])
            yield text(left + 14 * pairs + 6, top + 13, f"{pairs:g}", size=11)
        yield text(110 + 250 * row, 318, name, size=12)


def context() -> Iterator[str]:
    """What one rank of four sends and receives in an attention, by method."""
    yield text(20, 28, "One attention, cp=4, seen from rank 1: queries, keys and values of its part", size=15)
    methods = (
        ("gather", "all ranks get the keys and values of all", ("q1", "k0 k1 k2 k3", "v0 v1 v2 v3")),
        ("ulysses", "all-to-all: all positions of a quarter of the heads", ("q0 q1 q2 q3", "k0 k1 k2 k3", "v0 v1 v2 v3")),
        ("ring", "keys and values go on to the next rank, three times", ("q1", "k1, then k0, k3, k2", "v1, then v0, v3, v2")),
    )
    for row, (name, words, has) in enumerate(methods):
        top = 48 + 92 * row
        yield text(20, top + 20, name, size=14)
        yield text(110, top + 20, words)
        for index, content in enumerate(has):
            yield box(110 + 190 * index, top + 32, 180, 36, COLOURS["shard"])
            quarter = ", 1/4 of the heads" if name == "ulysses" else ""
            yield text(200 + 190 * index, top + 54, content + quarter, anchor="middle", size=11)


def mixers() -> Iterator[str]:
    """What one rank of four has in a mixer: its tokens, some heads of all tokens, its tokens again."""
    yield text(20, 28, "A mixer with a state, cp=4, zigzag, seen from rank 1: 8 chunks of tokens, 4 heads", size=15)
    steps = (
        ("openings", "its tokens, all heads", lambda chunk, head: chunk in (1, 6)),
        ("convolution, scan", "all tokens in order, one head", lambda chunk, head: head == 1),
        ("closing", "its tokens, all heads", lambda chunk, head: chunk in (1, 6)),
    )
    for step, (name, words, has) in enumerate(steps):
        left = 40 + 235 * step
        yield text(left, 62, name, size=14)
        for head in range(4):
            for chunk in range(8):
                fill = COLOURS["shard"] if has(chunk, head) else "white"
                yield box(left + 20 * chunk, 75 + 24 * head, 20, 24, fill)
        yield text(left, 192, words)
        yield text(left, 210, "tokens to the right, heads downwards", size=11)
        if step:
            yield text(left - 38, 118, "all-to-", anchor="middle", size=11)
            yield text(left - 38, 132, "all", anchor="middle", size=11)


def schedules() -> Iterator[tuple[str, str]]:
    """A drawing of each schedule over four ranks, with eight microbatches and halves of backward as long as a forward."""
    for chosen in PipelineSchedule:
        each = 1 if chosen.single else 2
        run = replay(order_of(chosen, 4, each, 8), lambda turn, each=each: (2 if turn.phase is Phase.BACKWARD else 1) / each)
        yield f"{chosen}.svg", drawing(run, f"{chosen}: idle {run.bubble:.1%}, {max(run.alive):g} microbatches alive", 1 / each)


def main() -> None:
    """Write all pictures."""
    picture("mesh.svg", 690, 320, mesh())
    picture("sync.svg", 790, 310, sync())
    picture("twins.svg", 800, 300, twins())
    picture("zigzag.svg", 620, 335, zigzag())
    picture("context.svg", 700, 330, context())
    picture("mixers.svg", 720, 225, mixers())
    for name, text_of in schedules():
        (HERE / name).write_text(text_of)


if __name__ == "__main__":
    main()
