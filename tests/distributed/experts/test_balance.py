"""Balance of routers: the formula, its gradient, what is counted and when, biases that move and are kept."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from maintain.tiny import TINY_MODELS
from meshwright.checkpoint import storage
from meshwright.checkpoint.export import export_checkpoint
from meshwright.distributed.experts.balance import Balance, refusals
from meshwright.distributed.experts.balance_loss import sequence_balance
from meshwright.distributed.parallelizer import get_lm_ac_layers
from meshwright.errors import ConfigError, ModelError
from meshwright.layout import Layout
from meshwright.models.objective import NextToken
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.spec import Scores
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ExpertsRow
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.run_files import Paths
from meshwright.train.start.setup import make_setup
from tests.diffusion_gemma import RUN
from tests.harness import run_ranks
from tests.recompute import checkpoint_layer
from tests.tiny import make, summed_loss
from tests.train.runs import LLAMA, losses, rows, train, trainer_on_rank

Tiny = Callable[..., RunConfig]
CPU = torch.device("cpu")

MIXTRAL = (
    "model.config={model_type: mixtral, num_local_experts: 4, num_experts_per_tok: 2, "
    + ", ".join(f"{key}: {value}" for key, value in LLAMA.items() if key != "model_type")
    + "}"
)
DEEPSEEK = (
    "model.config={model_type: deepseek_v3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 3, "
    "num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 64, q_lora_rank: 16, kv_lora_rank: 16, "
    "qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8, n_routed_experts: 4, num_experts_per_tok: 2, n_group: 2, "
    "topk_group: 1, n_shared_experts: 1, first_k_dense_replace: 1, moe_intermediate_size: 32}"
)
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


# -- the loss ----------------------------------------------------------------------------------------------------------------


def as_the_paper_has_it(scores: torch.Tensor, index: torch.Tensor, counts: torch.Tensor, kind: Scores) -> float:
    """Equations 17 to 20 with loops, each sequence times its tokens."""
    batch, length = counts.shape
    experts, chosen = scores.shape[1], index.shape[1]
    total = 0.0
    for b in range(batch):
        places = [b * length + t for t in range(length) if counts[b, t]]
        for i in range(experts):
            f = p = 0.0
            for place in places:
                row = {
                    Scores.SOFTMAX: lambda s: s.exp(),
                    Scores.SIGMOID: lambda s: 1 / (1 + (-s).exp()),
                    Scores.PROBABILITIES: lambda s: s,
                }[kind](scores[place])
                f += experts / (chosen * len(places)) * (i in index[place].tolist())
                p += float(row[i] / row.sum()) / len(places)
            total += len(places) * f * p
    return total


@pytest.mark.parametrize("kind", [kind for kind in Scores if kind is not Scores.UNKNOWN])
def test_the_formula(kind: Scores) -> None:
    torch.manual_seed(0)
    scores = torch.randn(3 * 5, 6, dtype=torch.float64)
    scores = scores.softmax(-1) if kind is Scores.PROBABILITIES else scores
    index = scores.topk(2).indices
    counts = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    found = sequence_balance(scores, index, counts, kind)
    torch.testing.assert_close(float(found), as_the_paper_has_it(scores, index, counts, kind))
    assert sequence_balance(scores.bfloat16(), index, counts, kind).dtype == torch.float32
    # What does not count has no say.
    others = scores.clone()
    others[7:] = others[7:].flip(0)
    assert torch.equal(sequence_balance(others, others.topk(2).indices, counts, kind), found)


def test_perfect_balance_is_one_for_each_token() -> None:
    scores = 5.0 * torch.eye(4).repeat(2, 1)
    index = torch.stack([torch.arange(8) % 4, (torch.arange(8) + 1) % 4], dim=1)
    counts = torch.ones(2, 4, dtype=torch.bool)
    torch.testing.assert_close(float(sequence_balance(scores, index, counts, Scores.SOFTMAX)), 8.0)
    collapsed, same = torch.tensor([[0, 1]]).expand(8, 2), torch.tensor([[9.0, 9.0, 0.0, 0.0]]).expand(8, 4)
    assert float(sequence_balance(same, collapsed, counts, Scores.SOFTMAX)) > 15.9


def test_tokens_that_count() -> None:
    labels = torch.tensor([[5, -100, 7, -100], [-100, -100, -100, -100], [-100, 4, 5, 6]])
    found = NextToken().routed({"labels": labels})
    assert found.int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


def batch_of(rows_: int = 3, length: int = 10) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 29, (rows_, length))
    labels = ids.roll(-1, 1)
    labels[1, 4:] = -100
    return {"input_ids": ids, "labels": labels}


def watched(
    model: Any, mode: ActivationCheckpointing, kept: Iterable[str] = (), **options: float
) -> tuple[Balance, tuple[ExpertsRow, ...]]:
    from meshwright.models.specs.registry import spec_of

    experts = resolve(spec_of(model), model, Layout(), world_size=1).experts
    modules = [model.get_submodule(name) for row in experts for name in (row.module, row.router)]
    for layer in get_lm_ac_layers(model):
        checkpoint_layer(layer, mode, kept, routing=modules)
    return Balance(model.train(), experts, CPU, **options), experts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gemma4_moe", "gpt_oss"])
def test_the_gradient_is_that_of_the_sum_of_both_losses(family: str) -> None:
    """Against autograd over the formula, written out; recomputed in every mode: the same bits, and nothing counted twice."""

    def on_rank(rank: int) -> None:
        coefficient = 0.3
        torch.manual_seed(1)
        batch = batch_of()
        counts = NextToken().routed(batch)
        tokens = counts.sum()

        model, _ = make(family)
        model.train()
        _, experts = watched(make(family)[0], ActivationCheckpointing.NONE)
        seen: list[tuple[Any, ExpertsRow]] = []
        for row in experts:
            router = model.get_submodule(row.router)
            router.register_forward_hook(lambda _, args, output, row=row: seen.append((output, row)))
        loss = summed_loss(model, batch) / 7
        terms = [sequence_balance(output[0], output[2], counts, Scores(row.scores)) for output, row in seen]
        expected_value = coefficient * sum(terms) / tokens
        (loss + expected_value).backward()
        expected = [p.grad for p in model.parameters()]
        expected_loads = [
            torch.bincount(output[2].view(*counts.shape, -1)[counts].flatten(), minlength=row.experts) for output, row in seen
        ]

        for mode in ActivationCheckpointing:
            model, _ = make(family)
            balance, _ = watched(model, mode, aux_loss=coefficient)
            balance.begin_step(tokens)
            with balance.microbatch(counts):
                (summed_loss(model, batch) / 7).backward()
            (value,) = balance.losses().values()
            torch.testing.assert_close(value, expected_value.detach(), rtol=1e-5, atol=0)
            for ours, theirs in zip(model.parameters(), expected, strict=True):
                assert (ours.grad is None) == (theirs is None)
                if theirs is not None:
                    torch.testing.assert_close(ours.grad, theirs, rtol=1e-5, atol=1e-6)
            metrics = balance.finish_step(lambda values: values, unless=torch.zeros(()), logged=True)
            for row, loads in zip(experts, expected_loads, strict=True):
                number = row.module.split(".")[2]
                most = float(loads.max() / loads.double().mean())
                assert metrics[f"moe/max_load/{number}"].item() == pytest.approx(most), mode
                assert metrics[f"moe/idle_experts/{number}"] == int((loads == 0).sum())

    run_ranks(on_rank, 1)


def test_what_is_counted_is_no_operator_of_the_layer() -> None:
    """Selective recomputation tells kept results apart by their order, and forward alone counts."""
    names = ("aten._to_copy.default", "aten.add.Tensor", "aten.ones_like.default", "aten.mul.Tensor")

    def on_rank(rank: int) -> None:
        batch = batch_of()
        counts = NextToken().routed(batch)

        def found(mode: ActivationCheckpointing, *kept: str) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, float]]:
            model = make("mixtral")[0].bfloat16()  # whose norms and routers convert, as what counts does
            balance, _ = watched(model, mode, kept=kept, aux_loss=0.3)
            balance.begin_step(counts.sum())
            with balance.microbatch(counts):
                (summed_loss(model, batch) / 7).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            metrics = balance.finish_step(lambda values: values, unless=torch.zeros(()), logged=True)
            return gradients, *balance.losses().values(), metrics

        expected = found(ActivationCheckpointing.NONE)
        for kept in (*((name,) for name in names), names):
            ours = found(ActivationCheckpointing.SELECTIVE, *kept)
            assert ours[1:] == expected[1:], kept
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours[0], expected[0], strict=True)), kept

    run_ranks(on_rank, 1)


def test_neither_evaluation_nor_a_draft_nor_another_step_is_counted() -> None:
    def on_rank(rank: int) -> None:
        model, _ = make("mixtral")
        balance, _ = watched(model, ActivationCheckpointing.FULL, aux_loss=1.0)
        batch = batch_of()
        counts = NextToken().routed(batch)

        def once(**options: Any) -> float:
            balance.begin_step(counts.sum())
            if options.get("eval"):
                model.eval()
            with torch.set_grad_enabled(not options.get("draft")):
                if options.get("outside"):
                    summed_loss(model, batch)
                else:
                    with balance.microbatch(counts):
                        summed_loss(model, batch)
            model.train()
            return float(balance.losses()["moe/aux_loss"])

        assert once() > 0
        first = once()
        assert once() == first
        assert once(eval=True) == once(draft=True) == once(outside=True) == 0

    run_ranks(on_rank, 1)


def test_a_router_whose_outputs_cannot_be_read_is_told_of_once() -> None:
    def on_rank(rank: int) -> None:
        model, _ = make("mixtral")
        balance, _ = watched(model, ActivationCheckpointing.NONE)
        batch = batch_of()
        other = batch["labels"][:, :-1] > 0  # of fewer tokens than the routers are given
        for expected in (["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"], []):
            balance.begin_step(other.sum())
            with balance.microbatch(other):
                summed_loss(model, batch)
            told = balance.pop_warnings()
            assert [line.split("'")[1] for line in told] == expected
            assert all("was given 30 tokens of a batch of 27" in line for line in told)

    run_ranks(on_rank, 1)


# -- refusals -----------------------------------------------------------------------------------------------------------------


def refused(tiny: Tiny, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        make_setup(tiny(*overrides), 1)
    return "\n".join(error.value.problems)


def test_refusals(tiny: Tiny) -> None:
    assert "moe.aux_loss=0.01: LlamaForCausalLM has no mixtures of experts" in refused(tiny, "moe.aux_loss=0.01")
    assert "moe.bias_update_rate=0.001: the router 'model.layers.0.mlp.gate' has no bias buffer for balance" in refused(
        tiny, MIXTRAL, "moe.bias_update_rate=0.001"
    )
    frozen = refused(tiny, MIXTRAL, "moe.aux_loss=0.01", "parallel.freeze=['model.layers.*.mlp.gate.*']")
    assert "moe.aux_loss=0.01: the router 'model.layers.0.mlp.gate' is frozen" in frozen
    with_logits = MIXTRAL[:-1] + ", output_router_logits: true}"
    assert "for a balance loss, set its coefficient moe.aux_loss" in refused(tiny, with_logits)
    with pytest.raises(ConfigError, match=r"moe\.aux_loss=-1: "):
        tiny("moe.aux_loss=-1")
    make_setup(tiny(MIXTRAL, "moe.aux_loss=0", "moe.bias_update_rate=0"), 1)


def test_an_unknown_router_is_refused_by_name() -> None:
    from dataclasses import replace

    model, spec = make("mixtral", meta=True)
    unknown = replace(spec, experts=tuple(replace(rule, router=None) for rule in spec.experts))
    plan = resolve(unknown, model, Layout(), world_size=1)
    found = refusals(plan, aux_loss=0.1, bias_update_rate=0.0, uncounted="")
    assert found[0].startswith("moe.aux_loss=0.1: the router of 'model.layers.0.mlp.experts' is unknown")
    known = resolve(spec, model, Layout(), world_size=1)
    assert refusals(known, aux_loss=0.1, bias_update_rate=0.0, uncounted="") == []
    assert refusals(known, aux_loss=0.1, bias_update_rate=0.0, uncounted="none") == ["moe.aux_loss=0.1: none"]


def test_scores_that_are_unknown_are_refused_to_the_loss_alone(tiny: Tiny) -> None:
    from dataclasses import replace

    model, spec = make("deepseek_v3", meta=True)
    unknown = replace(spec, experts=tuple(replace(rule, scores=Scores.UNKNOWN) for rule in spec.experts))
    plan = resolve(unknown, model, Layout(ep=2), world_size=2)
    assert plan.experts[0].scores == "unknown"
    (found,) = refusals(plan, aux_loss=0.1, bias_update_rate=0.1, uncounted="")
    assert found == (
        "moe.aux_loss=0.1: the kind of scores of the router 'model.layers.1.mlp.gate' is unknown; declare it (scores of an "
        "ExpertsRule in a strategy, docs/adding-a-family.md): softmax, sigmoid, probabilities, or leave moe.aux_loss out"
    )
    assert refusals(plan, aux_loss=0.0, bias_update_rate=0.1, uncounted="") == []
    Balance(model, plan.experts, CPU, bias_update_rate=0.1)
    with pytest.raises(
        ModelError, match=r"aux_loss: the kind of scores of the routers \['model.layers.1.mlp.gate'\] is unknown"
    ):
        Balance(model, plan.experts, CPU, aux_loss=0.1)
    with pytest.raises(ModelError, match="legal are softmax, sigmoid, probabilities"):
        sequence_balance(torch.ones(2, 4), torch.zeros(2, 1).long(), torch.ones(1, 2).bool(), Scores.UNKNOWN)


# -- whole runs ---------------------------------------------------------------------------------------------------------------


STAGES = ("layout.pp=2", "layout.dp_shard=1", "training.microbatch_size=2")


@pytest.mark.thorough
def test_metrics_of_a_run_do_not_depend_on_ranks_or_recomputation(tiny: Tiny) -> None:
    """One process, two shards with full checkpointing, two ranks of ep, two stages: the same loads and balance loss."""
    common = (MIXTRAL, "moe.aux_loss=0.1", "training.eval_every=2", "training.log_every=2")
    one = tiny(*common, name="one")
    train(one)
    found = [row for row in rows(one) if "loss" in row]
    assert [row["step"] for row in found] == [1, 2, 4, 6]
    assert {"moe/aux_loss", "moe/max_load/0", "moe/max_load/1", "moe/idle_experts/0"} <= found[0].keys()
    assert 0.1 * 2 * 0.9 < found[0]["moe/aux_loss"] < 0.1 * 2 * 2  # 1 for a layer in balance
    for index, options in enumerate((("parallel.activation_checkpointing=full",), ("layout.ep=2",), STAGES)):
        other = tiny(*common, *options, name=f"other {index}")
        train(other, 2)
        for ours, theirs in zip([row for row in rows(other) if "loss" in row], found, strict=True):
            assert {key for key in ours if key.startswith("moe/")} == {key for key in theirs if key.startswith("moe/")}
            for key in theirs:
                if key.startswith("moe/") or key == "loss":
                    assert ours[key] == pytest.approx(theirs[key], rel=2e-3), (key, ours["step"])


def test_without_load_metrics_there_are_none(tiny: Tiny) -> None:
    config = tiny(MIXTRAL, "moe.load_metrics=false", "training.steps=2")
    train(config)
    assert not [key for row in rows(config) for key in row if key.startswith("moe/")]


def test_the_balance_loss_balances(tiny: Tiny) -> None:
    found = {}
    for coefficient in (0.0, 1.0):
        config = tiny(MIXTRAL, f"moe.aux_loss={coefficient}", "training.steps=20", name=str(coefficient))
        train(config)
        last = [row for row in rows(config) if "loss" in row][-5:]
        found[coefficient] = sum(row[f"moe/max_load/{layer}"] for row in last for layer in (0, 1)) / 10
    assert found[1.0] < found[0.0] - 0.05


def bias_on_rank(rank: int, config: RunConfig, store: Path, spoiled: bool) -> list[list[float]]:
    trainer = trainer_on_rank(config, store)
    if spoiled:
        inner = trainer.clip
        trainer.clip = lambda: inner() * float("nan")
    trainer.run()
    return [trainer.model.get_buffer(BIAS.format(layer)).tolist() for layer in (1, 2)]


def biases(config: RunConfig, ranks: int, *, spoiled: bool = False) -> list[list[float]]:
    _, _, store = prepare_run(config, ranks)
    found = run_ranks(bias_on_rank, ranks, config, store.directory, spoiled)
    assert all(other == found[0] for other in found)
    return found[0]


def test_biases_move_with_the_load_and_are_kept(tiny: Tiny) -> None:
    options = (DEEPSEEK, "moe.bias_update_rate=0.015625", "training.steps=5", "checkpoint.every=3", "checkpoint.keep=null")
    config = tiny(*options)
    found = biases(config, 2)
    for layer in found:
        assert all(value * 64 == round(value * 64) and abs(value) <= 5 / 64 for value in layer)
    assert any(value for layer in found for value in layer)
    # One process moves them to the same bits; so does a run that goes on from a checkpoint.
    alone = tiny(*options, name="alone")
    assert biases(alone, 1) == found
    cut = tiny(*options, name="cut")
    shutil.copytree(config.directory, cut.directory)
    shutil.rmtree(Paths(cut.directory).checkpoints / "step-00000005")
    assert biases(cut, 2) == found
    assert losses(cut) == losses(config)
    # In the checkpoint, and in the export.
    last = Paths(config.directory).checkpoints / "step-00000005"
    saved = {f"model.{BIAS.format(1)}": torch.empty(4)}
    storage.read(last, saved)
    assert saved[f"model.{BIAS.format(1)}"].tolist() == found[0]
    hub = config.directory / "hub"
    export_checkpoint(last, hub)
    with safe_open(hub / "model.safetensors", framework="pt") as file:
        assert file.get_tensor(BIAS.format(2)).tolist() == found[1]


def test_a_skipped_step_moves_no_bias(tiny: Tiny) -> None:
    config = tiny(DEEPSEEK, "moe.bias_update_rate=0.125", "training.on_nonfinite=skip", "training.steps=2")
    assert biases(config, 1, spoiled=True) == [[0.0] * 4] * 2


def test_rate_zero_moves_no_bias(tiny: Tiny) -> None:
    assert biases(tiny(DEEPSEEK, "training.steps=2"), 1) == [[0.0] * 4] * 2


@pytest.mark.thorough
def test_compiled_layers_are_balanced_too(tiny: Tiny) -> None:
    def found(name: str, *options: str) -> list[dict[str, Any]]:
        config = tiny(MIXTRAL, "moe.aux_loss=0.5", "training.steps=3", *options, name=name)
        train(config)
        return [row for row in rows(config) if "loss" in row]

    plain = found("plain")
    for mode in ("none", "full"):
        compiled = found(
            f"compiled {mode}",
            "parallel.compile=true",
            "parallel.compile_backend=aot_eager",
            f"parallel.activation_checkpointing={mode}",
        )
        for ours, theirs in zip(compiled, plain, strict=True):
            for key in ("loss", "gradient_norm", "moe/aux_loss", "moe/max_load/0", "moe/max_load/1"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3), (mode, key)


@pytest.mark.thorough
def test_block_diffusion_counts_both_stacks_and_refuses_the_loss(tiny: Tiny) -> None:
    """The pass without gradient is not counted, so that the decoder's loads are those of one pass; recomputed: the same."""
    found = []
    for index, options in enumerate(((), ("parallel.activation_checkpointing=full",))):
        config = tiny(*RUN, "training.steps=1", *options, name=f"diffusion {index}")
        train(config)
        row = next(row for row in rows(config) if "loss" in row)
        found.append({key: value for key, value in row.items() if key.startswith("moe/")})
    assert found[0] == found[1]
    stacks = {key.split("/")[2].split(".layers")[0] for key in found[0]}
    assert len(stacks) == 2, stacks
    assert "block diffusion runs routers over a sequence and over its canvases" in refused(tiny, *RUN, "moe.aux_loss=0.1")


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["diffusion_gemma", "gemma4_moe"])
def test_routers_that_choose_for_slices_count_all_tokens_once(tiny: Tiny, family: str) -> None:
    known = {
        key: value for key, value in TINY_MODELS["gemma4_moe"].config.items() if "vocab" not in key and "_token" not in key
    }
    run = RUN if family == "diffusion_gemma" else (f"model.config={ {'model_type': 'gemma4_text', **known} }",)
    found = []
    for ranks, options in enumerate(((), ("layout.dp_shard=1", "layout.tp=2", "parallel.sequence_parallel=true")), start=1):
        config = tiny(*run, "training.steps=2", "training.log_every=1", *options, name=f"{ranks} ranks")
        train(config, ranks)
        found.append([row for row in rows(config) if "loss" in row])
    for one, two in zip(*found, strict=True):
        assert {key for key in one if key.startswith("moe/max_load")}
        for key in one:
            if key.startswith("moe/") or key == "loss":
                assert two[key] == pytest.approx(one[key], rel=2e-3), key
    with pytest.raises(ConfigError, match="router" if family == "gemma4_moe" else "block diffusion"):
        make_setup(tiny(*run, *options, "moe.aux_loss=0.1"), 2)
