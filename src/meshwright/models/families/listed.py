"""The families that differ from a causal language model of transformers. A new one is added here, in one line.

The module is light: no family imports its model's library.
"""

from typing import TYPE_CHECKING

from meshwright.models.diffusion_gemma import declared as diffusion_gemma
from meshwright.models.families import nemotron_h, wan
from meshwright.models.families.family import Family

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FAMILIES", "family_named", "family_of"]

FAMILIES: tuple[Family, ...] = (nemotron_h.FAMILY, wan.FAMILY, diffusion_gemma.FAMILY)

_CAUSAL = Family()


def family_named(model_type: str) -> Family:
    """Return the family with the ``model_type`` of a config."""
    return next((family for family in FAMILIES if family.name == model_type), _CAUSAL)


def family_of(model: "nn.Module") -> Family:
    """Return the family of a model: that of its class, or of the nearest class that it inherits from."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return next((family for name in names for family in FAMILIES if name in family.classes), _CAUSAL)
