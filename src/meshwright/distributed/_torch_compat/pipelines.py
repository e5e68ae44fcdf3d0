"""The backwards of torch's pipeline stages. They are imported when a pipeline uses them."""

from typing import Any

import torch

from meshwright.errors import UnsupportedError

__all__ = ["backward_of_stage", "own_backward_of_stage"]


def backward_of_stage(kind: str, stage: Any, arguments: dict[str, Any]) -> Any:
    """Run a backward of a pipeline stage, and return (gradients of inputs, groups of parameters for ``weight``).

    Args:
        kind: ``full``, ``input`` or ``weight``.
        stage: of torch's pipelining.
        arguments: the arguments that the schedule passes to ``backward_maybe_with_nosync``.
    """
    _backward, _ = _pipelining()
    if kind == "weight":
        return _backward.stage_backward_weight(stage.submod.parameters(), arguments["param_groups"]), None
    values = (arguments["stage_output"], arguments["output_grads"], arguments["input_values"])
    if kind == "input":
        return _backward.stage_backward_input(*values, stage.submod.parameters())
    return _backward.stage_backward(*values), None


def _pipelining() -> tuple[Any, Any]:
    """torch's module of stage backwards, and its base class of stages. :func:`check` does not require them."""
    try:
        from torch.distributed.pipelining import _backward
        from torch.distributed.pipelining.stage import _PipelineStageBase
    except ImportError as error:
        raise UnsupportedError(f"torch {torch.__version__}: pipelining is not as it was ({error})") from error
    return _backward, _PipelineStageBase


def own_backward_of_stage(kind: str, stage: Any, arguments: dict[str, Any], *, last: bool) -> Any:
    """torch's own ``backward_maybe_with_nosync``."""
    _, stage_type = _pipelining()
    return stage_type.backward_maybe_with_nosync(stage, kind, arguments, last_backward=last)
