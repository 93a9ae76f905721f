"""Collectives, what they cost, and how ranks agree.

`collectives` is the one place that issues them, `agreement` makes all ranks raise the same error,
`watch` holds the switches around a call. Which collectives a tensor needs is decided in
`redistribute`.
"""
