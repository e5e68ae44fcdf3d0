"""An exponential moving average of what is trained, sharded as the parameters are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field

from meshwright.distributed.pipeline.parameter_copies import local_shard
from meshwright.train.callbacks.callback import Callback
from meshwright.train.callbacks.training_run import TrainingRun

__all__ = ["MovingAverage"]


class MovingAverage(Callback):
    """Keeps, for each trained parameter p, a = decay * a + (1 - decay) * p after each update; a begins as p.

    It costs 4 bytes for each trained parameter, sharded as the parameter is. Buffers are not averaged.

    Args:
        decay: the share that stays.
        every: steps between two updates of the average.
        evaluate: evaluate the average too, after each evaluation: ``eval/ema_loss``.
        export: write the average at the end as a directory of Hugging Face, export-ema/.
    """

    def __init__(
        self,
        decay: Annotated[float, Field(gt=0, lt=1)] = 0.999,
        every: Annotated[int, Field(ge=1)] = 1,
        evaluate: bool = False,
        export: bool = False,
    ) -> None:
        self.decay, self.every, self.evaluate, self.export = decay, every, evaluate, export
        self.averages: dict[str, torch.Tensor] = {}

    def on_start(self, run: TrainingRun) -> None:
        """Begin with the parameters, in fp32 or what is more precise."""
        self.averages = {
            name: parameter.data.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in run.model.named_parameters()
            if parameter.requires_grad
        }

    def on_step(self, run: TrainingRun) -> None:
        """Move the averages; a step that changed nothing does not count."""
        if run.step % self.every:
            return
        share = (1 - run.skipped.double()) * (1 - self.decay)
        shares: dict[Any, torch.Tensor] = {}
        for name, parameter in run.model.named_parameters():
            if name in self.averages:
                average, own = local_shard(self.averages[name]), local_shard(parameter.data)
                kind = (average.device, average.dtype)
                if kind not in shares:
                    shares[kind] = share.to(*kind)
                average.lerp_(own.to(average.dtype), shares[kind])

    def on_evaluation(self, run: TrainingRun) -> None:
        """Evaluate the average too, if that is asked for and it is another model by now."""
        if self.evaluate and run.step:
            with self.in_place(run):
                measured = run.evaluate()
            run.log("eval/ema_loss", measured["eval/loss"])

    @contextmanager
    def in_place(self, run: TrainingRun) -> Iterator[None]:
        """Inside, the model has the averages in place of its parameters. Between steps only: then no unit is gathered."""
        own = {name: p for name, p in run.model.named_parameters() if name in self.averages}
        before = {name: local_shard(p.data).clone() for name, p in own.items()}
        try:
            for name, parameter in own.items():
                local_shard(parameter.data).copy_(local_shard(self.averages[name]))
            yield
        finally:
            for name, parameter in own.items():
                local_shard(parameter.data).copy_(before[name])

    def state_dict(self) -> Mapping[str, Any]:
        """Return the averages by the names of the parameters."""
        return self.averages
