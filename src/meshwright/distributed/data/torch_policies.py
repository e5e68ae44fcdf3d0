"""Translates torch's policy objects, which NeMo AutoModel's interface takes, to the options of a plan."""

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from meshwright.errors import UnsupportedError
from meshwright.plan.given.closed_choices import ActivationCheckpointing, GradientReduction, SyncPolicy
from meshwright.plan.given.options import ParallelOptions

__all__ = ["options_of_policies"]


def options_of_policies(
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None,
    activation_checkpointing: bool | ActivationCheckpointing,
    device_type: str,
    sync: SyncPolicy,
    **others: Any,
) -> ParallelOptions:
    """The options that policies mean. Gradients are averaged over data ranks: torch's default.

    Args:
        mp_policy: ``None``: bf16 compute, fp32 reduction and fp32 outputs of the model, the default of NeMo AutoModel.
        offload_policy: ``None``: no offload.
        activation_checkpointing: a mode; ``True`` means ``full`` for every layer.
        device_type: of the mesh.
        sync: when gradients are reduced.
        others: fields of the options that no policy speaks of.

    Raises:
        UnsupportedError: a field of a policy that is not carried out.
    """
    policy = mp_policy or MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    if not policy.cast_forward_inputs:
        raise UnsupportedError(
            "fsdp.torch_policy",
            "mp_policy.cast_forward_inputs=False: not supported, because units cast their inputs; the legal value is True",
        )
    if isinstance(offload_policy, CPUOffloadPolicy) and not offload_policy.pin_memory and device_type != "cpu":
        raise UnsupportedError(
            "fsdp.torch_policy", "offload_policy.pin_memory=False: not supported on a GPU; the legal value is True"
        )
    return ParallelOptions(
        param_dtype=_name(policy.param_dtype),
        reduce_dtype=_name(policy.reduce_dtype),
        output_dtype=_name(policy.output_dtype),
        sync=sync,
        cpu_offload=isinstance(offload_policy, CPUOffloadPolicy),
        activation_checkpointing=_mode(activation_checkpointing),
        gradient_reduction=GradientReduction.MEAN,
        **others,
    )


def _mode(chosen: bool | ActivationCheckpointing) -> ActivationCheckpointing:
    if isinstance(chosen, bool):
        return ActivationCheckpointing.FULL if chosen else ActivationCheckpointing.NONE
    return chosen


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
