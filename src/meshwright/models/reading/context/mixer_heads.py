"""How the heads of a mixer divide over ranks: found by the derivatives of its own code, and tried.

A mixer, such as one of Mamba-2 or of linear attention, carries a state along the sequence. Between the linear layers at its
entry and the one at its end, it computes each head, or each group of them, alone. So a rank can compute some heads for all
tokens, if it has what enters them. What that is follows from derivatives: of a share of the features that enter the last linear
layer, by each feature that leaves the first ones, and by each parameter between. A derivative that is zero for random values is
zero. Where several shares need the same features (B and C of a group, a key head of grouped values), several ranks have them.

The code between counts heads and widths by attributes of its modules. Their values for a rank are searched among few. What is
found is tried: for each rank the code is called with its features, its parts of the parameters and its numbers, and must return
its share of what it returns for all. Whatever is not understood here fails there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any

import torch
from torch import nn

from meshwright.models.reading.context.mixer_calls import MixerCalls, counting
from meshwright.models.reading.context.mixer_roles import Roles, roles_of, said
from meshwright.plan.given.sequence.mixer_shares import MixerShare, Pieces, blocks_of, entries_of

__all__ = ["divide"]

_CLOSE = 1e-4
"""The largest relative difference between a head that is computed alone and among others. Parts of scans compute in float32."""
_MOST_TRIALS = 3000
"""Number of calls after which the search for the numbers of a rank ends."""
_OWN_TOKENS = 3
"""Number of tokens that the last linear layer puts out in trials: another than enter, as on a rank."""

Tensors = dict[str, torch.Tensor]


class _UndividedError(Exception):
    """Why a mixer cannot be divided."""


def divide(draws: Sequence[MixerCalls], ranks: int) -> MixerShare:
    """Return how the heads of a mixer divide over ranks, or why they do not.

    Args:
        draws: the mixer with several draws of values. What is zero for one of them may not be so for another.
        ranks: number of ranks, above 1.
    """
    roles = roles_of(draws[0])
    if roles.problem:
        return MixerShare(draws[0].name, problem=roles.problem)
    problems = []
    # A linear layer in between sums over the features of all ranks, or is a parameter like others, of which ranks have parts.
    inner = [roles.inner[:count] for count in range(len(roles.inner), -1, -1)]
    for closing, summed in product(roles.closings, inner):
        own = [_with_matrices(draw, (*roles.read, *roles.inner[len(summed) :])) for draw in draws]
        calls = own[0]
        if any(type(calls.mixer.get_submodule(name)) is not nn.Linear for name in summed):
            problems.append(f"a linear layer with an adapter runs between what mixes tokens ({summed[0]})")
            continue
        for used in range(1, len(draws) + 1):  # a further draw takes time, and is needed where the first shows too little
            found = _Division(calls, roles, closing, ranks, summed)
            try:
                for draw in own[:used]:
                    found.differentiate(draw)
                found.cut()
                return found.share(found.numbers())
            except _UndividedError as why:
                problems.append(str(why))
            except Exception as error:  # whatever a module does with random values
                problems.append(f"it cannot be called in parts ({said(error)})")
    return MixerShare(calls.name, features=(calls.linear[roles.closings[0]][0],), problem=problems[0])


def _with_matrices(calls: MixerCalls, names: Sequence[str]) -> MixerCalls:
    for name in names:
        calls = calls.without(name)
    return calls


@dataclass
class _Division:
    """What is known of how one mixer divides."""

    calls: MixerCalls
    roles: Roles
    closing: str
    ranks: int
    summed: tuple[str, ...] = ()
    """The linear layers in between that sum over the features of all ranks."""
    features: tuple[int, ...] = ()
    """Number of features of each tensor that enters the last module, then of those that enter the layers in between."""
    needed: dict[str, torch.Tensor] = field(default_factory=dict)
    """For each opening and each tensor which of its entries a rank needs: bool [ranks, ...]."""
    pieces: dict[str, Pieces] = field(default_factory=dict)
    slices: dict[str, tuple[int, Pieces]] = field(default_factory=dict)
    reads_positions: bool = False

    def share(self, values: tuple[tuple[str, int], ...]) -> MixerShare:
        """Return what was found."""
        paths = dict(zip(self.roles.openings, self.roles.paths, strict=True))
        return MixerShare(
            self.calls.name,
            self.calls.hidden,
            openings=tuple(self.pieces.items()),
            after=self.after,
            paths=tuple(paths[name] for name in (*self.pieces, *self.after)),
            closing=self.closing,
            features=self.features[: len(self.features) - len(self.summed)],
            summed=tuple((name, self.calls.linear[name][1]) for name in self.summed),
            slices=(
                *((name, dim, pieces) for name, (dim, pieces) in self.slices.items()),
                *((f"{name}.weight", 1, ((self.calls.linear[name][0], 1),)) for name in self.summed),
            ),
            values=values,
            positions=self.calls.positions() if self.reads_positions else None,
        )

    @property
    def after(self) -> tuple[str, ...]:
        """The openings that what is mixed does not need."""
        return tuple(name for name in self.roles.openings if self.pieces and name not in self.pieces)

    def shares(self, rank: int) -> list[slice]:
        """Return the features of a rank in each tensor that enters the last module. They are divided evenly."""
        each = [width // self.ranks for width in self.features]
        return [slice(rank * width, (rank + 1) * width) for width in each]

    def given(self, calls: MixerCalls) -> Tensors:
        """Return values for what the openings put out, and the layers in between that sum."""
        rows, names = calls.given().shape[:-1], (*self.roles.openings, *self.summed)
        return {name: calls.random(*rows, calls.linear[name][1]) for name in names if name not in self.after}

    def call(
        self, calls: MixerCalls, given: Tensors, tensors: Tensors, tokens: int, *, training: bool, beside: Any = None
    ) -> list[torch.Tensor]:
        """Return what enters the last module, and each layer that sums: tensors [rows, tokens, features].

        Nothing but what the openings put out may reach it: the hidden state, and linear layers before them, are not numbers.
        From the last module on there are as many tokens as is said: on a rank these are fewer.
        """
        entered: list[list[torch.Tensor]] = []
        parts: list[torch.Tensor] = []
        rows = calls.given().shape[0]

        def linear(name: str, arguments: list[torch.Tensor]) -> torch.Tensor:
            before, width = not entered, calls.linear[name][1] if name in calls.linear else self.ending
            if name == self.closing:
                entered.append(arguments)
                width = width or arguments[0].shape[-1]
            elif name in given:
                parts.extend(arguments if name in self.summed else ())
                return given[name]
            elif name in calls.shifts:
                return torch.full_like(arguments[0], float("nan"))
            elif before and name not in self.after:
                return torch.full((*arguments[0].shape[:-1], width), float("nan"), dtype=calls.dtype)
            return calls.random(rows, tokens, width)

        hidden = torch.full_like(calls.given(), float("nan"))
        output = calls.run(linear, tensors, hidden, training=training, beside=beside, also=self.closing)
        output = output[0] if isinstance(output, tuple) else output
        if not isinstance(output, torch.Tensor) or output.shape[:2] != (rows, tokens) or bool(output.isnan().any()):
            raise _UndividedError(f"its output is not made of that of {self.closing} alone")
        return [*entered[0], *parts]

    @property
    def ending(self) -> int:
        """Number of features that leave the last module, if it is no linear layer: a norm keeps it; 0: unknown yet."""
        return self.features[0] if self.features else 0

    def differentiate(self, calls: MixerCalls) -> None:
        """Note what each share of the last features depends on."""
        given, tensors = self.given(calls), calls.between()
        leaves = {name: own.requires_grad_() for name, own in (given | tensors).items()}
        whole = self.call(calls, given, tensors, calls.tokens, training=True)
        if any(own.ndim != 3 or bool(own.isnan().any()) for own in whole):
            raise _UndividedError("what it mixes comes from more than its linear layers")
        self.features = tuple(own.shape[-1] for own in whole)
        if any(width % self.ranks for width in self.features):
            raise _UndividedError(f"the {self.features[0]} features that enter {self.closing} do not divide")
        other = self.call(calls, given, tensors, calls.tokens, training=True, beside=calls.others())
        if not all(map(torch.equal, whole, other)):
            raise _UndividedError("it reads an argument beside the hidden state")
        if calls.positions():
            moved = self.call(calls, given, tensors, calls.tokens, training=True, beside=calls.elsewhere())
            self.reads_positions |= not all(map(torch.equal, whole, moved))
        weights = [calls.random(*own.shape) for own in whole]
        for rank in range(self.ranks):
            parts = zip(whole, weights, self.shares(rank), strict=True)
            total = torch.stack([(own[..., part] * weight[..., part]).sum() for own, weight, part in parts]).sum()
            gradients = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
            for (name, own), gradient in zip(leaves.items(), gradients, strict=True):
                if name not in self.needed:
                    shape = own.shape[-1:] if name in given else own.shape
                    self.needed[name] = torch.zeros((self.ranks, *shape), dtype=torch.bool)
                if gradient is not None:
                    nonzero = gradient != 0
                    self.needed[name][rank] |= nonzero.flatten(0, -2).any(0) if name in given else nonzero

    def cut(self) -> None:
        """Find how features and tensors are divided."""
        for name in self.summed:
            del self.needed[name]  # each rank has all of it
        of_openings = {name: self.needed.pop(name) for name in self.roles.openings}
        self.pieces = {name: _pieces(own, f"the features of {name}") for name, own in of_openings.items() if bool(own.any())}
        if all(copies == self.ranks for pieces in self.pieces.values() for _, copies in pieces):
            raise _UndividedError("each share of its heads needs the features of all: it mixes them, as a norm over all does")
        for name, needed in self.needed.items():
            if not bool(needed.any()):
                continue
            by_dim = [
                needed.movedim(dim + 1, 1).flatten(2).any(2) if needed.ndim > 2 else needed for dim in range(needed.ndim - 1)
            ]
            # What no rank needs, such as the end of a table of the tokens of a block, does not tell ranks apart.
            parted = [dim for dim, some in enumerate(by_dim) if not bool((some.all(0) | ~some.any(0)).all())]
            if len(parted) > 1:
                raise _UndividedError(f"its heads use parts of {name} along several dimensions")
            if parted:
                self.slices[name] = parted[0], _pieces(by_dim[parted[0]], f"the entries of {name}")

    def numbers(self) -> tuple[tuple[str, int], ...]:
        """Return the attributes that a rank has other values of, which were tried.

        Raises:
            _UndividedError: the code of the mixer computes something else with each choice.
        """
        choices, numbers = _Choices(self), self.calls.numbers()
        given, tensors = self.given(self.calls), self.calls.between()
        with torch.no_grad():
            whole = self.call(self.calls, given | self._others_given(), tensors, self.calls.tokens, training=True)
            with counting(numbers, choices):
                for _ in range(_MOST_TRIALS):
                    if self._fits(whole, given, tensors):
                        return choices.other_values()
                    if not choices.advance():
                        break
        raise _UndividedError("its own code does not compute some of its heads alone")

    def _others_given(self) -> Tensors:
        rows = self.calls.given().shape[:-1]
        return {name: self.calls.random(*rows, self.calls.linear[name][1]) for name in self.after}

    def _fits(self, whole: list[torch.Tensor], given: Tensors, tensors: Tensors) -> bool:
        """Return whether each rank computes its share with the numbers that its code reads now."""
        for rank in range(self.ranks):
            own = {
                name: value if name in self.summed else _of_rank(value, -1, self.pieces[name], self.ranks, rank)
                for name, value in given.items()
            }
            parts = {
                name: _of_rank(value, *self.slices[name], self.ranks, rank) if name in self.slices else value
                for name, value in tensors.items()
            }
            try:
                results = self.call(self.calls, own, parts, _OWN_TOKENS, training=False)
            except Exception:  # sizes that do not belong together
                return False
            for result, all_heads, part in zip(results, whole, self.shares(rank), strict=True):
                expected, size = all_heads[..., part], all_heads.abs().max()
                if result.shape != expected.shape or not bool(((result - expected).abs() <= _CLOSE * size).all()):
                    return False
        return True


def _of_rank(tensor: torch.Tensor, dim: int, pieces: Pieces, ranks: int, rank: int) -> torch.Tensor:
    return torch.cat([tensor.narrow(dim, own.start, len(own)) for own in blocks_of(pieces, ranks, rank)], dim)


def _pieces(needed: torch.Tensor, what: str) -> Pieces:
    """Return how entries are divided of which it is known what each rank needs.

    Args:
        needed: bool [ranks, entries].
        what: what they are, for the message.
    """
    ranks, found = len(needed), []
    by_entry = (tuple(column.nonzero().flatten().tolist()) for column in needed.T)
    following, width = 0, 0
    for owners, entries in groupby(by_entry):
        size, copies = len(list(entries)), len(owners)
        follows = copies and owners == tuple(range(following, following + copies)) and ranks % copies == 0
        if not follows or (following and size != width):
            raise _UndividedError(f"{what} lie in no order of its heads, or unevenly")
        following, width = (following + copies) % ranks, size
        if not following:
            found.append((size * ranks // copies, copies))
    if following:
        raise _UndividedError(f"{what} lie unevenly")
    return tuple(found)


class _Choices:
    """The numbers of a rank: for each attribute that is read some candidates, tried one after another, the last read first."""

    def __init__(self, division: _Division) -> None:
        pieces = {**division.pieces, **{name: pieces for name, (_, pieces) in division.slices.items()}}
        ranks = division.ranks
        self._sizes = {(sum(size for size, _ in own), entries_of(own, ranks)) for own in pieces.values()}
        self._sizes |= {(width, width // ranks) for width in division.features}
        self._sizes |= {(size, size * copies // ranks) for own in pieces.values() for size, copies in own}
        self._shares = sorted({(copies, ranks) for own in pieces.values() for _, copies in own})
        self._chosen: dict[str, int] = {}
        self._candidates: dict[str, tuple[int, ...]] = {}
        self._whole: dict[str, int] = {}

    def __call__(self, name: str, value: int) -> int:
        if name not in self._chosen:
            self._chosen[name], self._whole[name] = 0, value
            self._candidates[name] = tuple(dict.fromkeys(self._values(value)))
        return self._candidates[name][self._chosen[name]]

    def _values(self, value: int) -> Iterator[int]:
        yield value
        yield from (local for whole, local in self._sizes if whole == value)
        yield from (value * copies // ranks for copies, ranks in self._shares if value * copies % ranks == 0)

    def advance(self) -> bool:
        """Choose what comes next; ``False``: nothing does."""
        while self._chosen:
            name, index = self._chosen.popitem()
            if index + 1 < len(self._candidates[name]):
                self._chosen[name] = index + 1
                return True
        return False

    def other_values(self) -> tuple[tuple[str, int], ...]:
        """Return the names of attributes whose value differs, and that value."""
        known: Mapping[str, int] = {name: self._candidates[name][index] for name, index in self._chosen.items()}
        return tuple((name, value) for name, value in known.items() if value != self._whole[name])
