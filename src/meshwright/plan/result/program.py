"""The program of a plan: the actions that are performed on a model, in order.

Rows (:mod:`meshwright.plan.result.rows`) tell people what becomes of each parameter and unit. Actions say what
:mod:`meshwright.distributed` has to do to get there. They name the modules, the parameters and the attributes that are set, so
that nothing is left to decide. An action that carries out what a row says holds the row. Its ``SHOWN`` then names its own
values and those of the row in the order in which ``meshwright plan --program`` prints them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Generic, TypeVar

from meshwright.plan.axes.tensor.move_kinds import Bias, Kernel
from meshwright.plan.given.closed_choices import ContextBalance
from meshwright.plan.result.context.before_action import TakeTokensBefore
from meshwright.plan.result.context.cache_action import GiveCache
from meshwright.plan.result.context.count_action import CountPositions
from meshwright.plan.result.context.heads_action import ShareHeads
from meshwright.plan.result.cut_action import Cut
from meshwright.plan.result.mixer_action import MixChannels
from meshwright.plan.result.rows import AttentionRow, ExpertsRow, LossRow, TensorParallelRow, UnitRow

__all__ = [
    "ACTIONS",
    "Action",
    "Assign",
    "Attend",
    "ChunkLoss",
    "Compile",
    "Compute",
    "CountPositions",
    "Cut",
    "Dispatch",
    "Engine",
    "Freeze",
    "GiveCache",
    "JoinTwins",
    "MixChannels",
    "Pack",
    "PartTwins",
    "Prefetch",
    "Recompute",
    "ShareHeads",
    "Slice",
    "TakeTokensBefore",
    "Wrap",
]


@dataclass(frozen=True)
class Slice:
    """Make a parameter a DTensor, of which each rank of an axis stores a slice.

    Attributes:
        names: all names of the parameter; a tied one has several, and is sliced once.
        axis: mesh axis.
        dim: dimension that is sliced.
        pieces: number of tensors that are concatenated along this dimension; each of them is sliced.
    """

    names: tuple[str, ...]
    axis: str
    dim: int
    pieces: int = 1


@dataclass(frozen=True)
class Assign:
    """Set attributes of a module.

    Attributes:
        module: name of the module.
        values: (dotted attribute, value) pairs.
        own: attributes that are copied for this module first, because other modules share them.
    """

    module: str
    values: tuple[tuple[str, int | str], ...]
    own: tuple[str, ...] = ()


Row = TypeVar("Row", TensorParallelRow, ExpertsRow, AttentionRow, LossRow)


class _OnModule(Generic[Row]):
    """What actions on the module of a row have in common."""

    row: Row

    @property
    def module(self) -> str:
        """The name of the module."""
        return self.row.module


@dataclass(frozen=True)
class Compute(_OnModule[TensorParallelRow]):
    """Let a module compute with slices of its parameters, between a move of its input and a move of its output.

    Attributes:
        row: has the moves, and the parameters whose gradients are summed over the axis.
        kernel: what it computes.
        argument: position and name of the argument that the move at the entry moves; ``None``: all floating-point tensors.
        parts: sizes into which a move or a kernel splits a tensor.
        features: width of the whole output, if the move at the exit needs it.
        bias: which ranks add the bias.
        padding: row of an embedding that gets no gradient.
        axis: mesh axis.
    """

    SHOWN: ClassVar = "module kernel entry exit argument sums parts features bias padding axis flat"

    row: TensorParallelRow
    kernel: Kernel = Kernel.OWN
    argument: tuple[int, str] | None = None
    parts: tuple[int, ...] = ()
    features: int = 0
    bias: Bias = Bias.EACH
    padding: int | None = None
    axis: str = "tp"


@dataclass(frozen=True)
class Dispatch(_OnModule[ExpertsRow]):
    """Send the tokens of a mixture to the ranks that store their experts, and the results back.

    Attributes:
        row: has the number of experts, and the axis whose ranks have the same tokens.
        axis: mesh axis whose ranks store the experts.
    """

    SHOWN: ClassVar = "module experts axis token_axis"

    row: ExpertsRow
    axis: str = "ep"


@dataclass(frozen=True)
class Attend(_OnModule[AttentionRow]):
    """Let an attention work on this rank's part of each sequence, with the keys and values of the other ranks of `cp`.

    Attributes:
        row: has the method, the kernel and the mask.
        balance: which positions each rank has.
        axis: mesh axis.
    """

    SHOWN: ClassVar = "module method kernel balance causal window recompute axis"

    row: AttentionRow
    balance: ContextBalance
    axis: str = "cp"


@dataclass(frozen=True)
class ChunkLoss(_OnModule[LossRow]):
    """Let the forward of the model return its loss, which is computed in chunks of tokens, if it is given labels.

    Attributes:
        row: has the output head, the number of chunks and that of words.
    """

    SHOWN: ClassVar = "module chunks vocabulary"

    row: LossRow


@dataclass(frozen=True)
class Recompute:
    """Recompute a module in backward instead of keeping its activations.

    Attributes:
        module: name of the module.
        selective: keep the results of operators that are expensive to repeat, or of ``operators`` if any are named.
        operators: names, each ``namespace.operator.overload``.
        routing: keep the choice of experts, whatever else is recomputed.
    """

    module: str
    selective: bool = False
    operators: tuple[str, ...] = ()
    routing: bool = False


@dataclass(frozen=True)
class Freeze:
    """Freeze parameters; all others are trained.

    Attributes:
        parameters: first names of all parameters without a gradient; the others have one.
    """

    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pack:
    """Store a frozen matrix in 4 bits, and gather it so.

    Attributes:
        names: all its names.
    """

    names: tuple[str, ...]


@dataclass(frozen=True)
class PartTwins:
    """Give the second modules of twin units parameters of their own while units are wrapped.

    FSDP2 refuses a parameter that is in two units.

    Attributes:
        parameters: (name in the first unit, name in the second unit) pairs.
    """

    parameters: tuple[tuple[str, str], ...]


class Engine(StrEnum):
    """The torch function that makes a unit."""

    SHARD = "fully_shard"
    REPLICATE = "replicate"
    """The same engine with whole parameters: one all-reduce for each unit."""


@dataclass(frozen=True)
class Wrap:
    """Make modules one unit, which gathers and reduces the parameters in them that are in no unit yet.

    Attributes:
        row: has the dtypes, the sync policy, and whether gathered parameters are freed after forward.
        modules: names of its modules; usually one.
        engine: torch function that makes it.
        axes: mesh axes that its parameters are replicated and sharded over.
        divisor: number that the sum of the gradients is divided by; ``None``: the number of ranks that reduce, as in torch.
        plain_sum: reduce with a plain sum and divide afterwards, on every backend.
        experts: whether the axes are those of the expert mesh.
        dims: (parameter, dimension) pairs, for parameters that are not sharded along their first dimension.
        offload: keep shards in host memory, which is pinned if the device is an accelerator.
        each_run: gather and reshard around each run of each module, because the modules run at different times.
        around: with ``each_run``, the modules around whose runs it is gathered instead: layers, which are fewer.
        no_grad_runs: whether modules also run without gradient. Such runs are kept out of the order in which backward
            prefetches.
        sharded_by: name of the user's function that makes the unit; empty: torch's ``fully_shard`` does.
    """

    SHOWN: ClassVar = (
        "unit modules engine axes param_dtype reduce_dtype reshard_after_forward sync divisor output_dtype plain_sum experts "
        "dims offload each_run around no_grad_runs sharded_by"
    )

    row: UnitRow
    modules: tuple[str, ...]
    engine: Engine
    axes: tuple[str, ...]
    divisor: float | None
    plain_sum: bool = False
    experts: bool = False
    dims: tuple[tuple[str, int], ...] = ()
    offload: bool = False
    each_run: bool = False
    around: tuple[str, ...] = ()
    no_grad_runs: bool = False
    sharded_by: str = ""

    @property
    def unit(self) -> str:
        """The name of the unit, which is that of its first module."""
        return self.row.name


@dataclass(frozen=True)
class JoinTwins:
    """Make the parameters of twin units the same again: as attributes now, and as shards before each forward of the root.

    Attributes:
        parameters: as in :class:`PartTwins`.
        units: (first unit, second unit) pairs.
    """

    parameters: tuple[tuple[str, str], ...]
    units: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Prefetch:
    """Make a unit start the all-gathers of other units, in this order.

    Attributes:
        unit: name of the unit.
        forward: units whose all-gathers it starts in forward; empty: FSDP2's default.
        backward: the same in backward.
    """

    unit: str
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compile:
    """Compile the forward of a module, as one graph or as many as it takes.

    Attributes:
        module: name of the module.
        backend: backend of ``torch.compile``.
    """

    module: str
    backend: str


Action = (
    Cut | Slice | Assign | Compute | Dispatch | Attend | ShareHeads | TakeTokensBefore | CountPositions | GiveCache | ChunkLoss
    | Recompute | Freeze | Pack | PartTwins | Wrap | JoinTwins | Prefetch | Compile | MixChannels
)  # fmt: skip

ACTIONS: dict[str, type[Action]] = {kind.__name__: kind for kind in Action.__args__}
"""The kinds of actions by name."""
