"""Meshwright: the trainer's own step on the trainer's own set-up; nothing is rebuilt here."""

from datetime import timedelta

import torch.distributed as dist
from measure import job, measure
from workload import MESHWRIGHT, train_config

from meshwright.data.store import TokenStore
from meshwright.distributed.process_group import process_group
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import make_setup
from meshwright.train.trainer import Trainer


def main() -> None:
    run = job(variants=tuple(MESHWRIGHT))
    config = RunConfig.model_validate(train_config(run.directory, run.output, run.microbatches, run.variant))
    with process_group(timedelta(minutes=2), "cpu") as device:
        setup = make_setup(config, dist.get_world_size())
        trainer = Trainer(setup, TokenStore.open(run.directory / "store"), device)

        def train_step(step: int) -> float:
            trainer.train_step()
            trainer.step += 1  # as Trainer.run does
            return trainer.metrics()["loss"]

        measure(run, trainer.model, train_step)


if __name__ == "__main__":
    main()
