"""The forecast of a step, made in a process of its own beside a run that begins.

``python -m meshwright.trace.background CONFIG RANKS GPU`` prints the parts of a step in seconds, as JSON. `train` is given
:func:`command` by whoever starts it, since it does not import this room.
"""

import json
import sys
from pathlib import Path

__all__ = ["command"]


def command(config: Path, world_size: int, gpu: str) -> list[str]:
    """Return the command that makes the forecast of a run.

    Args:
        config: the configuration that the run has written.
        world_size: number of ranks.
        gpu: name or file of the device.
    """
    return [sys.executable, "-m", "meshwright.trace.background", str(config), str(world_size), gpu]


def _main(config: str, world_size: str, gpu: str) -> None:
    from meshwright.plan.cost.hardware import load_hardware
    from meshwright.trace.time import forecast_time
    from meshwright.train.config import load_config
    from meshwright.train.start.setup import make_setup
    from meshwright.train.start.teacher_setup import with_teacher

    setup = with_teacher(make_setup(load_config(Path(config)), int(world_size), planning=True))
    print(json.dumps(forecast_time(setup, load_hardware(gpu)).all_together))


if __name__ == "__main__":
    _main(*sys.argv[1:])
