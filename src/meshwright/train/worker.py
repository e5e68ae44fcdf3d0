"""One worker process of a run, whoever started it."""

import os
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console

from meshwright.data.store import TokenStore
from meshwright.distributed.process_group import process_group
from meshwright.errors import MeshwrightError, WorkerError
from meshwright.models.imports import import_modules
from meshwright.plan.explain import explain
from meshwright.train.assure import assure
from meshwright.train.config import RunConfig
from meshwright.train.prepare import checkpoint_to_resume, describe_data, load_run_tokenizer, locked, prepare_run
from meshwright.train.proof import Source
from meshwright.train.setup import make_setup

__all__ = ["run_worker"]


def run_worker(
    config: RunConfig,
    device_kind: str,
    prepared: tuple[str, Path | None] | None = None,
    *,
    source: Source | None = None,
) -> None:
    """Train as one rank; collective over all ranks of the job.

    Args:
        config: of the run.
        device_kind: ``cpu`` or ``cuda``.
        prepared: the token store and the checkpoint to resume from, where the launcher prepared the run; ``None``: rank 0
            prepares it.
        source: of the configuration, for the line that says whether the layout is proven, where rank 0 says it.
    """
    with ExitStack() as held:
        device = held.enter_context(process_group(timedelta(minutes=config.launch.timeout_minutes), device_kind))
        # One process decides which checkpoint it is: on a shared file system ranks may see different ones.
        store, resume = prepared or _prepare_on_rank_0(config, held, source)
        import_modules(config.imports)  # before the tokenizer, which one of them may register
        tokenizer = load_run_tokenizer(config)
        setup = make_setup(config, dist.get_world_size(), tokenizer)
        from meshwright.train.trainer import Trainer

        trainer = Trainer(setup, TokenStore.open(store), device, resume)
        if resume is not None:
            trainer.recorder.say(f"resumed from {resume} at step {trainer.step}")
        trainer.run()
        speaks = trainer.rank == 0
        del trainer
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if speaks:
        finish_run(config)


def _prepare_on_rank_0(config: RunConfig, held: ExitStack, source: Source | None) -> tuple[str, Path | None]:
    """Prepare the run on one rank; its failure is the failure of all, known to all."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            held.enter_context(locked(config))
            setup, _, store = prepare_run(config, dist.get_world_size())
            Console().print(explain(setup.plan, parameters=False))
            Console().print(describe_data(config, store), highlight=False, markup=False, soft_wrap=True)
            assure(setup, source, None)
            outcome[0] = (str(store.directory), checkpoint_to_resume(config))
        except MeshwrightError as error:
            outcome[0] = error
        except Exception as error:  # whatever it was, the others must not wait for it
            outcome[0] = WorkerError(f"rank 0: {type(error).__name__}: {error}")
    # A download or a large corpus takes longer than a collective of training may.
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=2))
    dist.broadcast_object_list(outcome, src=0, group=patient)
    if isinstance(outcome[0], MeshwrightError):
        if dist.get_rank() != 0:
            leave_to_rank_0(outcome[0])
        raise outcome[0]
    return outcome[0]


def leave_to_rank_0(error: MeshwrightError) -> NoReturn:
    """End this rank without a word, for an error that rank 0 has too; a moment later, or rank 0 is stopped before it spoke."""
    time.sleep(1)
    os._exit(error.exit_code)  # the group is still there, and the end of the interpreter might wait for it


def finish_run(config: RunConfig) -> None:
    """Export the last checkpoint and sample from it, if the run asks for it. On one rank, without a process group."""
    from meshwright.checkpoint.export import export_checkpoint, generate
    from meshwright.checkpoint.manager import latest
    from meshwright.train.setup import Paths

    paths = Paths(config.directory)
    console = Console()
    newest = latest(paths.checkpoints)
    if not config.export or newest is None:
        return
    export_checkpoint(newest, paths.export)
    console.print(f"exported {paths.export}", highlight=False)
    for prompt in config.sample.prompts:
        text = generate(
            paths.export,
            prompt,
            config.sample.max_new_tokens,
            temperature=None,
            trust_remote_code=config.model.trust_remote_code,
        )
        console.print(f"[bold]{prompt}[/bold]", end="")
        console.print(text, highlight=False, markup=False)
