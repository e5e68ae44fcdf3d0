"""Checks that a model keeps packed documents apart. Some families ignore the positions that mark where a document begins."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError
from meshwright.models.objective import Batch

__all__ = ["check_boundaries"]


@torch.no_grad()
def check_boundaries(
    logits: Callable[[Batch], torch.Tensor],
    model: nn.Module,
    device: torch.device,
    rows: int,
    length: int,
    *,
    exact: bool = True,
    multiple: int = 1,
    share: Callable[[Batch], Batch] = dict,
    pairs: bool = False,
) -> None:
    """Refuse packing for a model in which one document of a sequence changes another.

    Each sequence holds two documents. When the first document is replaced by another, the logits of the second must stay the
    same to the last bit: masked positions have a weight of exactly zero, and all shapes are the same.

    Args:
        logits: returns the logits of a batch, in evaluation mode; every rank takes part.
        model: a causal language model of transformers, for its vocabulary and its name.
        device: device of the inputs.
        rows: number of sequences in a batch; some attention kernels support packing only with one.
        length: number of tokens in a sequence.
        exact: ``False`` for mixtures of experts: the shapes of their matrix products change when tokens are routed to other
            experts, so a small difference is allowed.
        multiple: sequence lengths must be multiples of it.
        share: returns this rank's part of each sequence of a batch.
        pairs: whether both documents of a pair must share a sequence.

    Raises:
        ConfigError: a document changes the next one; on all ranks. The error names what to change.
    """
    length = -(-min(length, 32) // multiple) * multiple
    half = length // 2
    vocabulary: int = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    ids = (torch.arange(rows * length, device=device).reshape(rows, length) * 7 + 3) % vocabulary
    positions = torch.cat([torch.arange(half), torch.arange(length - half)]).to(device).expand(rows, length)
    other = ids.clone()
    other[:, :half] = (ids[:, :half] + 5) % vocabulary
    second_half = (torch.arange(length, device=device) >= half).expand(rows, length)

    def second_logits(tokens: torch.Tensor) -> torch.Tensor:
        batch = share({"input_ids": tokens, "position_ids": positions, "second": second_half})
        own = batch.pop("second")[0].nonzero().flatten()
        outcome = logits(batch)
        return (outcome.to_local() if isinstance(outcome, DTensor) else outcome)[:, own].float()

    try:
        first, second = second_logits(ids), second_logits(other)
    except TypeError as error:
        raise ConfigError(
            "data.packing.documents", f"{_refusal(model, rows, pairs)} (it takes no position_ids: {error})"
        ) from error
    difference, largest = _largest(first - second), _largest(first)
    if difference > (0.0 if exact else 0.02 * largest):
        raise ConfigError(
            "data.packing.documents", f"{_refusal(model, rows, pairs)} (logits of the second differ by {difference:.2g})"
        )


def _largest(logits: torch.Tensor) -> float:
    """The largest absolute value of all entries of all ranks. A rank may have none of the positions, or words."""
    largest = logits.abs().max() if logits.numel() else logits.new_zeros(())
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _refusal(model: nn.Module, rows: int, pairs: bool) -> str:
    """The error message, with what may help; a smaller microbatch is proposed only if there are several rows."""
    smaller = ["training.microbatch_size=1"] if rows > 1 else []
    possible = [*([] if pairs else ["data.packing=pad"]), "another model.attn_implementation", *smaller]
    size = " and microbatch size" if smaller else ""
    what = "both answers of a pair share a sequence" if pairs else "data.packing=pack"
    return (
        f"{what}: in {class_name(model)}, with this attention{size}, a document changes the one packed after it; set "
        f"{_listed(possible)}"
    )


def _listed(possible: list[str]) -> str:
    *others, last = possible
    return f"{', '.join(others)}{',' if len(others) > 1 else ''} or {last}" if others else last
