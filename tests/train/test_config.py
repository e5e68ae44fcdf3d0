"""The configuration: overrides, all errors in one report, and a printed form that reproduces the run."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from meshwright.errors import ConfigError
from meshwright.train.config import RunConfig, load_config
from meshwright.train.schema.config_problems import FOREIGN, FOREIGN_IN_SECTION, sections
from tests.train.runs import train, write_config

Tiny = Callable[..., RunConfig]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_config(tmp_path, tmp_path / "words.jsonl")


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr=1e-4", 1e-4),
        ("model.config.rms_norm_eps=1e-5", 1e-5),  # YAML 1.1 takes it for a string, and here no schema converts it
        ("model.config.rms_norm_eps=-2E+1", -20.0),
        ("optimizer.lr=2", 2.0),
        ("optimizer.eps=1.5E-7", 1.5e-7),
        ("layout.dp_replicate=2", 2),
        ("layout.dp_shard=null", None),
        ("layout.dp_shard=-1", -1),
        ("training.clip_norm=null", None),
        ("training.clip_norm=~", None),
        ("parallel.cpu_offload=true", True),
        ("parallel.sync=reduce_each", "reduce_each"),
        ("parallel.sync_units={'model.layers.*': defer}", {"model.layers.*": "defer"}),
        ("parallel.activation_checkpointing_layers={'model.layers.0': none}", {"model.layers.0": "none"}),
        ("parallel.activation_checkpointing_save=[aten.mm.default]", ["aten.mm.default"]),
        ("parallel.freeze=[lm_head.weight]", ["lm_head.weight"]),
        ("optimizer.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("metrics.wandb=my=project", "my=project"),
        ("sample.prompts=['a: b', c]", ["a: b", "c"]),
        ("model.config.num_hidden_layers=3", 3),
        ("model.config.rope_parameters.rope_theta=5000", 5000),  # sections that the file does not have
        ("output=/elsewhere", "/elsewhere"),
        ("output='1e5'", "1e5"),
    ],
)
def test_override(file: Path, override: str, value: Any) -> None:
    found: Any = load_config(file, [override, "export=true"])
    for part in override.partition("=")[0].split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value) or isinstance(found, str)


def test_later_overrides_win_and_the_rest_stays(file: Path) -> None:
    plain = load_config(file)
    changed = load_config(file, ["training.steps=9", "training.steps=10"])
    assert changed.training.steps == 10
    assert changed.model_copy(update={"training": plain.training}) == plain


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimiser.lr=1", ("optimiser", "unknown key", "did you mean 'optimizer'?")),
        ("optimizer.learning_rate=1", ("optimizer.learning_rate", "unknown key", "lr, betas, eps")),
        ("layout.dp_shards=2", ("layout.dp_shards", "did you mean 'layout.dp_shard'?")),
        ("training.global_batchsize=2", ("did you mean 'training.global_batch_size'?",)),
        ("data.sequence_len=2", ("did you mean 'data.sequence_length'?",)),
        (
            "training.gradient_accumulation_steps=4",
            ("unknown key; here it is training.global_batch_size, the sequences of an",),
        ),
        (
            "training.per_device_train_batch_size=4",
            ("unknown key; did you mean 'training.microbatch_size'?",),
        ),
        ("training.num_train_epochs=3", ("unknown key; did you mean 'training.epochs'?",)),
        ("num_train_epochs=3", ("num_train_epochs: unknown key; here it is training.epochs; legal here: output",)),
        ("learning_rate=1e-4", ("learning_rate: unknown key; here it is optimizer.lr; legal here: output",)),
        ("optimizer.learning-rate=1e-4", ("here it is optimizer.lr",)),
        ("max_seq_length=128", ("here it is data.sequence_length",)),
        ("adapter.r=16", ("adapter.r: unknown key; here it is adapter.rank; legal here: kind, rank, alpha",)),
        ("adapter.lora_alpha=16", ("did you mean 'adapter.alpha'?",)),
        ("adapter.rnak=16", ("did you mean 'adapter.rank'?",)),
        ("adapter.target_modules=[q_proj]", ("here it is adapter.targets;",)),
        ("adapter.use_dora=true", ("here it is adapter.kind=dora;",)),
        ("adapter.modules_to_save=[lm_head]", ("did you mean 'adapter.save_modules'?",)),
        ("rank=16", ("here it is adapter.rank;",)),
        ("lora={rank: 16}", ("lora: unknown key; here it is adapter;",)),
        ("adapter=lora", ("adapter='lora': must be a mapping of keys; legal in it: kind, rank, alpha",)),
        ("model=gpt2", ("model='gpt2': must be a mapping of keys; legal in it: path, config",)),
        ("parallel.pipeline=gpipe", ("parallel.pipeline='gpipe': must be a mapping of keys; legal in it: schedule, stages",)),
        ("parallel.pipeline.stages_per_rnk=2", ("did you mean 'parallel.pipeline.stages_per_rank'?",)),
        ("parallel.tp=2", ("here it is layout.tp;",)),
        ("layout.dp=2", ("here it is layout.dp_shard or layout.dp_replicate;",)),
        ("training.sequence_length=2", ("here it is data.sequence_length;",)),
        ("schedule.type=cosine", ("here it is schedule.kind;",)),
        ("optimizer.name=sgd", ("here it is optimizer.use, for another than AdamW;",)),
        ("training.steps=many", ("training.steps='many'", "integer")),
        ("training.steps=2.5", ("training.steps=2.5", "integer")),
        ("training.steps=0", ("training.steps=0", "greater than or equal to 1")),
        ("optimizer.lr=-1", ("optimizer.lr=-1", "greater than 0")),
        ("optimizer.betas=0.9", ("optimizer.betas=0.9",)),
        ("parallel.param_dtype=int8", ("parallel.param_dtype='int8'", "'float32'", "'bfloat16'")),
        ("parallel.sync=sometimes", ("parallel.sync='sometimes'", "'defer', 'reshard_each' or 'reduce_each'")),
        ("parallel.freeze=lm_head", ("parallel.freeze='lm_head'", "list")),
        ("training=5", ("training=5",)),
        ("model.path=somewhere", ("model: exactly one of path and config",)),
        ("model.config.model_type=null", ("model.config: model_type is missing",)),
        ("training.steps", ("'training.steps'", "section.key=value")),
        ("training.steps.more=1", ("training.steps.more", "is not a section")),
        ("=5", ("section.key=value",)),
        ("model.config.text_config=5", ("model.config.text_config=5", "must be a mapping")),
        ("model.config.vision_config=[1]", ("model.config.vision_config=[1]", "must be a mapping")),
        ("output=~nobody-there/x", ("output='~nobody-there/x'", "user after ~ is unknown")),
        ("output=", ("output=''", "is empty")),
        ('data.files=["a\\0b"]', ("data.files.0=", "NUL")),
        (f"tokenizer.path={'long' * 100}", ("tokenizer.path='longlong", "too long for a path", "255")),
        ("optimizer.lr=.inf", ("optimizer.lr=inf", "finite")),
        ("parallel.sync_budget_gib=.nan", ("parallel.sync_budget_gib=nan", "finite")),
    ],
)
def test_one_problem_is_one_message(file: Path, override: str, parts: tuple[str, ...]) -> None:
    found = problems(file, override)
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0]


def test_the_keys_that_stand_for_names_of_other_trainers_exist() -> None:
    known = sections(RunConfig)
    for name, here in {**FOREIGN, **FOREIGN_IN_SECTION}.items():
        found = re.findall(r"\b(\w+)\.(\w+)", here)
        assert found or here.partition(",")[0] in RunConfig.model_fields or here.startswith("no key for it: "), name
        for section, key in found:
            assert key in known[section].model_fields, here
        section, _, key = name.rpartition(".")
        assert key not in (known[section] if section else RunConfig).model_fields
    assert all(name.partition(".")[0] in known for name in FOREIGN_IN_SECTION)


def test_all_problems_in_one_report(file: Path) -> None:
    found = problems(file, "layout.tpp=2", "training.steps=none", "optimizer.lr=0", "nonsense", "data.packing=loose")
    assert len(found) == 5
    for part in ("layout.tpp", "training.steps", "optimizer.lr", "nonsense", "data.packing"):
        assert sum(part in line for line in found) == 1


def test_required_keys(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert set(problems(path)) == {
        f"{name}: is required; {path} does not have it" for name in ("output", "model", "data", "training")
    }


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml") == (f"{tmp_path / 'none.yaml'}: no such file",)
    path = tmp_path / "bad.yaml"
    path.write_text("output: [unclosed\nmodel: {")
    assert "not readable as YAML" in problems(path)[0]
    path.write_text("- a\n- list\n")
    assert "must be a mapping of sections, found list" in problems(path)[0]
    path.write_bytes(b"output: \xff\xfe")
    assert "not readable as YAML" in problems(path)[0]


def test_printed_form_loads_to_an_equal_configuration(file: Path, tmp_path: Path) -> None:
    config = load_config(
        file, ["parallel.sync_units={'model.layers.*': reshard_each}", "optimizer.lr=1e-4", "training.clip_norm=null"]
    )
    config = config.model_copy(update={"output": "1e5"})  # a string that looks like a number
    path = tmp_path / "printed.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config
    content = yaml.safe_load(config.to_yaml())
    assert content["output"] == "1e5"
    assert set(content) == set(RunConfig.model_fields)  # complete, defaults included
    assert content["schedule"]["kind"] == "cosine"


def test_saved_configuration_reproduces_the_run(tiny: Tiny) -> None:
    config = tiny("training.seed=3", "schedule.warmup_steps=2")
    first = train(config)
    again = load_config(config.directory / "config.yaml", [f"output={config.output}-again"])
    assert train(again) == first
    assert all(map(math.isfinite, first))


def _sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for item in model.model_fields.values():
        if isinstance(item.annotation, type) and issubclass(item.annotation, BaseModel):
            yield from _sections(item.annotation)


@pytest.mark.parametrize("section", list(_sections(RunConfig)), ids=lambda section: section.__name__)
def test_every_field_is_described(section: type[BaseModel]) -> None:
    assert section.__doc__
    for name, item in section.model_fields.items():
        assert item.description, name
        assert item.description.strip().endswith((".", "?")), name
