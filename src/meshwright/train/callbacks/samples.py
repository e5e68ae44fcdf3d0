"""Continues prompts with the model while it trains (`sample.every`)."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field
from rich.markup import escape

from meshwright.models.families.family import Family
from meshwright.models.families.listed import FAMILIES
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.callbacks.callback import Callback
from meshwright.train.callbacks.training_run import TrainingRun
from meshwright.train.config import RunConfig

__all__ = ["Samples"]


class Samples(Callback):
    """Prints what the model makes of prompts, with the most likely tokens.

    Args:
        prompts: the prompts.
        every: steps between samples.
        tokens: largest number of new tokens.
        raw: continue a prompt as it stands, even if the tokenizer has a chat template.
    """

    def __init__(
        self,
        prompts: list[str],
        every: Annotated[int, Field(ge=1)],
        tokens: Annotated[int, Field(ge=1)] = 48,
        raw: bool = False,
    ) -> None:
        self.prompts, self.every, self.tokens, self.raw = prompts, every, tokens, raw

    def check(self, config: RunConfig, plan: ShardingPlan) -> Iterable[str]:
        """The model has to generate one token after another."""
        if any(plan.family in family.classes and type(family).generate is not Family.generate for family in FAMILIES):
            yield f"{plan.family} does not generate one token after another; the legal value of sample.every is 0"
        if config.model.head is not None:
            yield f"{plan.family} says labels (model.head), and generates no text; the legal value of sample.every is 0"

    def on_step(self, run: TrainingRun) -> None:
        """Sample."""
        if run.step % self.every == 0:
            run.say(f"samples after step {run.step}:")
            for prompt, text in zip(self.prompts, run.generate(self.prompts, self.tokens, raw=self.raw), strict=True):
                run.say(f"  [bold]{escape(prompt)}[/bold]{escape(text)}")
