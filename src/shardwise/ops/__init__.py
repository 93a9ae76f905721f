"""One file per family of ops: rules, local functions, decompositions, kernels above autograd.

`catalog` lists the families. To add an op, add a line to its family and a sample to `tests/ops`.
"""
