"""A family of models: everything that differs between families, in one object.

:class:`Family` itself describes a causal language model of transformers. A family that differs has an object of its own, in its
own file or folder. `models/families/listed.py` lists these objects, and the rest of the package looks them up there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError
from meshwright.models.objective import NextToken, Objective
from meshwright.models.specs.strategy import ParallelizationStrategy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Family", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How a prompt is continued.

    Attributes:
        max_new_tokens: largest number of new tokens.
        temperature: temperature of sampling; ``None``: the family's default, which is 0 (the most likely token), except for
            block diffusion: there it is 0.8, because denoising has to sample.
        top_p: nucleus of the distribution to sample from; 1: the whole distribution.
        seed: seed of the random numbers.
        steps: largest number of denoising steps; ``None``: the model's own number. For block diffusion.
        show: is called with a line about each denoising step. For block diffusion.
    """

    max_new_tokens: int
    temperature: float | None
    top_p: float = 1.0
    seed: int = 0
    steps: int | None = None
    show: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Family:
    """What the rest of the package needs to know of a family.

    Attributes:
        name: its ``model_type`` in transformers; if transformers has no such model, a name of its own.
        classes: names of its model classes. A model belongs to the family if its class inherits from one of them.
        strategy: the strategy that parallelizes it; ``None``: its spec is derived.
    """

    name: str = ""
    classes: tuple[str, ...] = ()
    strategy: type[ParallelizationStrategy] | None = None

    def objective(self) -> type[Objective]:
        """Return the objective that its models are trained for."""
        return NextToken

    def auto_class(self) -> Any:
        """Return the class of transformers that creates a model from a config and loads it."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def generate(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        inputs: "Mapping[str, torch.Tensor]",
        sampling: Sampling,
    ) -> str:
        """Continue a prompt.

        Args:
            model: the model, with weights, in evaluation mode.
            tokenizer: the tokenizer of the model.
            inputs: ``input_ids`` and ``attention_mask`` of the prompt, [1, tokens], on the device of the model.
            sampling: how to sample. A ``temperature`` of 0 or ``None`` takes the most likely token each time.

        Returns:
            The text after the prompt.

        Raises:
            ConfigError: a setting that the family does not use.
        """
        import torch

        if sampling.steps is not None:
            raise ConfigError(
                "generate.sampling", f"steps={sampling.steps}: {class_name(model)} generates one token at a time; leave it out"
            )
        sampled = {"temperature": sampling.temperature, "top_p": sampling.top_p} if (sampling.temperature or 0) > 0 else {}
        torch.manual_seed(sampling.seed)
        with torch.no_grad():
            output = model.generate(
                inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                do_sample=bool(sampled),
                **sampled,
            )
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
