"""Checks the experts that rows say each token went to, before any process starts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from meshwright.data.rows.columns import ROUTED_EXPERTS
from meshwright.errors import ConfigError, DataError
from meshwright.plan.result.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    import torch

    from meshwright.data.store import TokenStore

__all__ = ["check_batch", "check_routes"]

AT_ONCE = 2**24
"""How many numbers are read at once."""


def check_routes(store: "TokenStore", plan: ShardingPlan) -> None:
    """Refuse rows of a run with numbers of experts that do not exist, or that no router chooses.

    Args:
        store: the tokens, with the column or not.
        plan: the plan, whose mixtures are those of the column.

    Raises:
        DataError: names the first document and token, the mixture and the number.
    """
    values = store.values.get(ROUTED_EXPERTS)
    if values is None:
        return
    tokens = max(1, AT_ONCE // values.shape[1])
    for begin in range(0, len(values), tokens):
        some = values[begin : begin + tokens]
        if (found := _wrong(some, plan) or _unlike_a_choice(some, plan)) is not None:
            token, said = begin + found[0], found[1]
            document = int(np.searchsorted(store.offsets, token, side="right")) - 1
            place = f"document {document + 1}, token {token - int(store.offsets[document]) + 1}"
            raise DataError("data.tensors", f"data.tensors.{ROUTED_EXPERTS}: {place}: {said}")


def check_batch(batch: Mapping[str, "torch.Tensor"], where: str, plan: ShardingPlan) -> None:
    """Refuse experts of a batch [B, S, width] of a loop of one's own, on the host.

    Raises:
        ConfigError: the width is not that of the mixtures of the plan, or an expert does not exist.
    """
    if ROUTED_EXPERTS not in batch:
        return
    values, mixtures = batch[ROUTED_EXPERTS], len(plan.experts)
    legal = f"whole numbers [rows, length, {mixtures} x the experts of a token]" if mixtures else "none, for a dense model"
    if not mixtures or values.ndim != 3 or values.shape[-1] % mixtures or values.is_floating_point():
        raise ConfigError("engine.batch", f"{where}: {ROUTED_EXPERTS}: {values.dtype} {list(values.shape)}; legal are {legal}")
    if (found := _wrong(values.flatten(0, 1).numpy(), plan)) is not None:
        row, token = divmod(found[0], values.shape[1])
        raise ConfigError("engine.batch", f"{where}: {ROUTED_EXPERTS}: row {row + 1}, token {token + 1}: {found[1]}")


def _wrong(values: npt.NDArray[Any], plan: ShardingPlan) -> tuple[int, str] | None:
    """Return the first token [tokens, width] with an expert that does not exist, and what it is; ``None``: there is none."""
    each = values.shape[1] // len(plan.experts)
    wrong = (values >= np.repeat([row.experts for row in plan.experts], each)) | (values < -1)
    if not wrong.any():
        return None
    token, place = (int(index) for index in np.argwhere(wrong)[0])
    row = plan.experts[place // each]
    legal = f"legal are 0 to {row.experts - 1}, and -1, which leaves the choice to the router"
    return token, f"expert {int(values[token, place])} of {row.module}; {legal}"


def _unlike_a_choice(values: npt.NDArray[Any], plan: ShardingPlan) -> tuple[int, str] | None:
    """Return the first token that goes to an expert twice, or of whose experts in a mixture only some are given."""
    ordered = np.sort(values.reshape(len(values), len(plan.experts), -1), axis=-1)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(axis=-1)
    partly = (ordered[..., 0] < 0) & (ordered[..., -1] >= 0)
    if not (wrong := twice | partly).any():
        return None
    token, mixture = (int(index) for index in np.argwhere(wrong)[0])
    each = ordered.shape[-1]
    given = values[token, mixture * each : (mixture + 1) * each].tolist()
    return token, f"experts {given} of {plan.experts[mixture].module}; legal are {each} different ones, or -1 for all"
