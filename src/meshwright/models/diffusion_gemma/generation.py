"""Text from a DiffusionGemma, and how it comes about: drafts that become clearer step by step.

The loop is the model's own ``generate``: a canvas of random tokens after the prompt, denoised in some steps. In each step the
tokens of which the model is surest are kept and the others drawn anew, until nothing changes any more; then the canvas joins
the prompt, and the next one begins.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from meshwright.errors import ConfigError
from meshwright.models.family import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["TEMPERATURE", "Draft", "continue_text", "denoise"]

TEMPERATURE = 0.8
"""Of the first step of a canvas, unless said otherwise. Denoising draws, so it is above 0."""

SURE = 0.5
"""Probability of the likeliest token from which on a column counts as certain."""


@dataclass(frozen=True)
class Draft:
    """A canvas after a denoising step.

    Attributes:
        canvas: its number, from 0.
        step: of the canvas, from 1.
        tokens: the likeliest token of each column.
        certain: for each column, whether that token has more than half of the probability.
        entropy: mean over the columns, in nats.
    """

    canvas: int
    step: int
    tokens: list[int]
    certain: list[bool]
    entropy: float

    @property
    def uncertain(self) -> int:
        """Columns that are not certain."""
        return len(self.certain) - sum(self.certain)

    def text(self, tokenizer: "PreTrainedTokenizerBase", blank: str = "·") -> str:
        """The draft in words, with a blank for each token that is not certain."""
        shown, run = [], []
        for token, certain in zip(self.tokens, self.certain, strict=True):
            if certain:
                run.append(token)
                continue
            shown += [tokenizer.decode(run, skip_special_tokens=True), blank] if run else [blank]
            run = []
        return "".join([*shown, tokenizer.decode(run, skip_special_tokens=True) if run else ""])


class _Watcher:
    """A streamer for ``generate``; it gets the prompt, the logits of every draft, and each canvas that is done."""

    _takes_logits = True

    def __init__(self, show: Callable[[Draft], None]) -> None:
        self.show = show
        self.canvas, self.step = -1, 0

    def put(self, value: torch.Tensor) -> None:
        self.canvas, self.step = self.canvas + 1, 0

    def put_draft(self, logits: torch.Tensor) -> None:
        self.step += 1
        chances = logits[0].float().softmax(dim=-1)
        best, tokens = chances.max(dim=-1)
        entropy = torch.special.entr(chances).sum(dim=-1).mean()
        self.show(Draft(self.canvas, self.step, tokens.tolist(), (best > SURE).tolist(), float(entropy)))

    def end(self) -> None:
        """Nothing is held back."""


def continue_text(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: torch.Tensor,
    max_new_tokens: int = 256,
    temperature: float = TEMPERATURE,
    steps: int | None = None,
    show: Callable[[Draft], None] | None = None,
) -> str:
    """Continue a prompt.

    Args:
        model: a ``DiffusionGemmaForBlockDiffusion`` with weights, in evaluation mode.
        tokenizer: of the model.
        prompt: ids, [1, tokens].
        max_new_tokens: at most so many; a canvas is filled to its end and cut.
        temperature: of the first step of a canvas; it falls to half of it. Above 0.
        steps: denoising steps of a canvas at most; ``None``: the model's own number.
        show: is called after each step.

    Raises:
        ConfigError: a temperature of 0.
    """
    if temperature <= 0:
        raise ConfigError(f"temperature={temperature}: denoising draws tokens and weighs how sure it is; legal is above 0")
    options: dict[str, Any] = {} if steps is None else {"max_denoising_steps": steps}
    own = model.generation_config
    output = model.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        t_max=temperature,
        t_min=temperature / 2,
        eos_token_id=tokenizer.eos_token_id if own.eos_token_id is None else own.eos_token_id,
        pad_token_id=tokenizer.pad_token_id if own.pad_token_id is None else own.pad_token_id,
        streamer=None if show is None else _Watcher(show),
        return_dict_in_generate=False,
        **options,
    )
    return tokenizer.decode(output[0, prompt.shape[1] :][:max_new_tokens], skip_special_tokens=True)


def denoise(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompt: torch.Tensor, sampling: Sampling) -> str:
    """Continue a prompt as a family does, see :meth:`~meshwright.models.family.Family.generate`.

    Raises:
        ConfigError: a temperature of 0, or a nucleus.
    """
    if sampling.top_p != 1.0:
        raise ConfigError(f"top_p={sampling.top_p}: block diffusion draws from the whole distribution; the legal value is 1")
    show = sampling.show

    def line(draft: Draft) -> None:
        assert show is not None
        text = draft.text(tokenizer).replace("\n", "\u23ce")
        show(f"canvas {draft.canvas + 1} step {draft.step:2}  uncertain {draft.uncertain:3} of {len(draft.certain)}  {text}")

    torch.manual_seed(sampling.seed)
    temperature = TEMPERATURE if sampling.temperature is None else sampling.temperature
    watcher = None if show is None else line
    return continue_text(model, tokenizer, prompt, sampling.max_new_tokens, temperature, sampling.steps, watcher)
