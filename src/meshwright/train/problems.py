"""Messages about a wrong configuration: where, what is wrong, what is legal; for a key of another trainer, its name here."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

__all__ = ["FOREIGN", "message"]

FOREIGN = {
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "bf16": "parallel.param_dtype=bfloat16",
    "chat_template": "tokenizer.chat_template",
    "cutoff_len": "data.sequence_length",
    "dataloader_shuffle": "data.shuffle",
    "dataset_name": "data.hub",
    "dataset_text_field": "data.columns={text: ...}",
    "datasets": "data.files or data.hub",
    "epochs": "training.epochs",
    "eval_steps": "training.eval_every",
    "fp16": "parallel.param_dtype, float32 or bfloat16",
    "fsdp": "layout.dp_shard",
    "gradient_accumulation_steps": "training.global_batch_size, the sequences of an optimizer step over all ranks: "
    "training.microbatch_size x data ranks x accumulation",
    "gradient_checkpointing": "parallel.activation_checkpointing=full",
    "learning_rate": "optimizer.lr",
    "logging_steps": "training.log_every",
    "lr": "optimizer.lr",
    "lr_scheduler": "schedule.kind",
    "lr_scheduler_type": "schedule.kind",
    "max_grad_norm": "training.clip_norm",
    "max_length": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "max_steps": "training.steps",
    "micro_batch_size": "training.microbatch_size",
    "model_name_or_path": "model.path",
    "num_epochs": "training.epochs",
    "num_train_epochs": "training.epochs",
    "output_dir": "output",
    "per_device_eval_batch_size": "training.microbatch_size, of training and evaluation alike",
    "per_device_train_batch_size": "training.microbatch_size",
    "report_to": "metrics.wandb, metrics.mlflow or metrics.tensorboard",
    "resume_from_checkpoint": "checkpoint.resume",
    "sample_packing": "data.packing=pack",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "seed": "training.seed",
    "sequence_len": "data.sequence_length",
    "tensor_parallel_size": "layout.tp",
    "torch_compile": "parallel.compile",
    "train_batch_size": "training.global_batch_size",
    "train_file": "data.files",
    "train_on_inputs": "data.kind: of a chat only the assistant's turns are learned, of a text all",
    "val_set_size": "data.eval_fraction",
    "warmup_ratio": "schedule.warmup_steps, a number of steps",
    "warmup_steps": "schedule.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}
"""What users of the Hugging Face Trainer, TRL, axolotl and LLaMA-Factory type, and the key that it is here."""


def message(item: Mapping[str, Any], schema: type[BaseModel]) -> str:
    """Return the message for one of pydantic's errors: where, what is wrong, what is legal.

    Args:
        item: an entry of the list of errors that pydantic gives.
        schema: the class of the whole configuration.
    """
    location = [str(part) for part in item["loc"]]
    where = ".".join(location)
    kind, value = item["type"], item.get("input")
    if kind == "extra_forbidden":
        legal = _legal_keys(schema, location[:-1])
        return f"{where}: unknown key; {_hint(location, legal)}legal here: {', '.join(legal)}"
    if kind == "missing":
        return f"{where}: is required"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    return f"{where}={value!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _hint(location: Sequence[str], legal: Sequence[str]) -> str:
    near = [".".join([*location[:-1], name]) for name in difflib.get_close_matches(location[-1], legal, n=1, cutoff=0.5)]
    here = FOREIGN.get(location[-1].lower().replace("-", "_"))
    if here is not None and here not in near:
        return f"here it is {here}; "
    return f"did you mean {near[0]!r}? " if near else ""


def _legal_keys(schema: type[BaseModel], location: Sequence[str]) -> list[str]:
    model: Any = schema
    for part in location:
        annotation = model.model_fields[part].annotation
        model = next((a for a in (annotation, *get_args(annotation)) if hasattr(a, "model_fields")), None)
        if model is None:
            return []
    return list(model.model_fields)
