"""The families that need a strategy of their own. Importing this module registers them; a new one is a line here."""

from meshwright.models import nemotron_h, wan
from meshwright.models.diffusion_gemma import strategy as diffusion_gemma

__all__ = ["diffusion_gemma", "nemotron_h", "wan"]
