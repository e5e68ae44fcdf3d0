"""The configuration of an audit: that of a run, changed where an audit needs other settings."""

from pathlib import Path
from typing import Any

from meshwright.audit.case import in_dtype
from meshwright.shrink.small_config import Change
from meshwright.train.config import OptimizerConfig, RunConfig, ScheduleConfig
from meshwright.train.schema.optimizer_kinds import MUON, QUANTIZED

__all__ = ["SMOOTH_EPS", "make_ready"]

LEAST_RATE = 1e-3
"""Smallest learning rate of an audit: a step has to be visible in the parameters."""

SMOOTH_EPS = 1e-3
"""Smallest eps of Adam in float32 and bfloat16. Adam divides a gradient by its own size. With a small eps, the sign of a
gradient that is only rounding moves a weight by the whole learning rate, and the next gradient depends on that."""


def make_ready(config: RunConfig, dtype: str, steps: int, folder: Path) -> tuple[RunConfig, tuple[Change, ...]]:
    """Return a configuration that runs some steps in a dtype and writes only inside a folder, and the changes made for it."""
    changed = in_dtype(config, dtype, store=None if dtype == "bfloat16" else dtype)
    parallel, model, optimizer = changed.parallel, changed.model, config.optimizer
    if dtype != "float64" or optimizer.kinds & set(QUANTIZED):  # another may amplify what is only rounding; these round
        optimizer = optimizer.as_adamw
    else:
        optimizer = _orthogonalised_in(optimizer, dtype)
    if dtype == "float64" and parallel.compile:
        parallel = parallel.model_copy(update={"compile": False})
    if model.attn_implementation not in (None, "eager", "sdpa"):
        model = model.model_copy(update={"attn_implementation": "sdpa"})
    if dtype != "float64":
        smooth = [one.model_copy(update={"eps": max(one.eps, SMOOTH_EPS)} if one.eps else {}) for one in optimizer.groups]
        optimizer = optimizer.model_copy(update={"eps": max(optimizer.eps, SMOOTH_EPS), "groups": smooth})
    optimizer = optimizer.model_copy(update={"lr": max(optimizer.lr, LEAST_RATE)})
    ready = changed.model_copy(
        update={
            "output": str(folder / "run"),
            "parallel": parallel,
            "model": model,
            "optimizer": optimizer,
            "data": config.data.model_copy(update={"eval_fraction": 0.0, "eval_files": []}),
            "schedule": ScheduleConfig(kind="constant"),
            "training": config.training.model_copy(
                update={"steps": steps, "epochs": None, "eval_every": 0, "on_nonfinite": "skip"}
            ),
            "metrics": type(config.metrics)(jsonl=False, tensorboard=False),
            **{
                name: RunConfig.model_fields[name].get_default()
                for name in ("checkpoint", "launch", "export", "sample", "profile")
            },
        }
    )
    reasons = {
        "model.dtype": "the arithmetic of the audit (--dtype)",
        "model.attn_implementation": "other kernels need a GPU",
        "model.experts_implementation": "kernels for many experts at once have no float64",
        "parallel.param_dtype": "the arithmetic of the audit (--dtype)",
        "parallel.reduce_dtype": "the arithmetic of the audit (--dtype)",
        "parallel.output_dtype": "the arithmetic of the audit (--dtype)",
        "parallel.compile": "compiled code rounds by itself; --dtype float32 audits it",
        "optimizer.lr": "steps have to be seen in the parameters",
        "optimizer.eps": "rounding is not to decide the sign of an update",
        "optimizer.groups": "rounding is not to decide the sign of an update; AdamW stands in for other optimizers",
        "optimizer.kind": "AdamW stands in for it, for it rounds; --dtype float64 audits the state of kinds that do not",
        "optimizer.with": "the arithmetic of the audit (--dtype)"
        if dtype == "float64"
        else "AdamW stands in for the optimizer",
        "optimizer.use": "AdamW stands in for it: --dtype float64 audits its state",
        "schedule.kind": "the first steps are to count",
        "schedule.warmup_steps": "the first steps are to count",
    }
    before, after = config.model_dump(), ready.model_dump()
    changes = []
    for key, why in reasons.items():
        section, _, field = key.partition(".")
        if before[section][field] != after[section][field]:
            changes.append(Change(key, before[section][field], after[section][field], why))
    return ready, tuple(changes)


def _orthogonalised_in(optimizer: OptimizerConfig, dtype: str) -> OptimizerConfig:
    """Return the same settings, with Muon in the dtype of an audit."""

    def changed(one: Any) -> Any:
        return one.model_copy(update={"arguments": {**one.arguments, "dtype": dtype}}) if one.kind == MUON else one

    return changed(optimizer.model_copy(update={"groups": [changed(one) for one in optimizer.groups]}))
