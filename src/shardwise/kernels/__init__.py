"""Fused kernels over all the embedding tables that a rank holds, in Triton.

Nothing here is imported unless a GPU backend is chosen: Triton is not a dependency of the package.
"""
