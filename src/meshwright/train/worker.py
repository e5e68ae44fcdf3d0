"""One worker process of a run, whoever started it."""

from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console

from meshwright.data.store import TokenStore
from meshwright.distributed.process_group import process_group
from meshwright.errors import MeshwrightError
from meshwright.plan.explain import explain
from meshwright.train.config import RunConfig
from meshwright.train.prepare import checkpoint_to_resume, load_run_tokenizer, prepare_run
from meshwright.train.setup import make_setup

__all__ = ["run_worker"]


def run_worker(config: RunConfig, store_directory: str | None = None) -> None:
    """Train as one rank; collective over all ranks of the job.

    Args:
        config: of the run.
        store_directory: the token store, where the launcher prepared the run; ``None``: rank 0 prepares it.
    """
    with process_group(timedelta(minutes=config.launch.timeout_minutes)) as device:
        if store_directory is None:
            store_directory = _prepare_on_rank_0(config)
        tokenizer = load_run_tokenizer(config)
        setup = make_setup(config, dist.get_world_size(), tokenizer)
        resume = checkpoint_to_resume(config)
        from meshwright.train.trainer import Trainer

        trainer = Trainer(setup, TokenStore.open(store_directory), device, resume)
        if resume is not None:
            trainer.recorder.say(f"resumed from {resume} at step {trainer.step}")
        trainer.run()
        speaks = trainer.rank == 0
        del trainer
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if speaks:
        finish_run(config)


def _prepare_on_rank_0(config: RunConfig) -> str:
    """Prepare the run on one rank; its failure is the failure of all, known to all."""
    outcome: list[object] = [None]
    if dist.get_rank() == 0:
        try:
            setup, _, store = prepare_run(config, dist.get_world_size())
            Console().print(explain(setup.plan, parameters=False))
            outcome[0] = str(store.directory)
        except MeshwrightError as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], MeshwrightError):
        raise outcome[0]
    return str(outcome[0])


def finish_run(config: RunConfig) -> None:
    """Export the last checkpoint and sample from it, if the run asks for it. On one rank, without a process group."""
    from meshwright.checkpoint.export import export_checkpoint, generate
    from meshwright.checkpoint.manager import latest
    from meshwright.train.setup import Paths

    paths = Paths(config.directory)
    console = Console()
    newest = latest(paths.checkpoints)
    if not (config.export or config.sample.prompts) or newest is None:
        return
    export_checkpoint(newest, paths.export)
    console.print(f"exported {paths.export}", highlight=False)
    for prompt in config.sample.prompts:
        text = generate(paths.export, prompt, config.sample.max_new_tokens, temperature=0.0)
        console.print(f"[bold]{prompt}[/bold]", end="")
        console.print(text, highlight=False, markup=False)
