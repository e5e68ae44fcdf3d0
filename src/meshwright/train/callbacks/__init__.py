"""Callbacks: code that a run calls at fixed points of its steps. The trainer calls one object (:mod:`.hooks`)."""
