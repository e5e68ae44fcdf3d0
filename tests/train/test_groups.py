"""Groups of the optimizer: other rates and decays by patterns, in the plan, in a run, resumed, on pipelines, and audited."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from maintain.cells import Variant, family_case
from meshwright.audit.conduct import Auditor
from meshwright.audit.one_process.decay import plain_groups, to_be_decayed
from meshwright.errors import ConfigError, PlanError
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.explain import explain
from meshwright.shrink.run import shrink
from meshwright.train.config import RunConfig
from meshwright.train.learning_rate import SHARE, set_learning_rate
from meshwright.train.optimizer import build_optimizer
from meshwright.train.schema.optimizer_config import OptimizerGroup
from meshwright.train.start.setup import make_setup
from tests.audit.conftest import auditor, folder
from tests.harness import refuses
from tests.objectives.test_given import PLACES
from tests.train.runs import tiny_run, train, write_corpus

__all__ = ["auditor", "folder"]

GROUPS = [
    {"match": "**.embed_tokens", "lr": "0.1x", "weight_decay": 0},
    {"match": "model.layers.*.mlp.down_proj.weight", "lr": 0.002, "weight_decay": 0.3},
    {"match": "**", "lr": "0.5x", "lr_decay": 0.8},
]
SET = "optimizer.groups=" + str(GROUPS).replace("'", "").replace("**", "'**'").replace("'**'.embed_tokens", "'**.embed_tokens'")


def run(tmp_path: Path, *overrides: str) -> RunConfig:
    return tiny_run(tmp_path, tmp_path / "words.jsonl", "model.config.vocab_size=300", *overrides)


def rows(plan: ShardingPlan) -> dict[str, tuple[float, float | None, bool]]:
    return {row.name: (round(row.rate, 6), row.weight_decay, row.decayed) for row in plan.parameters}


def test_the_plan_has_rate_and_decay_of_each_parameter(tmp_path: Path) -> None:
    plan = make_setup(run(tmp_path, SET, "model.config.num_hidden_layers=4"), 1).plan
    found = rows(plan)
    assert found["model.embed_tokens.weight"] == (0.1, 0.0, False)
    assert found["model.layers.2.mlp.down_proj.weight"] == (0.2, 0.3, True)
    assert [found[f"model.layers.{n}.mlp.up_proj.weight"][0] for n in range(4)] == [0.256, 0.32, 0.4, 0.5]
    assert found["model.layers.0.input_layernorm.weight"] == (0.256, None, False)
    assert found["model.norm.weight"] == (0.5, None, False)
    assert found["lm_head.weight"] == (0.5, None, True)
    assert ShardingPlan.from_json(plan.to_json()) == plan
    page = Console(file=StringIO(), width=240)
    page.print(explain(plan))
    for words in ("no (group), lr 0.1x", "0.3, lr 0.2x", "yes, lr 0.256x", "no (vector), lr 0.4x"):
        assert words in page.file.getvalue()  # type: ignore[attr-defined]


def test_what_is_before_the_first_layer_is_one_below_it(tmp_path: Path) -> None:
    sets = "optimizer.groups=[{match: '**', lr_decay: 0.5}]"
    found = rows(make_setup(run(tmp_path, sets), 1).plan)
    assert found["model.embed_tokens.weight"][0] == 0.25
    assert [found[f"model.layers.{n}.self_attn.q_proj.weight"][0] for n in (0, 1)] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("groups", "kind", "words"),
    [
        ("[{match: 'model.blocks', lr: 0.1x}]", PlanError, "optimizer.groups pattern 'model.blocks' matches no parameter"),
        ("[{match: '**', lr: 2x}, {match: '**.mlp', lr: 3x}]", PlanError, "earlier groups have all its parameters"),
        ("[{match: lm_head, lr_decay: 0.5}]", PlanError, "names no layer"),
        (
            "[{match: lm_head}]",
            ConfigError,
            "'lm_head' changes nothing; legal are lr, lr_decay, weight_decay, betas, eps, fused, kind, use and with",
        ),
        ("[{match: lm_head, lr: '0.1'}]", ConfigError, "legal are a rate above 0, and a share of optimizer.lr, as 0.1x"),
        ("[{match: lm_head, lr: 0}]", ConfigError, "legal are a rate above 0"),
        ("[{match: lm_head, lr: fastx}]", ConfigError, "legal are a rate above 0"),
        ("[{match: lm_head, rate: 0.1x}]", ConfigError, "groups.0.rate: unknown key"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path: Path, groups: str, kind: Any, words: str) -> None:
    with pytest.raises(kind) as caught:
        make_setup(run(tmp_path, f"optimizer.groups={groups}"), 1)
    assert words in str(caught.value)


def test_the_optimizer_has_them(tmp_path: Path) -> None:
    setup = make_setup(run(tmp_path, SET), 1)
    model = setup.model
    optimizer = build_optimizer(model, setup.config.optimizer, setup.plan.parameters)
    set_learning_rate(optimizer, 0.02)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {names[p]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert found["model.embed_tokens.weight"] == (0.02 * 0.1, 0.0)
    assert found["model.layers.0.mlp.down_proj.weight"] == (pytest.approx(0.02 * 0.2), 0.3)
    assert found["model.layers.0.mlp.up_proj.weight"] == (pytest.approx(0.02 * 0.4), 0.1)
    assert found.keys() == set(names.values())
    settings = setup.config.optimizer
    plain = plain_groups(model, settings, to_be_decayed(model, 0, (), ()))["adamw"]
    theirs = {names[p]: (0.02 * group[SHARE], group["weight_decay"]) for group in plain for p in group["params"]}
    assert {name: pytest.approx(pair) for name, pair in found.items()} == theirs
    user = settings.model_copy(update={"use": "torch.optim:SGD", "arguments": {"momentum": 0.5}})
    with pytest.raises(PlanError, match="updated by adamw, and the configuration has torch"):
        build_optimizer(model, user, setup.plan.parameters)
    rows = [replace(row, update="torch.optim:SGD (momentum=0.5)") for row in setup.plan.parameters]
    groups = build_optimizer(model, user, rows).param_groups
    assert {(group["lr"], group["weight_decay"]) for group in groups} >= {(settings.lr * 0.1, 0.0)}


def test_a_parameter_moves_by_its_rate() -> None:
    """One step of Adam moves every entry by its rate."""
    from meshwright.layout import Layout
    from meshwright.plan.given.options import ParallelOptions
    from meshwright.plan.given.spec import ParallelSpec
    from meshwright.plan.resolver import resolve
    from meshwright.train.config import OptimizerConfig

    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    options = ParallelOptions(groups=(("0", 0.25, None, None, ()),))
    plan = resolve(ParallelSpec("plain", layers=()), model, Layout(), options, world_size=1)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.0), plan.parameters)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moved = [(one - other.detach()).abs().max().item() for one, other in zip(before, model.parameters(), strict=True)]
    assert moved == pytest.approx([0.025, 0.1], rel=1e-4)


@pytest.mark.thorough
def test_a_run_that_resumes_goes_on_on_another_layout(tmp_path: Path) -> None:
    goes_on(tmp_path, SET)


def goes_on(folder: Path, *overrides: str) -> None:
    """A run on stages that is resumed on shards has the losses of one process, and not those of a run without the overrides."""
    (folder / "whole").mkdir()
    corpus = write_corpus(folder / "words.jsonl")
    sets = (*overrides, "training.steps=4", "checkpoint.every=2")
    at_once = train(tiny_run(folder / "whole", corpus, *sets))
    parts = tiny_run(folder, corpus, *sets, "layout.pp=2", "layout.dp_shard=1")
    train(parts, 2)
    for later in (Path(parts.output) / "checkpoints").glob("*4"):
        later.rename(folder / "gone")
    again = train(tiny_run(folder, corpus, *sets, "layout.dp_shard=2"), 2)
    assert again == pytest.approx(at_once, rel=1e-4)
    plain = tiny_run(folder / "whole", corpus, "training.steps=4", f"output={folder}/plain")
    assert train(plain)[-1] != pytest.approx(at_once[-1], rel=1e-4)


def audited(auditor: Auditor, folder: Path, label: str, plants: Any = ()) -> Any:
    place = PLACES[label]
    case = family_case("llama", place, Variant(SyncPolicy.REDUCE_EACH, "float64", 2, False, False), folder)
    groups = [OptimizerGroup.model_validate(group) for group in GROUPS]
    optimizer = case.config.optimizer.model_copy(update={"groups": groups})
    changed = replace(case, config=case.config.model_copy(update={"optimizer": optimizer}))
    return auditor.audit(changed, place.world_size, plants=plants)


@pytest.mark.parametrize(
    "label", ["pp 2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("shard 2", "tp 2", "cp 2", "pp 2 x cp 2"))]
)
def test_groups_are_audited(auditor: Auditor, folder: Path, label: str) -> None:
    report = audited(auditor, folder, label)
    assert report.passed, report.verdict


def forget(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group[SHARE] = 1.0


def test_a_layout_that_forgets_them_is_found(auditor: Auditor, folder: Path) -> None:
    report = audited(auditor, folder, "shard 2", plants=[forget])
    assert not report.passed
    assert "model.layers" in report.verdict


def test_a_small_model_for_an_audit_keeps_the_groups(tmp_path: Path) -> None:
    groups = "[{match: model.layers.5, lr: 0.1x}, {match: 'model.layers.*.mlp', lr_decay: 0.9}, {match: lm_head, lr: 2x}]"
    large = run(tmp_path, f"optimizer.groups={groups}", "model.config.num_hidden_layers=8", "model.config.hidden_size=1024")
    small, world_size, changes = shrink(large, 2)
    assert [group.match for group in small.optimizer.groups][1:] == ["model.layers.*.mlp", "lm_head"]
    assert any(change.key == "optimizer.groups" for change in changes)
    found = rows(make_setup(small, world_size).plan)
    assert {0.1, 2.0} <= {rate for rate, _, _ in found.values()}
    with refuses(PlanError, "plan.pattern"):
        make_setup(run(tmp_path, "optimizer.groups=[{match: model.layers.9, lr: 0.1x}]"), 1)
