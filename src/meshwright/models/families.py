"""The families that need a strategy of their own. Importing this module registers them; a new one is a line here."""

from meshwright.models import nemotron_h, wan

__all__ = ["nemotron_h", "wan"]
