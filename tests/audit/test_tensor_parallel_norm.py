"""A norm weight under sequence parallel whose gradient is not summed: every rank has that of its own part of the sequence.

This version plans tensor parallel and does not carry it out, so the norms are made sequence parallel by hand here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.audit.case import Case
from meshwright.audit.diagnose import Finding, Kind, diagnose
from meshwright.audit.matrix import LAYOUTS, Variant, family_case
from meshwright.audit.pool import Pool
from meshwright.audit.ranks import RankResult, RankTrainer
from meshwright.audit.reference import Reference, record_reference
from meshwright.audit.tolerance import Tolerances
from meshwright.distributed.grad_sync import GradSync
from meshwright.plan.options import SyncPolicy
from meshwright.train.setup import make_setup


class _Split(torch.autograd.Function):
    """This rank's part of the sequence; backward gathers the parts of the gradient."""

    @staticmethod
    def forward(context: Any, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(context: Any, part: torch.Tensor) -> torch.Tensor:
        return _gathered(part)


class _Gather(torch.autograd.Function):
    """The whole sequence; backward keeps this rank's part of the gradient."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor) -> torch.Tensor:
        return _gathered(part)

    @staticmethod
    def backward(context: Any, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def _gathered(part: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim=1)


class SequenceParallelNorms(RankTrainer):
    summed = True

    def distribute(self, model: nn.Module) -> nn.Module:
        for name, module in model.named_modules():
            if name.endswith("layernorm"):
                module.register_forward_pre_hook(lambda _, args: (_Split.apply(args[0]),))
                module.register_forward_hook(lambda _, args, output: _Gather.apply(output))
        return model

    def fill(self, device: torch.device) -> None:
        super().fill(device)
        if self.summed:
            for name, parameter in self.model.named_parameters():
                if "layernorm" in name:
                    parameter.register_hook(_summed)

    def build_sync(self) -> GradSync:
        return GradSync(self.model)


class Forgotten(SequenceParallelNorms):
    summed = False


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


def run(device: torch.device, case: Case, folder: Path, trainer: type[RankTrainer]) -> RankResult:
    found = trainer(case, device, Reference(folder), {})
    found.run()
    return found.result


@pytest.fixture(scope="module")
def case_and_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    folder = tmp_path_factory.mktemp("norms")
    place = next(place for place in LAYOUTS if place.label == "tp 2")
    case = family_case("llama", place, Variant(SyncPolicy.DEFER, "float64", 2, False, False), folder)
    with Pool(1) as pool:
        pool.run(record_reference, case, folder / "reference")
    return case, folder / "reference"


def findings(case: Case, folder: Path, trainer: type[RankTrainer]) -> list[Finding]:
    with Pool(2) as pool:
        ranks = pool.run(run, case, folder, trainer)
    plan, reference = make_setup(case.config, 2).plan, Reference(folder)
    found = diagnose(plan, reference, ranks, Tolerances(plan, "float64", reference, {}, case.steps))
    return [finding for finding in found if finding.kind is not Kind.COLLECTIVES]  # made by hand, so they are not planned


def test_a_norm_that_is_summed_is_right(case_and_reference: tuple[Case, Path]) -> None:
    assert findings(*case_and_reference, SequenceParallelNorms) == []


def test_a_norm_that_is_not_summed_is_named_with_its_axis(case_and_reference: tuple[Case, Path]) -> None:
    first = findings(*case_and_reference, Forgotten)[0]
    assert first.kind is Kind.UNREDUCED
    assert set(first.names) == {
        f"model.layers.{layer}.{norm}.weight" for layer in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    assert "differs between ranks 0 and 1, which should hold the same" in first.message
    assert "it is not summed, or not kept in step, over tp" in first.message
