"""Routing by a column: the experts that each token went to elsewhere, such as in the engine that sampled it.

A mixture is not the same function in two programs: where two experts have almost the same score, rounding decides, and the
probability of a token changes with the expert. So rollout engines record which experts each token went to, and training sends
it to the same ones ("router replay": Ma et al. 2025, arXiv 2510.11370). Only the choice is given. The weights of the chosen
experts are computed by the router's own code, from this model's scores, and have a gradient.

A router chooses by one ``topk`` over its scores of a token. While a router runs, that call returns the given experts and their
scores; other calls, such as those that choose groups of experts, return what they do. An entry below 0 leaves the choice to the
router. A layer that is recomputed in backward gets the same experts again.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import ModelError, Problems
from meshwright.plan.result.sharding_plan import ExpertsRow, ShardingPlan

__all__ = ["Replay", "replay_refusals"]

WHERE = "data.tensors.routed_experts"


class Replay:
    """Lets the routers of a model choose the experts of a column.

    Args:
        model: the parallelized model.
        rows: rows of the mixtures of the whole model, in the order of the column.
        own: names of the mixtures that this rank runs; ``None``: all.
    """

    def __init__(self, model: nn.Module, rows: Sequence[ExpertsRow], own: Collection[str] | None = None) -> None:
        self._model, self._rows, self._own = model, rows, own
        self._given: torch.Tensor | None = None
        self._hooked = False

    def _hook(self) -> None:
        """Reach the routers, once: a run without the column has no hooks, which compiled layers would have to trace."""
        self._hooked = True
        for number, row in enumerate(self._rows):
            if row.router and (self._own is None or row.module in self._own):
                before, after = self._hooks(number, row)
                router = self._model.get_submodule(row.router)
                router.register_forward_pre_hook(before)
                router.register_forward_hook(after, always_call=True)  # a recomputation may stop within a router

    @contextmanager
    def of(self, given: torch.Tensor) -> Iterator[None]:
        """Inside, forwards and recomputations of a microbatch go to given experts.

        Args:
            given: int64 [B, S, mixtures x k], this rank's part of each sequence.

        Raises:
            ModelError: the model has no mixtures, or not so many; or a router chooses in another way.
        """
        if not self._rows or given.shape[-1] % len(self._rows) or not all(row.router for row in self._rows):
            raise ModelError(
                "moe.replay",
                f"routed_experts has {given.shape[-1]} numbers for each token, and the model {len(self._rows)} mixtures with a "
                "router that is known; legal is the number of experts of a token for each mixture",
            )
        if not self._hooked:
            self._hook()
        before, self._given = self._given, given
        try:
            yield
        finally:
            self._given = before

    def _hooks(self, number: int, row: ExpertsRow) -> tuple[Callable[..., None], Callable[..., None]]:
        running: list[_Given] = []

        def before(module: nn.Module, args: Any) -> None:
            if self._given is not None:
                each = self._given.shape[-1] // len(self._rows)
                running.append(_Given(self._given[..., number * each : (number + 1) * each], row.experts))
                running[-1].__enter__()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if running:
                mode = running.pop()
                mode.__exit__(None, None, None)
                if mode.chosen != 1:
                    raise ModelError("moe.replay", f"{WHERE}: router {row.router!r} {_found(mode.chosen)}")

        return before, after


def _found(choices: int) -> str:
    number = "none" if choices == 0 else str(choices)
    return f"does not choose by one topk over its scores of each token (found: {number}), so it cannot be given experts"


class _Given(TorchFunctionMode):
    """While it is active, the choice of experts is a given one, and counted.

    Args:
        given: int64 [B, S, k].
        experts: number of experts that there are.
    """

    def __init__(self, given: torch.Tensor, experts: int) -> None:
        super().__init__()
        self.given, self.experts, self.chosen = given, experts, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        rows, each = self.given.shape[:-1], self.given.shape[-1]
        if result[1].shape[-1] != each or scores.shape[-1] != self.experts or scores.shape[:-1] not in (rows, (rows.numel(),)):
            return result
        self.chosen += 1
        given = self.given.reshape(result[1].shape)
        index = torch.where(given < 0, result[1], given)
        return torch.return_types.topk((scores.gather(-1, index), index))


def replay_refusals(plan: ShardingPlan, width: int, choices: Callable[[], Mapping[str, int]], uncounted: str) -> Problems:
    """Return why the routers of a plan cannot be given experts, one line for each reason.

    Args:
        plan: the plan of the run.
        width: of the column.
        choices: returns for each router how many experts of a token its one topk chooses; 0: it has none, or several.
        uncounted: why the tokens that routers get are not those of a batch; empty: they are.
    """
    problems = Problems()
    if not plan.experts:
        problems.add("moe.dense", f"{WHERE}: {plan.family} has no mixtures of experts; leave it out")
        return problems
    if uncounted:
        problems.add("moe.replay", f"{WHERE}: {uncounted}")
        return problems
    if sliced := [row.router for row in plan.experts if row.slice_axis]:
        problems.add(
            "moe.replay",
            f"{WHERE}: under sequence parallel the router {sliced[0]!r} gets slices of sequences; legal is "
            "parallel.sequence_parallel=false",
        )
        return problems
    if unknown := [row.module for row in plan.experts if not row.router]:
        problems.add("moe.router", f"{WHERE}: the router of {unknown[0]!r} is unknown (router of its ExpertsRule)")
        return problems
    each = choices()
    if other := [row.router for row in plan.experts if not each.get(row.router)]:
        problems.add("moe.replay", f"{WHERE}: {plan.family}: router {other[0]!r} {_found(0)}")
        return problems
    numbers = {each[row.router] for row in plan.experts}
    if len(numbers) > 1:
        problems.add(
            "moe.replay", f"{WHERE}: routers choose {min(numbers)} to {max(numbers)} experts of a token; legal is one number"
        )
    elif width != (legal := len(plan.experts) * numbers.pop()):
        problems.add(
            "moe.replay",
            f"{WHERE}: width={width}: legal is {legal}, for {len(plan.experts)} routers that choose "
            f"{legal // len(plan.experts)} experts of a token each",
        )
    return problems
