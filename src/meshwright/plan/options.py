"""ParallelOptions: the choices of a run that are neither sizes (layout) nor facts of the model (spec)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from meshwright.errors import PlanError

__all__ = ["DTYPES", "ActivationCheckpointing", "GradientReduction", "ParallelOptions", "SyncPolicy"]

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Legal dtypes of parameters, reductions and outputs, with their size in bytes."""


class SyncPolicy(StrEnum):
    """What a unit does between the microbatches of an optimizer step."""

    DEFER = "defer"
    """Gather once, reduce once. The gathered parameters and the unsharded gradients stay through the step."""

    RESHARD_EACH = "reshard_each"
    """Gather in every microbatch, reduce once. Only the unsharded gradients stay through the step."""

    REDUCE_EACH = "reduce_each"
    """Gather and reduce in every microbatch. Nothing unsharded stays: the least memory, the most traffic."""


class ActivationCheckpointing(StrEnum):
    """Which activations of a layer are recomputed in backward instead of kept."""

    NONE = "none"
    """Keep all."""

    FULL = "full"
    """Keep the layer's input, recompute the rest in one go: the least memory, a second forward of the whole layer."""

    SUBMODULE = "submodule"
    """Keep the inputs of its attention, its MLP and its norms, and recompute these one by one: more is kept between them, and
    less is held at once in backward."""

    SELECTIVE = "selective"
    """Keep the layer's input and the results of the operators that are dear to repeat: attention, communication, the routing of
    experts and every second matrix product. Recompute the cheap rest."""


class GradientReduction(StrEnum):
    """How the gradients of the data ranks become one."""

    SUM = "sum"
    """Add them. The loss is divided by the number of valid tokens of the whole optimizer step, so no factor is left."""

    MEAN = "mean"
    """Average over data ranks: torch's default, for loops whose loss is a mean on each rank."""


@dataclass(frozen=True)
class ParallelOptions:
    """Choices that the resolver turns into rows of the plan.

    Args:
        param_dtype: dtype of gathered parameters and of compute; ``None``: that of the stored parameters.
        reduce_dtype: dtype of gradient reduction and accumulation; ``None``: ``param_dtype``.
        output_dtype: dtype that the root casts its floating outputs to; ``None``: no cast.
        reshard_after_forward: ``None``: the container rule (all layers but the last; not the root); else for all units.
        sync: default policy of all units. ``None``: ``defer`` if all that it keeps unsharded through a step (parameters,
            and with several microbatches gradients) is at most ``sync_budget`` bytes; otherwise ``reduce_each`` for experts,
            and for the rest too if that does not fit either.
        sync_budget: bytes, see ``sync``.
        sync_units: pattern of unit names to policy; a later entry wins over an earlier one.
        all_reduce_once: with ``reduce_each`` and replicas, all-reduce across them only in the last microbatch.
        microbatches: forward-backward passes in an optimizer step; only prices depend on it.
        tokens: of a microbatch, on a data rank; only the bytes of activations depend on it. ``None``: not known.
        experts_of_token: experts that a token goes to in each mixture; for the same.
        prefetch_forward: how many layers ahead all-gathers are started in forward; ``None``: as FSDP2 does by itself.
        prefetch_backward: the same in backward; 0: none.
        cpu_offload: keep sharded parameters, gradients and optimizer state in host memory.
        activation_checkpointing: what is recomputed in backward.
        activation_checkpointing_layers: pattern of layer names to mode; a later entry wins over an earlier one.
        activation_checkpointing_save: the operators whose results ``selective`` keeps instead of its own choice, such as
            ``aten.mm.default``.
        compile: ``torch.compile`` each layer.
        compile_backend: backend for it.
        freeze: patterns of parameter names that are not trained.
        no_decay: patterns of parameter names that are not decayed, though they are matrices.
        gradient_reduction: add or average over data ranks.
        twin_units: of a stack that runs twice, where two layers share parameters, make a unit of each (it gathers and reduces
            in each pass, and holds one layer's gradients) instead of one of both (one reduction; the gradients of the whole
            stack wait for it). ``None``: one of both where these are at most ``sync_budget`` bytes.
        sequence_parallel: with ``tp``, hold each rank's part of the sequence between attention and MLP.
        loss_parallel: with ``tp``, leave logits sharded over the vocabulary (a DTensor); ``None``: where the model's head is
            known, for the loss of :mod:`~meshwright.distributed.loss_parallel`.
        tp_plan: tensor parallel styles that win over all others: pattern of module names to style, or the import path of such
            a dict or of a function that returns one.
    """

    param_dtype: str | None = "bfloat16"
    reduce_dtype: str | None = "float32"
    output_dtype: str | None = None
    reshard_after_forward: bool | None = None
    sync: SyncPolicy | None = None
    sync_budget: int = 8 * 2**30
    sync_units: Mapping[str, SyncPolicy] = field(default_factory=dict)
    all_reduce_once: bool = True
    microbatches: int = 1
    tokens: int | None = None
    experts_of_token: int | None = None
    prefetch_forward: int | None = None
    prefetch_backward: int | None = None
    cpu_offload: bool = False
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    activation_checkpointing_layers: Mapping[str, ActivationCheckpointing] = field(default_factory=dict)
    activation_checkpointing_save: tuple[str, ...] = ()
    compile: bool = False
    compile_backend: str = "inductor"
    freeze: tuple[str, ...] = ()
    no_decay: tuple[str, ...] = ()
    gradient_reduction: GradientReduction = GradientReduction.SUM
    twin_units: bool | None = None
    sequence_parallel: bool = False
    loss_parallel: bool | None = False
    tp_plan: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        """Take plain strings for closed choices, and refuse what is not legal.

        Raises:
            PlanError: all illegal values together.
        """
        found = []
        for name, choices in (
            ("sync", SyncPolicy),
            ("activation_checkpointing", ActivationCheckpointing),
            ("gradient_reduction", GradientReduction),
        ):
            if name == "sync" and self.sync is None:
                continue
            try:
                object.__setattr__(self, name, choices(getattr(self, name)))
            except ValueError:
                found.append(f"{name}={getattr(self, name)!r}: legal are {', '.join(choices)}")
        for name, choices in (("sync_units", SyncPolicy), ("activation_checkpointing_layers", ActivationCheckpointing)):
            chosen = {}
            for pattern, value in getattr(self, name).items():
                try:
                    chosen[pattern] = choices(value)
                except ValueError:
                    found.append(f"{name}[{pattern!r}]={value!r}: legal are {', '.join(choices)}")
            object.__setattr__(self, name, chosen)
        for name in ("freeze", "no_decay", "activation_checkpointing_save"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            if getattr(self, name) not in (None, *DTYPES):
                found.append(f"{name}={getattr(self, name)!r}: legal are {', '.join(DTYPES)}")
        if self.microbatches < 1:
            found.append(f"microbatches={self.microbatches}: must be at least 1")
        if self.prefetch_forward is not None and self.prefetch_forward < 1:
            found.append(
                f"prefetch_forward={self.prefetch_forward}: must be at least 1; FSDP2 cannot be kept from running ahead"
            )
        if self.prefetch_backward is not None and self.prefetch_backward < 0:
            found.append(f"prefetch_backward={self.prefetch_backward}: must be at least 0")
        if found:
            raise PlanError(found)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            **plain,
            "sync_units": dict(self.sync_units),
            "activation_checkpointing_layers": dict(self.activation_checkpointing_layers),
            "activation_checkpointing_save": list(self.activation_checkpointing_save),
            "freeze": list(self.freeze),
            "no_decay": list(self.no_decay),
            "tp_plan": dict(self.tp_plan) if isinstance(self.tp_plan, Mapping) else self.tp_plan,
        }
