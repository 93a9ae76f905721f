"""Eager code as one op of a compiled graph.

`effect_op` declares such an op; `ordering` keeps the compiler from moving or dropping it.
"""
