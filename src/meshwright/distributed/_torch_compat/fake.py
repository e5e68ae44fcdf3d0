"""Tensors without memory, and a process group without processes. Imported only where a step is traced."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "FakeTensorMode", "FakeTensors", "forget_meshes"]


def forget_meshes() -> None:
    """Clear what DTensor remembers of operators.

    It remembers results by meshes that are equal, and meshes of equal ranks are equal, whichever rank this process was: a rank
    of another world, or one that is forked from this process, would take its place on the mesh from there.
    """
    debug._clear_sharding_prop_cache()


class FakeTensors(FakeTensorMode):
    """Fake tensors for a step.

    Grouped products have any dtype: torch's shape function knows bf16 alone, its CPU kernel fp32 too. A question whether
    something holds, such as whether all labels are legal, is answered yes.
    """

    @property
    def avoid_device_init(self) -> bool:
        """Whether to act as if there was a GPU; a step is traced on the CPU.

        With torch for CUDA on a machine without a GPU, torch otherwise adds a device with which backward has threads of its
        own, after which no process can be forked from this one that runs a backward.
        """
        return False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on shapes."""
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            half = [item.to(torch.bfloat16) for item in args[:2]]
            with self:
                made: Any = super().dispatch(func, types, (*half, *args[2:]), kwargs)
                return made.to(args[0].dtype)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True
        return super().dispatch(func, types, args, kwargs)
