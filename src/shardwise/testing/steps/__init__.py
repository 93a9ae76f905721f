"""Whether ranks train a model as one device does.

A case is a model, a mesh, front doors in some order, and options. It takes three steps, and all
parameters are compared. `python -m shardwise.testing.steps` draws cases and plays them.
"""

from shardwise.testing.steps.case import Door, StepCase, StepVerdict, prove

__all__ = ["Door", "StepCase", "StepVerdict", "prove"]
