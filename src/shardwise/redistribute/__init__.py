"""From one layout to another: steps, the search for the cheapest sequence, its execution.

One tensor at a time. Which layout an op wants is decided in `dispatch`; gradients of a
redistribution are in `dtensor.autograd`.
"""
