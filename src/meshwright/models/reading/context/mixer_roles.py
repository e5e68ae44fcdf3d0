"""What the linear layers of a mixer are: those at its entry, whose outputs are mixed along the sequence, and the one after.

Mamba-1 has some in between as well: one gives time steps, B and C from what a convolution puts out. The matrix of another one
is read by the code of the mixer itself.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from meshwright.models.reading.context.mixer_calls import MixerCalls, linear_layers
from meshwright.models.reading.tracing import hooked, tensors_in

__all__ = ["Recorder", "Roles", "roles_of", "said"]


@dataclass(frozen=True)
class Roles:
    """What the linear layers of a mixer are.

    Attributes:
        openings: those whose outputs are mixed along the sequence, in the order in which they run.
        paths: for each of them, see :class:`~meshwright.plan.given.sequence.mixer_shares.MixerShare`.
        closings: the one after what is mixed; then the modules that run between, the last one first.
        inner: the linear layers that run between, on what is mixed along the sequence.
        read: the linear layers that do not run: the mixer's own code reads their matrices.
        problem: why they have no such roles; empty: they have.
    """

    openings: tuple[str, ...] = ()
    paths: tuple[tuple[str, ...], ...] = ()
    closings: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    problem: str = ""


class _Ran(NamedTuple):
    """A linear layer that ran, what entered it, and what it put out."""

    name: str
    given: torch.Tensor
    output: torch.Tensor


class _EnoughError(Exception):
    """Ends a call of which nothing more is needed."""


class Recorder:
    """Stands for linear layers, each of rank one: all features of a token enter each feature that leaves."""

    def __init__(self, calls: MixerCalls) -> None:
        self.shifts = calls.shifts
        self.matrices = {name: (calls.random(ins) / ins, calls.random(outs)) for name, (ins, outs) in calls.linear.items()}
        self.ran: list[_Ran] = []
        self.last = ""

    def __call__(self, name: str, entered: list[torch.Tensor]) -> torch.Tensor:
        if name in self.shifts:
            return entered[0].clone()  # tokens are treated alone, but another tensor than the hidden state leaves
        (given, *_), (entry, leave) = entered, self.matrices[name]
        output = (given.to(entry.dtype) @ entry).unsqueeze(-1) * leave
        self.ran.append(_Ran(name, given, output))
        if name == self.last:
            raise _EnoughError
        return output


def roles_of(calls: MixerCalls) -> Roles:
    """Return the roles of the linear layers of a mixer, from calls in which one token differs."""
    hidden = calls.given()
    other, later = hidden.clone(), hidden.clone()
    other[:, 0] += 1
    later[:, -1] += 1
    calls, read = _with_read_matrices(calls)
    record, tensors = Recorder(calls), calls.between()
    try:
        first, second, third = (_ran(calls, record, tensors, own) for own in (hidden, other, later))
    except Exception as error:  # whatever a module does with random values
        if _reads_a_matrix(error):
            return Roles(problem="its code reads the matrix of a linear layer itself, or one that is not its own")
        return Roles(problem=f"it cannot be called alone ({said(error)})")
    names = [ran.name for ran in first]
    if len(set(names)) < len(names) or any(names != [ran.name for ran in own] for own in (second, third)):
        return Roles(problem="a linear layer in it runs several times")
    if any(ran.given.shape[:-1] != hidden.shape[:-1] for ran in first):
        return Roles(problem="a linear layer in it gets tokens in another shape")
    mixed = [one.name for one, two in zip(first, second, strict=True) if not torch.equal(one.given[:, 1:], two.given[:, 1:])]
    if any(not torch.equal(one.given[:, :-1], three.given[:, :-1]) for one, three in zip(first, third, strict=True)):
        return Roles(problem="a token changes those before it, so padding at the end would")
    if not mixed:
        return Roles(problem="no linear layer runs after it")
    *inner, closing = mixed
    paths = _paths([ran for ran in first if ran.name not in mixed], hidden)
    closings = (closing, *(_between(calls, record, tensors) if not inner else ()))
    roles = Roles(tuple(paths), tuple(paths.values()), closings, tuple(inner), read)
    if not all(paths.values()) and not _treats_tokens_alone(calls, record, tensors, roles, first):
        return replace(roles, problem="what runs before a linear layer at its entry needs more than one token")
    return roles


def _with_read_matrices(calls: MixerCalls) -> tuple[MixerCalls, tuple[str, ...]]:
    """Return calls in which linear layers do not stand apart whose matrices the mixer's own code reads, and their names.

    Of those that have not run when a matrix is read, the smallest is taken to be the one: its values are made.
    """
    read: list[str] = []
    for _ in calls.linear:
        record = Recorder(calls)
        try:
            _ran(calls, record, calls.between(), calls.given())
        except Exception as error:
            ran = {one.name for one in record.ran}
            waiting = sorted((ins * outs, name) for name, (ins, outs) in calls.linear.items() if name not in ran)
            if _reads_a_matrix(error) and ran and waiting:
                read.append(waiting[0][1])
                calls = calls.without(read[-1])
                continue
        break
    return calls, tuple(read)


def _reads_a_matrix(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "meta" in str(error)


def _ran(calls: MixerCalls, record: Recorder, tensors: dict[str, torch.Tensor], hidden: torch.Tensor) -> list[_Ran]:
    record.ran = []
    with torch.no_grad():
        calls.run(record, tensors, hidden)
    return record.ran


def _between(calls: MixerCalls, record: Recorder, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the modules with parameters, but no linear layer in them, that get tokens [rows, tokens, features] alone.

    What such a module returns for some of the tokens must be what it returns for them among all.
    """
    found: list[str] = []
    shape, some = calls.given().shape[:2], torch.arange(calls.tokens - 1, -1, -2)
    inside: list[str] = []

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = tensors_in((args, kwargs))
        if inside or not given or any(item.ndim != 3 or item.shape[:2] != shape for item in given):
            return
        inside.append(name)
        try:
            args, kwargs = tree_map_only(torch.Tensor, lambda own: own[:, some], (args, kwargs))
            alone = zip(tensors_in(module.forward(*args, **kwargs)), tensors_in(output), strict=True)
            if all(part.shape == whole[:, some].shape and torch.allclose(part, whole[:, some]) for part, whole in alone):
                found.append(name)
        except Exception:  # it needs all tokens
            pass
        finally:
            inside.clear()

    handles = [
        module.register_forward_hook(
            lambda module, args, kwargs, output, name=name: note(name, module, args, kwargs, output), with_kwargs=True
        )
        for name, module in calls.mixer.named_modules()
        if name and any(True for _ in module.parameters()) and not linear_layers(module)
    ]
    with hooked(handles):
        _ran(calls, record, tensors, calls.given())
    return [name for name in reversed(found) if found.count(name) == 1]


def _paths(ran: list[_Ran], hidden: torch.Tensor) -> dict[str, tuple[str, ...]]:
    """Return the linear layers from the hidden state to the output of each one that others than linear layers read."""
    paths: dict[str, tuple[str, ...]] = {}
    inside = set()
    for index, (name, given, _) in enumerate(ran):
        before = next((earlier.name for earlier in ran[:index] if earlier.output is given), "")
        if before:
            inside.add(before)
            paths[name] = (*paths[before], name) if paths[before] else ()
        else:
            paths[name] = (name,) if given is hidden else ()
    return {name: path for name, path in paths.items() if name not in inside}


def _treats_tokens_alone(
    calls: MixerCalls, record: Recorder, tensors: dict[str, torch.Tensor], roles: Roles, whole: list[_Ran]
) -> bool:
    """Return whether the mixer's own code up to its last opening computes the same of some tokens, in another order."""
    some = torch.arange(calls.tokens - 1, -1, -2)
    record.ran, record.last = [], roles.openings[-1]
    try:
        calls.run(record, tensors, calls.given()[:, some])
    except _EnoughError:
        expected = {ran.name: ran.given[:, some] for ran in whole}
        return all(torch.equal(ran.given, expected[ran.name]) for ran in record.ran if ran.name in roles.openings)
    except Exception:  # it needs all tokens
        return False
    finally:
        record.last = ""
    return False


def said(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
