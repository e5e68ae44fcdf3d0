"""The model of a run and the options of its family, as a schema. It is light to import: pydantic only."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.models.diffusion_gemma.block_diffusion_options import DiffusionConfig
from meshwright.paths import PathText

__all__ = ["AdapterConfig", "DiffusionConfig", "HeadConfig", "ModelConfig"]


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


class AdapterConfig(BaseModel):
    """Small trained matrices beside frozen ones (needs the extra [adapters])."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["lora", "dora"] = Field(
        default="lora", description="'lora': W + s B A. 'dora': its rows scaled to trained norms."
    )
    rank: int = Field(default=16, ge=1, description="Rows of A, columns of B.")
    alpha: int = Field(default=32, ge=1, description="The adapter is multiplied by s = alpha / rank.")
    scaling: Literal["standard", "rs"] = Field(
        default="standard", description="'rs': s = alpha / sqrt(rank) (rank-stabilised, arXiv 2312.03732)."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of the input of A.")
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="Matrices with an adapter: last components of their names, as in [q_proj, v_proj], or patterns. "
        "'all-linear': all linear layers inside the model's layers, but routers and parts that text does not run.",
    )
    experts: bool = Field(
        default=False, description="Also give each fused expert of a mixture its own A and B (lora, without dropout)."
    )
    reduce: Literal["unit", "once"] = Field(
        default="unit",
        description="'unit': adapters are gathered and reduced with their layer. 'once': all together, once a step, and they "
        "stay gathered in it. Those of experts stay with their experts.",
    )
    base: Literal["nf4"] | None = Field(
        default=None,
        description="'nf4': store and gather the frozen matrices of linear layers and experts inside the model's layers in 4 "
        "bits, 4.5 with scales (QLoRA, arXiv 2305.14314).",
    )
    save_modules: list[str] = Field(
        default=[],
        description="Modules that are trained whole and saved with the adapter, as in [lm_head]. Tied ones together.",
    )
    path: PathText | None = Field(
        default=None, description="A directory of peft to start from, of the same kind, rank and targets."
    )

    @property
    def scale(self) -> float:
        """The factor of the adapter."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "rs" else self.rank)

    @model_validator(mode="after")
    def _check_experts(self) -> "AdapterConfig":
        wrong = "kind: dora" if self.kind == "dora" else f"dropout: {self.dropout}" if self.dropout else ""
        if self.experts and wrong:
            raise ValueError(f"adapter.experts: {wrong} is not for experts, and peft has no such adapters of them")
        return self


class HeadConfig(BaseModel):
    """A head in place of the one that says the next token. It is made anew where the files of the model have none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["sequence_classification", "token_classification"] = Field(
        description="'sequence_classification': numbers for each text, from its last token. 'token_classification': for each "
        "token."
    )
    num_labels: int | None = Field(
        default=None, ge=1, le=2**20, description="How many numbers. Default: as many as labels, or as the model's files have."
    )
    labels: list[str] | None = Field(
        default=None, min_length=1, description="Names of the numbers, in order. Default: LABEL_0, ... or those of the files."
    )
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = Field(
        default=None,
        description="What the numbers say, as in transformers. Default: that of the files, or regression for one number, and "
        "else single_label_classification.",
    )

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_number(self) -> "HeadConfig":
        names = self.labels or []
        if self.num_labels is not None and names and len(names) != self.num_labels:
            raise ValueError(f"model.head: num_labels={self.num_labels}, and {len(names)} labels; leave num_labels out")
        if doubled := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"model.head.labels: {min(doubled)!r} is there twice")
        return self

    def task(self, described: Mapping[str, Any]) -> tuple[str, int, tuple[str, ...]] | None:
        """Return what the numbers say, how many they are, and their names, if they have some; ``None``: it is unknown.

        Args:
            described: what a config of transformers says of its own head: ``id2label``, ``num_labels``, ``problem_type``.
        """
        known = described.get("id2label") or {}
        names = tuple(self.labels or (str(known[key]) for key in sorted(known, key=int)))
        count = self.num_labels or len(names) or described.get("num_labels")
        if not isinstance(count, int):
            return None
        if len(names) != count or (self.labels is None and names == tuple(f"LABEL_{number}" for number in range(count))):
            names = ()
        kind = self.problem_type or described.get("problem_type")
        return kind or ("regression" if count == 1 else "single_label_classification"), count, names


class ModelConfig(BaseModel):
    """A pretrained model, or the config of a new one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: PathText | None = Field(
        default=None, description="Pretrained model: a local directory of transformers (safetensors), or a hub name."
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description="A new model with random weights: a config of transformers, with its model_type, such as "
        "{model_type: llama, hidden_size: 256}. Keys that are left out take the family's defaults; vocab_size and special "
        "tokens take the tokenizer's.",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32",
        description="What parameters are stored and optimized in; computing has parallel.param_dtype. bfloat16 halves "
        "memory, and small updates are lost; float64 is for proofs.",
    )
    attn_implementation: str | None = Field(
        default=None, description="Attention of transformers: eager, sdpa, flash_attention_2, ... Default: the model's."
    )
    experts_implementation: str | None = Field(
        default=None,
        description="Matrix products of experts in transformers: eager, batched_mm, grouped_mm, ... Default: the model's.",
    )
    head: HeadConfig | None = Field(
        default=None,
        description="Another head than the one that says the next token: its kind, or a mapping. It needs an objective such "
        "as training.objective=classification.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run model code that comes with a pretrained model. Only for code that you have read.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.config is None):
            raise ValueError("model: exactly one of path and config must be given")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("model.config: model_type is missing; it names the family, such as llama, qwen3 or gemma3_text")
        for key, value in (self.config or {}).items():
            if key.endswith("_config") and value is not None and not _is_config(value):
                raise ValueError(f"model.config.{key}={value!r}: must be a mapping of keys, the config of a part of the model")
        return self

    @property
    def task(self) -> tuple[str, int, tuple[str, ...]] | None:
        """What the numbers of its head say, how many they are, and their names; ``None``: none, or it is unknown.

        The config of a pretrained model is read if it is a local directory.
        """
        if self.head is None:
            return None
        described = self.config or {}
        if self.local is not None:
            try:
                described = json.loads((self.local / "config.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):  # the code that builds the model says what is wrong
                described = {}
            ending = "ForSequenceClassification" if self.head.kind == "sequence_classification" else "ForTokenClassification"
            own = any(str(name).endswith(ending) for name in described.get("architectures") or ())
            described = described if own else {}
        found = self.head.task(described)
        if found is None or self.head.kind == "sequence_classification":
            return found
        return "single_label_classification", *found[1:]

    @property
    def local(self) -> Path | None:
        """The directory of a local pretrained model; ``None`` if the model is not local."""
        if self.path is None:
            return None
        path = Path(self.path).expanduser()
        return path if path.is_dir() else None

    def configured(self, key: str) -> Any:
        """Return the value of a key in the config of a new model, else in its ``text_config``; ``None`` if neither has it."""
        values = self.config or {}
        inner = values.get("text_config") or {}
        return inner.get(key) if values.get(key) is None else values[key]
