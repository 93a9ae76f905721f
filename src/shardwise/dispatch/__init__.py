"""How a call is planned: rules and their notation, inference, propagation, the plan cache.

Everything here works on layouts and knows no DTensor. The rules themselves are in `ops`; the class
that calls this is in `dtensor`.
"""
