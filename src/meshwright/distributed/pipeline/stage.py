"""The backward of a pipeline stage, in place of torch's: its units reduce when their sync policies say, not once a schedule.

torch's own stage reduces at the end of every ``schedule.step()`` if its module is a unit itself, and in every microbatch if it
is not. Its split backward looks for the parameters that are registered when it runs, and those of units that were resharded
are not in the graph: they get no gradient, often without an error. Here it gets those that are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.distributed import _torch_compat
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.errors import UnsupportedError

__all__ = ["NoGradient", "check_sent", "explained_half", "scale_gradients", "stage_backward"]

_KINDS = ("full", "input", "weight")


def stage_backward(
    stage: Any, sync: GradSync | None, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool
) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
    """The backward of one microbatch, in place of the stage's ``backward_maybe_with_nosync``.

    Args:
        stage: of ``torch.distributed.pipelining``.
        sync: the machine of the stage's module; ``None``: torch's own backward.
        backward_type: ``full``; or ``input`` and later ``weight``, the halves of a split backward.
        bwd_kwargs: ``stage_output``, ``output_grads`` and ``input_values``, or for ``weight`` ``param_groups``.
        last_backward: whether it is the last of this schedule on this stage.

    Returns:
        Gradients of the inputs, and for ``input`` what ``weight`` goes on from.

    Raises:
        RuntimeError: another kind of backward.
    """
    if backward_type not in _KINDS:
        raise RuntimeError(f"Unknown backward type: {backward_type}")
    if sync is None:
        own_gradients: Any = _torch_compat.own_backward_of_stage(backward_type, stage, bwd_kwargs, last=last_backward)
        return own_gradients
    last = last_backward and sync.ends_step
    sync.begin_backward(last=last, splits=backward_type != "full")
    gradients, groups = _torch_compat.backward_of_stage(backward_type, stage, bwd_kwargs)
    if last or backward_type == "weight":
        sync.end_backward(last=last)
    return gradients, groups


@contextmanager
def explained_half(stage: int) -> Iterator[None]:
    """Say what the half of backward for weights lacks, where torch's error does not."""
    try:
        yield
    except RuntimeError as error:
        if "graph a second time" in str(error):
            raise UnsupportedError(
                "pp.split_backward",
                f"stage {stage}: the half of backward for weights needs what the half for inputs has freed: a weight is used "
                "on what others are computed from; set a schedule that does not split backward",
            ) from error
        if "not allocated" not in str(error):
            raise
        raise UnsupportedError(
            "pp.split_backward",
            f"stage {stage}: an operator reads a weight in the half of backward for weights, when it is not gathered; set "
            "parallel.sync=defer, or a schedule that does not split backward",
        ) from error


def scale_gradients(stage: Any, grad_scale_factor: int) -> None:
    """Scale the gradients of the stage; it replaces the stage's ``perform_reduce_grad``, and does not reduce.

    It need not: either :func:`stage_backward` has reduced already, or the optimizer step is not over.
    """
    if grad_scale_factor != 1:
        stage.scale_grads(grad_scale_factor)


class NoGradient(torch.autograd.Function):
    """Returns the first tensor. The gradient of the second one is zero, and costs nothing."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        context.zeros = received.detach().new_zeros(()).expand(received.shape)
        context.mark_dirty(output)  # a view could not be detached in place, as torch does after a half of backward
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, context.zeros.contiguous()


def check_sent(sent: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> None:
    """Refuse to send what the receiving rank does not expect: it would end without a word."""
    if tuple(sent.shape) != tuple(shape) or sent.dtype != dtype:
        raise UnsupportedError(
            "pp.stage_call", f"{name}: sends {sent.dtype} {tuple(sent.shape)}, and the plan has {dtype} {tuple(shape)}"
        )
