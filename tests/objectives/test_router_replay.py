"""Routing by a column: experts are given, weights are the model's own, on every axis as in one process."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from maintain.objectives import objective_case
from maintain.tiny import TINY_MODELS
from meshwright.audit.case import Case
from meshwright.audit.conduct import Auditor, audit
from meshwright.audit.small_routes import Routes
from meshwright.data.loader import TrainLoader
from meshwright.data.preparation import write_documents
from meshwright.data.store import TokenStore
from meshwright.data.tokenizer import train_tokenizer
from meshwright.distributed.experts.router_replay import Replay
from meshwright.errors import ConfigError, DataError, ModelError
from meshwright.models.token_loss import forward_logits
from meshwright.objectives.policy import Policy
from meshwright.plan.result.rows import ExpertsRow
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.given_routes import check_routes
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from tests.audit.conftest import auditor, folder
from tests.harness import refuses, run_ranks
from tests.objectives.shipped import PLACES, facts, plain_step
from tests.train.runs import rows, train, write_config
from tests.train.test_scoring import score

__all__ = ["auditor", "folder"]

EXPERTS, EACH, WORDS = 4, 2, 50
SAME = 99
"""Stands for the expert beside it."""
GROUPED = {
    "n_group": 2, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 0, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": EACH, "num_key_value_heads": 1},
    "deepseek_v3": GROUPED,
}


def made(family: str) -> tuple[Any, list[ExpertsRow]]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": WORDS}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", experts_implementation="eager").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):  # of zeros, it would choose by chance
                parameter.normal_(0, 0.5)
    return model, [
        ExpertsRow(f"model.layers.{n}.mlp.experts", f"model.layers.{n}.mlp.gate", "", "", EXPERTS, EXPERTS) for n in (0, 1)
    ]


def random_routes(*shape: int, mixtures: int = 2, experts: int = EXPERTS, each: int = EACH, seed: int = 0) -> torch.Tensor:
    """Different experts of each token, [*shape, mixtures x each]."""
    draw = torch.rand(*shape, mixtures, experts, generator=torch.Generator().manual_seed(seed))
    return draw.argsort(-1)[..., :each].flatten(-2)


def inputs(rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.arange(length).expand(rows, -1)}


@contextmanager
def own_code(model: nn.Module, family: str, given: torch.Tensor) -> Iterator[None]:
    """Routers as the papers have them, for given experts: written here once more."""
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]

    def forward(router: Any, index: torch.Tensor) -> Any:
        def run(hidden: torch.Tensor) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]).to(router.weight.dtype) @ router.weight.T
            if family == "mixtral":
                weights = torch.softmax(logits.float(), -1).gather(1, index)
                return logits, weights / weights.sum(-1, keepdim=True), index
            weights = logits.float().sigmoid().gather(1, index)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) if router.norm_topk_prob else weights
            return logits, weights * router.routed_scaling_factor, index

        return run

    for number, router in enumerate(routers):
        router.forward = forward(router, given[..., number * EACH : (number + 1) * EACH].reshape(-1, EACH))
    yield
    for router in routers:
        del router.forward


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_those_of_the_routers_own_code(family: str) -> None:
    model, rows = made(family)
    plain, batch, given = copy.deepcopy(model), inputs(), random_routes(2, 9)
    model.gradient_checkpointing_enable()
    model.train(), plain.train()
    replay = Replay(model, rows)
    with replay.of(given):
        found = forward_logits(model, batch)
        found.square().mean().backward()  # inside, since layers run again
    with own_code(plain, family, given):
        truth = forward_logits(plain, batch)
        truth.square().mean().backward()
    assert float((found - truth).abs().max()) < 1e-6  # routers compute in fp32
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert other.grad is None or float((one.grad - other.grad).abs().max()) < 1e-6 * (1 + float(other.grad.abs().max())), (
            name
        )
    assert float((forward_logits(model, batch) - truth).abs().max()) > 1e-3  # outside, routers choose


def recorded(model: nn.Module, rows: list[ExpertsRow], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What routers choose, as a rollout engine records it."""
    found: list[torch.Tensor] = []
    handles = [
        model.get_submodule(row.router).register_forward_hook(lambda module, args, output: found.append(output[2]))
        for row in rows
    ]
    forward_logits(model, dict(batch))
    for handle in handles:
        handle.remove()
    shape = batch["input_ids"].shape
    return torch.cat([one.reshape(*shape, -1) for one in found], -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_choices_and_none_change_nothing(family: str) -> None:
    model, rows = made(family)
    batch = inputs()
    replay, truth = Replay(model, rows), forward_logits(model, batch)
    own = recorded(model, rows, batch)
    for given in (own, torch.full_like(own, -1), torch.where(torch.arange(9)[:, None] % 2 == 0, own, -1)):
        with replay.of(given):
            assert torch.equal(forward_logits(model, batch), truth)


def run_of(**tensors: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output": "nowhere",
            "model": {"config": {"model_type": "mixtral", "vocab_size": WORDS}},
            "data": {"files": ["none"], "sequence_length": 24, "tensors": tensors},
            "training": {"steps": 1, "global_batch_size": 1},
        }
    )


ROUTES = {"routed_experts": {"per": "input", "width": 2 * EACH, "dtype": "int64"}}


def test_the_first_ratio_is_one(tmp_path: Path) -> None:
    """Rollouts of a program that routes tokens otherwise: with its experts the ratio is exactly 1."""
    config = run_of(**ROUTES, old_log_probs={"per": "token"}, advantages={"per": "token"})
    draw = np.random.default_rng(3)
    lengths = [int(draw.integers(4, 15)) for _ in range(4)]
    tokens = [draw.integers(0, WORDS, length) for length in lengths]
    routes = [random_routes(length, seed=length).numpy() for length in lengths]
    model, rows = made("mixtral")
    model.float()
    replay = Replay(model, rows)

    def old(ids: Any, given: Any) -> Any:
        with torch.no_grad(), replay.of(torch.tensor(given)[None]):
            logits = model(input_ids=torch.tensor(ids)[None]).logits[0].log_softmax(-1)
        return np.r_[0.0, logits[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0].numpy()].astype(np.float32)

    values = [
        {"routed_experts": given, "old_log_probs": old(ids, given), "advantages": np.full(len(ids), draw.normal(), np.float32)}
        for ids, given in zip(tokens, routes, strict=True)
    ]
    masks = [np.arange(length) > 1 for length in lengths]
    store = write_documents(tmp_path / "s", tokens, masks, sequence_length=24, tensors=config.data.values, values=values)
    check_routes(store, make_plan())
    ratios = {}
    for name in ("given", "own"):
        objective = Policy("grpo")
        objective.begin(model, facts(config))
        with Watched(replay, given=name == "given"):
            _, metrics = plain_step(objective, model, store, config, 1)
        ratios[name] = metrics["ratio"]
    assert ratios["given"] == pytest.approx(1, abs=1e-6)
    assert abs(ratios["own"] - 1) > 1e-4


class Watched:
    """Lets `plain_step`, which has no runner, feed the experts of the batch."""

    def __init__(self, replay: Replay, given: bool) -> None:
        self.replay, self.given = replay, given

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        from tests.objectives import shipped

        own = shipped.evaluate_batch

        def fed(objective: Any, model: Any, batch: Any, call: Any) -> Any:
            if not self.given:
                return own(objective, model, batch, call)
            with self.replay.of(batch["routed_experts"]):
                terms, metrics = own(objective, model, batch, call)
                return terms, metrics

        self.patch.setattr(shipped, "evaluate_batch", fed)

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()


def make_plan(**changes: Any) -> Any:
    config = RunConfig.model_validate(
        {
            "output": "nowhere",
            "model": {"config": {"model_type": "mixtral", "vocab_size": WORDS, **SMALL, **changes}},
            "data": {"files": ["none"], "sequence_length": 24},
            "training": {"steps": 1, "global_batch_size": 1},
        }
    )
    return make_setup(config, 1).plan


SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_local_experts": EXPERTS, "num_experts_per_tok": EACH,
}  # fmt: skip


def test_values_lie_beside_the_inputs(tmp_path: Path) -> None:
    config = run_of(**ROUTES)
    tokens = [np.arange(5), np.arange(7)]
    values = [{"routed_experts": np.arange(4 * len(ids)).reshape(-1, 4)} for ids in tokens]
    masks = [np.arange(5) == 4, np.arange(7) == 6]
    store = write_documents(tmp_path / "s", tokens, masks, sequence_length=14, tensors=config.data.values, values=values)
    loader = TrainLoader(store, sequence_length=14, global_batch_size=1, microbatch_size=1, shuffle=False, multiple=16)
    (batch,) = loader.microbatches(0)
    first = batch["position_ids"][0] == 0
    for begin in first.nonzero()[:2, 0].tolist():
        length = 5 if batch["input_ids"][0, begin + 5] == 0 else 7
        given = batch["routed_experts"][0, begin : begin + length]
        assert given.tolist() == values[length == 7]["routed_experts"].tolist()  # of the prompt and of the last token too
    assert (batch["routed_experts"][0, 12:] == -1).all()
    assert batch["routed_experts"].shape == (1, 16, 4)


def routed_case(folder: Path, label: str, family: str = "mixtral", packing: str = "pack", **options: Any) -> Case:
    """The case of policy gradients whose rows say which experts each token goes to; of some tokens they do not."""
    place = PLACES[label]
    shape = objective_case(folder, place, {"use": "policy"}, family, packing=packing, **options).config.model.config or {}
    text = TINY_MODELS[family].config
    experts = int(text.get("num_local_experts") or text.get("n_routed_experts") or text["num_experts"])
    dense = int(shape.get("first_k_dense_replace", 0)) + len(shape.get("mlp_only_layers", ()))
    each, mixtures = int(text["num_experts_per_tok"]), int(shape["num_hidden_layers"]) - dense
    tensors = {"routed_experts": {"per": "input", "width": mixtures * each, "dtype": "int64"}}
    case = objective_case(folder, place, {"use": "policy"}, family, packing=packing, tensors=tensors, **options)
    store, drawn = Path(f"{case.store}-routed-{experts}"), TokenStore.open(case.store)
    if not store.is_dir():
        pieces = [slice(int(a), int(b)) for a, b in zip(drawn.offsets, drawn.offsets[1:], strict=False)]
        values = [
            {
                name: np.array(one[piece] if drawn.tensors[name].per != "document" else one[n])
                for name, one in drawn.values.items()
            }
            for n, piece in enumerate(pieces)
        ]
        for number, one in enumerate(values):
            length = len(one["routed_experts"])
            given = random_routes(length, mixtures=mixtures, experts=experts, each=each, seed=number).numpy()
            one["routed_experts"] = np.where(np.arange(length)[:, None] % 5 == 4, -1, given)
        write_documents(
            store,
            [np.asarray(drawn.tokens[piece], np.int64) for piece in pieces],
            None,
            sequence_length=case.config.data.sequence_length,
            tensors=drawn.tensors,
            values=values,
        )
    return replace(case, store=store)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("label", ["ep 2", "tp 2 seq", "cp 2", "pp 2"])
def test_an_axis(auditor: Auditor, folder: Path, label: str) -> None:
    report = auditor.audit(routed_case(folder, label), PLACES[label].world_size)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-11


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "label", ["shard 2", "2 x shard 2", "tp 2", "ep 2 = tp 2", "cp 2 x ep 2", "pp 2 x ep 2", "pp 2 x cp 2", "cp 2 x tp 2 seq"]
)
def test_products(auditor: Auditor, folder: Path, label: str, family: str, packing: str) -> None:
    report = auditor.audit(routed_case(folder, label, family, packing), PLACES[label].world_size)
    assert report.passed, report.verdict


@pytest.mark.thorough
@pytest.mark.parametrize("modes", [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}])
def test_layers_that_run_again_go_to_the_same_experts(auditor: Auditor, folder: Path, modes: dict[str, str]) -> None:
    case = routed_case(folder, "ep 2")
    parallel = case.config.parallel.model_copy(update=modes)
    report = auditor.audit(replace(case, config=case.config.model_copy(update={"parallel": parallel})), 2)
    assert report.passed, report.verdict


def forget(trainer: Any) -> None:
    trainer.runner.inner.replay.of = lambda given: nullcontext()


def shift(trainer: Any) -> None:
    own = trainer.runner.inner.replay.of
    trainer.runner.inner.replay.of = lambda given: own(given.roll(1, 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plant", [shift, forget])
def test_a_layout_that_routes_otherwise_is_found(auditor: Auditor, folder: Path, plant: Any) -> None:
    report = auditor.audit(routed_case(folder, "ep 2"), 2, plants=[plant])
    assert not report.passed


@pytest.mark.parametrize(
    ("model", "column", "code", "words"),
    [
        ({}, {"width": 5}, "moe.replay", "width=5: legal is 4, for 2 routers that choose 2 experts of a token each"),
        ({"model_type": "llama"}, {}, "moe.dense", "no mixtures of experts"),
        ({"model_type": "phimoe"}, {}, "moe.replay", "does not choose by one topk over its scores of each token"),
    ],
)
def test_what_cannot_be_given_is_refused(tmp_path: Path, model: Any, column: Any, code: str, words: str) -> None:
    sections = {"model": {"config": {"model_type": "mixtral", **SMALL, **model}}}
    if model.get("model_type") == "llama":
        sections["model"]["config"] = {key: own for key, own in sections["model"]["config"].items() if "experts" not in key}
    path = write_config(tmp_path, tmp_path / "none", **sections)
    sets = json.dumps({**ROUTES["routed_experts"], **column})
    with refuses(ConfigError, code) as caught:
        make_setup(load_config(path, ["model.config.vocab_size=50", f"data.tensors.routed_experts={sets}"]), 1)
    assert words in str(caught.value)


@pytest.mark.parametrize("column", [{"per": "token"}, {"width": None}, {"dtype": "float32"}])
def test_a_column_of_another_kind_is_refused(tmp_path: Path, column: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"data\.tensors\.routed_experts: legal is per: input, width"):
        run_of(routed_experts={**ROUTES["routed_experts"], **column})


def rollout_run(tmp_path: Path, wrong: int | None = None, *overrides: str) -> RunConfig:
    draw = np.random.default_rng(0)
    lines = []
    for number in range(40):
        prompt, said = draw.integers(0, WORDS, 4).tolist(), draw.integers(0, WORDS, int(draw.integers(2, 9))).tolist()
        length = len(prompt) + len(said)
        routes = random_routes(length, seed=number).tolist()
        if wrong is not None and number == 7:
            routes[3][2:] = [routes[3][3] if wrong == SAME else wrong, routes[3][3]]
        lines.append(
            json.dumps(
                {
                    "prompt_ids": prompt,
                    "completion_ids": said,
                    "old_log_probs": [-3.9] * len(said),
                    "advantages": float(draw.normal()),
                    "routed_experts": routes,
                }
            )
        )
    corpus = tmp_path / "rollouts.jsonl"
    corpus.write_text("\n".join(lines) + "\n")
    train_tokenizer(["some words of a text, and some more"], 270, at_most=True).save_pretrained(tmp_path / "words")
    model, tokenizer = {"config": {"model_type": "mixtral", **SMALL}}, {"path": str(tmp_path / "words")}
    path = write_config(tmp_path, corpus, model=model, tokenizer=tokenizer)
    column = json.dumps(ROUTES["routed_experts"])
    sets = ["training.objective=policy", f"data.tensors.routed_experts={column}", "training.steps=3", *overrides]
    return load_config(path, sets)


@pytest.mark.parametrize("wrong", [EXPERTS, -2])
def test_experts_that_do_not_exist_are_named(tmp_path: Path, wrong: int) -> None:
    with refuses(DataError, "data.tensors") as caught:
        prepare_run(rollout_run(tmp_path, wrong), 1)
    assert f"token 4: expert {wrong} of model.layers.1.mlp.experts; legal are 0 to 3, and -1" in str(caught.value)


@pytest.mark.thorough
def test_a_run_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    losses = []
    for name, sets, ranks in (
        ("one", ["layout.dp_shard=1"], 1),
        ("two", ["layout.ep=2"], 2),
        ("pp", ["layout.pp=2", "layout.dp_shard=1"], 2),
    ):
        (tmp_path / name).mkdir()
        losses.append(train(rollout_run(tmp_path / name, None, *sets), ranks))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [["layout.ep=2"], ["layout.tp=2", "layout.dp_shard=1"]])
def test_scores_and_the_first_step_route_alike(tmp_path: Path, layout: list[str]) -> None:
    """What `score` says of tokens with given experts are the old log-probabilities of a run with these: the ratio is 1."""
    config = rollout_run(tmp_path, None, *layout)
    corpus, begun = Path(config.data.files[0]), tmp_path / "run.yaml"
    given = [json.loads(line) for line in corpus.read_text().splitlines()]
    tokens = [
        {
            "input_ids": [*row["prompt_ids"], *row["completion_ids"]],
            "loss_mask": [0] * len(row["prompt_ids"]) + [1] * len(row["completion_ids"]),
            "routed_experts": row["routed_experts"],
        }
        for row in given
    ]
    (tmp_path / "tokens.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in tokens))
    begun.write_text(config.to_yaml())
    sets = [f"data.files=[{tmp_path}/tokens.jsonl]", "training.objective=null", "data.format=tokens"]
    score(begun, tmp_path / "scores.jsonl", *sets, *layout, top_k=0)
    found = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    for row, scored in zip(given, found, strict=True):
        row["old_log_probs"] = scored["log_probs"][len(row["prompt_ids"]) :]
    corpus.write_text("".join(f"{json.dumps(row)}\n" for row in given))
    train(config, 2)
    first = next(row for row in rows(config) if "loss" in row)
    assert first["ratio"] == pytest.approx(1, abs=1e-5)
    assert first["clipped"] == 0
    other = config.model_copy(
        update={"output": str(tmp_path / "other"), "data": config.data.model_copy(update={"tensors": {}})}
    )
    train(other, 2)
    assert abs(next(row for row in rows(other) if "loss" in row)["ratio"] - 1) > 1e-4


@pytest.mark.parametrize("wrong", [SAME, -1])
def test_experts_that_no_router_chooses_are_named(tmp_path: Path, wrong: int) -> None:
    with refuses(
        DataError,
        "data.tensors",
    ) as caught:
        prepare_run(rollout_run(tmp_path, wrong), 1)
    assert "of model.layers.1.mlp.experts; legal are 2 different ones, or -1 for all" in str(caught.value)


def test_a_small_model_of_an_audit_has_fewer(tmp_path: Path) -> None:
    routes = Routes(3, 2, 4)
    fitted = routes.fit(np.array([[5, 1, 2, -1], [0, 3, 7, 6]]))
    assert fitted.tolist() == [[1, 2, 1, 2, 2, 3], [0, 1, 3, 0, 3, 0]]
    assert routes.fit(np.array([[-1, 0]]))[0].tolist() == [-1, -1, 0, 1, -1, -1]


@pytest.mark.thorough
@pytest.mark.parametrize("drawn", [True, False])
def test_the_audit_of_a_run_shrinks_the_column(tmp_path: Path, drawn: bool) -> None:
    config = rollout_run(tmp_path, None, "model.config.hidden_size=256", "model.config.vocab_size=4000", "layout.ep=2")
    report = audit(config, nproc=2, steps=2, drawn=drawn)
    assert report.passed, report.verdict
    assert any(change.key.startswith("data.tensors") for change in report.changes)


def test_a_model_without_known_routers_takes_no_column() -> None:
    model, rows = made("mixtral")
    with refuses(ModelError, "moe.replay"), Replay(model, [replace(row, router="") for row in rows]).of(random_routes(1, 2)):
        pass
    with refuses(ModelError, "moe.replay"), Replay(model, rows).of(torch.zeros(1, 2, 5, dtype=torch.long)):
        pass
    with Replay(model, rows).of(torch.zeros(2, 9, 6, dtype=torch.long)), refuses(ModelError, "moe.replay"):
        forward_logits(model, inputs())  # routers choose two experts


def looped(rank: int) -> list[float]:
    """Losses of a loop of one's own under ep 2, with given experts and without."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", vocab_size=WORDS, **SMALL))
    engine = mw.Engine(model, layout="dp_shard=2,ep=2", optimizer={"kind": "adamw", "lr": 1e-3}, sequence_length=16)
    losses = []
    for given in (None, random_routes(2, 9), random_routes(2, 9, seed=5), torch.full((2, 9, 4), -1)):
        batch = inputs() if given is None else {**inputs(), "routed_experts": given}
        losses.append(float(engine.evaluate([batch], lambda log_probs, batch: -log_probs)["loss"]))
    for wrong, words in (
        (random_routes(2, 9) + 3, "row 1, token"),
        (torch.zeros(2, 9, 3, dtype=torch.long), "legal are whole"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine.evaluate([{**inputs(), "routed_experts": wrong}], lambda log_probs, batch: -log_probs)
    return losses


def test_a_loop_of_ones_own_gives_them_too() -> None:
    (own, one, other, left), again = run_ranks(looped, 2)
    assert again == [own, one, other, left]
    assert left == own
    assert len({own, one, other}) == 3
