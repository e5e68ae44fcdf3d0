"""Layout: the sizes of the mesh axes, their inference, and rank arithmetic.

Pure Python, so that a layout for a thousand GPUs is checked on a laptop. The mesh always has five axes, in this order:

    (pp, dp_replicate, dp_shard, cp, tp)

and, over the same ranks, the expert mesh ``(pp, dp_replicate, ep_shard, ep)`` with
``ep_shard * ep == dp_shard * cp * tp``. Ranks are numbered row-major: neighbours on the last axis are neighbours in rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import isqrt, prod

from meshwright.errors import LayoutError, Problems, Refusal, number_of
from meshwright.once import Once

__all__ = ["AXES", "EXPERT_AXES", "FLATTENED", "Layout", "ModelSizes", "divisors", "undivided"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the mesh, outermost first."""

EXPERT_AXES = ("pp", "dp_replicate", "ep_shard", "ep")
"""The axes of the expert mesh, outermost first."""

FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}
"""Submeshes that have a name of their own: who reads which data; FSDP's gather and reduce; loss and token counts."""


def divisors(number: int) -> tuple[int, ...]:
    """All positive divisors of a positive number, ascending; above 10^12 only those up to 10^6, and their partners."""
    low = [d for d in range(1, min(isqrt(number), 10**6) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))


def _legal(values: Iterable[int]) -> str:
    listed = [str(value) for value in values]
    return f"legal {'is' if len(listed) == 1 else 'are'} {', '.join(listed)}"


def undivided(axis: str, size: int, count: int, noun: str) -> Refusal:
    """The refusal of a size that does not divide what its ranks share.

    Args:
        axis: the knob.
        size: its value.
        count: number of things to share.
        noun: what one of them is.
    """
    text = f"{axis}={size}: {number_of(count, noun)} cannot be divided by {size}; {_legal(divisors(count))}"
    return Refusal("ep.experts" if axis == "ep" else "tp.heads", text)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that limit a layout. ``None``: the model does not declare it, so nothing is checked.

    Attributes:
        layers: layers that pipeline stages can be cut between.
        heads: attention (query) heads.
        kv_heads: key/value heads.
        experts: routed experts in a layer; 0 for a dense model.
        kv_groups: whether several tensor parallel ranks can share a key/value head.
        whole_heads: whether an attention whose heads ``tp`` does not divide is computed whole: where a trace alone says what is
            sliced.
    """

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    experts: int | None = None
    kv_groups: bool = False
    whole_heads: bool = False

    def problems(self, layout: "Layout") -> Problems:
        """What of a layout does not fit the model, one message a knob."""
        pp = layout.size("pp")
        problems = Problems() if self.whole_heads else self.undivided_heads(layout.size("tp"))
        if self.layers is not None and pp > self.layers:
            problems.add(
                "pp.layers",
                f"pp={pp}: {number_of(self.layers, 'layer')} make at most {number_of(self.layers, 'stage')}; legal are 1 to "
                f"{self.layers}",
            )
        if self.experts is not None and layout.ep > 1:
            if self.experts == 0:
                problems.add("ep.dense", f"ep={layout.ep}: the model has no experts; the legal value is 1")
            elif self.experts % layout.ep:
                problems.append(undivided("ep", layout.ep, self.experts, "expert"))
        return problems

    def undivided_heads(self, tp: int) -> Problems:
        """The heads that a size of `tp` does not divide, nor is shared by."""
        problems = Problems()
        for heads, count, grouped in (
            ("attention head", self.heads, False),
            ("key/value head", self.kv_heads, self.kv_groups),
        ):
            if count and tp > 1 and count % tp and not (grouped and tp % count == 0):
                several = f", and multiples of {count}, whose ranks share heads" if grouped else ""
                problems.append(undivided("tp", tp, count, heads).within("", several))
        return problems


@dataclass(frozen=True)
class Layout(Once):
    """The sizes of the axes.

    Args:
        pp: pipeline stages.
        dp_replicate: replicas of the sharded model (HSDP); gradients are all-reduced across them.
        dp_shard: ranks that parameters are sharded over (FSDP).
        cp: ranks that share a sequence (context parallel).
        tp: ranks that share a layer's matrices (tensor parallel).
        ep: ranks that share the experts of a layer (expert parallel); they are taken from ``dp_shard * cp * tp``.

    At most one of the five mesh axes may be ``None`` or -1: :meth:`resolve` infers it from the world size.
    """

    pp: int | None = 1
    dp_replicate: int | None = 1
    dp_shard: int | None = None
    cp: int | None = 1
    tp: int | None = 1
    ep: int = 1

    def resolve(self, world_size: int, sizes: ModelSizes | None = None) -> "Layout":
        """The layout with every size known.

        Args:
            world_size: number of ranks.
            sizes: limits that the model sets.

        Raises:
            LayoutError: all problems together, each with the knob, its value and the legal values.
        """
        problems = self._illegal_values()
        if world_size < 1:
            problems.add("layout.world_size", f"world size {world_size}: must be at least 1")
        if problems:
            raise LayoutError(problems)

        unknown = [axis for axis in AXES if getattr(self, axis) in (None, -1)]
        given = {axis: getattr(self, axis) for axis in AXES if axis not in unknown}
        product = prod(given.values())
        resolved = self
        if len(unknown) > 1:
            problems.add(
                "layout.unknown",
                f"{' and '.join(unknown)}: not set (or -1), and only one can be inferred from the number of ranks; set "
                f"the other{'s' if len(unknown) > 2 else ''}",
            )
        elif (unknown and world_size % product) or (not unknown and world_size != product):
            inferred = unknown[0] if unknown else None
            problems.extend(self._misfits(world_size, given, inferred, sizes or ModelSizes()))
        elif unknown:
            resolved = replace(self, **{unknown[0]: world_size // product})

        # The model's limits are checked also where the world size does not fit: all problems in one report.
        checkable = replace(resolved, **{axis: 1 for axis in AXES if getattr(resolved, axis) in (None, -1)})
        if sizes is not None:
            problems.extend(sizes.problems(checkable))
        if not problems:
            inside_replica = prod(resolved.sizes()[axis] for axis in ("dp_shard", "cp", "tp"))
            if inside_replica % self.ep:
                problems.add(
                    "ep.ranks",
                    f"ep={self.ep}: a replica has dp_shard * cp * tp = {number_of(inside_replica, 'rank')}, which cannot be "
                    f"divided by {self.ep}; {_legal(divisors(inside_replica))}",
                )
        if problems:
            raise LayoutError(problems)
        return resolved

    def fewest(self, least: int = 1) -> int | None:
        """Return the smallest number of ranks, at least ``least``, that the layout resolves for; ``None``: it fits none."""
        each = prod(size for axis in AXES if (size := getattr(self, axis)) not in (None, -1))
        begin = -(-least // each) if each > 0 else 1
        for factor in range(begin, begin + self.ep):  # `ep` divides one of so many multiples
            try:
                self.resolve(each * factor)
            except LayoutError:
                continue
            return each * factor
        return None

    def _illegal_values(self) -> Problems:
        problems = Problems()
        for field in fields(self):
            value = getattr(self, field.name)
            inferable = field.name != "ep"
            if inferable and value in (None, -1):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                legal = "a positive whole number" + (", or -1 to infer it" if inferable else "")
                problems.add("layout.size", f"{field.name}={value!r}: must be {legal}")
        return problems

    @staticmethod
    def _misfits(world_size: int, given: dict[str, int], inferred: str | None, model: ModelSizes) -> Problems:
        problems = Problems()
        """Name each knob that another value would mend, with the values that fit the model too; a lone 1 is not to blame."""
        product = prod(given.values())
        above = [f"{axis}={size}" for axis, size in given.items() if size > 1]
        terms, ranks = " * ".join(above), number_of(world_size, "rank")
        if inferred:
            equals = f" = {product}" if len(above) > 1 else ""
            problems.add("layout.ranks", f"{ranks} cannot be divided by {terms}{equals}")
        elif above:
            make, there = "make" if len(above) > 1 else "makes", "is" if world_size == 1 else "are"
            problems.add("layout.ranks", f"{terms} {make} {number_of(product, 'rank')}, and there {there} {world_size}")
        else:
            problems.add("layout.ranks", f"the layout is one of 1 rank (all sizes are 1), and there are {world_size}")
        for axis, size in given.items():
            others = product // size
            if size == 1 or world_size % others:
                continue
            rest = world_size // others
            fit = [value for value in divisors(rest) if not model.problems(Layout(**{"dp_shard": 1, axis: value}))]
            legal = fit if inferred else [value for value in fit if value == rest]
            if not legal:
                continue
            problems.add("layout.ranks", f"{axis}={size}: with {ranks} and the other sizes as they are, {_legal(legal)}")
        if len(problems) == 1:
            problems.add("layout.ranks", f"each size must divide {world_size}: {_legal(divisors(world_size))}")
        return problems

    # -- rank arithmetic, for a resolved layout -----------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Axis name to size, in mesh order.

        Raises:
            LayoutError: if a size is still to be inferred.
        """
        unknown = [axis for axis in AXES if getattr(self, axis) in (None, -1)]
        if unknown:
            raise LayoutError("layout.unknown", f"{', '.join(unknown)}: not known yet; call resolve(world_size) first")
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes().values())

    @property
    def ep_shard(self) -> int:
        """Ranks that one expert is FSDP-sharded over, inside a replica."""
        sizes = self.sizes()
        return sizes["dp_shard"] * sizes["cp"] * sizes["tp"] // self.ep

    @property
    def replicated(self) -> bool:
        """Whether there are replicas. How many there are does not change the rows of a plan."""
        return self.size("dp_replicate") > 1

    def expert_sizes(self) -> dict[str, int]:
        """Axis name to size of the expert mesh, in mesh order."""
        sizes = self.sizes()
        return {"pp": sizes["pp"], "dp_replicate": sizes["dp_replicate"], "ep_shard": self.ep_shard, "ep": self.ep}

    def size(self, axis: str) -> int:
        """Size of an axis, of a flattened submesh or of an expert axis."""
        return self._all_sizes[axis]

    @cached_property
    def _all_sizes(self) -> dict[str, int]:
        sizes = self.sizes()
        flattened = {name: prod(sizes[part] for part in parts) for name, parts in FLATTENED.items()}
        return {**sizes, **self.expert_sizes(), **flattened}

    def coordinates(self, rank: int, *, experts: bool = False) -> dict[str, int]:
        """Where a rank stands on each axis of the mesh (or of the expert mesh)."""
        sizes = self.expert_sizes() if experts else self.sizes()
        if not 0 <= rank < prod(sizes.values()):
            raise LayoutError("layout.rank", f"rank {rank}: legal are 0 to {self.world_size - 1}")
        coordinates: dict[str, int] = {}
        for axis in reversed(sizes):
            rank, coordinates[axis] = divmod(rank, sizes[axis])
        return {axis: coordinates[axis] for axis in sizes}

    def groups(self, axes: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only on the given axes.

        Args:
            axes: an axis, a flattened name (``dp``, ``dp_shard_cp``, ``dp_cp``), or axes of one mesh. Expert axes
                (``ep_shard``, ``ep``) are read on the expert mesh.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        wanted = {part for name in names for part in FLATTENED.get(name, (name,))}
        experts = bool(wanted & {"ep_shard", "ep"})
        legal = EXPERT_AXES if experts else AXES
        if unknown := wanted - set(legal):
            raise LayoutError("layout.axes", f"axes {', '.join(sorted(unknown))}: legal are {', '.join(legal)}")
        grouped: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank, experts=experts)
            grouped.setdefault(tuple(place[axis] for axis in legal if axis not in wanted), []).append(rank)
        return tuple(tuple(ranks) for ranks in grouped.values())

    def group(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """The group of :meth:`groups` that a rank is in."""
        return next(ranks for ranks in self.groups(axes) if rank in ranks)

    def __str__(self) -> str:
        """Only what is not 1, as in ``dp_replicate=2 dp_shard=4``."""
        parts = [f"{axis}={getattr(self, axis)}" for axis in (*AXES, "ep") if getattr(self, axis) != 1]
        return " ".join(parts) or "one process"
