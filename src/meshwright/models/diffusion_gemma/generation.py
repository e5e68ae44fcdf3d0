"""Text generation with a DiffusionGemma, with the drafts of its denoising steps.

The loop is the model's own ``generate``. A canvas of random tokens after the prompt is denoised in several steps. Each step
keeps the tokens of which the model is most certain, and samples the others again, until nothing changes any more. Then the
canvas is appended to the prompt, and the next canvas begins.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from meshwright.errors import ConfigError
from meshwright.models.families.family import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["TEMPERATURE", "Draft", "continue_text", "denoise"]

TEMPERATURE = 0.8
"""Default temperature of the first step of a canvas. It is above 0 because denoising samples."""

SURE = 0.5
"""A column counts as certain if the probability of its most likely token is above this."""


@dataclass(frozen=True)
class Draft:
    """A canvas after a denoising step.

    Attributes:
        canvas: number of the canvas, counted from 0.
        step: step of the canvas, counted from 1.
        tokens: the most likely token of each column.
        certain: for each column, whether this token has more than half of the probability.
        entropy: mean over the columns, in nats.
    """

    canvas: int
    step: int
    tokens: list[int]
    certain: list[bool]
    entropy: float

    @property
    def uncertain(self) -> int:
        """Number of columns that are not certain."""
        return len(self.certain) - sum(self.certain)

    def text(self, tokenizer: "PreTrainedTokenizerBase", blank: str = "·") -> str:
        """Return the draft as text, with a blank for each token that is not certain."""
        shown, run = [], []
        for token, certain in zip(self.tokens, self.certain, strict=True):
            if certain:
                run.append(token)
                continue
            shown += [tokenizer.decode(run, skip_special_tokens=True), blank] if run else [blank]
            run = []
        return "".join([*shown, tokenizer.decode(run, skip_special_tokens=True) if run else ""])


class _Watcher:
    """A streamer for ``generate``. It gets the prompt, the logits of every draft, and each finished canvas."""

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
        """Do nothing: no output is buffered."""


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
        tokenizer: the tokenizer of the model.
        prompt: token ids, [1, tokens].
        max_new_tokens: largest number of new tokens; the last canvas is filled to its end and then cut.
        temperature: temperature of the first step of a canvas; it falls to half of that. Above 0.
        steps: largest number of denoising steps of a canvas; ``None``: the model's own number.
        show: is called after each step.

    Raises:
        ConfigError: the temperature is not above 0.
    """
    if temperature <= 0:
        raise ConfigError(
            "generate.sampling", f"temperature={temperature}: must be above 0, because block diffusion samples its tokens"
        )
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
    """Continue a prompt, see :meth:`~meshwright.models.families.family.Family.generate`.

    Raises:
        ConfigError: the temperature is not above 0, or ``top_p`` is not 1.
    """
    if sampling.top_p != 1.0:
        raise ConfigError(
            "generate.sampling",
            f"top_p={sampling.top_p}: block diffusion samples from the whole distribution; the legal value is 1",
        )
    show = sampling.show

    def line(draft: Draft) -> None:
        assert show is not None
        text = draft.text(tokenizer).replace("\n", "\u23ce")
        show(f"canvas {draft.canvas + 1} step {draft.step:2}  uncertain {draft.uncertain:3} of {len(draft.certain)}  {text}")

    torch.manual_seed(sampling.seed)
    temperature = TEMPERATURE if sampling.temperature is None else sampling.temperature
    watcher = None if show is None else line
    return continue_text(model, tokenizer, prompt, sampling.max_new_tokens, temperature, sampling.steps, watcher)
