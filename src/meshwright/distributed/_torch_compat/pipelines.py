"""The schedules of torch's pipelines, and the backwards of their stages. They are imported when a pipeline uses them."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.distributed._torch_compat.unit_state import param_groups
from meshwright.errors import UnsupportedError
from meshwright.plan.axes.pipeline.schedule_turns import TORCH_SCHEDULES
from meshwright.plan.given.closed_choices import PipelineSchedule

__all__ = ["backward_of_stage", "detachable", "make_schedule", "own_backward_of_stage", "run_schedule"]


def make_schedule(chosen: PipelineSchedule, stages: Sequence[Any], microbatches: int) -> Any:
    """Make a schedule over this rank's stages. The connections between ranks are made now, not in the first step.

    Raises:
        UnsupportedError: this torch does not have the schedule.
    """
    from torch.distributed.pipelining import schedules

    if (kind := getattr(schedules, TORCH_SCHEDULES[chosen], None)) is None:
        raise UnsupportedError("torch.version", f"torch {torch.__version__}: there is no {TORCH_SCHEDULES[chosen]}")
    if chosen.splits:
        _check_halves()
    own = stages[0] if chosen.single else stages
    # The last stage computes the loss itself, and its tokens are counted over the whole step.
    schedule = kind(own, microbatches, loss_fn=lambda loss, target: loss, scale_grads=False)
    initialize = schedule._initialize_stage if chosen.single else schedule._initialize_stages
    initialize((), {})
    return schedule


def run_schedule(schedule: Any, keywords: Sequence[dict[str, Any]]) -> None:
    """Run microbatches through a schedule.

    Args:
        schedule: from :func:`make_schedule`.
        keywords: for each microbatch, what the module of every stage is called with beside the hidden state.
    """
    count = len(keywords)
    if "arg_mbs" in inspect.signature(schedule.step).parameters:  # torch 2.14
        schedule.step(arg_mbs=[()] * count, kwarg_mbs=list(keywords), target_mbs=[None] * count, return_outputs=False)
    else:  # before it, the public step() cuts one large batch into microbatches
        schedule._step_microbatches([()] * count, list(keywords), [None] * count, None, return_outputs=False)


def backward_of_stage(kind: str, stage: Any, arguments: dict[str, Any]) -> Any:
    """Run a backward of a pipeline stage, and return (gradients of inputs, groups of parameters for ``weight``).

    Args:
        kind: ``full``, ``input`` or ``weight``.
        stage: of torch's pipelining.
        arguments: the arguments that the schedule passes to ``backward_maybe_with_nosync``.
    """
    _backward, _ = _pipelining()
    if kind != "full":
        _check_halves()
    if kind == "weight":
        return _backward.stage_backward_weight(_leaves(stage.submod), arguments["param_groups"]), None
    values = (arguments["stage_output"], arguments["output_grads"], arguments["input_values"])
    if kind == "input":
        return _backward.stage_backward_input(*values, _leaves(stage.submod))
    return _backward.stage_backward(*values), None


def detachable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that is no view: torch detaches what a stage sends in place, which a view does not allow."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor._is_view() else tensor


def _leaves(model: nn.Module) -> Iterator[nn.Parameter]:
    """The tensors that autograd knows as parameters. Those of a unit are its unsharded ones, also while it is resharded.

    A resharded unit registers its sharded parameters, which no forward has seen. Its unsharded ones keep their place in the
    graph: only their storage is freed, and the gradient of a weight does not need the weight.
    """
    units = [unit for module in model.modules() for group in param_groups(module) for unit in group.fsdp_params]
    registered = {id(unit.sharded_param) for unit in units} | {id(leaf) for leaf in map(_unsharded, units)}
    yield from (leaf for leaf in map(_unsharded, units) if leaf is not None)
    yield from (parameter for parameter in model.parameters() if id(parameter) not in registered)


def _unsharded(unit: Any) -> nn.Parameter | None:
    """The unsharded parameter; ``None``: the unit has never been gathered."""
    leaf: nn.Parameter | None = getattr(unit, "_unsharded_param", None)
    return leaf


def _check_halves() -> None:
    """Refuse a torch whose halves of backward are wrong: a weight that is used twice in a stage gets a wrong gradient there.

    Raises:
        UnsupportedError: names the schedules that do not split backward.
    """
    if not hasattr(_pipelining()[0], "_autograd_grad_for_inputs"):  # which came with the mend, after torch 2.11
        raise UnsupportedError(
            "pp.split_backward",
            f"torch {torch.__version__}: its backward in halves gives wrong gradients where a weight is used twice; legal "
            "schedules are gpipe, 1f1b and interleaved_1f1b, or take torch 2.13",
        )


def _pipelining() -> tuple[Any, Any]:
    """torch's module of stage backwards, and its base class of stages. :func:`check` does not require them."""
    try:
        from torch.distributed.pipelining import _backward
        from torch.distributed.pipelining.stage import _PipelineStageBase
    except ImportError as error:
        raise UnsupportedError("torch.version", f"torch {torch.__version__}: pipelining is not as it was ({error})") from error
    return _backward, _PipelineStageBase


def own_backward_of_stage(kind: str, stage: Any, arguments: dict[str, Any], *, last: bool) -> Any:
    """torch's own ``backward_maybe_with_nosync``."""
    _, stage_type = _pipelining()
    return stage_type.backward_maybe_with_nosync(stage, kind, arguments, last_backward=last)
