"""Tensors without memory, and a process group without processes. Imported only where a step is traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.distributed._torch_compat.repeated_operators import RepeatedOperators, Results

__all__ = ["FakeStore", "FakeTensorMode", "FakeTensors", "Watch", "forget_meshes", "without_propagation"]


class Watch(Protocol):
    """A dispatch mode that looks away where ``paused`` says so."""

    paused: bool


@contextmanager
def without_propagation(*watching: Watch) -> Iterator[None]:
    """Inside, modes see nothing of what DTensor computes to know the shapes of a result.

    Under fake tensors, torch 2.11 does so for each operator with tensors of the whole shape, whenever it runs.
    """
    find = ShardingPropagator.propagate_op_sharding_non_cached

    def unwatched(self: Any, schema: Any) -> Any:
        before = [mode.paused for mode in watching]
        for mode in watching:
            mode.paused = True
        try:
            return find(self, schema)
        finally:
            for mode, paused in zip(watching, before, strict=True):
                mode.paused = paused

    ShardingPropagator.propagate_op_sharding_non_cached = unwatched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShardingPropagator.propagate_op_sharding_non_cached = find  # type: ignore[method-assign]


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

    _results: ClassVar[Results] = {}
    """Of all traces of this process."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._operators = RepeatedOperators((FakeTensor,), partial(FakeTensor, self), self._results)

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
        find = super().dispatch
        return self._operators.run(func, args, kwargs or {}, lambda *args, **kwargs: find(func, types, args, kwargs))
