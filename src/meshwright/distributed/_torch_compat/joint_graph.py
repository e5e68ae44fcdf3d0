"""What ``torch.compile`` keeps of a function for its backward. Imported only where a compiled step is traced.

The compiler makes one graph of forward and backward, and cuts it where the least has to be kept: not what is cheap to compute
again, and no operand of a product (``min_cut_rematerialization_partition`` in torch/_functorch/partitioners.py).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

__all__ = ["kept_by_compiler"]


class _KnownError(BaseException):
    """What was asked is known: nothing is compiled."""


def kept_by_compiler(run: Callable[..., Any], parameters: Sequence[torch.Tensor], *inputs: Any) -> int:
    """Return the bytes of storages that a compiled function keeps for its backward, without its parameters.

    Args:
        run: it is given the parameters as a list, and the inputs. It is not compiled, but its operators are traced.
        parameters: tensors that are there anyway.
        inputs: tensors, and what holds tensors.

    Raises:
        Exception: whatever the tracer raises if it cannot make a graph of the function.
    """
    found = 0

    def cut(joint: torch.fx.GraphModule, examples: Any, **more: Any) -> Any:
        nonlocal found
        given = [node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]  # a group of ranks is given, too
        there = {tensor.untyped_storage()._cdata for tensor in tensors[: len(parameters)]}
        forward, _ = min_cut_rematerialization_partition(joint, examples, **more)
        (outputs,) = (node for node in forward.graph.nodes if node.op == "output")
        values = [node.meta.get("val") for node in outputs.args[0][more["num_fwd_outputs"] :]]
        storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
        found = sum({storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in there}.values())
        raise _KnownError

    with suppress(_KnownError):
        made = aot_function(run, fw_compiler=nop, bw_compiler=nop, partition_fn=cut, decompositions=select_decomp_table())
        made(list(parameters), *inputs)
    return found  # 0: nothing has a gradient, so nothing is cut
