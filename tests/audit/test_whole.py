"""What an audit looks at besides the steps: files, evaluation, resuming, and one process beside plain libraries.

Bugs that both sides share are planted before the processes are forked, so that both have them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.audit.causes.diagnose import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.report import AuditReport
from meshwright.data import packing
from meshwright.distributed.memory import nf4
from meshwright.models import _transformers_compat
from meshwright.models.adapters import adapt as adapters
from meshwright.train import trainer
from meshwright.train.engine import runner, steps
from tests.audit.test_plants import PLACES, case

Patch = Callable[[pytest.MonkeyPatch], None]
LORA = {"rank": 3, "alpha": 6}


def audited(folder: Path, place: str = "shard 2", **options: Any) -> AuditReport:
    with Auditor() as auditor:
        return auditor.audit(case(folder, place, **options), PLACES[place].world_size, whole=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("shard 2", {}),
        ("tp 2 seq", {"family": "qwen3", "adapter": LORA}),
        ("pp 2", {"family": "qwen2", "pipeline": {"schedule": "zbv"}, "model": {"num_hidden_layers": 4}, "microbatches": 4,
                  "loss_chunks": 0}),
        ("ep 2", {"family": "mixtral", "adapter": {**LORA, "experts": True}}),
        ("cp 2", {"family": "llama", "adapter": {**LORA, "kind": "dora", "save_modules": ["lm_head"]}}),
        ("shard 2", {"family": "llama", "model": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
                     "adapter": {**LORA, "base": "nf4"}}),
        ("pp 2", {"family": "llama", "adapter": LORA}),
        ("tp 2", {"family": "gpt2"}),
        ("replicate 2", {"family": "gemma3_text"}),
    ],
)  # fmt: skip
def test_nothing_planted_nothing_found(tmp_path: Path, place: str, options: dict[str, Any]) -> None:
    report = audited(tmp_path, place, **options)
    assert report.passed, report.verdict
    checks = {check.what: check for check in report.checks}
    assert checks["the model was read from files"].compared == "by each rank its slices"
    assert checks["loss of an evaluation"].passed
    assert checks["steps after resuming"].passed
    beside = checks["one process beside plain libraries"]
    assert beside.compared.startswith("loss, gradients and update of a step of"), beside


def wrong_slice(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 reads the rows of a slice in another order."""
    load = _transformers_compat.load_sharded

    def loaded(model: Any, *args: Any) -> Any:
        report = load(model, *args)
        weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
        if dist.get_rank() == 1 and isinstance(weight, DTensor):
            weight.data._local_tensor.copy_(weight.data._local_tensor.roll(1, 0))
        return report

    patch.setattr(_transformers_compat, "load_sharded", loaded)


def labels_shifted_by_two(patch: pytest.MonkeyPatch) -> None:
    own = packing.SequenceDataset.__getitem__

    def sequence(self: Any, number: int) -> Any:
        found = own(self, number)
        labels = found["labels"].copy()
        labels[:-1] = labels[1:]
        labels[-1] = packing.IGNORE
        return {**found, "labels": labels}

    patch.setattr(packing.SequenceDataset, "__getitem__", sequence)


def documents_that_see_each_other(patch: pytest.MonkeyPatch) -> None:
    """The positions of packed documents do not restart."""
    own = packing.SequenceDataset.__getitem__

    def sequence(self: Any, number: int) -> Any:
        found = own(self, number)
        return {**found, "position_ids": packing.np.arange(self.sequence_length, dtype=packing.np.int64)}

    patch.setattr(packing.SequenceDataset, "__getitem__", sequence)


def scale_of_adapters(patch: pytest.MonkeyPatch) -> None:
    own = adapters.peft_config

    def doubled(config: Any, targets: Any) -> Any:
        return own(config.model_copy(update={"alpha": 2 * config.alpha}), targets)

    patch.setattr(adapters, "peft_config", doubled)


def blocks_of_four_bits(patch: pytest.MonkeyPatch) -> None:
    """The levels of another distribution, on both sides and in both directions."""
    patch.setattr(nf4, "LEVELS", tuple(index / 8 - 1 for index in range(8)) + tuple(index / 7 for index in range(8)))


def mean_of_the_loss(patch: pytest.MonkeyPatch) -> None:
    """The loss of a step is divided by one token too few: no layout, but a wrong number."""
    own = runner.Objective.combine

    def combine(self: Any, sums: Any, counts: Any) -> Any:
        return own(self, sums, counts) * counts[0] / (counts[0] - 5)

    patch.setattr(runner.Objective, "combine", combine)


def moments_zeroed_on_resume(patch: pytest.MonkeyPatch) -> None:
    own = steps.storage.read

    def read(checkpoint: Any, tensors: Any) -> None:
        own(checkpoint, tensors)
        for name, tensor in tensors.items():
            if name.endswith("exp_avg"):
                tensor.zero_()

    patch.setattr(steps.storage, "read", read)


def evaluation_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """The loss of an evaluation is that of a rank's own sequences, each rank's count is right."""
    own = trainer.Trainer.evaluate

    def evaluate(self: Any) -> Any:
        self.runner.evaluate, inner = (lambda batches: inner(batches) / dist.get_world_size()), self.runner.evaluate
        return own(self)

    patch.setattr(trainer.Trainer, "evaluate", evaluate)


SIZES = {"model": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("plant", "options", "kind", "words"),
    [
        (wrong_slice, {}, Kind.VALUES, "the ranks begin with other values than one process: model.layers.1.mlp.up_proj.weight"),
        (labels_shifted_by_two, {}, Kind.PLAIN, "one process of Meshwright differs from plain libraries"),
        (documents_that_see_each_other, {}, Kind.PLAIN, "its loss is"),
        (mean_of_the_loss, {}, Kind.PLAIN, "its loss is 1.0"),
        (scale_of_adapters, {"adapter": LORA}, Kind.PLAIN, "the gradients of"),
        (blocks_of_four_bits, {"adapter": {**LORA, "base": "nf4"}, **SIZES}, Kind.PLAIN, "the gradients of"),
        (moments_zeroed_on_resume, {}, Kind.RESUMED, "a trainer that goes on from the checkpoint of step 1 ends elsewhere on"),
        (evaluation_of_one_rank, {}, Kind.EVALUATION, "(0.5 times it), though the steps agree"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)  # fmt: skip
def test_each_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Patch, options: dict[str, Any], kind: Kind, words: str
) -> None:
    plant(monkeypatch)
    report = audited(tmp_path, **options)
    assert not report.passed
    finding = report.findings[0]
    assert (finding.kind, words in finding.message) == (kind, True), report.findings
