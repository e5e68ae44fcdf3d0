"""How far one process is from itself: in the next more precise dtype, and with other last bits of its weights."""

import statistics
from pathlib import Path
from typing import Any

import torch

from meshwright.audit.case import Case
from meshwright.audit.compare import compare
from meshwright.audit.one_process.reference import LOSS, Reference, ReferenceTrainer
from meshwright.audit.precision import FLOORS

__all__ = ["measure_drift", "measure_noise"]

SHAKES = 4
"""Number of tries to measure drift."""


def measure_noise(device: torch.device, case: Case, folder: Path) -> dict[str, float]:
    """Measure how far gradients and loss of a reference are from those in the next more precise dtype. Job of the one process.

    Returns:
        Parameter name to the error of :func:`~meshwright.audit.compare.compare`, but at least that of the median parameter,
        because the error of a small tensor may be small by chance; and :data:`LOSS` to the relative error of the loss. Empty
        for float64.
    """
    better = case.more_precise()
    if better is None:
        return {}
    reference = Reference(folder)
    trainer = ReferenceTrainer(better.on_one_process(), device)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            initial = reference.get(f"initial.{name}")
            assert initial is not None
            parameter.copy_(initial)
    trainer.train_step()
    loss = trainer.metrics()["loss"]
    floor = FLOORS[case.dtype] * reference.largest_gradient
    noise = {}
    for name, _ in trainer.model.named_parameters():
        gradient = reference.get(f"gradient.{name}")
        if gradient is not None:
            noise[name] = compare(trainer.tensors.get(f"gradient.{name}"), gradient, floor)[0]
    typical = statistics.median(noise.values())
    loss_noise = abs(reference.losses[0] - loss) / abs(loss) if loss else 0.0
    return {LOSS: loss_noise, **{name: max(own, typical) for name, own in noise.items()}}


def _shake(trainer: ReferenceTrainer, seed: int, bits: int) -> None:
    """After each step, change the last bits of each trained weight, up or down at random."""
    generator = torch.Generator().manual_seed(seed)

    def move(*_: Any) -> None:
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                sign = torch.randint(2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                parameter.data.mul_(1 + sign * bits * torch.finfo(parameter.dtype).eps)

    trainer.optimizer.register_step_post_hook(move)


def measure_drift(device: torch.device, case: Case, folder: Path, bits: int = 1) -> dict[str, tuple[float, float]]:
    """Measure how far one process is from its own reference if the last bits of its weights change. Job of the one process.

    No layout can reproduce these bits: sums in another order differ by as much. But in bfloat16 a weight near the middle
    between two numbers is then cast to the other one, a router sends a token to another expert, and the next gradient is
    different. The first moment of AdamW shows this, for it is a sum of gradients that is not divided by their size.

    Args:
        device: the device to compute on.
        case: the case of the reference.
        folder: the folder that the reference was written to.
        bits: how far weights are changed, in units of their relative rounding.

    Returns:
        Parameter name to the largest error of its first moment after the steps, over several tries, and the scale of its
        gradient.
    """
    reference = Reference(folder)
    floor = FLOORS[case.dtype] * reference.largest_gradient
    drift: dict[str, tuple[float, float]] = {}
    for seed in range(SHAKES):
        trainer = ReferenceTrainer(case.on_one_process(), device)
        _shake(trainer, seed, bits)
        trainer.record(folder / f"shaken-{seed}")
        first = {row.name: (row.betas or trainer.config.optimizer.betas)[0] for row in trainer.setup.plan.parameters}
        for name, _ in trainer.model.named_parameters():
            key = f"optimizer.{name}.exp_avg"
            truth, gradient = reference.get(key), reference.get(f"gradient.{name}")
            if truth is None or gradient is None:
                continue
            scale = max(float(gradient.abs().max()), floor)
            error = compare(trainer.tensors.get(key), truth, (1 - first[name]) * scale)[0]
            drift[name] = (max(error, drift.get(name, (0.0, 0.0))[0]), scale)
    return drift
