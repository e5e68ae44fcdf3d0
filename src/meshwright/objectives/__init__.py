"""What a model can be trained for. ``Objective`` is the base class of one's own, ``given`` what it computes with."""

from meshwright.models.objective import Batch, Column, NextToken, Objective, RunFacts
from meshwright.objectives import given

__all__ = ["Batch", "Column", "NextToken", "Objective", "RunFacts", "given"]
