"""Groups of the optimizer with settings of their own, and with other optimizers: planned, run, resumed, audited."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maintain.cells import Variant, family_case
from meshwright.audit.conduct import Auditor
from meshwright.audit.one_process.decay import plain_groups, to_be_decayed
from meshwright.audit.ready import SMOOTH_EPS, make_ready
from meshwright.checkpoint.state import initialize_optimizer, optimizer_tensors
from meshwright.errors import ConfigError, PartError
from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.config import OptimizerConfig, RunConfig, load_config
from meshwright.train.engine.guard import Guard
from meshwright.train.learning_rate import SHARE, set_learning_rate
from meshwright.train.optimizer import SeveralOptimizers, build_optimizer, check_parts
from meshwright.train.schema.optimizer_config import OptimizerGroup
from meshwright.train.start.processes import adapted
from meshwright.train.start.resume import changes
from meshwright.train.start.setup import RunSetup, make_setup
from tests.audit.conftest import auditor, folder
from tests.harness import refuses
from tests.objectives.test_given import PLACES
from tests.train.runs import tiny_run, write_config
from tests.train.test_groups import goes_on

__all__ = ["auditor", "folder"]

HERE = "tests.train.test_group_settings:"
GROUPS: list[dict[str, Any]] = [
    {"match": "**.embed_tokens", "betas": [0.5, 0.8], "eps": 1e-5},
    {"match": "model.layers.*.mlp.down_proj.weight", "lr": "0.2x", "eps": 1e-3},
    {"match": "model.layers.1", "betas": [0.7, 0.9], "weight_decay": 0.3, "fused": False},
]
EMBEDDING, DOWN, UP, OTHER = (
    "model.embed_tokens.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
)


class Heavy(torch.optim.SGD):
    """Momentum of the user's, whose step raises where it is told to."""

    broken = False

    def step(self, closure: Any = None) -> Any:
        if self.broken:
            raise KeyError("gone")
        return super().step(closure)


def run(directory: Path, groups: list[dict[str, Any]], *overrides: str, **optimizer: Any) -> RunConfig:
    config = tiny_run(directory, directory / "words.jsonl", "model.config.vocab_size=300", *overrides)
    given = {"lr": 0.01, **optimizer, "groups": groups}
    return config.model_copy(update={"optimizer": OptimizerConfig.model_validate(given)})


def settings_of(setup: RunSetup, optimizer: torch.optim.Optimizer, *keys: str) -> dict[str, tuple[Any, ...]]:
    names = {parameter: name for name, parameter in setup.model.named_parameters()}
    return {names[p]: tuple(group.get(key) for key in keys) for group in optimizer.param_groups for p in group["params"]}


def test_plan_and_optimizer_have_them(tmp_path: Path) -> None:
    setup = make_setup(run(tmp_path, GROUPS), 1)
    rows = {row.name: row for row in setup.plan.parameters}
    assert {name: (rows[name].betas, rows[name].eps, rows[name].fused) for name in (EMBEDDING, DOWN, UP, OTHER)} == {
        EMBEDDING: ((0.5, 0.8), 1e-5, None),
        DOWN: (None, 1e-3, None),
        UP: ((0.7, 0.9), None, False),
        OTHER: (None, None, None),
    }
    assert rows[EMBEDDING].decay_and_rate == "yes, betas 0.5 0.8, eps 1e-05"
    assert rows[UP].decay_and_rate == "0.3, betas 0.7 0.9, not fused"
    assert ShardingPlan.from_json(setup.plan.to_json()) == setup.plan
    assert rows[EMBEDDING].to_dict()["betas"] == (0.5, 0.8)
    assert not {"betas", "eps", "fused"} & rows[OTHER].to_dict().keys()  # as in plans without such groups
    optimizer = build_optimizer(setup.model, setup.config.optimizer, setup.plan.parameters)
    found = settings_of(setup, optimizer, "betas", "eps", "weight_decay", SHARE)
    assert found[EMBEDDING] == ((0.5, 0.8), 1e-5, 0.1, 1.0)
    assert found[DOWN] == ((0.9, 0.95), 1e-3, 0.1, 0.2)
    assert found[UP] == ((0.7, 0.9), 1e-8, 0.3, 1.0)
    assert found[OTHER] == ((0.9, 0.95), 1e-8, 0.1, 1.0)
    optimizer = build_optimizer(setup.model.to_empty(device="cpu"), setup.config.optimizer, setup.plan.parameters)
    fused = settings_of(setup, optimizer, "fused")
    assert (fused[UP], fused[OTHER]) == ((False,), (True,))
    # The audit derives the same from the words of the configuration alone.
    plain = plain_groups(setup.model, setup.config.optimizer, to_be_decayed(setup.model, 0, (), ()))["adamw"]
    names = {parameter: name for name, parameter in setup.model.named_parameters()}
    theirs = {names[p]: (g["betas"], g["eps"], g["weight_decay"], g[SHARE]) for g in plain for p in g["params"]}
    assert theirs == found


def test_the_parameters_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Three steps with given gradients, beside torch's AdamW, whose groups are written out here."""
    torch.manual_seed(0)
    setup = make_setup(run(tmp_path, GROUPS, fused=False), 1)
    model = setup.model.to_empty(device="cpu")
    plain = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(plain[name])

    def settings(name: str) -> dict[str, Any]:
        decay = 0.0 if plain[name].ndim < 2 else 0.1
        if name == EMBEDDING:
            return {"lr": 0.02, "betas": (0.5, 0.8), "eps": 1e-5, "weight_decay": decay}
        if name.endswith("mlp.down_proj.weight"):
            return {"lr": 0.004, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": decay}
        if name.startswith("model.layers.1."):
            return {"lr": 0.02, "betas": (0.7, 0.9), "eps": 1e-8, "weight_decay": 3 * decay}
        return {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}

    theirs = torch.optim.AdamW([{"params": [plain[name].requires_grad_()], **settings(name)} for name in plain], foreach=False)
    ours = build_optimizer(model, setup.config.optimizer, setup.plan.parameters)
    set_learning_rate(ours, 0.02)
    for _ in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape) * 1e-3  # so small that eps counts
            plain[name].grad = parameter.grad.clone()
        ours.step()
        theirs.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), plain[name].detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("group", "whole", "words"),
    [
        ({"betas": [0.9, 1.0]}, {}, "groups.0.betas.1"),
        ({"eps": 0}, {}, "groups.0.eps"),
        ({"decay": ["**.norm"]}, {}, "has decay; it lists patterns of the whole model: set optimizer.decay, or weight_decay"),
        ({"no_decay": ["**.norm"]}, {}, "has no_decay; it lists patterns of the whole model"),
        ({"kind": "lamb"}, {}, "groups.0.kind"),
        ({"kind": "adamw", "use": "torch.optim:SGD"}, {}, "has kind and use"),
        (
            {"with": {"momentum": 0.9}},
            {},
            "with.momentum: unknown option of kind=adamw; leave it out; legal",
        ),
        ({"kind": "sgd", "with": {"momentum": 2}}, {}, "with.momentum=2: input should be less than 1"),
        ({"kind": "lion", "betas": [0.5, 0.6]}, {}, "has betas, which belongs to kind=adamw, and lion; see `with`"),
        ({"use": "torch.optim:SGD", "betas": [0.5, 0.6]}, {}, "has betas, which belongs to kind=adamw, and torch.optim:SGD"),
        ({"eps": 1e-6}, {"use": "torch.optim:SGD"}, "has eps, which belongs to kind=adamw, and torch.optim:SGD; see `with`"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path: Path, group: dict[str, Any], whole: dict[str, Any], words: str) -> None:
    path = write_config(tmp_path, tmp_path / "words.jsonl", optimizer={**whole, "groups": [{"match": "lm_head", **group}]})
    with pytest.raises(ConfigError) as caught:
        load_config(path, [])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("group", "kind", "code", "words"),
    [
        ({"use": "torch.optim:Nothing"}, ConfigError, "config.part", "optimizer.groups: 'lm_head': use"),
        ({"use": "math:sqrt"}, ConfigError, "part.signature", "optimizer.groups: 'lm_head': use=math:sqrt: is no class"),
        ({"use": "torch.optim:SGD", "with": {"momentun": 1}}, ConfigError, "config.part.arguments", "with.momentun"),
        (
            {"use": "torch.optim:Rprop"},
            ConfigError,
            "config.value",
            "weight_decay=0.1: torch.optim:Rprop takes no weight_decay",
        ),
    ],
)
def test_a_wrong_optimizer_of_a_group_is_refused(
    tmp_path: Path, group: dict[str, Any], kind: Any, code: str, words: str
) -> None:
    with refuses(kind, code) as caught:
        check_parts(run(tmp_path, [{"match": "lm_head", **group}]), 4)
    assert words in str(caught.value)


def test_a_group_may_have_another_optimizer(tmp_path: Path) -> None:
    groups = [
        {"match": "**.embed_tokens", "use": f"{HERE}Heavy", "with": {"momentum": 0.9}, "lr": "10x", "weight_decay": 0},
        {"match": "lm_head", "betas": [0.5, 0.6]},
    ]
    setup = make_setup(run(tmp_path, groups), 1)
    row = setup.plan.parameter(EMBEDDING)
    assert (row.update, row.decay_and_rate) == (f"{HERE}Heavy (momentum=0.9)", "no (group), lr 10x")
    # Its own state is one tensor, which was tried; AdamW's are two.
    assert totals(setup.plan).optimizer_bytes == sum(
        one.bytes_per_rank * (1 if one is row else 2) for one in setup.plan.parameters if one.trainable
    )
    assert ShardingPlan.from_json(setup.plan.to_json()) == setup.plan
    assert setup.config.own_parts == [f"optimizer of **.embed_tokens: {HERE}Heavy (momentum=0.9)"]
    model = setup.model.to_empty(device="cpu")
    optimizer = build_optimizer(model, setup.config.optimizer, setup.plan.parameters)
    assert isinstance(optimizer, SeveralOptimizers)
    found = settings_of(setup, optimizer, "momentum", "betas", SHARE)
    assert (found[EMBEDDING], found[OTHER]) == ((0.9, None, 10.0), (None, (0.9, 0.95), 1.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.full_like(parameter, 2.0)
    set_learning_rate(optimizer, 0.001)
    guard = Guard(optimizer, torch.device("cpu"), None)
    guard.judge(torch.tensor(float("nan")), torch.tensor(1.0))
    guard.step()
    assert not optimizer.state
    assert bool((model.get_parameter(EMBEDDING) == 1).all())
    guard.judge(torch.tensor(1.0), torch.tensor(1.0))
    guard.step()
    assert float(model.get_parameter(EMBEDDING)[0, 0].detach()) == pytest.approx(1 - 0.01 * 2.0)
    assert float(model.get_parameter(OTHER)[0, 0].detach()) == pytest.approx(1 - 0.001 * 1.1, rel=1e-6)
    tensors = optimizer_tensors(model, optimizer)
    assert {f"optimizer.{EMBEDDING}.momentum_buffer", f"optimizer.{OTHER}.exp_avg"} <= tensors.keys()
    assert f"optimizer.{EMBEDDING}.exp_avg" not in tensors
    before = build_optimizer(model, setup.config.optimizer, setup.plan.parameters)
    initialize_optimizer(before)
    assert optimizer_tensors(model, before).keys() == tensors.keys()
    assert all(float(value.abs().sum()) == 0 for value in optimizer_tensors(model, before).values())
    optimizer.optimizers[f"{HERE}Heavy (momentum=0.9)"].broken = True  # type: ignore[attr-defined]
    with pytest.raises(PartError, match=f"optimizer {HERE}Heavy, step: KeyError"):
        guard.step()


def test_flags_of_the_guard_reach_fused_optimizers(tmp_path: Path) -> None:
    groups = [{"match": "lm_head", "use": "torch.optim:SGD", "with": {"fused": True}}]
    setup = make_setup(run(tmp_path, groups), 1)
    model = setup.model.to_empty(device="cpu")
    optimizer = build_optimizer(model, setup.config.optimizer, setup.plan.parameters)
    guard = Guard(optimizer, torch.device("cpu"), None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.ones_like(parameter)
    for loss, moves in ((float("inf"), False), (1.0, True)):
        guard.judge(torch.tensor(loss), torch.tensor(1.0))
        guard.step()
        assert all(bool((parameter != 1).any()) is moves for parameter in model.parameters())


def test_adamw_beside_an_optimizer_of_the_user(tmp_path: Path) -> None:
    groups = [
        {"match": "lm_head", "kind": "adamw", "betas": [0.5, 0.6]},
        {"match": "**.embed_tokens", "with": {"momentum": 0.5}},
    ]
    config = run(tmp_path, groups, use="torch.optim:SGD", **{"with": {"momentum": 0.9, "nesterov": True}})
    setup = make_setup(config, 1)
    optimizer = build_optimizer(setup.model, setup.config.optimizer, setup.plan.parameters)
    found = settings_of(setup, optimizer, "betas", "momentum", "nesterov")
    assert (found["lm_head.weight"], found[EMBEDDING], found[OTHER]) == (
        ((0.5, 0.6), None, None),
        (None, 0.5, True),
        (None, 0.9, True),
    )
    ours = config.optimizer.as_adamw
    assert (ours.is_adamw, config.optimizer.is_adamw) == (True, False)
    setup = make_setup(config.model_copy(update={"optimizer": ours}), 1)
    assert type(build_optimizer(setup.model, ours, setup.plan.parameters)) is torch.optim.AdamW


def test_devices_and_checkpoints_know_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run(tmp_path, [{"match": "lm_head", "fused": True}, {"match": "**.embed_tokens", "eps": 1e-9}])
    monkeypatch.setattr("meshwright.device.able", lambda kind, ability: False)
    assert [group.fused for group in adapted(config, "cpu")[0].optimizer.groups] == [False, None]
    before, now = config.model_dump(mode="json"), run(tmp_path, [{"match": "lm_head", "fused": True}]).model_dump(mode="json")
    assert any(line.startswith("optimizer.groups: ") for line in changes(before, now))
    old = run(tmp_path, [{"match": "lm_head", "lr": "2x"}]).model_dump(mode="json")
    assert old["optimizer"]["groups"] == [{"match": "lm_head", "lr": "2x", "lr_decay": None, "weight_decay": None}]


def test_audits_smooth_eps_of_groups_too(tmp_path: Path) -> None:
    config = run(tmp_path, [*GROUPS, {"match": "lm_head", "use": "torch.optim:SGD"}])
    ready, notes = make_ready(config, "float32", 2, tmp_path)
    assert [group.eps for group in ready.optimizer.groups] == [SMOOTH_EPS, SMOOTH_EPS, None, None]
    assert ready.optimizer.groups[3].use is None
    assert "optimizer.groups" in {change.key for change in notes}
    kept, _ = make_ready(run(tmp_path, GROUPS), "float64", 2, tmp_path)
    assert kept.optimizer.groups == run(tmp_path, GROUPS).optimizer.groups


def audited(auditor: Auditor, folder: Path, label: str, dtype: str = "float64", plants: Any = ()) -> Any:
    place = PLACES[label]
    case = family_case("llama", place, Variant(SyncPolicy.REDUCE_EACH, dtype, 2, False, False), folder)
    groups = [OptimizerGroup.model_validate(group) for group in GROUPS]
    optimizer = case.config.optimizer.model_copy(update={"groups": groups})
    changed = replace(case, config=case.config.model_copy(update={"optimizer": optimizer}))
    return auditor.audit(changed, place.world_size, plants=plants)


@pytest.mark.parametrize(
    ("label", "dtype"),
    [
        ("shard 2", "float64"),
        ("tp 2", "float64"),
        *(pytest.param(label, "float64", marks=pytest.mark.thorough) for label in ("pp 2", "cp 2")),
        *(pytest.param(label, "float32", marks=pytest.mark.thorough) for label in ("shard 2", "tp 2")),
    ],
)
def test_groups_are_audited(auditor: Auditor, folder: Path, label: str, dtype: str) -> None:
    report = audited(auditor, folder, label, dtype)
    assert report.passed, report.verdict


def forgets_betas(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        if group["betas"] == (0.5, 0.8):
            group["betas"] = trainer.config.optimizer.betas


def forgets_eps(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        if group["eps"] == 1e-3:
            group["eps"] = trainer.config.optimizer.eps


@pytest.mark.parametrize(("plant", "name"), [(forgets_betas, EMBEDDING), (forgets_eps, "down_proj")])
def test_a_layout_that_forgets_them_is_found(auditor: Auditor, folder: Path, plant: Any, name: str) -> None:
    report = audited(auditor, folder, "shard 2", plants=[plant])
    assert not report.passed
    assert name in report.verdict


@pytest.mark.thorough
def test_a_run_with_several_optimizers_resumes_on_another_layout(tmp_path: Path) -> None:
    use = f"{{match: '**.embed_tokens', use: '{HERE}Heavy', with: {{momentum: 0.9}}, lr: 10x}}"
    goes_on(tmp_path, f"optimizer.groups=[{use}, {{match: model.layers.1, betas: [0.5, 0.6]}}]")
