"""A family of models: what is not the same in every family, in one object.

:class:`Family` itself is that of a causal language model of transformers. A family that differs has an object of its own in its
file or folder. `models/families.py` lists these objects, and the rest of the house asks there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.distributed.names import class_name
from meshwright.errors import ConfigError
from meshwright.models.objective import NextToken, Objective
from meshwright.models.strategy import ParallelizationStrategy
from meshwright.models.tiny import TinyModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Family", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How a prompt is continued.

    Attributes:
        max_new_tokens: at most so many tokens.
        temperature: ``None``: the lowest that makes sense for the family.
        top_p: nucleus of the distribution to sample from; 1: all of it.
        seed: of what is drawn.
        steps: of denoising, at most; ``None``: the model's own number. For block diffusion.
        show: is given a line about each step of denoising. For block diffusion.
    """

    max_new_tokens: int
    temperature: float | None
    top_p: float = 1.0
    seed: int = 0
    steps: int | None = None
    show: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Family:
    """What the house asks of a family.

    Attributes:
        name: its ``model_type`` in transformers, or a name of its own where transformers has no such model.
        classes: names of its model classes. A model whose class inherits from one of them is of the family.
        strategy: how it is parallelized; ``None``: its spec is derived.
        tiny: its row of the support matrix; ``None``: it has none.
    """

    name: str = ""
    classes: tuple[str, ...] = ()
    strategy: type[ParallelizationStrategy] | None = None
    tiny: TinyModel | None = None

    def objective(self) -> type[Objective]:
        """What its models are trained to do."""
        return NextToken

    def auto_class(self) -> Any:
        """The class of transformers that makes and loads a model from a config."""
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
            model: with weights, in evaluation mode.
            tokenizer: of the model.
            inputs: ``input_ids`` and ``attention_mask`` of the prompt, [1, tokens], where the model is.
            sampling: how. A ``temperature`` of 0 takes the likeliest token each time, and so does ``None``.

        Returns:
            What comes after the prompt.

        Raises:
            ConfigError: a setting that the family has no use for.
        """
        import torch

        if sampling.steps is not None:
            raise ConfigError(f"steps={sampling.steps}: {class_name(model)} says one token after another; leave it out")
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p} if (sampling.temperature or 0) > 0 else {}
        torch.manual_seed(sampling.seed)
        with torch.no_grad():
            output = model.generate(
                inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                do_sample=bool(drawn),
                **drawn,
            )
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
