"""torch.compile, module by module."""

import torch
from torch import nn

from meshwright.distributed.mesh import ParallelMesh
from meshwright.plan.result.program import Compile

__all__ = ["compile_module"]


def compile_module(model: nn.Module, action: Compile, mesh: ParallelMesh) -> None:
    """Compile a module: its forward is replaced on its instance."""
    module = model.get_submodule(action.module)
    module.forward = torch.compile(module.forward, backend=action.backend)
