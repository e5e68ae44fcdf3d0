"""Messages about a wrong configuration: where, what is wrong, what is legal; for a key of another trainer, its name here."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from meshwright.errors import Refusal, coded

__all__ = ["FOREIGN", "FOREIGN_IN_SECTION", "message", "sections"]

FOREIGN = {
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "base_model": "model.path",
    "batch_size": "training.global_batch_size or, of one forward of a rank, training.microbatch_size",
    "bf16": "parallel.param_dtype=bfloat16",
    "chat_template": "tokenizer.chat_template",
    "context_parallel_size": "layout.cp",
    "cutoff_len": "data.sequence_length",
    "dataloader_shuffle": "data.shuffle",
    "dataset": "data.files or data.hub",
    "dataset_name": "data.hub",
    "dataset_text_field": "data.columns={text: ...}",
    "datasets": "data.files or data.hub",
    "dp_size": "layout.dp_shard",
    "epochs": "training.epochs",
    "eval_steps": "training.eval_every",
    "eval_strategy": "training.eval_every",
    "expert_parallel_size": "layout.ep",
    "flash_attention": "model.attn_implementation=flash_attention_2",
    "fp16": "parallel.param_dtype, float32 or bfloat16",
    "fsdp": "layout.dp_shard",
    "gradient_accumulation_steps": "training.global_batch_size, the sequences of an optimizer step over all ranks: "
    "training.microbatch_size x data ranks x accumulation",
    "gradient_checkpointing": "parallel.activation_checkpointing=full",
    "learning_rate": "optimizer.lr",
    "load_in_4bit": "adapter.base=nf4",
    "load_in_8bit": "adapter.base=nf4, of 4 bits",
    "logging_steps": "training.log_every",
    "lora": "adapter",
    "lora_alpha": "adapter.alpha",
    "lora_config": "adapter",
    "lora_dropout": "adapter.dropout",
    "lora_model_dir": "adapter.path",
    "lora_modules_to_save": "adapter.save_modules",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_target": "adapter.targets",
    "lora_target_linear": "adapter.targets=all-linear",
    "lora_target_modules": "adapter.targets",
    "lr": "optimizer.lr",
    "lr_scheduler": "schedule.kind",
    "lr_scheduler_type": "schedule.kind",
    "max_grad_norm": "training.clip_norm",
    "max_length": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "max_steps": "training.steps",
    "micro_batch_size": "training.microbatch_size",
    "min_lr": "schedule.final_ratio, a share of optimizer.lr",
    "mixed_precision": "parallel.param_dtype",
    "model_name_or_path": "model.path",
    "modules_to_save": "adapter.save_modules",
    "num_epochs": "training.epochs",
    "num_processes": "launch.nproc",
    "num_train_epochs": "training.epochs",
    "num_warmup_steps": "schedule.warmup_steps",
    "optim": "optimizer, AdamW, or one of your own as optimizer.use",
    "output_dir": "output",
    "peft": "adapter",
    "peft_config": "adapter",
    "peft_type": "adapter.kind",
    "per_device_eval_batch_size": "training.microbatch_size, of training and evaluation alike",
    "per_device_train_batch_size": "training.microbatch_size",
    "pipeline_parallel_size": "layout.pp",
    "pretrained_model_name_or_path": "model.path",
    "r": "adapter.rank",
    "report_to": "metrics.wandb, metrics.mlflow or metrics.tensorboard",
    "resume_from_checkpoint": "checkpoint.resume",
    "rope_scaling": "model.config.rope_parameters",
    "sample_packing": "data.packing=pack",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "seed": "training.seed",
    "sequence_len": "data.sequence_length",
    "target_modules": "adapter.targets",
    "tensor_model_parallel_size": "layout.tp",
    "tensor_parallel_size": "layout.tp",
    "torch_compile": "parallel.compile",
    "torch_dtype": "model.dtype",
    "tp_size": "layout.tp",
    "train_batch_size": "training.global_batch_size",
    "train_file": "data.files",
    "train_on_inputs": "data.kind: of a chat only the assistant's turns are learned, of a text all",
    "use_dora": "adapter.kind=dora",
    "use_rslora": "adapter.scaling=rs",
    "val_set_size": "data.eval_fraction",
    "warmup_ratio": "schedule.warmup_steps, a number of steps",
    "warmup_steps": "schedule.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}
"""What users of the Hugging Face Trainer, TRL, axolotl and LLaMA-Factory type, and the key that it is here."""

FOREIGN_IN_SECTION = {
    "adapter.type": "adapter.kind",
    "checkpoint.dir": "output",
    "checkpoint.interval": "checkpoint.every",
    "data.path": "data.files or data.hub",
    "launch.gpus": "launch.nproc",
    "launch.nodes": "no key for it: torchrun or Slurm starts processes on other machines",
    "layout.dp": "layout.dp_shard or layout.dp_replicate",
    "metrics.project": "metrics.wandb",
    "model.name": "model.path",
    "optimizer.name": "optimizer.use, for another than AdamW",
    "optimizer.type": "optimizer.use, for another than AdamW",
    "parallel.recompute": "parallel.activation_checkpointing",
    "schedule.name": "schedule.kind",
    "schedule.type": "schedule.kind",
}
"""The same for short words, which mean another thing in each section."""


def message(item: Mapping[str, Any], schema: type[BaseModel]) -> Refusal:
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
        return Refusal(
            "config.unknown_key", f"{where}: unknown key; {_hint(location, legal, schema)}legal here: {', '.join(legal)}"
        )
    if kind == "missing":
        return Refusal("config.required", f"{where}: is required")
    if kind == "model_type":
        return Refusal(
            "config.type",
            f"{where}={value!r}: must be a mapping of keys; legal in it: {', '.join(_legal_keys(schema, location))}",
        )
    if kind == "value_error":
        said = item["ctx"]["error"].args[0]
        return coded(str(said) if not isinstance(said, Refusal) else said, "config.value")
    return Refusal("config.type", f"{where}={value!r}: {item['msg'][0].lower()}{item['msg'][1:]}")


def sections(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the sections of a schema, also those that may be null: name to class."""
    found = {}
    for name, field in schema.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def _hint(location: Sequence[str], legal: Sequence[str], schema: type[BaseModel]) -> str:
    near = [".".join([*location[:-1], name]) for name in difflib.get_close_matches(location[-1], legal, n=1, cutoff=0.5)]
    name = location[-1].lower().replace("-", "_")
    here = FOREIGN_IN_SECTION.get(".".join([*location[:-1], name])) or FOREIGN.get(name)
    if here is None:
        elsewhere = [f"{section}.{name}" for section, keys in sections(schema).items() if name in keys.model_fields]
        here = elsewhere[0] if len(elsewhere) == 1 else None
    if here is not None and here not in near:
        return f"here {'is' if here.startswith('no key') else 'it is'} {here}; "
    return f"did you mean {near[0]!r}? " if near else ""


def _legal_keys(schema: type[BaseModel], location: Sequence[str]) -> list[str]:
    model, several = schema, False
    for part in location:
        if several:  # the place in a list, or the name in a mapping
            several = False
            continue
        inner = sections(model).get(part)
        if inner is None:
            return []
        several = get_origin(model.model_fields[part].annotation) in (list, dict)
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]
