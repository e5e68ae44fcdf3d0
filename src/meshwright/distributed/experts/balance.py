"""Load balance of routers: a balance loss, an update of the router's bias that needs no loss, and metrics of the load.

For N tokens and E experts, a router returns scores [N, E], and the weights [N, k] and indices [N, k] of the k experts that it
chose for each token. The plan says which modules are routers, what their scores are, and which buffer is their bias
(:class:`ExpertsRow`). A hook on each router does the rest, so models, experts and dispatch need no code for balance.

The loss is the sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20). It uses the experts that the
router chose in fact, with the effect of groups and bias. For a sequence b with T_b tokens that count, and coefficient a:

    f_i = E / (k T_b) * tokens of b that chose expert i        P_i = mean over the T_b tokens of the normalised score of i
    L_b = a * sum_i f_i P_i                                    loss of a layer = sum_b T_b / T * L_b

T is the number of tokens that count in the whole optimizer step. No statistic is taken over several sequences, so the loss and
its gradient are those of one process for any ranks, replicas and microbatches. Perfect balance gives ``a`` for each layer.

The gradient of the loss enters where the weights leave the router (:class:`LossAtWeights`). The backward of the training loss
passes there once in every microbatch, in a recomputed layer too.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.distributed import _torch_compat
from meshwright.distributed.experts.balance_loss import KINDS, LossAtWeights, sequence_balance
from meshwright.distributed.memory.kept_results import unwatched
from meshwright.distributed.tensor import moves
from meshwright.errors import ModelError, Problems, Refusal
from meshwright.plan.given.names import inside
from meshwright.plan.given.spec import Scores
from meshwright.plan.result.sharding_plan import ExpertsRow, ShardingPlan

__all__ = ["Balance", "refusals"]


_DECLARE = f"declare it (scores of an ExpertsRule in a strategy, docs/adding-a-family.md): {KINDS}"


@dataclass
class _Router:
    row: ExpertsRow
    label: str
    loads: torch.Tensor
    """int64 [E]: number of tokens of this step that were routed to each expert."""
    fits: bool = True


class Balance:
    """Balances the load of a model's routers through the microbatches of optimizer steps, and measures it.

    Args:
        model: the parallelized model.
        rows: rows of its mixtures; mixtures whose router is unknown are left out.
        device: the device that the model computes on.
        aux_loss: coefficient of the balance loss; 0: no loss.
        bias_update_rate: what is added to or subtracted from biases after a step; 0: no update.
        load_metrics: whether loads are reported as metrics.
        group: the ranks that share sequences; ``None``: each rank has whole sequences.
        slices: the ranks that have slices of sequences where routers run, see
            :attr:`~meshwright.plan.result.rows.ExpertsRow.slice_axis`; ``None``: there are none.
        own: names of the mixtures that this rank runs; ``None``: all. Other stages count the loads of the others.

    Raises:
        ModelError: a balance loss is asked for, and it is unknown what the scores of a router are.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[ExpertsRow],
        device: torch.device,
        *,
        aux_loss: float = 0.0,
        bias_update_rate: float = 0.0,
        load_metrics: bool = True,
        group: dist.ProcessGroup | None = None,
        slices: dist.ProcessGroup | None = None,
        own: Collection[str] | None = None,
    ) -> None:
        self.group, self.slices = group, slices
        self.model, self.aux_loss, self.rate, self.reports = model, aux_loss, bias_update_rate, load_metrics
        known = [row for row in rows if row.router]
        if not (aux_loss or bias_update_rate or load_metrics):
            known = []
        blind = [row.router for row in known if aux_loss and row.scores == Scores.UNKNOWN]
        if blind:
            raise ModelError("moe.scores", f"aux_loss: the kind of scores of the routers {blind} is unknown; {_DECLARE}")
        self._all_loads = torch.zeros(sum(row.experts for row in known), dtype=torch.int64, device=device)
        loads = self._all_loads.split([row.experts for row in known])
        self._routers = [_Router(row, label, load) for row, label, load in zip(known, _labels(known), loads, strict=True)]
        self._tokens = torch.ones((), dtype=torch.int64, device=device)
        self._value = torch.zeros((), device=device)
        self._open = False
        self._counts: torch.Tensor | None = None
        self._told: list[str] = []
        self._own = [router for router in self._routers if own is None or router.row.module in own]
        for router in self._own:
            model.get_submodule(router.row.router).register_forward_hook(self._hook(router))

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank runs routers, so that :meth:`microbatch` needs to know which tokens count."""
        return bool(self._own)

    # -- one optimizer step ------------------------------------------------------------------------------------------------

    def begin_step(self, tokens: torch.Tensor) -> None:
        """Begin a step, and reset what was counted in the last one.

        Args:
            tokens: integer scalar, number of tokens that count in this step, over all ranks and microbatches.
        """
        if not self._routers:
            return
        self._all_loads.zero_()
        self._value = torch.zeros_like(self._value)
        self._tokens = tokens.clamp(min=1)

    @contextmanager
    def microbatch(self, counts: torch.Tensor | None) -> Iterator[None]:
        """Switch the hooks of the routers on; use it around forward and backward of a microbatch.

        Args:
            counts: bool [B, S], which tokens count; ``None``: all that the routers get, and no balance loss.
        """
        self._open, self._counts = True, counts
        try:
            yield
        finally:
            self._open, self._counts = False, None

    def pop_warnings(self) -> list[str]:
        """Return and reset the warnings since the last call: a line for each router whose outputs cannot be read."""
        told, self._told = self._told, []
        return told

    def losses(self) -> dict[str, torch.Tensor]:
        """Return the balance loss of this rank's tokens in this step, by the name of its metric; empty without such a loss."""
        return {"moe/aux_loss": self._value} if self.aux_loss else {}

    def finish_step(
        self, add_up: Callable[[torch.Tensor], torch.Tensor], *, unless: torch.Tensor, logged: bool
    ) -> dict[str, torch.Tensor]:
        """Update the biases, and return the metrics of the load. All ranks call this, and the host does not wait.

        Args:
            add_up: sums a tensor, in place, over the ranks that have different tokens, and over those with other stages.
            unless: scalar; 1 if the optimizer changed nothing in this step, so that no bias changes either, otherwise 0.
            logged: whether the metrics of this step are written.

        Returns:
            Name to metric, fp64 scalars.
        """
        logged = logged and self.reports
        if not self._routers or not (self.rate or logged):
            return {}
        self._join_slices()
        add_up(self._all_loads)
        if self.rate:
            self._move_biases(1 - unless)
        return self._metrics() if logged else {}

    def _join_slices(self) -> None:
        """Add up the loads of routers that chose for slices of sequences."""
        sliced = [router.loads for router in self._own if router.row.slice_axis]
        if sliced:
            whole = torch.cat(sliced)
            dist.all_reduce(whole, group=self.slices)
            torch._foreach_copy_(sliced, whole.split([len(loads) for loads in sliced]))

    @torch.no_grad()
    def _move_biases(self, share: torch.Tensor) -> None:
        """Raise the bias of experts with less than the mean load, lower that of experts with more.

        The rule is that of arXiv 2412.19437, section 2.1.2. Loads are sums of integers, so the copies of all ranks stay equal
        to the last bit.
        """
        for router in self._own:
            if router.row.bias:
                bias = self.model.get_buffer(router.row.bias)
                # Both sides of the comparison with the mean are multiplied by E, so nothing is rounded.
                direction = (router.loads.sum() - router.loads * len(router.loads)).sign()
                bias.add_((self.rate * share * direction).to(bias.dtype))

    def _metrics(self) -> dict[str, torch.Tensor]:
        metrics = {}
        for router in self._routers:
            if router.fits:
                loads = router.loads.double()
                metrics[f"moe/max_load/{router.label}"] = loads.max() / loads.mean().clamp(min=1e-9)
                metrics[f"moe/idle_experts/{router.label}"] = (router.loads == 0).sum().double()
        return metrics

    # -- one call of one router ------------------------------------------------------------------------------------------------

    def _hook(self, router: _Router) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            # Neither evaluation nor a forward without gradient, such as that of a draft, counts.
            if not self._open or not module.training or not torch.is_grad_enabled():
                return None
            counts = self._counts
            if counts is not None and router.row.slice_axis:
                assert self.slices is not None
                counts = moves.slice_of(counts, 1, self.slices)
            problem = _misfit(output, router.row, counts)
            if problem:
                if self.aux_loss or self.rate:
                    raise ModelError(
                        "moe.router", f"router {router.row.router!r}: {problem}; moe.aux_loss and moe.bias_update_rate need it"
                    )
                if router.fits:
                    router.fits = False
                    self._told.append(f"router {router.row.router!r}: {problem}; its load is not reported (moe.load_metrics)")
                return None
            scores, weights, index, *rest = output
            first = not _torch_compat.in_backward()  # the tokens of a recomputation were counted before
            if first:
                with unwatched():
                    _count(router.loads, index, counts)
            if not self.aux_loss or counts is None or not scores.requires_grad:
                return None
            loss = sequence_balance(scores, index, counts, Scores(router.row.scores), self.group)
            loss = loss * self.aux_loss / self._tokens
            if first:
                with unwatched():
                    self._value = self._value + loss.detach()
            return (scores, LossAtWeights.apply(weights, loss), index, *rest)

        return after


@torch.no_grad()
def _count(loads: torch.Tensor, index: torch.Tensor, counts: torch.Tensor | None) -> None:
    index = index.long()
    ones = torch.ones_like(index) if counts is None else counts.reshape(-1, 1).expand_as(index).long()
    loads.scatter_add_(0, index.flatten(), ones.flatten())


def _misfit(output: Any, row: ExpertsRow, counts: torch.Tensor | None) -> str:
    """Return why the outputs of a router cannot be read; empty if they can."""
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(item, torch.Tensor) for item in output[:3]):
        return "does not return scores, weights and numbers of experts"
    scores, weights, index = output[:3]
    if scores.ndim != 2 or scores.shape[1] != row.experts or weights.shape != index.shape or index.is_floating_point():
        shapes = ", ".join(str(tuple(item.shape)) for item in output[:3])
        return (
            f"must return scores [tokens, {row.experts}], weights and numbers of experts [tokens, k]; the shapes are {shapes}"
        )
    if counts is not None and len(index) != counts.numel():
        return f"was given {len(index)} tokens of a batch of {counts.numel()}"
    return ""


def _labels(rows: Sequence[ExpertsRow]) -> list[str]:
    """Return the layer number of each mixture if these numbers are unique, otherwise the names of the mixtures."""
    numbers = [next((part for part in row.module.split(".") if part.isdigit()), "") for row in rows]
    unique = len(set(numbers)) == len(numbers) and all(numbers)
    return numbers if unique else [row.module for row in rows]


def refusals(plan: ShardingPlan, *, aux_loss: float, bias_update_rate: float, uncounted: str) -> Problems:
    """Return why the balance that is asked for is impossible for a plan, one line for each reason.

    Args:
        plan: the plan of the run.
        aux_loss: coefficient of the balance loss; 0: not asked for.
        bias_update_rate: what is added to or subtracted from biases after a step; 0: not asked for.
        uncounted: why the objective does not say which tokens of a batch count; empty: it does.
    """
    problems = Problems()
    options = {"moe.aux_loss": aux_loss, "moe.bias_update_rate": bias_update_rate}
    asked = [f"{key}={value:g}" for key, value in options.items() if value]
    if asked and not plan.experts:
        return Problems(
            Refusal("moe.dense", f"{option}: {plan.family} has no mixtures of experts; leave it out") for option in asked
        )
    for option in asked:
        problems += [
            Refusal(
                "moe.router",
                f"{option}: the router of {row.module!r} is unknown (router of its ExpertsRule), so nothing can balance it",
            )
            for row in plan.experts
            if not row.router
        ]
    if aux_loss:
        if uncounted:
            problems.add("moe.balance", f"{asked[0]}: {uncounted}")
        problems += [
            Refusal(
                "moe.balance",
                f"{asked[0]}: under sequence parallel the router {row.router!r} chooses for slices of sequences, and a balance "
                "loss over them was compared by nobody; legal are parallel.sequence_parallel=false, and no moe.aux_loss",
            )
            for row in plan.experts
            if row.slice_axis and row.router
        ][:1]
        problems += [
            Refusal(
                "moe.scores",
                f"{asked[0]}: the kind of scores of the router {row.router!r} is unknown; {_DECLARE}, or leave moe.aux_loss "
                "out",
            )
            for row in plan.experts
            if row.router and row.scores == Scores.UNKNOWN
        ]
        for row in plan.experts:
            own = [item for item in plan.parameters if row.router and inside(item.name, row.router)]
            if own and not any(item.trainable for item in own):
                problems.add(
                    "moe.balance",
                    f"{asked[0]}: the router {row.router!r} is frozen, so a balance loss cannot change its choices; train it "
                    "(parallel.freeze), or leave moe.aux_loss out",
                )
    if bias_update_rate:
        problems += [
            Refusal(
                "moe.balance",
                f"{asked[-1]}: the router {row.router!r} has no bias buffer for balance (bias of its ExpertsRule); use "
                "moe.aux_loss",
            )
            for row in plan.experts
            if row.router and not row.bias
        ]
    return problems
