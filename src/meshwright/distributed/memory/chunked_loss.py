"""The loss of a language model in chunks of tokens: logits, loss and gradient of one chunk after another.

The model's own forward runs once. Its output head returns a tensor without values, :class:`DeferredLogits`, which notes what
the model does to its logits: a scale, a soft cap. The loss calls the head, and repeats what was noted, for each chunk. It
computes the gradient of a chunk at once, because the loss is a sum: what comes from above is one number, by which backward
multiplies. Values of single tokens, such as log-probabilities, get another gradient each. Backward computes their logits again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from meshwright.distributed.mesh import ParallelMesh
from meshwright.errors import UnsupportedError
from meshwright.plan.given.hidden_argument import value_of
from meshwright.plan.result.program import ChunkLoss

__all__ = ["LABELS", "VALUES", "DeferredLogits", "chunk_loss", "chunks_its_loss", "deferring"]

LABELS = "loss_labels"
"""Argument that the forward of a model takes in addition, once its loss is in chunks. With it, the forward returns the loss."""

VALUES = "token_values"
"""The same for values: (labels [rows, tokens, ...], function of logits and labels that returns [rows, tokens, values])."""

_CHUNKED: WeakSet[nn.Module] = WeakSet()
"""The models whose forward takes labels."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits, labels) -> their summed loss."""

_POINTWISE = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "truediv", "tanh", "clamp", "float", "double", "to", "type", "type_as",
    "contiguous", "neg", "sigmoid", "pow", "clone",
}  # fmt: skip
"""Functions that treat each logit alone, beside their forms in place and as operators of Python."""

_CONVERT = {"float", "double", "to", "type", "type_as", "contiguous"}
"""Those that return the tensor itself if nothing is to be done. Of another tensor they use dtype and device alone."""

_FACTS = {"__get__", "size", "dim", "ndimension", "numel", "is_floating_point", "get_device", "element_size", "__repr__"}
"""Functions that ask for shape, dtype or device, and not for values."""


class DeferredLogits(torch.Tensor):
    """Logits that were not computed: a tensor without values, which notes what is done to it.

    Args:
        hidden: [..., features], what the head was called with.
        words: number of words.
        head: computes logits of hidden states.
        steps: what is done to the logits, in order.
        dtype: dtype of the logits after the steps.
    """

    hidden: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    steps: list[Callable[[torch.Tensor], torch.Tensor]]

    @staticmethod
    def __new__(
        cls,
        hidden: torch.Tensor,
        words: int,
        head: Callable[[torch.Tensor], torch.Tensor],
        steps: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (),
        dtype: torch.dtype | None = None,
    ) -> "DeferredLogits":
        """Return logits without values."""
        shape = (*hidden.shape[:-1], words)
        logits: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype or hidden.dtype, device=hidden.device, requires_grad=False
        )
        logits.hidden, logits.head, logits.steps = hidden, head, list(steps)
        return logits

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of some hidden states."""
        logits = self.head(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is done, or refuse it."""
        name, kwargs = function.__name__, kwargs or {}
        plain = name.strip("_")
        place = next((index for index, item in enumerate(args) if isinstance(item, DeferredLogits)), None)
        if name in _FACTS or place is None:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        in_place = (name.endswith("_") and not name.startswith("__")) or (plain[:1] == "i" and plain[1:] in _POINTWISE)
        plain = next((own for own in (plain, plain[1:]) if own in _POINTWISE), "")
        beside = (item for index, item in enumerate((*args, *kwargs.values())) if index != place)
        others = [item for item in beside if isinstance(item, torch.Tensor) and plain not in _CONVERT]
        if not plain or any(item.numel() != 1 or item.requires_grad for item in others):
            raise UnsupportedError(
                "loss.chunks", f"parallel.loss_chunks: the model calls {name} on its logits; the legal value is 0"
            )
        logits: DeferredLogits = args[place]

        def step(values: torch.Tensor) -> torch.Tensor:
            return function(*args[:place], values, *args[place + 1 :], **kwargs)

        with torch._C.DisableTorchFunctionSubclass():
            dtype = step(torch.empty((1,) * logits.ndim, dtype=logits.dtype, device=logits.device)).dtype
        if in_place:
            logits.steps.append(step)
        if in_place or (plain in _CONVERT and dtype is logits.dtype and not kwargs.get("copy")):
            return logits  # as torch does, so that a later change in place reaches both
        return DeferredLogits(logits.hidden, logits.shape[-1], logits.head, [*logits.steps, step], dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse to compute with values that are not there."""
        raise UnsupportedError(
            "loss.chunks", f"parallel.loss_chunks: the model calls {function} on its logits; the legal value is 0"
        )


@contextmanager
def deferring(head: nn.Module, words: int) -> Iterator[None]:
    """Inside, a head returns :class:`DeferredLogits`."""
    before, own = head.forward, head.__dict__.get("forward")
    head.forward = lambda *args, **kwargs: DeferredLogits(value_of((0, "input"), args, kwargs, "head"), words, before)
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def chunk_loss(model: nn.Module, action: ChunkLoss, mesh: ParallelMesh) -> None:
    """Let the forward of a model take labels too, and return the summed loss then, which is computed in chunks."""
    head, chunks, forward = model.get_submodule(action.module), action.row.chunks, model.forward

    @wraps(forward)
    def with_loss(*args: Any, **kwargs: Any) -> Any:
        labels: tuple[torch.Tensor, Loss] | None = kwargs.pop(LABELS, None)
        values: tuple[torch.Tensor, Loss] | None = kwargs.pop(VALUES, None)
        asked = labels or values
        if asked is None:
            return forward(*args, **kwargs)
        with deferring(head, action.row.vocabulary):
            logits = forward(*args, **kwargs).logits
        if not isinstance(logits, DeferredLogits):
            raise UnsupportedError(
                "loss.chunks", f"parallel.loss_chunks: {action.module!r} did not give the logits; the legal value is 0"
            )
        parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
        return (_loss if values is None else _values)(logits, *asked, chunks, parameters)

    model.forward = with_loss
    _CHUNKED.add(model)


def chunks_its_loss(model: nn.Module) -> bool:
    """Return whether the forward of a model takes labels and returns a loss (:func:`chunk_loss`)."""
    return model in _CHUNKED


def _loss(
    logits: DeferredLogits, labels: torch.Tensor, loss: Loss, chunks: int, parameters: list[nn.Parameter]
) -> torch.Tensor:
    hidden = logits.hidden.flatten(0, -2).unsqueeze(0)
    return _ChunkedLoss.apply(
        hidden, labels.reshape(1, -1), logits.of, loss, min(chunks, hidden.shape[1]), torch.is_grad_enabled(), *parameters
    )


def _values(
    logits: DeferredLogits, labels: torch.Tensor, function: Loss, chunks: int, parameters: list[nn.Parameter]
) -> torch.Tensor:
    hidden = logits.hidden.flatten(0, -2).unsqueeze(0)
    chunks, flat = min(chunks, hidden.shape[1]), labels.flatten(0, 1).unsqueeze(0)
    found: torch.Tensor = _ChunkedValues.apply(hidden, flat, logits.of, function, chunks, *parameters)
    return found.view(*labels.shape[:2], -1)


def _check_leaves(value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    """Refuse a loss that depends on a trained parameter that is none of some inputs: it would get no gradient."""
    known, seen = set(map(id, inputs)), set()
    left: list[Any] = [value.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf: torch.Tensor | None = vars(type(node)).get("variable") and node.variable
        if leaf is not None and id(leaf) not in known:
            raise UnsupportedError(
                "loss.chunks",
                "parallel.loss_chunks: the output head uses a trained parameter that is not its own; the legal value is 0",
            )
        left += [following for following, _ in node.next_functions]


def _check_backward(*, first: bool) -> None:
    """Refuse a second backward, whose tensors are gone, and one that is to be differentiated again, which has no graph."""
    if not first or torch.is_grad_enabled():
        raise UnsupportedError(
            "loss.chunks",
            "parallel.loss_chunks: a loss in chunks has one backward, without create_graph; add up first what you want the "
            "gradient of, or set 0",
        )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        loss: Loss,
        chunks: int,
        trained: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        wanted = [trained and needed for needed in (context.needs_input_grad[0], *context.needs_input_grad[6:])]
        total: torch.Tensor | None = None
        gradients = _Gradients(logits_of, loss, parameters, wanted)
        for part, targets in zip(hidden.tensor_split(chunks, 1), labels.tensor_split(chunks, 1), strict=True):
            if not any(wanted):
                value = loss(logits_of(part), targets)
            else:
                value = gradients.add(part, targets)
            total = value if total is None else total + value
        assert total is not None
        context.gradients = [(gradients.of_hidden(), hidden.dtype)]
        context.gradients += [(value, parameter.dtype) for value, parameter in zip(gradients.sums, parameters, strict=True)]
        return total

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _check_backward(first=bool(context.gradients))
        # They go one after another, because the loss keeps this context until the backward of all layers is over.
        gradients, context.gradients = context.gradients[::-1], []
        found: list[torch.Tensor | None] = []
        while gradients:
            value, dtype = gradients.pop()
            # Rounded last: a sum over many tokens may be too large for the dtype of its parameter.
            found.append(None if value is None else value.mul_(gradient).to(dtype))
        return (found[0], None, None, None, None, None, *found[1:])


class _ChunkedValues(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        function: Loss,
        chunks: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        context.save_for_backward(hidden, labels, *parameters)
        context.logits_of, context.function, context.chunks = logits_of, function, chunks
        parts = zip(hidden.tensor_split(chunks, 1), labels.tensor_split(chunks, 1), strict=True)
        return torch.cat([function(logits_of(part), targets) for part, targets in parts], 1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _check_backward(first=context.logits_of is not None)
        hidden, labels, *parameters = context.saved_tensors
        wanted = [context.needs_input_grad[0], *context.needs_input_grad[5:]]
        gradients = _Gradients(context.logits_of, context.function, parameters, wanted)
        context.logits_of = context.function = None  # they hold hidden states, and this lives until all backward is over
        for chunk in zip(*(tensor.tensor_split(context.chunks, 1) for tensor in (hidden, labels, gradient)), strict=True):
            gradients.add(*chunk)
        rounded = [None if total is None else total.to(p.dtype) for total, p in zip(gradients.sums, parameters, strict=True)]
        return (gradients.of_hidden(), None, None, None, None, *rounded)


class _Gradients:
    """The gradients of chunks: those of hidden states one after another, those of the head's parameters added up.

    Args:
        logits_of: computes logits of hidden states.
        function: of logits and labels.
        parameters: of the head.
        wanted: whether the gradient of the hidden states is needed, and that of each parameter.

    Attributes:
        sums: of each parameter, in at least fp32; ``None``: it has none.
    """

    def __init__(
        self,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        function: Loss,
        parameters: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> None:
        self._logits_of, self._function = logits_of, function
        self._parameters, self._wanted = parameters, wanted
        self._hidden: list[torch.Tensor] = []
        self._checked = False
        self.sums: list[torch.Tensor | None] = [None] * len(parameters)

    def add(self, part: torch.Tensor, labels: torch.Tensor, above: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the function of a chunk and its gradients, and return its values, detached.

        Args:
            part: hidden states of the chunk.
            labels: its labels.
            above: the gradient of the values; ``None``: 1, of a scalar.
        """
        with torch.enable_grad():
            part = part.detach().requires_grad_(self._wanted[0])
            values = self._function(self._logits_of(part), labels)
        inputs = [tensor for tensor, needed in zip((part, *self._parameters), self._wanted, strict=True) if needed]
        if not self._checked:
            _check_leaves(values, inputs)
            self._checked = True
        found = iter(torch.autograd.grad(values, inputs, above, allow_unused=True))
        if self._wanted[0]:
            self._hidden.append(next(found))
        for index in (index for index, needed in enumerate(self._wanted[1:]) if needed):
            gradient, before = next(found), self.sums[index]
            if gradient is not None and before is None:  # a sum in bf16 would lose what bf16 cannot represent
                self.sums[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
            elif gradient is not None:
                before.add_(gradient)
        return values.detach()

    def of_hidden(self) -> torch.Tensor | None:
        """Return the gradient of all hidden states; ``None``: it is not needed."""
        return torch.cat(self._hidden, 1) if self._wanted[0] else None
