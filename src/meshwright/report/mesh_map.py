"""Ranks on their nodes, and the groups of each axis. The script draws them from the sizes; a table has the same for all."""

from collections import Counter
from dataclasses import asdict, dataclass
from html import escape

from meshwright.layout import Layout
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.cost.price import totals
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.summary import human_bytes
from meshwright.report.markup import Section, figure, table, tag

__all__ = ["Group", "groups_of", "mesh_section"]

NODE = 8
"""Devices of a node, if nothing says their number."""

_WORDS = {
    "tp": "slices of the matrices of a layer",
    "cp": "shares of a sequence",
    "dp_shard_cp": "shards of parameters, gradients and optimizer state (FSDP)",
    "dp_replicate": "replicas of the sharded model",
    "pp": "stages of the pipeline",
    "ep": "experts of a layer",
    "ep_shard": "shards of the experts",
}


@dataclass(frozen=True)
class Group:
    """The groups of an axis.

    Attributes:
        axis: its name.
        size: ranks in a group.
        distance: from a rank of a group to the next one.
        words: what they share.
        traffic: what a rank sends in a step, in words.
    """

    axis: str
    size: int
    distance: int
    words: str
    traffic: str

    def members(self, rank: int) -> list[int]:
        """Return the group of a rank."""
        first = rank - rank // self.distance % self.size * self.distance
        return [first + place * self.distance for place in range(self.size)]


def groups_of(layout: Layout, traffic: dict[str, str] | None = None) -> list[Group]:
    """Return the groups of all axes that have several ranks, the innermost first."""
    tp, model = layout.size("tp"), layout.size("tp") * layout.size("cp") * layout.size("dp_shard")
    found = {
        "tp": (tp, 1),
        "cp": (layout.size("cp"), tp),
        "dp_shard_cp": (layout.size("dp_shard_cp"), tp),
        "ep": (layout.ep, 1),
        "ep_shard": (layout.ep_shard if layout.ep > 1 else 1, layout.ep),
        "dp_replicate": (layout.size("dp_replicate"), model),
        "pp": (layout.size("pp"), model * layout.size("dp_replicate")),
    }
    return [
        Group(axis, size, distance, _WORDS[axis], (traffic or {}).get(axis, ""))
        for axis, (size, distance) in found.items()
        if size > 1
    ]


def mesh_section(plan: ShardingPlan, node: int | None = None) -> Section:
    """Return the part of a page with the ranks and their groups.

    Args:
        plan: the plan.
        node: devices of a node; ``None``: unknown.
    """
    layout, devices = plan.layout, node or NODE
    groups = groups_of(layout, _traffic(plan))
    world = layout.world_size
    rows = []
    for group in groups:
        nodes = len({rank // devices for rank in group.members(0)})
        where = "inside of a node" if nodes == 1 else f"over {nodes:,} nodes"
        rows.append(
            (
                group.axis,
                f"{group.size:,}",
                f"{world // group.size:,}",
                f"{group.distance:,}",
                where,
                group.words,
                group.traffic,
            )
        )
    columns = (
        "axis",
        "ranks in a group",
        "groups",
        "distance of its ranks",
        "where",
        "what they share",
        "a rank sends in a step",
    )
    alternative = table(columns, rows, numeric=(1, 2, 3), caption="Groups of each axis")
    choices = "".join(
        f'<label><input type="radio" name="axis" value="{place}"{" checked" if place == 0 else ""}> {escape(group.axis)} '
        f"<small>{group.size:,}</small></label>"
        for place, group in enumerate(groups)
    )
    controls = (
        f'<fieldset class="controls"><legend>Axis</legend>{choices}</fieldset>'
        '<div class="controls"><button type="button" data-group="-1">previous group</button>'
        '<button type="button" data-group="1">next group</button>'
        f'<label>rank <input type="number" id="rank" min="0" max="{world - 1}" value="0" inputmode="numeric"></label></div>'
    )
    drawing = (
        '<div class="pane map"><svg id="mesh-map" role="img" aria-label="Ranks on their nodes"><title>Ranks on their nodes'
        "</title><desc>Each square is a rank, each frame a node. The ranks of the chosen group are filled. The table below has "
        "the groups of all axes.</desc></svg></div>"
        '<p class="readout" id="mesh-readout" role="status" aria-live="polite"></p>'
    )
    if not groups:
        return Section("mesh", "Ranks", tag("p", f"{world:,} rank: nothing is communicated."))
    body = figure(
        drawing,
        caption=f"{world:,} ranks on {-(-world // devices):,} nodes of {devices}{'' if node else ' (assumed)'}: {layout}.",
        alternative=alternative,
        controls=controls,
    )
    data = {"world": world, "node": devices, "groups": [asdict(group) for group in groups]}
    lead = "Choose an axis: the ranks of one of its groups are filled. Choose another rank, or step through the groups."
    return Section("mesh", "Ranks and groups", body, data, lead)


def _traffic(plan: ShardingPlan) -> dict[str, str]:
    """Return what a rank sends over each axis in a step, in words."""
    sent = totals(plan).traffic
    sizes: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for item in activation_traffic(plan):
        sizes[item.axis] += item.size or 0
        calls[item.axis] += item.calls
    sizes["dp_shard_cp"] += sent.all_gather_bytes + sent.reduce_scatter_bytes
    calls["dp_shard_cp"] += sent.all_gathers + sent.reduce_scatters
    sizes["dp_replicate"] += sent.all_reduce_bytes
    calls["dp_replicate"] += sent.all_reduces
    return {axis: f"{human_bytes(sizes[axis])} in {calls[axis]:,} calls" for axis in sizes if calls[axis]}
