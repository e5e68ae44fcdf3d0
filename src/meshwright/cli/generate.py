"""`meshwright generate`: continues a prompt with an exported model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.arguments import DebugOption

__all__ = ["generate"]


def generate(
    directory: Annotated[Path, typer.Argument(help="A Hugging Face directory.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="Text to continue.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token each time. Block diffusion: of the first step, above 0.")
    ] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Block diffusion: denoising steps of a canvas, at most.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it stands, without a chat template.")] = False,
    adapter: Annotated[
        Path | None, typer.Option(help="A directory of peft: an adapter of this model.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Block diffusion: do not show the drafts.")] = False,
    debug: DebugOption = False,
) -> None:
    """Continue a prompt with an exported model; one with a chat template is asked it, as by a user, and answers.

    Block diffusion fills canvases: on the way, the drafts go to standard error, with a dot for each token that is not certain.
    """
    from meshwright.checkpoint.export import generate as continue_prompt

    show = None if quiet else lambda line: typer.echo(line, err=True)
    sampling = (max_new_tokens, temperature, top_p, seed)
    more: dict[str, Any] = {"steps": steps, "show": show, "raw": raw, "adapter": adapter}
    typer.echo(prompt + continue_prompt(directory, prompt, *sampling, **more, warn=lambda line: typer.echo(line, err=True)))
