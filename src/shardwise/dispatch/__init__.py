"""How a call is planned: rules and their notation, inference, propagation, the plan cache.

Everything here works on layouts and does not know the DTensor class, which is in `dtensor`. The
rules themselves are in `ops`.
"""
