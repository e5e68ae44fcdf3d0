"""The simulated device alone, rule by rule. Each rule that reports has a twin in order, which reports nothing."""

import torch

from tests.accelerator.workers import Workers


def test_values_are_those_of_the_cpu(one: Workers) -> None:
    one.run(_values)


def _values(device: torch.device) -> None:
    a, b = torch.randn(4, 5, device=device), torch.arange(20.0, device=device).view(4, 5)
    assert torch.equal((a + b).cpu(), a.cpu() + b.cpu())
    assert a[1:, 2].device == device
