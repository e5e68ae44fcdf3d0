"""Runs with Muon in float64: on every layout the parameters of one process that has the optimizer of torch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import _muon

from meshwright.audit.precision import KeepFloat64
from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.slices import whole_tensor
from meshwright.distributed.update.flagged import local
from meshwright.distributed.update.sharded_muon import Muon
from meshwright.plan.update.matrices import Form, Held, matrices_of
from meshwright.plan.update.muon_choice import held_of
from meshwright.plan.update.states import update_traffic
from meshwright.train import optimizer as optimizers
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from tests.distributed.update.muon_runs import newton_schulz_by_torch_names
from tests.harness import run_ranks
from tests.train.runs import trainer_on_rank

Tiny = Callable[..., RunConfig]
Parameters = dict[str, np.ndarray]

STEPS = 5
EXACT = 1e-12
"""Of the largest entry of a parameter."""

FLOAT64 = (
    "model.dtype=float64",
    "model.experts_implementation=eager",
    "parallel.param_dtype=float64",
    "parallel.reduce_dtype=float64",
)
MUON = ("optimizer.kind=muon", "optimizer.eps=1e-4", "training.steps=5", "training.eval_every=0", "checkpoint.every=0")
SMALL = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2"
MODELS = {
    "llama": f"model.config={{model_type: llama, {SMALL}, intermediate_size: 50, max_position_embeddings: 64}}",
    "phi3": f"model.config={{model_type: phi3, {SMALL}, intermediate_size: 48, max_position_embeddings: 64, pad_token_id: 0}}",
    "tied": f"model.config={{model_type: qwen2, {SMALL}, intermediate_size: 48, tie_word_embeddings: true}}",
    "gpt2": "model.config={model_type: gpt2, n_embd: 32, n_head: 4, n_layer: 2, n_positions: 64, resid_pdrop: 0, "
    "embd_pdrop: 0, attn_pdrop: 0}",
    "mixtral": f"model.config={{model_type: mixtral, {SMALL}, intermediate_size: 24, num_local_experts: 4, "
    "num_experts_per_tok: 2, max_position_embeddings: 64}",
}
LAYOUTS = {
    "shard 2": (2, ()),
    "shard 4": (4, ("training.microbatch_size=1",)),
    "2 x shard 2": (4, ("layout.dp_replicate=2", "training.microbatch_size=1")),
    "replicate 2": (2, ("layout.dp_replicate=2", "layout.dp_shard=1")),
    "tp 2": (2, ("layout.dp_shard=1", "layout.tp=2")),
    "tp 2 x shard 2": (4, ("layout.tp=2",)),
    "cp 2": (2, ("layout.dp_shard=1", "layout.cp=2")),
    "pp 2": (2, ("layout.dp_shard=1", "layout.pp=2")),
    "ep 2": (2, ("layout.ep=2",)),
    "ep 2 x shard 2": (4, ("layout.ep=2", "training.microbatch_size=1")),
    "2 x ep 2": (4, ("layout.dp_replicate=2", "layout.dp_shard=2", "layout.ep=2", "training.microbatch_size=1")),
}


class InOneProcess(torch.optim.Optimizer):
    """The Muon of torch, to which each matrix of a weight is a parameter of its own [out, in]."""

    def __init__(self, params: Any, lr: float, forms: Mapping[torch.Tensor, Form], **options: Any) -> None:
        super().__init__(params, {"lr": lr})
        self.forms = forms
        options = {key: own for key, own in options.items() if key not in ("dtype", "bucket")}
        self.apart = {own: self.parts(own, local(own.data)) for group in self.param_groups for own in group["params"]}
        self.alone = {own: [nn.Parameter(part()) for part, _ in parts] for own, parts in self.apart.items()}
        self.inner = []
        for group in self.param_groups:
            alone = [one for own in group["params"] for one in self.alone[own]]
            self.inner.append(torch.optim.Muon(alone, lr=lr, weight_decay=group["weight_decay"], **options))

    def parts(self, own: torch.Tensor, values: torch.Tensor) -> list[tuple[Callable[[], torch.Tensor], Callable[..., None]]]:
        """What reads and what writes each matrix of a parameter, or of its gradient."""
        found: list[tuple[Callable[[], torch.Tensor], Callable[..., None]]] = []
        for weight in values if values.ndim == 3 else [values]:
            for spans in matrices_of(Held(tuple(weight.shape), form=self.forms[own])):
                features = torch.cat([torch.arange(*span) for span in spans])
                turned = weight.T if self.forms[own].transposed else weight
                found.append((partial(torch.Tensor.__getitem__, turned, features), partial(turned.__setitem__, features)))
        return found

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group, inner in zip(self.param_groups, self.inner, strict=True):
            inner.param_groups[0]["lr"] = group["lr"]
            for own in group["params"]:
                gradients = None if own.grad is None else self.parts(own, local(own.grad))
                for place, (alone, (read, _)) in enumerate(zip(self.alone[own], self.apart[own], strict=True)):
                    alone.copy_(read())
                    alone.grad = None if gradients is None else gradients[place][0]()
            inner.step()
            for own in group["params"]:
                for alone, (_, write) in zip(self.alone[own], self.apart[own], strict=True):
                    write(alone.detach())


@contextmanager
def by_torch() -> Iterator[None]:
    with (
        mock.patch.dict(optimizers._OURS, {"muon": InOneProcess}),
        mock.patch.object(_muon, "_zeropower_via_newtonschulz", newton_schulz_by_torch_names),
    ):
        yield


def on_rank(rank: int, config: RunConfig, store: Path, until: int, reference: bool) -> tuple[Parameters, dict[str, list[Any]]]:
    """Train up to a step, save, and return the parameters; and what the last update counted and was planned to."""
    counted: dict[str, list[Any]] = {}
    if reference:
        with by_torch():
            trainer = trainer_on_rank(config, store)
            while trainer.step < until:
                with KeepFloat64():
                    trainer.train_step()
                trainer.step += 1
    else:
        trainer = trainer_on_rank(config, store)
        made, step = trainer.optimizer, trainer.optimizer.step
        own = next(one for one in getattr(made, "optimizers", {"": made}).values() if isinstance(one, Muon))

        def counting(*args: Any) -> None:
            with CommCounter() as counter:
                step(*args)
            counted["found"] = [counter.counts["all_to_all"], counter.bytes["all_to_all"], sum(counter.counts.values())]

        while trainer.step < until:
            made.step = counting
            with KeepFloat64():  # models compute routers and norms in fp32
                trainer.train_step()
            trainer.step += 1
        planned = update_traffic(trainer.setup.plan)
        counted["planned"] = [sum(item.calls for item in planned), sum(item.size or 0 for item in planned)]
        names = {parameter: name for name, parameter in trainer.model.named_parameters()}
        rows = {name: row for row in trainer.setup.plan.parameters for name in (row.name, *row.aliases)}
        for (parameter, _), held in zip(own.parameters, own.held, strict=True):
            row = rows[names[parameter]]
            assert row.form is not None
            assert held == held_of(row, trainer.setup.layout, row.form), row.name
        trainer.save()
        trainer.checkpoints.finish()
    trainer.recorder.close()
    found = {}
    for name, parameter in trainer.model.named_parameters():
        data = parameter.data
        found[name] = (whole_tensor(data) if isinstance(data, DTensor) else data).clone().numpy()
    return found, counted


def ran(config: RunConfig, ranks: int, until: int = STEPS, *, reference: bool = False) -> list[tuple[Parameters, Any]]:
    _, _, store = prepare_run(config, ranks)
    return run_ranks(on_rank, ranks, config, store.directory, until, reference)


def difference(found: list[tuple[Parameters, Any]], expected: Parameters) -> float:
    """The largest over all parameters, of those of all stages."""
    everything = {name: own for parameters, _ in found for name, own in parameters.items()}
    assert everything.keys() == expected.keys()
    return max(
        float(np.abs(own - expected[name]).max() / np.abs(expected[name]).max())
        for parameters, _ in found
        for name, own in parameters.items()
    )


def options(model: str, *more: str, by_head: bool = False) -> tuple[str, ...]:
    return (
        MODELS[model],
        *FLOAT64,
        *MUON,
        f"optimizer.with={{dtype: float64, bucket: 3000, by_head: {by_head}}}".lower(),
        *more,
    )


def cells() -> Iterator[Any]:
    for model in MODELS:
        for layout in LAYOUTS:
            if (model == "mixtral") >= ("ep" in layout.split()):
                yield pytest.param(model, layout, id=f"{model}, {layout}")


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "layout"), cells())
def test_a_run_is_that_of_one_process_with_the_optimizer_of_torch(tiny: Tiny, model: str, layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    ((expected, _),) = ran(tiny(*options(model), name="alone"), 1, reference=True)
    found = ran(tiny(*options(model, *overrides)), ranks)
    assert difference(found, expected) < EXACT
    for _, counted in found:
        calls, size, everything = counted["found"]
        planned_calls, planned_size = counted["planned"]
        if layout != "pp 2":  # whose plan is that of the fullest rank
            assert calls == everything == planned_calls
        assert size <= planned_size


@pytest.mark.thorough
def test_a_matrix_for_each_head(tiny: Tiny) -> None:
    ((expected, _),) = ran(tiny(*options("phi3", by_head=True), name="alone"), 1, reference=True)
    ((whole, _),) = ran(tiny(*options("phi3"), name="whole"), 1, reference=True)
    found = ran(tiny(*options("phi3", "layout.tp=2", by_head=True)), 4)
    assert difference(found, expected) < EXACT
    assert difference(found, whole) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["shard 2", pytest.param("tp 2 x shard 2", marks=pytest.mark.thorough)])
def test_a_run_resumes_on_another_layout(tiny: Tiny, layout: str) -> None:
    ((expected, _),) = ran(tiny(*options("phi3"), name="alone"), 1, reference=True)
    ranks, overrides = LAYOUTS[layout]
    config = tiny(*options("phi3", "layout.dp_shard=1", "layout.tp=2"))
    ran(config, 2, until=2)
    found = ran(tiny(*options("phi3", *overrides)), ranks)
    assert difference(found, expected) < EXACT
