"""Activation checkpointing of one layer, outside of a plan."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from meshwright.distributed.memory.activation_checkpointing import recompute
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.inspection import inspect_model
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.memory.recompute import parts_of_layer, recompute_layer

__all__ = ["checkpoint_layer", "parts_of"]

NO_MESH: Any = None
SPEC = ParallelSpec("layer", layers=())


def checkpoint_layer(
    layer: nn.Module,
    mode: ActivationCheckpointing,
    operators: Sequence[str] = (),
    routing: Collection[nn.Module] = (),
) -> None:
    """Recompute a layer as a plan would have it; ``routing``: modules that choose experts or hold them."""
    names = [name for name, module in layer.named_modules() if any(module is other for other in routing)]
    for action in recompute_layer(inspect_model(SPEC, layer), "", mode, tuple(operators), names):
        recompute(layer, action, NO_MESH)


def parts_of(layer: nn.Module) -> list[nn.Module]:
    """What ``submodule`` recomputes one by one."""
    return [layer.get_submodule(name) for name in parts_of_layer(inspect_model(SPEC, layer), "")]
