"""Models whose layers are not those of a Llama, over the slices of a sequence and over stages, and a bug of each mechanism."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from maintain.cells import LAYOUTS
from maintain.coverage import run_of
from maintain.tiny import TINY_MODELS
from meshwright.audit.case import Case
from meshwright.audit.causes.diagnose import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.data import draw_documents
from meshwright.audit.ranks import RankTrainer
from meshwright.audit.ready import make_ready
from meshwright.distributed.pipeline.cut import crossing_of
from meshwright.shrink.run import shrink
from tests.audit import plants

PLACES = {place.label: place for place in LAYOUTS}


@cache
def store_of(folder: Path, words: int) -> Path:
    return draw_documents(words, 32, 200, 0, folder / f"documents-{words}").directory


def case(folder: Path, model_type: str, label: str, packing: str = "pad") -> Case:
    """The default config of a model type, shrunk."""
    place = PLACES[label]
    small, _, _ = shrink(run_of(model_type, place, folder, packing), place.world_size)
    ready, _ = make_ready(small, "float64", 2, folder)
    values = ready.model.config or {}
    words = next((value for value in values.values() if isinstance(value, dict) and "vocab_size" in value), values)[
        "vocab_size"
    ]
    return Case(ready, store_of(folder, words), 2)


CELLS = [
    ("bert", "tp 2 seq", "pad"),  # a span ends in another module; the last layer gives the whole sequence
    ("opt", "tp 2 seq", "pad"),  # matrices in the layer itself, rows of a batch as one dimension
    ("bert", "pp 2", "pad"),  # a matrix inside of the embeddings that the head uses
    ("gemma3", "pp 2", "pack"),  # an image tower that does not run
    ("gemma4_text", "pp 2", "pack"),  # an embedding of each layer crosses with the hidden state
    *(
        pytest.param(*cell, marks=pytest.mark.thorough)
        for cell in [
            ("bloom", "tp 2 seq x shard 2", "pad"),  # an attention that is computed whole, with the residual inside
            ("gpt_neox_japanese", "tp 2 seq", "pack"),  # a bias that is handed out, and added to slices
            ("nanochat", "pp 2 x tp 2 seq", "pack"),  # a norm before and after the layers
            ("ctrl", "tp 2 seq", "pad"),  # one tensor as queries, keys and values
            ("llama4_text", "tp 2 seq x shard 2", "pack"),  # a mixture that returns rows as one dimension
            ("llama4_text", "cp 2 x tp 2 seq", "pack"),
            ("nanochat", "cp 2 x tp 2 seq", "pack"),
            ("bert", "pp 2 x tp 2 seq", "pad"),
            ("opt", "tp 4 seq", "pad"),
            ("hrm_text", "tp 2 seq", "pack"),  # two stacks of layers that run in cycles
            ("bert", "pp 4", "pad"),
            ("camembert", "pp 2 x tp 2", "pad"),  # the head is the first of the names
            ("big_bird", "pp 2", "pad"),  # a pooled head beside the one that is trained
            ("deepseek_v4", "pp 4", "pad"),  # several residual streams
            ("falcon_h1", "pp 2 x shard 2", "pad"),  # a model that fills buffers of all its layers
            ("mllama", "pp 2", "pack"),  # layers that do not run, among others
            ("longcat_flash", "tp 2 seq", "pad"),  # experts that the family does not declare
            ("falcon", "tp 2 seq", "pad"),  # heads that tp does not divide, linear layers of a class of its own
            ("doge", "tp 2 seq", "pad"),  # a declared plan that leaves a parameter out
            ("inkling_text", "tp 2 seq", "pad"),  # shared experts that sum what they put out, an embedding with a norm
            ("zamba", "tp 2", "pad"),  # matrices that layers share
            ("gemma4_text", "pp 4", "pack"),
            ("gemma4_text", "pp 2 x tp 2", "pack"),
            ("gemma4_text", "pp 2 x cp 2", "pack"),
            ("gemma4_text", "pp 2 x shard 2", "pack"),
            ("zaya", "pp 2 x tp 2", "pad"),  # and a state of a router, whole
            ("zamba", "pp 2", "pad"),  # layers that read the words' embedding, and share parameters
            ("zaya", "pp 4", "pad"),  # a state of a router goes from layer to layer; parameters of the model itself
            ("roformer", "pp 4", "pad"),  # positions from a module that is called without a tensor
            ("modernbert-decoder", "pp 2", "pack"),  # first values by the class of a module around the shared matrix
        ]
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model_type", "label", "packing"), CELLS)
def test_the_cell_of_a_mechanism(auditor: Auditor, folder: Path, model_type: str, label: str, packing: str) -> None:
    report = auditor.audit(case(folder, model_type, label, packing), PLACES[label].world_size)
    assert report.passed, report.findings
    assert report.worst_gradient < 1e-12


@pytest.mark.thorough
def test_keys_that_a_later_stage_shares_cross_with_the_heads_of_a_rank(auditor: Auditor, folder: Path) -> None:
    """The last two layers of four have the keys and values of the first two."""
    tiny = TINY_MODELS["gemma3n_text"].config
    drawn = case(folder, "gemma3n_text", "pp 2 x tp 2", "pack")
    words = {"vocab_size": 320, "vocab_size_per_layer_input": 320}
    config = drawn.config.model.model_copy(update={"config": {"model_type": "gemma3n_text", **tiny, **words}})
    report = auditor.audit(replace(drawn, config=drawn.config.model_copy(update={"model": config})), 4)
    assert report.passed, report.findings
    assert report.worst_gradient < 1e-12


def span_begins_without_a_sum(trainer: RankTrainer) -> None:
    """Each rank has the gradient of its own features alone: what entered the span gets half of it."""
    plants.replanned(trainer, "span", entry=plants.Move.GATHER_SEQUENCE_WHOLE)


def last_bias_not_summed(trainer: RankTrainer) -> None:
    """It is added to slices, so that each rank has the gradient of its own tokens."""
    plants.replanned(trainer, "rowwise", sums=())


def stream_left_out(trainer: RankTrainer) -> None:
    """The later stage gets the first residual stream in place of all of them."""
    if (part := plants.part_with(trainer, 1)) is not None:
        first = next(layer for layer in part.model.layers if any(True for _ in layer.parameters()))
        first.register_forward_pre_hook(lambda module, args: (args[0][:, :, :1].expand_as(args[0]), *args[1:]))


def carried_left_out(trainer: RankTrainer) -> None:
    """The layers of the later stage get what its own model made without the embedding."""
    if (part := plants.part_with(trainer, 1)) is not None:
        for layer in part.model.layers:
            for key in list(layer._forward_pre_hooks):
                if "receives" in getattr(layer._forward_pre_hooks[key], "__qualname__", ""):
                    del layer._forward_pre_hooks[key]


def carried_without_gradient(trainer: RankTrainer) -> None:
    """The earlier stage gets the gradient of the hidden state alone."""
    if (part := plants.part_with(trainer, 0)) is not None:
        crossing = crossing_of(part)
        inner = crossing.leave

        def leave() -> torch.Tensor:
            sent = inner()
            features = part.config.hidden_size
            return torch.cat([sent[..., :features], sent[..., features:].detach()], -1)

        crossing.leave = leave


def tower_drawn_anew(trainer: RankTrainer) -> None:
    """What does not run is on the first stage, with the values of one process."""
    if (part := plants.part_with(trainer, 0)) is not None:
        tower = next(own for name, own in part.named_parameters() if "vision_tower" in name)
        with torch.no_grad():
            tower.add_(1.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("plant", "model_type", "label", "kind", "words"),
    [
        (span_begins_without_a_sum, "bert", "tp 2 seq", Kind.BACKWARD, "bert.encoder.layer"),
        (last_bias_not_summed, "opt", "tp 2 seq", Kind.UNREDUCED, "model.decoder.layers"),
        (plants.tied_gradients_not_added, "bert", "pp 2", Kind.UNREDUCED, "bert.embeddings.word_embeddings.weight"),
        (tower_drawn_anew, "gemma3", "pp 2", Kind.VALUES, "vision_tower"),
        (carried_left_out, "gemma4_text", "pp 2", Kind.FORWARD, "model.layers.1"),
        (carried_without_gradient, "gemma4_text", "pp 2", Kind.BACKWARD, "model.per_layer_projection_norm"),
        pytest.param(stream_left_out, "deepseek_v4", "pp 2", Kind.FORWARD, "model.layers", marks=pytest.mark.thorough),
    ],
)
def test_a_bug_of_it_is_named(
    auditor: Auditor, folder: Path, plant: Callable[..., Any], model_type: str, label: str, kind: Kind, words: str
) -> None:
    packing = "pack" if model_type.startswith("gemma") else "pad"
    report = auditor.audit(case(folder, model_type, label, packing), PLACES[label].world_size, plants=[plant])
    first = report.findings[0]
    assert (first.kind, words in first.message) == (kind, True), [finding.message for finding in report.findings]
