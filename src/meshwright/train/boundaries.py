"""Whether a model keeps packed documents apart. Some families ignore the positions that tell where a document begins."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.names import class_name
from meshwright.errors import ConfigError
from meshwright.models.loss import forward_logits

__all__ = ["check_boundaries"]


@torch.no_grad()
def check_boundaries(
    model: nn.Module, device: torch.device, rows: int, length: int, *, exact: bool = True, multiple: int = 1
) -> None:
    """Refuse packing for a model in which one document of a sequence changes another.

    Two documents share each sequence. Another first document must leave the logits of the second as they are, to the last
    bit: what is masked has a weight of exactly zero, and all shapes are the same.

    Args:
        model: a causal language model of transformers; every rank of its mesh takes part. It is left in its mode.
        device: of its inputs.
        rows: sequences in a batch; some attention kernels take packing only with one.
        length: tokens in a sequence.
        exact: ``False`` for mixtures of experts, whose matrix products take other shapes when tokens are routed elsewhere.
        multiple: lengths that the model takes are multiples of it.

    Raises:
        ConfigError: on all ranks alike; names what to change.
    """
    length = -(-min(length, 32) // multiple) * multiple
    half = length // 2
    vocabulary: int = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    ids = (torch.arange(rows * length, device=device).reshape(rows, length) * 7 + 3) % vocabulary
    positions = torch.cat([torch.arange(half), torch.arange(length - half)]).to(device).expand(rows, length)
    other = ids.clone()
    other[:, :half] = (ids[:, :half] + 5) % vocabulary
    training = model.training
    model.eval()
    try:
        first, second = (
            forward_logits(model, {"input_ids": tokens, "position_ids": positions})[:, half:].float() for tokens in (ids, other)
        )
    except TypeError as error:
        raise ConfigError(f"{_refusal(model, rows)} (it takes no position_ids: {error})") from error
    finally:
        model.train(training)
    difference = _largest(first - second)
    if difference > (0.0 if exact else 0.02 * _largest(first)):
        raise ConfigError(f"{_refusal(model, rows)} (logits of the second differ by {difference:.2g})")


def _largest(logits: torch.Tensor) -> float:
    """Of all entries, on all ranks alike."""
    found = logits.abs().max()
    return float(found.full_tensor() if isinstance(found, DTensor) else found)


def _refusal(model: nn.Module, rows: int) -> str:
    """What is wrong, and what may help: smaller batches only where there are any."""
    smaller = ["training.microbatch_size=1"] if rows > 1 else []
    *others, last = ["data.packing=pad", "another model.attn_implementation", *smaller]
    size, comma = (" and microbatch size", ",") if smaller else ("", "")
    return (
        f"data.packing=pack: in {class_name(model)}, with this attention{size}, a document changes the one packed after it; "
        f"set {', '.join(others)}{comma} or {last}"
    )
