"""All private names of transformers that Meshwright uses.

Transformers 5 loads safetensors shard by shard: for a parameter that is a DTensor, it computes from the placements which slice
this rank has, and reads only that. The entry points are private; :func:`check` refuses a release that moved one of them.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.device import is_accelerator
from meshwright.distributed._torch_compat import not_moved, own_memory
from meshwright.errors import Problems, UnsupportedError
from meshwright.models._transformers_compat.asked_positions import find_documents, let_positions_answer
from meshwright.models._transformers_compat.attention_interfaces import attention_function, mask_function, masks_have_offsets
from meshwright.models.weights.bars import one_bar
from meshwright.models.weights.load_report import LoadReport

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

__all__ = [
    "MINIMUM_TRANSFORMERS",
    "TURNED_ROUTERS",
    "Declarations",
    "attention_function",
    "attention_of",
    "check",
    "declarations",
    "find_documents",
    "grouped_mm",
    "initialize_module",
    "initialized_flag",
    "is_experts",
    "keep_in_fp32",
    "keep_scale",
    "let_positions_answer",
    "load_sharded",
    "mask_function",
    "masks_have_offsets",
    "reading_one_by_one",
    "router_class",
    "router_classes",
    "tp_style_names",
    "untested",
    "without_torch_init",
]

MINIMUM_TRANSFORMERS = (5, 17)
CEILING = (5, 23)
"""The newest transformers that the tests have run with."""


def _version() -> tuple[int, ...]:
    import transformers

    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def untested() -> str:
    """Return a warning if this transformers is newer than all that the tests have run with; otherwise an empty string."""
    import transformers

    newest, installed = ".".join(map(str, CEILING)), transformers.__version__
    return f"transformers {installed}: Meshwright's tests have run with {newest} at the newest" if _version() > CEILING else ""


def check() -> None:
    """Refuse a transformers that lacks a name used here.

    Raises:
        UnsupportedError: names the release and what is missing.
    """
    import transformers
    from transformers import PreTrainedModel

    problems = Problems()
    if _version() < MINIMUM_TRANSFORMERS:
        needed = ".".join(map(str, MINIMUM_TRANSFORMERS))
        problems.add("transformers.version", f"transformers {transformers.__version__}: Meshwright needs {needed} or later")
    for name in ("_init_weights", "_load_pretrained_model", "_finalize_model_loading", "_no_split_modules"):
        if not hasattr(PreTrainedModel, name):
            problems.add("transformers.version", f"transformers {transformers.__version__} has no PreTrainedModel.{name}")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: F401
        from transformers.core_model_loading import revert_weight_conversion  # noqa: F401
        from transformers.initialization import guard_torch_init_functions  # noqa: F401
        from transformers.modeling_utils import LoadStateDictConfig  # noqa: F401
    except ImportError as error:
        problems.add("transformers.version", f"transformers {transformers.__version__}: {error}")
    if problems:
        raise UnsupportedError(problems)


@dataclass(frozen=True)
class Declarations:
    """What a model of transformers declares.

    Attributes:
        no_split: class names of modules that must stay whole: its layers.
        fp32: name components of modules that stay in fp32 if the rest is fp16.
        fp32_strict: name components of modules that stay in fp32 if the rest is bf16 or fp16.
        tied: name to source name of tied parameters.
        tp: pattern of modules to tensor parallel style.
    """

    no_split: frozenset[str]
    fp32: frozenset[str]
    fp32_strict: frozenset[str]
    tied: dict[str, str]
    tp: dict[str, str]


def declarations(model: "PreTrainedModel") -> Declarations:
    """Read the declarations of a model instance, with those of its submodels."""
    return Declarations(
        no_split=frozenset(model._no_split_modules or ()),
        fp32=frozenset(model._keep_in_fp32_modules or ()),
        fp32_strict=frozenset(model._keep_in_fp32_modules_strict or ()),
        tied=dict(model.all_tied_weights_keys),
        tp=_tp_plan(model),
    )


def _tp_plan(model: "PreTrainedModel") -> dict[str, str]:
    """Return the current tensor parallel plans of a model and its submodels.

    A model's own plan includes those of its submodels as they were when it was made.
    """
    from transformers import PreTrainedModel

    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            prefix = f"{name}." if name else ""
            styles.update({f"{prefix}{pattern}": style for pattern, style in (module.tp_plan or {}).items()})
    return styles


def tp_style_names() -> frozenset[str]:
    """Return the names of the tensor parallel styles of transformers."""
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    return frozenset(ALL_PARALLEL_STYLES.keys())


def embedding_and_head(model: "PreTrainedModel") -> "tuple[nn.Module | None, nn.Module | None]":
    """Return the embedding of tokens and the output head of a model, or ``None`` for what it does not have.

    A model without one of them may return ``None``, lack the method, or raise ``NotImplementedError`` in it.
    """
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, name)())
        except (AttributeError, NotImplementedError):
            found.append(None)
    return found[0], found[1]


def keep_scale(model: "PreTrainedModel") -> None:
    """Let no forward scale weights in place, as RWKV does in evaluation, until the next forward in training.

    A checkpoint between the two would have other weights. Scaled or not, a forward computes the same but for overflow in fp16.
    """
    for module in model.modules():
        if hasattr(module, "layers_are_rescaled"):
            vars(module)["_rescale_layers"] = _leave_scale


def _leave_scale() -> None:
    """Stand for a method that scales weights."""


def keep_in_fp32(model: "PreTrainedModel") -> None:
    """Store in fp32 what the model asks for, such as the bias of a router, which changes by less than bf16 can represent.

    Loading a model with transformers does this, its constructor does not.
    """
    import torch

    wanted = declarations(model).fp32_strict
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                halved = tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16)
                if tensor is not None and halved and wanted.intersection(f"{prefix}.{name}".split(".")):
                    tensor.data = tensor.data.float()


def is_experts(module: "nn.Module") -> bool:
    """Return whether a module holds routed experts and uses the interface of transformers for them."""
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, name) for name in ("has_bias", "is_transposed"))


def grouped_mm(rows: "torch.Tensor", weights: "torch.Tensor", offsets: "torch.Tensor") -> "torch.Tensor":
    """Return the product of each row with the matrix of its group, with a kernel that this device, dtype and compiler have.

    Args:
        rows: [rows, in], group after group.
        weights: [groups, in, out].
        offsets: [groups], where each group ends, int32.
    """
    from transformers.integrations import moe

    multiply = getattr(moe, "_grouped_mm", None)
    if multiply is None:  # a release that has it under another name; torch's own needs a dtype that the device has
        from torch.nn.functional import grouped_mm as torch_grouped_mm

        return torch_grouped_mm(rows, weights, offs=offsets)
    result: torch.Tensor = multiply(rows, weights, offsets)
    return result


def router_classes(model: "nn.Module") -> "tuple[type[nn.Module], ...]":
    """Return the classes whose first output a model, or one inside it, records as ``router_logits``."""
    from transformers import PreTrainedModel

    classes = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
            for item in recorded if isinstance(recorded, list) else [recorded]:
                kind = getattr(item, "target_class", item)
                if isinstance(kind, type) and getattr(item, "index", 0) == 0:
                    classes.append(kind)
    return tuple(dict.fromkeys(classes))


TURNED_ROUTERS = frozenset(
    {"GraniteMoeHybridTopKRouter", "GraniteMoeSWATopKRouter", "GraniteMoeSharedTopKRouter", "GraniteMoeTopKRouter"}
)
"""Routers that, in transformers 5.17, return the indices of experts first and scores last. That release does not list them as
routers, so none is known there."""


def router_class(module: "nn.Module") -> str:
    """Return the class name of transformers whose forward a module runs; empty if the forward is not from transformers.

    A subclass with its own forward gives an empty name. So does remote code, even if its class has a known name.
    """
    kind = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return kind.__name__ if kind.__module__.startswith("transformers.models.") else ""


def without_torch_init() -> AbstractContextManager[Any]:
    """Inside this context, init functions skip tensors that :func:`initialized_flag` has marked."""
    from transformers.initialization import guard_torch_init_functions

    return guard_torch_init_functions()


def attention_of(model: "PreTrainedModel") -> str:
    """Return the attention implementation that the layers of a model use, such as ``sdpa``."""
    return str(model.config.get_text_config()._attn_implementation)


def attention_configs(model: "nn.Module") -> "list[Any]":
    """Return the configs, each once, from which modules of a model read their attention implementation."""
    own = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in own if hasattr(config, "_attn_implementation")}.values())


def set_attention(model: "nn.Module", name: str) -> None:
    """Set the attention implementation of all layers, which need not be installed."""
    for config in attention_configs(model):
        config._attn_implementation = name


_LEFT_OUT = {"DiffusionGemmaEncoderTextLayer": {"layer_scalar": 1.0}}
"""Class of a module to the buffers that ``_init_weights`` of transformers 5.23 leaves out, with the values of the constructor.
"""


def initialize_module(owner: "PreTrainedModel", module: "nn.Module") -> None:
    """Run the family's own initialization of one module, which may also initialize parameters of its children."""
    owner._init_weights(module)
    for kind in type(module).__mro__:  # FSDP gives its units classes of their own
        for name, value in _LEFT_OUT.get(kind.__name__, {}).items():
            module.get_buffer(name).fill_(value)


def initialized_flag(tensor: "torch.Tensor") -> None:
    """Mark a tensor as initialized, so that the init functions of transformers do not change it."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


@contextmanager
def reading_one_by_one() -> Iterator[None]:
    """Inside, tensors of files are not read ahead of their use. Otherwise all slices of a rank would be in memory at once."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def names_in_files(model: "PreTrainedModel", state: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return whole tensors of a model under the names and in the shapes of its files. All that belong together are given."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return found


def load_sharded(model: "PreTrainedModel", files: Sequence[str], device: "torch.device") -> LoadReport:
    """Read safetensors into a model whose parameters are (meta) DTensors. This rank reads only its own slices.

    Buffers that are not in the files get their computed values. Missing parameters get the family's own initialization; the
    caller decides whether that is an error.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    config = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model, None, None),
        device_map={"": device},
        ignore_mismatched_sizes=True,
    )
    # A stage of a pipeline may have one of two tied weights.
    names = {name for named in (model.named_parameters, model.named_buffers) for name, _ in named(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        name: source for name, source in model.all_tied_weights_keys.items() if name in names and source in names
    }
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # we report missing keys ourselves
    try:
        with one_bar("reading weights"), not_moved():
            info, _ = type(model)._load_pretrained_model(model, None, list(files), config)
        info = type(model)._finalize_model_loading(model, config, info)
    finally:
        logging.set_verbosity(verbosity)
    if not is_accelerator(device):  # to one it was copied
        for tensor in (*model.parameters(), *model.buffers()):
            own_memory(tensor)
    return LoadReport(
        missing=tuple(sorted(info.missing_keys)),
        unexpected=tuple(sorted(info.unexpected_keys)),
        mismatched=tuple((name, tuple(ours), tuple(theirs)) for name, ours, theirs in sorted(info.mismatched_keys)),
        errors=tuple(f"{name}: {message}" for name, message in dict(info.conversion_errors).items()),
    )
