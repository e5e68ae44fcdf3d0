"""What a model is trained to do: how a batch is prepared, which losses it gives, and what each is divided by.

A loss has one or more *terms*. Each is a sum over its own targets. Every term is divided by the number of its targets in the
whole optimizer step, over all ranks and microbatches; then the terms are added with their weights.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn

from meshwright.errors import Problems
from meshwright.models.token_loss import IGNORE, count_tokens, forward_arguments, forward_loss
from meshwright.plan.given.closed_choices import ActivationCheckpointing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PRECOMPUTED", "ROUTED", "Batch", "Column", "Gathered", "NextToken", "Objective", "RunFacts"]

Batch = dict[str, torch.Tensor]

PRECOMPUTED: Literal["precomputed"] = "precomputed"
"""Value of :attr:`Objective.reference`."""

ROUTED = "routed"
"""Key of what :meth:`Objective.routed` returned for the whole sequences, in a batch that has a part of each."""


@dataclass(frozen=True)
class Column:
    """A column of the data, which batches have by its name.

    Attributes:
        per: ``token``: [B, S, ...], beside the label that it belongs to, 0 where there is none. ``input``: [B, S, ...], beside
            ``input_ids``. ``document``: [B, D, ...], as
            from :func:`~meshwright.objectives.given.per_document`; in :meth:`Objective.training` and ``held_out`` [B, S, ...],
            at each token the value of its document.
        width: size of the last dimension; ``None``: there is none.
        dtype: ``float32`` or ``int64``.
    """

    per: str
    width: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class RunFacts:
    """What an objective needs to know of a run, besides its own options.

    Attributes:
        seed: seed of the run.
        sequence_length: number of tokens in a sequence.
        packing: ``data.packing``.
        output_dtype: dtype that the model's outputs are cast to; ``None``: no cast.
        compiled: whether layers are compiled.
        recomputed: the modes of activation checkpointing of all layers.
        columns: the columns of the data, by their names in a batch.
        adapter: whether an adapter is trained.
        begins_without: whether the model without its adapter is the model as the run begins, and stays it: the adapter is a new
            one, and no module is trained whole beside it.
    """

    seed: int
    sequence_length: int
    packing: str
    output_dtype: str | None
    compiled: bool
    recomputed: Collection[ActivationCheckpointing]
    columns: Mapping[str, Column] = field(default_factory=dict)
    adapter: bool = False
    begins_without: bool = True


@dataclass(frozen=True)
class Gathered:
    """Values that an objective gathers over data ranks for a batch: their number is a product of powers of its sizes.

    Attributes:
        share: what the product is multiplied by.
        powers: the powers of rows B, of the length S of a row (of this rank of `cp`) and of documents D in a row.
        widths: bytes of a number by the bytes of a number in which the model computes: 2, 4 and 8.
        reduced: whether the values have a gradient, which is summed over data ranks.
    """

    share: float
    powers: tuple[int, int, int]
    widths: Mapping[int, int]
    reduced: bool

    def size(self, rows: int, length: int, documents: int, width: int) -> int:
        """Return the bytes of the values of one rank."""
        sizes = zip((rows, length, documents), self.powers, strict=True)
        return round(self.share * math.prod(size**power for size, power in sizes)) * self.widths[width]


class Objective(ABC):
    """What a model is trained to do. An objective has no state: the same batch gives the same loss.

    One of the user's own needs :meth:`sums`, and :meth:`counts` where the loss is not divided by the number of labels. What it
    computes with is given: :mod:`meshwright.objectives.given`. See docs/own-parts.md.

    Attributes:
        name: value of ``training.objective``.
        purpose: what a model with this objective is trained to do, in words.
        section: section of the configuration that has its options; empty: it has none.
        terms: names of the terms of the loss; by default one, with the name of the objective.
        weights: weights of the terms; by default all are 1.
        unit: what the first term is divided by, for a line about an evaluation: ``token``, ``document`` or ``pair``.
        nats: whether the loss is a negative log-probability in nats, for the same line.
        perplexity: whether the exponential of the loss is a perplexity.
        uncounted: why :meth:`routed` does not say which tokens count, as a message if a balance loss is asked for; empty: it
            does.
        pipelines: whether it calls the model once for a batch, as :mod:`~meshwright.objectives.given` does, so that the stages
            of a pipeline can share the call; ``None``: this is tried when the run is planned.
        chunks: whether its loss can be computed in chunks of tokens; ``None``: this is tried.
        shares: whether its sums over parts of a sequence add up to that of the whole, so that the ranks of `cp` can share it;
            ``None``: this is tried.
        packs: whether several documents in a sequence give the same sums as alone; ``None``: this is tried.
        documents: whether batches say which document each token belongs to, as
            :func:`~meshwright.objectives.given.per_document` needs.
        gathers: whether it gathers values of all data ranks (:func:`~meshwright.objectives.given.gather`).
        reference: whether ``reference_log_probs`` [B, S] are computed before each step, by the model with its adapters off;
            not if they are a column of the data. :data:`PRECOMPUTED`: they are computed once, before the first step, by the
            model as the run begins, and kept beside the tokens.
        reads: names of the columns of the data that it reads, as it was tried.
        whole_logits: whether it needs the logits of all words on each rank of `tp`.
        without_head: whether it uses the hidden states alone, so that the output head gets no gradient, as it was tried.
        collectives: how often sums gather values, reduce their gradients, and sum over documents for a batch, as it was tried.
        gathered: what each of these gathers has, as it was tried; ``None``: no product of the sizes of a batch says it.
        frozen: patterns of parameters that are not trained, in addition to those of ``parallel.freeze``.
        metric_names: names of what :meth:`metrics` returns, as it was tried.
        wanted: names of values of tokens that one forward computes, as they were asked for when it was tried.
        canvas_sizes: number of columns of the canvas of a sequence, at most, and of tokens of the sequence, for objectives that
            have a second sequence beside each; ``None``: it has none.
        added: what :meth:`modules` returned.
        module_runs: how often each of these is called for a batch, and how often of these with gradient, as it was tried.
    """

    name: str
    purpose: str
    section = ""
    terms: tuple[str, ...]
    weights: tuple[float, ...]
    unit = "token"
    nats = True
    perplexity = False
    uncounted = ""
    pipelines: bool | None = None
    chunks: bool | None = None
    shares: bool | None = None
    packs: bool | None = None
    documents = False
    gathers = False
    reference: "bool | Literal['precomputed']" = False
    canvas_sizes: tuple[int, int] | None = None
    whole_logits = False
    without_head = False
    collectives = (0, 0, 0)
    gathered: tuple[Gathered, ...] | None = ()
    frozen: tuple[str, ...] = ()
    metric_names: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()
    added: Mapping[str, nn.Module] = MappingProxyType({})
    module_runs: Mapping[str, tuple[int, int]] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give what a subclass leaves out its default."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "name" not in own:
            cls.name = re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", cls.__name__).lower()
        if not hasattr(cls, "purpose"):
            cls.purpose = cls.name.replace("_", " ")
        if not hasattr(cls, "terms"):
            cls.terms = (cls.name,)
        if "weights" not in own and ("terms" in own or not hasattr(cls, "weights")):
            cls.weights = (1.0,) * len(cls.terms)

    @classmethod
    def problems(cls, model: "PreTrainedModel", options: Any, run: RunFacts) -> Problems:
        """Return why the objective is impossible for a run or its model, one line for each reason.

        Args:
            model: the model of the run, on any device.
            options: the section of this objective; ``None`` if it has none.
            run: further facts of the run.
        """
        return Problems()

    @classmethod
    def of(cls, model: "PreTrainedModel", options: Any, run: RunFacts) -> Self:
        """Return the objective of a run that has no :meth:`problems`. The arguments are the same as there.

        One of the user's is made from its arguments in the configuration instead.
        """
        return cls()

    def begin(self, model: "PreTrainedModel", run: RunFacts) -> None:  # noqa: B027 - optional
        """Read what is needed of a run and of its model, which is on any device, before anything else is called."""

    def modules(self, model: "PreTrainedModel") -> Mapping[str, nn.Module]:
        """Return modules that are added to the model, such as a head, by name; none by default.

        It is called once, after :meth:`begin`, and what it makes is on the meta device. Each module with parameters of its own
        has ``reset_parameters``, which gives them their first values; no parameter is a scalar, and there are no buffers.
        :func:`~meshwright.objectives.given.module` returns them where they are called.

        Args:
            model: the model of the run, on the meta device; its config has sizes.
        """
        return {}

    def attach(self, model: nn.Module) -> None:  # noqa: B027 - optional
        """Prepare a parallelized model for :meth:`sums`."""

    def stage_arguments(self, batch: Batch) -> dict[str, Any]:
        """Return what the stages of a pipeline are called with, but the last one, which :meth:`sums` calls."""
        return forward_arguments(batch)

    def training(self, batches: list[Batch], numbers: Sequence[Sequence[int]]) -> list[Batch]:
        """Prepare the microbatches of a step, on the host.

        Args:
            batches: the microbatches of this rank.
            numbers: for each microbatch, the numbers of its sequences in the stream of all sequences of the run.
        """
        return batches

    def held_out(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Prepare a batch of held-out sequences, the same in every evaluation.

        Args:
            batch: the batch.
            numbers: the numbers of its sequences among all that are held out.
        """
        return batch

    def counts(self, batches: list[Batch]) -> list[int]:
        """Return the number of targets of each term in some prepared batches, on the host; by default that of valid labels."""
        return [count_tokens(batches)] * len(self.terms)

    def before(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return what is added to a batch of training: values of the model as it is before the step, without gradient.

        It is called for each microbatch, in evaluation mode. If it is overridden, each step has one more forward.
        """
        return {}

    def baselines(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return means over the whole step that :meth:`sums` needs: name to a sum over this batch, and to its count.

        It is called for each microbatch before the step, after :meth:`before`, in evaluation mode and without gradient. They
        are added over microbatches and data ranks, and each batch has the mean [] by its name. If it is overridden, each step
        has one more forward.
        """
        return {}

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return further means to report: name to a sum over this batch, and to what the sums of a step are divided by.

        Both are scalars on the device. They are added over microbatches and ranks. The names are the same for every batch.
        """
        return {}

    def summary(self, sums: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return what is reported of the metrics: name to a scalar; by default each sum divided by its count.

        Args:
            sums: what :meth:`metrics` returned, added up over a step or an evaluation, and over all ranks; fp64.
        """
        return {name: total / count.clamp(min=1) for name, (total, count) in sums.items()}

    def routed(self, batch: Batch) -> torch.Tensor | None:
        """Return which tokens count for the balance of experts, bool [B, S]; ``None``: all that routers get, in any pass."""
        return None

    @abstractmethod
    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return each term, summed over its targets, in nats."""

    def combine(self, sums: Sequence[torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
        """Return the loss times ``counts[0]``.

        Args:
            sums: the terms, summed over some of a step's tokens.
            counts: [terms], number of targets of each term in the whole step.
        """
        total = sums[0]
        for index, weight in enumerate(self.weights[1:], start=1):
            share = (counts[0].clamp(min=1).double() / counts[index].clamp(min=1)).to(total.dtype)
            total = total + weight * share * sums[index]
        return total


class NextToken(Objective):
    """Predict the next token: the loss of a causal language model."""

    name = "next_token"
    purpose = "say the next token"
    terms = ("next_token",)
    weights = (1.0,)
    perplexity = True
    pipelines = chunks = shares = packs = True

    def routed(self, batch: Batch) -> torch.Tensor:
        """Return the tokens up to the last label of their sequence. Later ones have no effect on the loss, like padding."""
        if ROUTED in batch:
            return batch[ROUTED]
        return (batch["labels"] != IGNORE).flip(1).cumsum(1).flip(1) > 0

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the cross-entropy of the next token."""
        return (forward_loss(model, batch),)
